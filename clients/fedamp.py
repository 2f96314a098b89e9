"""FedAMP (Huang et al., AAAI 2021): train near the mean of similar models."""

from flwr_frl.clients.base import Client
from flwr_frl.common.settings import setting
from flwr_frl.task.training.sgd import Proximal


class FedAMPClient(Client, supports_example_dp=True):
    """Algorithm 1, client side: w_i ← argmin_w F_i(w) + λ/(2 α_k) ‖w − u_i‖².

    The minimum is approximated by local epochs from u_i, so that a client keeps no
    state; the paper leaves the start open. PFLlib starts from the last w_i, and its
    proximal term has no gradient, so that its clients train alone.

    In the paper all clients take part from the first round on, so it has no rule for a
    client that joins after training. Here such a client does the same as one in its
    first round: u_i is the mean of the last round's models, and the client trains its
    w_i near it, for ``newcomer-epochs``. It does not attend to the nearest models, for
    which the server would need its w_i.

    Parameters
    ----------
    fedamp_lambda : float, default 1
        λ of the proximal term λ/(2 α_k) ‖w − u_i‖² (equation 6).
    fedamp_alpha : float, default 10000
        α_k, as for the strategy.
    """

    fedamp_lambda: float = setting(1.0, ge=0)
    fedamp_alpha: float = setting(1e4, gt=0)

    def update(self) -> float:
        """Train near the received u_i for ``representation-epochs``."""
        return self._train_near(self.settings.representation_epochs)

    def personalize(self) -> None:
        """Train near the received mean of the models for ``newcomer-epochs``."""
        self._train_near(self.settings.newcomer_epochs)

    def _train_near(self, epochs: int) -> float:
        weight = self.settings.fedamp_lambda / self.settings.fedamp_alpha
        return self.train("all", epochs, Proximal(weight, self.received))
