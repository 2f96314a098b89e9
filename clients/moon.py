"""MOON (Li et al., CVPR 2021): FedAvg with a model-contrastive loss."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from flwr_frl.clients.base import Client, trained_representation
from flwr_frl.clients.device.groups import REPRESENTATION, Tensors, under, within
from flwr_frl.clients.device.training import minimise
from flwr_frl.common.settings import setting
from flwr_frl.task.models.frozen import copy_sharing_frozen

PREVIOUS = "previous."


class MOONClient(Client, requires=(trained_representation,)):
    """Algorithm 1, client side: the previous local representation is personal.

    The loss is ℓ_sup + μ ℓ_con (equation 4). With the features z of the model that
    trains, z_glob of the received model and z_prev of the client's last local model,
    ℓ_con = −log(exp(s_glob/τ) / (exp(s_glob/τ) + exp(s_prev/τ))), where s is the cosine
    similarity to z (equation 3). Both other models are frozen, in evaluation mode.

    A client that is not sampled keeps its last local representation, however old.
    Before its first training it uses the initial representation, so that ℓ_con has no
    gradient in round 1. The authors' code omits ℓ_con in round 1; the previous model of
    a client that first trains later is randomly initialised. In that code z is the
    output of an additional projection head of two layers; here it is the output of the
    model's representation.

    Parameters
    ----------
    moon_mu : float, default 1
        Weight μ of the contrastive loss (equation 4). The paper tries 0.1, 1, 5 and 10;
        0 is FedAvg.
    moon_temperature : float, default 0.5
        Temperature τ of the contrastive loss (equation 3).
    """

    personal = (PREVIOUS,)
    moon_mu: float = setting(1.0, ge=0)
    moon_temperature: float = setting(0.5, gt=0)

    def initial_group(self, group: str) -> Tensors:
        """Return the initial representation."""
        return under(REPRESENTATION, self.task.initial_state)

    def update(self) -> float:
        """Train for ``representation-epochs``, and save the representation.

        The training loss is ℓ_sup.
        """
        model, settings = self.model, self.settings
        received = copy_sharing_frozen(model.representation)
        previous = copy_sharing_frozen(model.representation)
        previous.load_state_dict(under(PREVIOUS, self.saved))
        others = [other.requires_grad_(False).eval() for other in (received, previous)]

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            z = model.representation(inputs)
            loss = self.task.loss(model.head(z), targets)
            distance = contrastive_loss(z, inputs, others, settings.moon_temperature)
            return loss, loss + settings.moon_mu * distance

        loss = minimise(self, objective, settings.representation_epochs)
        self.saved = within(PREVIOUS, under(REPRESENTATION, model.state_dict()))
        return loss


def contrastive_loss(
    features: Tensor, inputs: Tensor, others: list[nn.Module], temperature: float
) -> Tensor:
    """Return the mean of ℓ_con over a batch.

    Parameters
    ----------
    features : Tensor
        Features z of the inputs.
    inputs : Tensor
        The batch.
    others : list of nn.Module
        The received and the previous representation.
    temperature : float
        τ.
    """
    z = features.flatten(1)
    similar = [cosine_similarity(z, other(inputs).flatten(1)) for other in others]
    scores = torch.stack(similar, 1) / temperature
    # Cross-entropy with the received model as the right one of two classes.
    return cross_entropy(scores, torch.zeros_like(scores[:, 0], dtype=torch.long))
