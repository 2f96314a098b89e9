"""pFedFDA (McLaughlin & Su, NeurIPS 2024): a generative classifier of the features."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flwr_frl.clients.base import Client, Update, linear_head, needs_classes
from flwr_frl.clients.device.groups import REPRESENTATION, Tensors
from flwr_frl.clients.device.training import class_means, labelled_features
from flwr_frl.common.settings import setting
from flwr_frl.task.devices import seeded
from flwr_frl.task.models import SplitModel

GAUSSIAN = "gaussian."
MEANS, COVARIANCE = f"{GAUSSIAN}means", f"{GAUSSIAN}covariance"
# Weight of an isotropic covariance in the matrix that is inverted. Also the number that
# is added to each class's share of the examples. Both as in the authors' code.
SHRINKAGE = 1e-4
# Factor by which each step of golden-section search for β shortens the interval, and
# number of steps; the last interval has length 6e-6.
RATIO, STEPS = (5**0.5 - 1) / 2, 25


@dataclass(frozen=True)
class Gaussians:
    """Gaussian distributions of the features of each class, with a common covariance.

    Parameters
    ----------
    means : Tensor, shape (classes, width)
        The means μ_c.
    covariance : Tensor, shape (width, width)
        The covariance Σ.
    """

    means: Tensor
    covariance: Tensor

    def interpolated(self, other: "Gaussians", beta: float) -> "Gaussians":
        """Return β times these parameters plus 1 − β times the others."""
        means = torch.lerp(other.means, self.means, beta)
        return Gaussians(means, torch.lerp(other.covariance, self.covariance, beta))

    def classifier(self, priors: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights Σ⁻¹ μ_c and biases log π_c − ½ μ_cᵀ Σ⁻¹ μ_c.

        With them, a linear head computes log π_c N(z; μ_c, Σ) up to a term that all
        classes share. Before its inversion, Σ is mixed with an isotropic covariance.
        If Σ is 0, as that of one example without a ridge, it is replaced by I.
        """
        width = len(self.covariance)
        scale = self.covariance.trace() / width
        identity = torch.eye(width, dtype=scale.dtype)
        mixed = (1 - SHRINKAGE) * self.covariance + SHRINKAGE * scale * identity
        weight = torch.linalg.solve(mixed if scale > 0 else identity, self.means.T).T
        return weight, priors.log() - (self.means * weight).sum(1) / 2


class PFedFDAClient(
    Client, requires=(needs_classes, linear_head("pFedFDA", bias=True))
):
    """Algorithm 1, client side: representation and Gaussians are shared.

    The representation is trained with a frozen head, which is computed from the
    received Gaussians and the client's class proportions. From the features of the
    trained representation, the client estimates its own class means and covariance. The
    adapted ones are β times its own plus 1 − β times the received ones, with the same β
    for means and covariance. β minimises the cross-entropy of two-fold
    cross-validation, by golden-section search. A class without examples keeps the
    received mean.

    For deployment, the Gaussians are adapted again to the received representation, and
    the head is computed from them without training. A device without training examples
    uses the head of its last training, or else the initial one. A client that joins
    after training does the same, as the held-out clients in the authors' code.

    The authors' code differs: it drops an incomplete last batch of an epoch, estimates
    from the features of all steps of local training, finds separate β for means and
    covariance by L-BFGS, draws the folds at random, and adds 1e-4 to every entry of a
    covariance. Here the folds are every other example of each class. For tests, that
    code uses the received mean of classes with at most two examples, and all clients
    train in its last round.

    Parameters
    ----------
    pfedfda_ridge : float, default 1
        Multiple of the identity that is added to a client's covariance. The authors'
        code adds the identity.
    """

    shared = (REPRESENTATION, GAUSSIAN)
    personal = "head"
    pfedfda_ridge: float = setting(1.0, ge=0)

    @property
    def head(self) -> nn.Linear:
        """The head."""
        return self.model.linear_head("pFedFDA")

    def initial_group(self, group: str) -> Tensors:
        """Return means drawn from U(0, 1) with the task's seed, and the identity."""
        shape, dtype = self.head.weight.shape, self.head.weight.dtype
        with seeded(getattr(self.task, "seed", 0) or 0):
            means = torch.rand(shape, dtype=dtype)
        return {"means": means, "covariance": torch.eye(shape[1], dtype=dtype)}

    def update(self) -> Update:
        """Train the representation, and adapt the Gaussians to its features."""
        targets = self.task.train_examples(self._index).targets.flatten()
        self.set_head(self.received_gaussians(), targets[targets >= 0])
        loss = self.train("representation", self.settings.representation_epochs)
        adapted = self.adapt()
        sent = {MEANS: adapted.means, COVARIANCE: adapted.covariance}
        sent = {name: value.to(self.head.weight.dtype) for name, value in sent.items()}
        return loss, {**self.model.state_dict(), **sent}

    def received_gaussians(self) -> Gaussians:
        """Return the received Gaussians in float64; on the CPU, as MPS has none."""
        covariance = self.received[COVARIANCE].cpu().double()
        symmetric = (covariance + covariance.T) / 2
        return Gaussians(self.received[MEANS].cpu().double(), symmetric)

    def adapt(self) -> Gaussians:
        """Return the Gaussians adapted to the features, and set the head from them."""
        pairs = (tensor.cpu() for tensor in labelled_features(self))
        received, (features, targets) = self.received_gaussians(), pairs
        features = features.double()
        local = self.estimated(features, targets, received)
        adapted = local.interpolated(received, self.beta(features, targets, received))
        self.set_head(adapted, targets)
        return adapted

    def estimated(
        self, features: Tensor, targets: Tensor, received: Gaussians
    ) -> Gaussians:
        """Return class means and the covariance within classes, of n examples.

        The covariance is Σ (z − μ_y)(z − μ_y)ᵀ / (n − 1) plus the ridge.
        """
        means, counts = class_means(features, targets, len(received.means))
        means = torch.where((counts > 0).unsqueeze(1), means, received.means)
        away = features - means[targets]
        covariance = away.T @ away / max(1, len(targets) - 1)
        covariance.diagonal().add_(self.settings.pfedfda_ridge)
        return Gaussians(means, covariance)

    def beta(self, features: Tensor, targets: Tensor, received: Gaussians) -> float:
        """Return β; 0 if no class has the two examples that two folds need."""
        folds = stratified_halves(targets)
        if not all(len(fold) for fold in folds):
            return 0.0
        priors = class_priors(targets, len(received.means))
        pairs = []
        for ours, others in (folds, folds[::-1]):
            local = self.estimated(features[ours], targets[ours], received)
            pairs.append((local, features[others], targets[others]))

        def risk(beta: float) -> float:
            """Return the sum over both folds of the mean cross-entropy."""
            total = 0.0
            for local, z, y in pairs:
                weight, bias = local.interpolated(received, beta).classifier(priors)
                total += float(cross_entropy(z @ weight.T + bias, y))
            return total

        return minimum_in_unit_interval(risk)

    @torch.no_grad()
    def set_head(self, gaussians: Gaussians, targets: Tensor) -> None:
        """Set the head from the Gaussians and the class shares of the targets."""
        weight, bias = gaussians.classifier(class_priors(targets, len(gaussians.means)))
        self.head.weight.copy_(weight)
        self.head.bias.copy_(bias)

    def deployed_model(self) -> SplitModel:
        """Return the received representation with the head adapted to it."""
        if len(self.task.train_examples(self._index)):
            self.adapt()
        return self.model

    def personalize(self) -> None:
        """Set the head as for deployment, without training."""
        self.deployed_model()


def class_priors(targets: Tensor, classes: int) -> Tensor:
    """Return the share of each class, all of them above 0, in float64."""
    counts = torch.bincount(targets, minlength=classes).double()
    shares = counts / counts.sum().clamp(min=1) + SHRINKAGE
    return shares / shares.sum()


def stratified_halves(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices that split the examples of each class into two halves.

    Classes with one example are in neither half.
    """
    by_class = targets.argsort(stable=True)
    held = nn.functional.one_hot(targets[by_class])
    # The number of an example in its class, from 1
    places = (held * held.cumsum(0)).sum(1)
    shared = held.sum(0)[targets[by_class]] > 1
    odd = places % 2 == 1
    return by_class[shared & odd], by_class[shared & ~odd]


def minimum_in_unit_interval(function: Callable[[float], float]) -> float:
    """Return the argument in [0, 1] that minimises a unimodal function.

    It is found by golden-section search.
    """
    function = cache(function)
    low, left, right, high = 0.0, 1 - RATIO, RATIO, 1.0
    for _ in range(STEPS):
        if function(left) <= function(right):
            left, right, high = right - RATIO * (right - low), left, right
        else:
            low, left, right = left, right, left + RATIO * (high - left)
    # The search itself never evaluates the ends.
    return min((0.0, 1.0, (low + high) / 2), key=function)
