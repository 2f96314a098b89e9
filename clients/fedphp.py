"""FedPHP (Li et al., ECML PKDD 2021): a private model inherits earlier local models."""

import torch
from torch import Tensor

from flwr_frl.clients.base import trained_representation
from flwr_frl.clients.device.groups import REPRESENTATION, Tensors, under
from flwr_frl.clients.device.personal_model import PERSONAL_MODEL, PersonalModelClient
from flwr_frl.clients.device.training import minimise
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.frozen import copy_sharing_frozen

COUNT = "count."
TRAININGS = f"{COUNT}trainings"


class FedPHPClient(PersonalModelClient, requires=(trained_representation,)):
    """Client side: the private model θ_p, a mean of earlier local models, is personal.

    The local model starts from the received one and minimises (1 − λ) ℓ + λ MMD, where
    MMD is the maximum mean discrepancy between its features of a batch and those of
    θ_p, which is frozen and in evaluation mode. It is sent. Then
    θ_p ← μ_z θ_p + (1 − μ_z) θ_i with μ_z = μ min(z/Z, 1), where z is the number of
    earlier trainings of the client and Z the expected number in the whole run,
    ``fraction-train`` × ``num-server-rounds``.

    θ_p is deployed. A client that has not trained deploys the received model; its
    first features are compared with those of the initial model. One that joins later
    trains the received model for ``newcomer-epochs``.

    The paper also transfers knowledge by logits. The equations were compared with the
    authors' code (FedRepo, commit 18eeb6d), and are the same; it also clips gradients,
    and makes at least five steps a round. PFLlib has a kernel with fixed widths (10,
    15, 20, 50), takes the round as z, also for clients that were not sampled, and tests
    the received model.

    Parameters
    ----------
    fedphp_mu : float, default 0.9
        Largest weight μ of the old private model (the authors' code).
    fedphp_lambda : float, default 0.01
        Weight λ of the discrepancy; with 0 the messages are those of FedAvg. The best
        of 0, 0.01 and 0.1 on the default task (one seed).
    fraction_train, num_server_rounds
        For Z.
    """

    personal = (PERSONAL_MODEL, COUNT)
    fedphp_mu: float = setting(0.9, ge=0, le=1)
    fedphp_lambda: float = setting(0.01, ge=0, le=1)
    fraction_train: float = setting(0.5, gt=0, le=1)
    num_server_rounds: int = setting(30, ge=1)

    def initial_group(self, group: str) -> Tensors:
        """Return 0 for the number of trainings, and the initial model for θ_p."""
        if group == COUNT:
            return {"trainings": torch.zeros((), dtype=torch.int64)}
        return super().initial_group(group)

    def update(self) -> float:
        """Train for ``representation-epochs``, and let θ_p inherit the result."""
        loss, settings, count = self.transfer(), self.settings, self.saved[TRAININGS]
        expected = max(int(settings.fraction_train * settings.num_server_rounds), 1)
        mu = settings.fedphp_mu * min(count.item() / expected, 1)
        for name, private in under(PERSONAL_MODEL, self.saved).items():
            new = self.model.tensors[name]
            mixed = mu * private + (1 - mu) * new if new.is_floating_point() else new
            private.copy_(mixed)
        count += 1
        return loss

    def transfer(self) -> float:
        """Train the local model with both losses; return the mean of ℓ."""
        model, weight = self.model, self.settings.fedphp_lambda
        private = copy_sharing_frozen(model.representation)
        private.load_state_dict(under(PERSONAL_MODEL + REPRESENTATION, self.saved))
        private.requires_grad_(False).eval()

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            z = model.representation(inputs)
            loss = self.task.loss(model.head(z), targets)
            distance = discrepancy(z.flatten(1), private(inputs).flatten(1))
            return loss, (1 - weight) * loss + weight * distance

        return minimise(self, objective, self.settings.representation_epochs)

    def personalize(self) -> None:
        """Train the received model, and keep the result as θ_p."""
        self.train("all", self.settings.newcomer_epochs)
        self.keep_personal_model()
        self.saved[TRAININGS].fill_(1)

    def deployed_model(self) -> SplitModel:
        """Return θ_p; the received model if the client has not trained."""
        return super().deployed_model() if self.saved[TRAININGS] else self.model


def discrepancy(features: Tensor, others: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples.

    The kernel is Σ_{k=−2}^{2} exp(−d²/(2ᵏ b)), where b is the mean squared distance of
    all pairs.

    Parameters
    ----------
    features, others : Tensor, shape (n, width)
        The samples.
    """
    both, n = torch.cat([features, others]), 2 * len(features)
    # Differences rather than products, which are inexact for nearly equal features.
    mode = "donot_use_mm_for_euclid_dist"
    squares = torch.cdist(both, both, compute_mode=mode).square()
    width = squares.detach().sum() / (n * n - n) + 1e-8
    kernels = [torch.exp(-squares / (width * 2.0**k)) for k in range(-2, 3)]
    weights = squares.new_tensor([2 / n, -2 / n]).repeat_interleave(n // 2)
    return weights @ torch.stack(kernels).sum(0) @ weights
