"""Representation transfer (Singh, UCLA 2024, ch. 5): sources and targets."""

from dataclasses import dataclass
from typing import Annotated, cast

import numpy as np
import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Arrays, Client, Config, Evaluation, Reply
from flwr_frl.clients.device.conversions import to_numpy, to_tensors
from flwr_frl.clients.device.evaluation import measure
from flwr_frl.clients.device.parameter_groups import (
    HEAD,
    REPRESENTATION,
    Groups,
    array_names,
)
from flwr_frl.clients.fedrep import FedRepSettings
from flwr_frl.clients.traits import NODE_SETTINGS
from flwr_frl.task.base import Matrix
from flwr_frl.task.examples import EVALUATION_BATCH, ExampleSet
from flwr_frl.task.messages import SERVER_ROUND
from flwr_frl.task.models import SplitModel
from flwr_frl.task.resident import test_examples
from flwr_frl.task.settings import Checked, Choice, Range
from flwr_frl.task.tasks.transfer import TransferTask
from flwr_frl.task.training import train
from flwr_frl.task.transfer import (
    ROLES,
    TransferData,
    basis,
    halves,
    is_source,
    phase_one,
    phase_two,
    phase_two_descent,
)


@dataclass(frozen=True)
class RoleSettings(Checked):
    """Roles of the clients.

    Parameters
    ----------
    num_sources : int, default 10
        Clients below this index are sources.
    role : {"auto", "source", "target"}, default "auto"
        Role of a device, set in its node config. ``auto`` decides by the client's
        index, which is 0 on every device without a ``partition-id``.
    """

    num_sources: Annotated[int, Range("[0, inf)")] = TransferData.num_sources
    role: Annotated[str, Choice(*ROLES)] = TransferData.role


class TransferClient(
    Client,
    # Targets receive all representations, stacked or as a basis.
    fixed_shapes=False,
    node_settings=(*NODE_SETTINGS, "role", "num-sources"),
):
    """A source, which sends its representation, or a target, which uses all of them."""

    shared = (REPRESENTATION,)
    settings: RoleSettings

    @property
    def is_source(self) -> bool:
        """Whether this client is a source."""
        role, sources = self.settings.role, self.settings.num_sources
        return is_source(role, self.index, sources)

    @property
    def sent(self) -> Groups:
        """The representation for a source; nothing for a target."""
        return self.shared if self.is_source else ()

    def get_properties(self, config: Config) -> Config:
        """Add ``role``: ``source`` or ``target``."""
        role = "source" if self.is_source else "target"
        return {**super().get_properties(config), "role": role}

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit a source's model and send its representation, or fit a target's model.

        A source receives the initial representation, a target the combined ones.
        """
        if self.is_source:
            return self.fit_source(parameters, config)
        model, loss = self.fit_target(parameters)
        self.state.save(model, int(config[SERVER_ROUND]))
        return [], len(self.task.train_examples(self.index)), {"train-loss": loss}

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit a source's model and save its head; see `fit`."""
        raise NotImplementedError

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Fit a target's model to the sources' arrays; return it and its loss."""
        raise NotImplementedError

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test this target's model; report no examples before it has one."""
        model = self.state.load()
        return (0.0, 0, {}) if model is None else self.test_target(parameters, model)

    def test_target(self, parameters: NDArrays, saved: Arrays) -> Evaluation:
        """Test a model returned by `fit_target`; see `Client.evaluate`."""
        raise NotImplementedError


@dataclass(frozen=True)
class RepresentationTransferSettings(RoleSettings):
    """Settings of linear representation transfer.

    Parameters
    ----------
    descent_steps : int, default 0
        Maximum number of gradient steps in phase 2; 0 uses the closed form.
    """

    descent_steps: Annotated[int, Range("[0, inf)")] = 0


class RepresentationTransferClient(TransferClient, task_type=TransferTask):
    """Linear regression: sources fit y ≈ X B w and send B; targets learn in two phases.

    Source (equation 5.3): least squares determine only the product θ = B w, and any B
    whose span contains θ attains the minimum. We use the smallest, with k = 1: the
    direction B = θ / ‖θ‖, while the head w = ‖θ‖ stays on the client. With fewer
    samples than dimensions, θ is the least-norm solution.

    Target (section 5.3): phase 1 fits a head on V to the first half of the samples, and
    phase 2 fits all parameters to the second half (see ``descent_steps``). The model
    stays on the client.

    Other tasks than ``transfer`` use the `FeatureTransferClient`.
    """

    task: TransferTask
    settings_type = RepresentationTransferSettings
    settings: RepresentationTransferSettings

    def get_parameters(self, config: Config) -> NDArrays:
        """Return zeros in the shape (1, d) of the sources' Bᵀ."""
        return [np.zeros((1, self.task.dimension))]

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit y ≈ X B w, save w, and send Bᵀ of shape (1, d)."""
        x, y = self.task.draw(self.index)
        theta = phase_two(np.zeros(x.shape[1]), x, y)
        norm = float(np.linalg.norm(theta))
        head = {"head.weight": np.array([[norm]])}
        self.state.save(head, int(config[SERVER_ROUND]))
        loss = float(np.mean((y - x @ theta) ** 2))
        # θ = 0 has no direction; B is then 0, too.
        return [theta[None] / (norm or 1.0)], len(y), {"train-loss": loss}

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return θ₁ as ``phase-1`` and θ₂ as ``phase-2``, given Vᵀ of shape (q, d).

        Both have the shape (d,). The loss is the mean squared error of θ₂ on all
        samples.
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

    def test_target(self, parameters: NDArrays, saved: Arrays) -> Evaluation:
        """Compare this target's model with θ*.

        The loss is the mean squared error of θ₂ on the test examples. The metrics are
        errors relative to that of θ* (Table 5.1): ``error`` (phase 2),
        ``error-phase-1``, and ``error-scratch`` of the least-norm model fitted to all
        samples without V.
        """
        x, y = self.task.draw(self.index)
        scratch = phase_two(np.zeros(x.shape[1]), x, y)
        models = cast(Matrix, saved["phase-1"]), cast(Matrix, saved["phase-2"]), scratch
        best, first, second, alone = self.task.errors(self.index, *models)
        errors: Config = {
            "error": second,
            "error-phase-1": first,
            "error-scratch": alone,
        }
        return second * best, len(self.task.test_examples(self.index)), errors


@dataclass(frozen=True)
class FeatureTransferSettings(FedRepSettings, RoleSettings):
    """Settings of representation transfer for nonlinear models.

    Parameters
    ----------
    rank_tolerance : float, default 0.01
        Singular values below this fraction of the largest do not count towards the rank
        of a basis.
    source_epochs : int, default 50
        Epochs in which a source trains its whole model.
    """

    rank_tolerance: Annotated[float, Range("(0, 1)")] = 0.01
    source_epochs: Annotated[int, Range("[0, inf)")] = 50


class FeatureTransferClient(TransferClient):
    """Representation transfer for nonlinear models, which the theory does not cover.

    A source trains its whole model for ``source-epochs`` and sends the representation
    φ_i. A target's features are [φ_1(x) … φ_m(x)], projected onto an orthonormal basis
    of their span on its training examples (the principal directions whose singular
    values are above ``rank-tolerance`` times the largest). It trains a linear head on
    them for ``head-epochs``, and saves the basis and the head. The representations
    themselves stay fixed: there is no phase 2.
    """

    personal = (HEAD,)
    settings_type = FeatureTransferSettings
    settings: FeatureTransferSettings

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Train the whole model and save the head."""
        self.receive(parameters, config)
        loss = self.train("all", self.settings.source_epochs)
        self.save(config)
        return self.send(loss)

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return a linear head on the features of all m sources, given arrays (m, …).

        The result contains ``basis``, shape (features of all sources, q),
        ``head.weight`` and ``head.bias``. The loss is the mean over the last epoch.
        """
        examples = self.train_examples.without_augmentation()
        features = self.features(parameters, examples)
        tolerance = self.settings.rank_tolerance
        columns = to_numpy(features).astype(np.float64).T
        v = torch.from_numpy(basis([columns], tolerance)).float().to(self.device)
        outputs = len(self.task.classes) or examples.targets.shape[1]
        head = nn.Linear(v.shape[1], outputs).to(self.device)
        model = SplitModel(nn.Identity(), head)
        epochs = self.settings.head_epochs
        projected = ExampleSet(features @ v, _one_per_row(examples.targets))
        loss = train(
            model, "head", projected, self.training_loss, epochs, self.settings
        )
        learned = {name: to_numpy(value) for name, value in model.tensors.items()}
        return {"basis": to_numpy(v), **learned}, loss

    @torch.no_grad()
    def features(self, parameters: NDArrays, examples: ExampleSet) -> Tensor:
        """Return [φ_1(x) … φ_m(x)], shape (n, m k), given arrays of shape (m, …).

        If the examples are sequences with a class at every position, so are the rows.
        """
        names = array_names(self, self.shared)
        columns, at_positions = [], _has_positions(examples.targets)
        for source in zip(*parameters, strict=True):
            state = to_tensors(dict(zip(names, source, strict=True)), self.device)
            self.model.load_state_dict(state, strict=False)
            self.model.eval()
            batches = examples.batches(EVALUATION_BATCH)
            features = (self.model.representation(x) for x, _ in batches)
            rows = [
                z.flatten(0, -2) if at_positions else z.flatten(1) for z in features
            ]
            columns.append(torch.cat(rows))
        # NaN features of one source must not affect those of the others.
        return torch.nan_to_num(torch.cat(columns, dim=1), 0.0, 0.0, 0.0)

    def test_target(self, parameters: NDArrays, saved: Arrays) -> Evaluation:
        """Test this target's head on the features of all sources."""
        examples = test_examples(self.task, self.index)
        if len(examples) == 0:
            return 0.0, 0, {}
        tensors = to_tensors(saved, self.device)
        v, weight, bias = (tensors[n] for n in ("basis", "head.weight", "head.bias"))
        head = nn.Linear(v.shape[1], len(weight)).to(self.device)
        model = SplitModel(nn.Identity(), head)
        model.head.load_state_dict({"weight": weight, "bias": bias})
        projected = ExampleSet(
            self.features(parameters, examples) @ v, _one_per_row(examples.targets)
        )
        loss, metrics = measure(self.task, model, projected)
        return loss, len(examples), metrics


def _has_positions(targets: Tensor) -> bool:
    """Return True if each target is a sequence of classes."""
    return targets.ndim > 1 and not targets.is_floating_point()


def _one_per_row(targets: Tensor) -> Tensor:
    """Return the targets of the rows of `RepresentationTransferClient.features`."""
    return targets.flatten() if _has_positions(targets) else targets
