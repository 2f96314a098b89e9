"""FedDyn (Acar et al., ICLR 2021)."""

from typing import Any

import numpy as np

from flwr_frl.common.messages import PROXIMAL_WEIGHT
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, stored
from flwr_frl.strategies.server.client_state_mean import ClientStateMean
from flwr_frl.strategies.server.replies import Floats


class FedDyn(ClientStateMean, client="flwr_frl.clients.feddyn:FedDynClient"):
    """Algorithm 1: h ← h − α/m Σ_k (θ_k − θ), and θ ← mean θ_k − h/α.

    The sums are over the clients of a round; m is the number of all clients that have
    been seen so far. With λ_k ← λ_k − α (θ_k − θ), which each client keeps as its
    gradient ∇L_k(θ_k), h is the mean of all λ_k, with 0 for clients that have not
    trained. Checkpoints contain m h = Σ_k λ_k, which remains correct when m grows.

    If h begins anew (`ClientStateMean`), h and all λ_k are 0.

    The paper has one α. The authors' code divides it by a client's share of the
    examples; here, as in the paper, it is the same for all. Clients are tested with θ;
    the authors' code tests means of the θ_k, without −h/α.

    Parameters
    ----------
    feddyn_alpha : float, default 0.01
        α of the dynamic regularizer (equation 1). The paper tries 0.1, 0.01 and 0.001.
        Clients receive it with each training message, under the key of Flower's
        FedProx.
    **base
        Arguments of `Strategy`.
    """

    feddyn_alpha: float = setting(0.01, gt=0)
    # Σ_k λ_k
    gradients: dict[str, Floats] = stored("gradients")

    def begin(self, round: Round) -> None:
        """Send α."""
        round.config[PROXIMAL_WEIGHT] = self.feddyn_alpha

    def moved(
        self, round: Round, changes: Arrays, lost: bool
    ) -> tuple[Arrays, dict[str, Any]]:
        """Move h by the clients' changes θ_k − θ, and θ by their mean and h."""
        m, totals, new = len(self.seen), dict[str, Floats](), Arrays()
        for name, change in changes.items():
            old, moved = round.arrays[name], change.astype(np.float64)
            total = self.gradients.get(name, np.zeros(old.shape))
            total = total - self.feddyn_alpha * len(round.replies) * moved
            totals[name] = np.zeros(old.shape) if lost else total
            new[name] = old + moved - totals[name] / m / self.feddyn_alpha
        return new, {"gradients": totals}
