"""SCAFFOLD (Karimireddy et al., ICML 2020)."""

from typing import Any

import numpy as np

from flwr_frl.common.messages import CONTROL
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round
from flwr_frl.strategies.server.client_state_mean import ClientStateMean


class SCAFFOLD(ClientStateMean, client="flwr_frl.clients.scaffold:SCAFFOLDClient"):
    """Algorithm 1: x ← x + η_g mean Δy_i and c ← c + |S|/N mean Δc_i.

    The server's control variate c travels with the model x, under ``control.``, and
    stays the mean of the c_i of all N clients that have been seen so far. Statistics of
    batch norms are not parameters: they are averaged without η_g. If c begins anew
    (`ClientStateMean`), c and all c_i are 0, as in round 1.

    Parameters
    ----------
    global_learning_rate : float, default 1
        The server's step size η_g.
    **base
        Arguments of `Strategy`.
    """

    global_learning_rate: float = setting(1.0, gt=0)

    def moved(
        self, round: Round, changes: Arrays, lost: bool
    ) -> tuple[Arrays, dict[str, Any]]:
        """Add the mean changes Δy_i and Δc_i to x and c."""
        total, new = len(self.seen), {}
        # N when c was last computed. Clients without a c_i so far count with 0.
        before = self.state.get("total", total)
        for name, change in changes.items():
            kept, step = 1.0, 1.0
            if name.startswith(CONTROL):
                kept, step = before / total, len(round.replies) / total
                if lost:
                    kept = step = 0.0
            elif CONTROL + name in changes:
                step = self.global_learning_rate
            new[name] = np.multiply(round.arrays[name], kept, dtype=np.float64)
            new[name] += np.multiply(change, step, dtype=np.float64)
        return new, {"total": total}


class SCAFFOLDFT(
    SCAFFOLD,
    client="flwr_frl.clients.scaffold:SCAFFOLDFTClient",
    # Each evaluation fine-tunes anew.
    evaluate_last_round_only=True,
):
    """SCAFFOLD; clients test it with a fine-tuned head."""
