"""Representation transfer (Singh, UCLA 2024, ch. 5): sources and targets."""

from dataclasses import dataclass
from typing import Annotated, cast

import numpy as np
import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Arrays, Client, Config, Evaluation, Reply
from flwr_frl.clients.device.evaluation import measure
from flwr_frl.clients.device.parameter_groups import HEAD, REPRESENTATION, to_numpy
from flwr_frl.clients.fedrep import FedRepSettings
from flwr_frl.task.base import Matrix
from flwr_frl.task.calls import EVALUATION_BATCH
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.messages import SERVER_ROUND
from flwr_frl.task.models import SplitModel
from flwr_frl.task.resident import test_examples
from flwr_frl.task.settings import Checked, Range
from flwr_frl.task.tasks.transfer import TransferTask
from flwr_frl.task.training import train
from flwr_frl.task.transfer import (
    TransferData,
    basis,
    halves,
    phase_one,
    phase_two,
    phase_two_descent,
)


@dataclass(frozen=True)
class RoleSettings(Checked):
    """Who is a source.

    Parameters
    ----------
    num_sources : int, default 10
        The first so many clients are sources; a device that sets 0 for itself is a
        target.
    """

    num_sources: Annotated[int, Range("[0, inf)")] = TransferData.num_sources


class TransferClient(Client):
    """A source sends its representation; a target keeps a model that uses them all."""

    shared = (REPRESENTATION,)
    # Targets get what all sources sent, stacked or as a basis.
    fixed_shapes = False
    node_settings = (*Client.node_settings, "num-sources")
    settings: RoleSettings

    @property
    def is_source(self) -> bool:
        """Whether this client is a source."""
        return self.index < self.settings.num_sources

    @property
    def sent(self) -> tuple[str, ...]:  # type: ignore[override]
        """A source's representation; a target sends no arrays."""
        return self.shared if self.is_source else ()

    def get_properties(self, config: Config) -> Config:
        """Return also ``role``: ``source`` or ``target``."""
        role = "source" if self.is_source else "target"
        return {**super().get_properties(config), "role": role}

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit a source's model and send its representation, or a target's and keep it.

        A target gets what the sources gave; a source the initial representation.
        """
        if self.is_source:
            return self.fit_source(parameters, config)
        kept, loss = self.fit_target(parameters)
        self.state.save(kept, int(config[SERVER_ROUND]))
        return [], len(self.task.train_examples(self.index)), {"train-loss": loss}

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit a source's model and keep its head; as `fit`."""
        raise NotImplementedError

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return what a target keeps, from what the sources gave, and its loss."""
        raise NotImplementedError

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test the own model; without one there are no examples."""
        kept = self.state.load()
        return (0.0, 0, {}) if kept is None else self.test_target(parameters, kept)

    def test_target(self, parameters: NDArrays, kept: Arrays) -> Evaluation:
        """Test what `fit_target` has returned; as `Client.evaluate`."""
        raise NotImplementedError


@dataclass(frozen=True)
class RepresentationTransferSettings(RoleSettings):
    """Settings of linear representation transfer.

    Parameters
    ----------
    descent_steps : int, default 0
        0 solves phase 2 in closed form; otherwise gradient descent makes at most so
        many steps.
    """

    descent_steps: Annotated[int, Range("[0, inf)")] = 0


class RepresentationTransferClient(TransferClient):
    """A source fits y ≈ X B w and sends B; a target learns its model in two phases.

    Source, equation 5.3: least squares determine only the product θ = B w, and any B
    whose span holds θ attains the minimum. Here B is the smallest one, k = 1: the
    direction θ / ‖θ‖; the head w = ‖θ‖ stays. With fewer samples than dimensions θ is
    the solution of least norm.

    Target, section 5.3: a head on V from the first half of the samples (phase 1), all
    parameters from the second half (phase 2, see ``descent_steps``). The model stays.

    For any task but ``transfer`` there is the `FeatureTransferClient`.
    """

    task: TransferTask
    task_type = TransferTask
    settings_type = RepresentationTransferSettings
    settings: RepresentationTransferSettings

    def get_parameters(self, config: Config) -> NDArrays:
        """Return zeros of the shape (1, d) of what sources send."""
        return [np.zeros((1, self.task.dimension))]

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit y ≈ X B w and keep w; send Bᵀ of shape (1, d)."""
        x, y = self.task.draw(self.index)
        theta = phase_two(np.zeros(x.shape[1]), x, y)
        norm = float(np.linalg.norm(theta))
        head = {"head.weight": np.array([[norm]])}
        self.state.save(head, int(config[SERVER_ROUND]))
        loss = float(np.mean((y - x @ theta) ** 2))
        # A model of zeros has no direction.
        return [theta[None] / (norm or 1.0)], len(y), {"train-loss": loss}

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return θ₁ and θ₂, from the first and second half of the samples.

        They are ``phase-1`` and ``phase-2``, of shape (d,), from Vᵀ of shape (q, d).
        The loss is the mean squared error of θ₂ on all samples.
        """
        x, y = self.task.draw(self.index)
        x1, y1, x2, y2 = halves(x, y)
        first = phase_one(parameters[0].T, x1, y1)
        steps = self.settings.descent_steps
        if steps == 0:
            second = phase_two(first, x2, y2)
        else:
            second = phase_two_descent(first, x2, y2, max_steps=steps)
        loss = float(np.mean((y - x @ second) ** 2))
        return {"phase-1": first, "phase-2": second}, loss

    def test_target(self, parameters: NDArrays, kept: Arrays) -> Evaluation:
        """Compare the own model with θ*.

        The loss is the mean squared error of θ₂ on the test examples. The metrics are
        errors relative to that of θ* (Table 5.1): ``error`` (phase 2),
        ``error-phase-1``, and ``error-scratch`` of the model of least norm that fits
        all samples without V.
        """
        x, y = self.task.draw(self.index)
        scratch = phase_two(np.zeros(x.shape[1]), x, y)
        models = cast(Matrix, kept["phase-1"]), cast(Matrix, kept["phase-2"]), scratch
        best, first, second, alone = self.task.errors(self.index, *models)
        errors: Config = {
            "error": second,
            "error-phase-1": first,
            "error-scratch": alone,
        }
        return second * best, len(self.task.test_examples(self.index)), errors


@dataclass(frozen=True)
class FeatureTransferSettings(FedRepSettings, RoleSettings):
    """Settings of representation transfer for models that are not linear.

    Parameters
    ----------
    rank_tolerance : float, default 0.01
        Where the rank of a basis ends, relative to the largest singular value.
    source_epochs : int, default 50
        Epochs of a source's whole model.
    """

    rank_tolerance: Annotated[float, Range("(0, 1)")] = 0.01
    source_epochs: Annotated[int, Range("[0, inf)")] = 50


class FeatureTransferClient(TransferClient):
    """The same for models that are not linear, which the theory does not cover.

    A source trains its whole model for ``source-epochs`` and sends the representation
    φ_i. A target's features are [φ_1(x) … φ_m(x)], projected onto an orthonormal basis
    of what they span on its own training examples (the principal directions whose
    singular values are above ``rank-tolerance`` times the largest). It trains a linear
    head on them for ``head-epochs`` and keeps basis and head. The representations are
    not trained further: there is no phase 2.
    """

    personal = (HEAD,)
    settings_type = FeatureTransferSettings
    settings: FeatureTransferSettings

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Train the whole model and keep the head."""
        self.receive(parameters, config)
        loss = self.train("all", self.settings.source_epochs)
        self.save(config)
        return self.send(loss)

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return a linear head on the features of all m sources, from arrays (m, …).

        ``basis`` is of shape (features of all sources, q), beside ``head.weight`` and
        ``head.bias``. The loss is the mean over the last epoch.
        """
        examples = self.train_examples.without_augmentation()
        features = self.features(parameters, examples)
        tolerance = self.settings.rank_tolerance
        spanned = to_numpy(features).astype(np.float64)
        v = torch.from_numpy(basis([spanned.T], tolerance)).float().to(self.device)
        outputs = len(self.task.classes) or examples.targets.shape[1]
        head = nn.Linear(v.shape[1], outputs).to(self.device)
        model = SplitModel(nn.Identity(), head)
        epochs = self.settings.head_epochs
        projected = ExampleSet(features @ v, examples.targets)
        loss = train(model, "head", projected, self.task.loss, epochs, self.settings)
        learned = {name: to_numpy(value) for name, value in model.tensors.items()}
        return {"basis": to_numpy(v), **learned}, loss

    @torch.no_grad()
    def features(self, parameters: NDArrays, examples: ExampleSet) -> Tensor:
        """Return [φ_1(x) … φ_m(x)], of shape (n, m k), from arrays of shape (m, …)."""
        names = self.names(self.shared)
        columns = []
        for source in zip(*parameters, strict=True):
            state = self.tensors(dict(zip(names, source, strict=True)))
            self.model.load_state_dict(state, strict=False)
            self.model.eval()
            batches = examples.batches(EVALUATION_BATCH)
            rows = [self.model.representation(x).flatten(1) for x, _ in batches]
            columns.append(torch.cat(rows))
        # NaN features of one source must not spoil the others'.
        return torch.nan_to_num(torch.cat(columns, dim=1), 0.0, 0.0, 0.0)

    def test_target(self, parameters: NDArrays, kept: Arrays) -> Evaluation:
        """Test the own head on the features of all sources."""
        examples = test_examples(self.task, self.index)
        if len(examples) == 0:
            return 0.0, 0, {}
        own = self.tensors(kept)
        v, weight, bias = own["basis"], own["head.weight"], own["head.bias"]
        head = nn.Linear(v.shape[1], len(weight)).to(self.device)
        model = SplitModel(nn.Identity(), head)
        model.head.load_state_dict({"weight": weight, "bias": bias})
        projected = ExampleSet(
            self.features(parameters, examples) @ v, examples.targets
        )
        loss, metrics = measure(self.task, model, projected)
        return loss, len(examples), metrics
