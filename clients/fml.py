"""FML (Shen et al., 2020): mutual learning of a private and a shared small model."""

from torch import Tensor

from flwr_frl.clients.base import Update, needs_classes
from flwr_frl.clients.device.architectures import SmallModelClient, divergence
from flwr_frl.common.settings import setting


class FMLClient(SmallModelClient, requires=(needs_classes,)):
    """Deep mutual learning of the client's private model and the shared meme model.

    In each step, the private model minimises α L + (1 − α) KL(p_meme ‖ p), and the meme
    model β L_meme + (1 − β) KL(p ‖ p_meme), where p are probabilities of the same
    batch. As in the paper, each model takes the other's outputs as constants, and KL is
    a mean over examples. PFLlib and HtFLlib differentiate both terms by both models,
    and divide KL by the number of classes as well; their gradients are also clipped to
    a norm of 10 (``max-gradient-norm``). The private model is deployed.

    Parameters
    ----------
    fml_alpha : float, default 0.5
        Weight α of the private model's own loss; 1 is local training.
    fml_beta : float, default 0.5
        Weight β of the meme model's own loss; 1 is FedAvg of the meme model.
    """

    fml_alpha: float = setting(0.5, ge=0, le=1)
    fml_beta: float = setting(0.5, ge=0, le=1)

    def update(self) -> Update:
        """Train both models for ``representation-epochs``, and send the meme model."""
        model, meme = self.model, self.small_model()
        alpha, beta = self.settings.fml_alpha, self.settings.fml_beta

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            outputs, of_meme = model(inputs), meme(inputs)
            loss = self.task.loss(outputs, targets)
            of_memes = self.task.loss(of_meme, targets)
            private = divergence(outputs, of_meme.detach())
            shared = divergence(of_meme, outputs.detach())
            value = alpha * loss + (1 - alpha) * private
            return loss, value + beta * of_memes + (1 - beta) * shared

        return self.train_both(objective, meme)
