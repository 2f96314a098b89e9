"""FLUTE (Liu et al., ICML 2024): the server stores a head for each client."""

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Client, needs_classes, separate_head
from flwr_frl.clients.device.groups import Config, EvaluateResult, FitResult
from flwr_frl.clients.fedrep import FedRepLinearClient
from flwr_frl.common.messages import IS_CHANGE
from flwr_frl.common.settings import Checked, setting
from flwr_frl.task.models import Part, SplitModel
from flwr_frl.task.models.neural_collapse import neural_collapse


@dataclass(frozen=True)
class Penalty:
    """λ1 ‖ψ(x)‖² + λ2 ‖H‖_F² + λ3 NC_i(H) (equation 10), of a linear head H.

    Parameters
    ----------
    feature_weight, head_weight, nc_weight : float
        λ1, λ2 and λ3.
    classes : Tensor of bool, shape (1, m)
        Classes of the client.
    """

    feature_weight: float
    head_weight: float
    nc_weight: float
    classes: Tensor

    def __call__(self, features: Tensor, targets: Tensor, model: SplitModel) -> Tensor:
        """Return the penalty, a scalar."""
        head = cast(nn.Linear, model.head).weight
        collapse = neural_collapse(head[None], self.classes)[0]
        penalty = self.head_weight * head.square().sum() + self.nc_weight * collapse
        if self.feature_weight:
            penalty = self.feature_weight * features.square().sum() + penalty
        return penalty


class FLUTEClient(
    Client, requires=(needs_classes, separate_head), supports_example_dp=True
):
    """Algorithm 2, client side: the server sends representation and head.

    The loss is CE + λ1 ‖ψ(x)‖² + λ2 ‖H‖_F² + λ3 NC_i(H) (equation 10).

    Parameters
    ----------
    nc_weight : float, default 0.25
        Weight λ3 of NC_i(H).
    head_weight : float, default 0.0025
        Weight λ2 of ‖H‖_F².
    feature_weight : float, default 0.0005
        Weight λ1 of ‖ψ(x)‖² summed over a batch, as in the authors' code.
    """

    nc_weight: float = setting(0.25, ge=0)
    head_weight: float = setting(0.0025, ge=0)
    feature_weight: float = setting(0.0005, ge=0)

    def personalize(self) -> None:
        """Train a regularised head for ``newcomer-epochs``."""
        self.train_regularized("head", self.settings.newcomer_epochs)

    def get_properties(self, config: Config) -> Config:
        """Add ``classes``, a string with 1 for each class of the client, else 0."""
        mask = "".join(str(int(has)) for has in self._class_mask()[0].tolist())
        return {**super().get_properties(config), "classes": mask}

    def update(self) -> float:
        """Train head and representation together for ``representation-epochs``."""
        return self.train_regularized("all", self.settings.representation_epochs)

    def train_regularized(self, part: Part, epochs: int) -> float:
        """Train a part with the regularised loss; λ1 is 0 if only the head trains.

        Returns the mean cross-entropy over the last epoch.
        """
        settings = self.settings
        feature_weight = settings.feature_weight if part == "all" else 0.0
        weights = feature_weight, settings.head_weight, settings.nc_weight
        return self.train(part, epochs, Penalty(*weights, self._class_mask()))


class FLUTEStarClient(FLUTEClient, supports_example_dp=True):
    """FLUTE*: train the head alone for ``head-epochs`` additional epochs.

    Parameters
    ----------
    head_epochs : int, default 10
        Epochs in which the head trains alone.
    head_epochs_order : {"before", "after"}, default "before"
        Whether the head trains alone before the joint epochs, as in the authors' code,
        or after them, as in the paper. The former is more accurate
        (``benchmarks/results/papers_tables.md``).
    """

    head_epochs: int = setting(10, ge=0)
    head_epochs_order: Literal["before", "after"] = setting("before")

    def update(self) -> float:
        """Train head and representation together, and the head alone."""
        settings = self.settings
        if settings.head_epochs_order == "before":
            self.train_regularized("head", settings.head_epochs)
        loss = self.train_regularized("all", settings.representation_epochs)
        if settings.head_epochs_order == "after":
            self.train_regularized("head", settings.head_epochs)
        return loss


class FLUTELinearClient(FedRepLinearClient):
    """Algorithm 1, client side: both gradients of the squared loss.

    L_i = 1/(2N) Σ (xᵀ B w_i − y)² over the same N examples in every round. With the
    factor ½, γ1 = 1/4 and γ2 = 1/8 balance B and W.
    """

    shared = Client.shared
    personal = ()
    sent = ("gradient.",)
    _settings_type = Checked
    get_parameters = Client.get_parameters

    def fit(self, parameters: NDArrays, config: Config) -> FitResult:
        """Send ∇_B L_i, of shape (k, d) as Bᵀ is, and ∇_{w_i} L_i, of shape (1, k)."""
        b, w = parameters[0].T, parameters[1][0]
        x, y = self.task.draw(self._index)
        residual = x @ (b @ w) - y
        towards = x.T @ residual / len(y)
        gradients: NDArrays = [np.outer(w, towards), (b.T @ towards)[None]]
        loss = float(residual @ residual) / (2 * len(y))
        return gradients, len(y), {"train-loss": loss, IS_CHANGE: 1}

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Compare B w_i with the truth, as `RegressionTask.compare`."""
        return self.task.compare(self._index, parameters[0].T, parameters[1][0])
