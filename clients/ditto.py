"""Ditto (Li et al., ICML 2021): a personal model regularised towards the global one."""

from flwr_frl.clients.base import Update
from flwr_frl.clients.device.personal_model import PersonalModelClient
from flwr_frl.common.settings import setting
from flwr_frl.task.training.sgd import Proximal


class DittoClient(PersonalModelClient, supports_example_dp=True):
    """Algorithm 1, client side: w_k is sent, v_k is personal.

    ``representation-epochs`` are those of w_k.

    Parameters
    ----------
    ditto_lambda : float, default 0.1
        λ of the personal objective F_k(v) + λ/2 ‖v − w‖² (equation 2); 0 trains
        v locally.
    personal_epochs : int, default 1
        Epochs of the personal model v_k.
    """

    ditto_lambda: float = setting(0.1, ge=0)
    personal_epochs: int = setting(1, ge=0)

    def update(self) -> Update:
        """Train w_k from wᵗ, and v_k from its last value, regularised towards wᵗ."""
        loss = self.train("all", self.settings.representation_epochs)
        sent = {n: w.clone() for n, w in self.model.tensors.items()}
        self.load_personal_model()
        near = Proximal(self.settings.ditto_lambda, self.received)
        self.train("all", self.settings.personal_epochs, near)
        self.keep_personal_model()
        return loss, sent

    def personalize(self) -> None:
        """Train v_k from w for ``newcomer-epochs`` (equation 2)."""
        self.personalize_near(self.settings.ditto_lambda)
