"""Fed-MTL: mean-regularised multi-task learning (Smith et al., NeurIPS 2017)."""

from flwr_frl.clients.base import Update
from flwr_frl.clients.device.personal_model import AllClientsMeanClient
from flwr_frl.common.settings import setting
from flwr_frl.task.training.sgd import Proximal


class FedMTLClient(AllClientsMeanClient, supports_example_dp=True):
    """Minimise f_i(w_i) + λ tr(W Ω Wᵀ) in w_i, with the other models fixed.

    With Ω = (I − 11ᵀ/m)², the gradient of the second term is 2λ (w_i − w̄), with w̄ as
    received.

    Parameters
    ----------
    mtl_lambda : float, default 0.1
        λ of λ tr(W Ω Wᵀ) = λ Σ_i ‖w_i − w̄‖²; 0 is local training. Smith et al. choose
        it from 1e-5 to 10 by validation. For their term λ₂ ‖W‖², set ``weight-decay``
        to 2 λ₂.
    """

    mtl_lambda: float = setting(0.1, ge=0)

    def update(self) -> Update:
        """Train w_i from its last value, regularised towards w̄, and send Δw_i."""
        self.load_personal_model()
        near = Proximal(2 * self.settings.mtl_lambda, self.received)
        loss = self.train("all", self.settings.representation_epochs, near)
        return loss, self.change()
