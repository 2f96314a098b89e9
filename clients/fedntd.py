"""FedNTD (Lee et al., NeurIPS 2022): distillation of the classes that are not true."""

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from flwr_frl.clients.base import Client, needs_classes
from flwr_frl.clients.device.training import minimise
from flwr_frl.common.settings import setting
from flwr_frl.task.models.frozen import copy_sharing_frozen


class FedNTDClient(Client, requires=(needs_classes,)):
    """Minimise L_CE + β L_NTD, where the received model is the teacher (section 4).

    L_NTD = Σ_{c ≠ y} q_g(c) log(q_g(c) / q_l(c)), where q_g and q_l are the softmax of
    the teacher's and of the local logits without that of the target y, divided by the
    temperature τ. The teacher is frozen, in evaluation mode. In the authors' code and
    in PFLlib, L_NTD has the additional factor τ².

    Parameters
    ----------
    ntd_beta : float, default 1
        Weight β of the distillation; 0 is FedAvg.
    ntd_temperature : float, default 1
        Temperature τ.
    """

    ntd_beta: float = setting(1.0, ge=0)
    ntd_temperature: float = setting(1.0, gt=0)

    def update(self) -> float:
        """Train for ``representation-epochs``; return the mean of L_CE."""
        model, beta = self.model, self.settings.ntd_beta
        teacher = copy_sharing_frozen(model).requires_grad_(False).eval()

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            outputs = model(inputs)
            loss = self.task.loss(outputs, targets)
            scores = not_true(outputs, targets), not_true(teacher(inputs), targets)
            local, received = (
                (score / self.settings.ntd_temperature).log_softmax(1)
                for score in scores
            )
            divergence = kl_div(local, received, reduction="batchmean", log_target=True)
            return loss, loss + beta * divergence

        return minimise(self, objective, self.settings.representation_epochs)


def not_true(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the logits of all classes but the target's, of shape (n, classes - 1).

    A sequence has a target at every position; negative ones are left out.
    """
    outputs, targets = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
    outputs, targets = outputs[targets >= 0], targets[targets >= 0, None]
    others = torch.arange(outputs.shape[1] - 1, device=outputs.device)
    return outputs.gather(1, others + (others >= targets))
