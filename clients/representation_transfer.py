"""Representation transfer (Singh, UCLA 2024, ch. 5): sources and targets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, cast

import numpy as np
import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Arrays, Client, Config, Evaluation, Reply
from flwr_frl.clients.device.conversions import (
    Tensors,
    to_numpy,
    to_tensors,
    under,
    within,
)
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
from flwr_frl.task.models.combined import (
    CombinedRepresentation,
    has_positions,
    one_per_row,
)
from flwr_frl.task.resident import test_examples
from flwr_frl.task.settings import Checked, Choice, Range, require
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

# Prefixes of arrays that a target saves after phase 2.
SOURCES, PHASE_ONE = "sources.", "phase-1."


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
    whose span contains θ attains the minimum. We use the smallest: the direction
    B = θ / ‖θ‖, while the head w = ‖θ‖ stays on the client. With k outputs
    (``source-outputs``), B has the directions of the k products as columns. With fewer
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
        """Return zeros in the shape (k, d) of the sources' Bᵀ."""
        return [np.zeros((self.task.source_outputs, self.task.dimension))]

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit y ≈ X B w, save wᵀ of shape (k, k), and send Bᵀ of shape (k, d)."""
        x, y = self.task.draw(self.index)
        columns = y.reshape(len(y), -1).T
        thetas = [phase_two(np.zeros(x.shape[1]), x, column) for column in columns]
        norms = [float(np.linalg.norm(theta)) for theta in thetas]
        head = {"head.weight": np.diag(norms)}
        self.state.save(head, int(config[SERVER_ROUND]))
        pairs = zip(columns, thetas, strict=True)
        losses = [np.mean((column - x @ theta) ** 2) for column, theta in pairs]
        # θ = 0 has no direction; its column of B is then 0, too.
        scaled = zip(thetas, norms, strict=True)
        directions = np.array([theta / (norm or 1.0) for theta, norm in scaled])
        return [directions], len(y), {"train-loss": float(np.mean(losses))}

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
    phase_two_epochs : int, default 0
        Epochs of phase 2, in which a target trains its whole model, the sources'
        representations included, on a random half of its examples; the head is then
        trained on the other half. 0 leaves phase 2 out.
    """

    rank_tolerance: Annotated[float, Range("(0, 1)")] = 0.01
    source_epochs: Annotated[int, Range("[0, inf)")] = 50
    phase_two_epochs: Annotated[int, Range("[0, inf)")] = 0


class FeatureTransferClient(TransferClient):
    """Representation transfer for nonlinear models, which the theory does not cover.

    A source trains its whole model for ``source-epochs`` and sends the representation
    φ_i. A target's features are [φ_1(x) … φ_m(x)], projected onto an orthonormal basis
    of their span on its training examples (the principal directions whose singular
    values are above ``rank-tolerance`` times the largest). Phase 1 trains a linear head
    on them for ``head-epochs``. Phase 2 (``phase-two-epochs``) then trains the whole
    model, from this initialisation, on other examples (section 5.3.2): the φ_i, the
    basis and the head. The target saves everything that it has trained.
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
        ``head.weight`` and ``head.bias``. After phase 2 it also contains the trained
        ``sources.`` arrays (m, …), and basis and head of phase 1 under ``phase-1.``.
        The loss is the mean over the last epoch.
        """
        examples, epochs = self.train_examples, self.settings.phase_two_epochs
        if not epochs:
            v, head, loss = self.phase_one(parameters, examples)
            return _arrays(v, head), loss
        n = len(examples)
        allowed = "0 for a target with one example, as each phase needs one"
        require(n > 1, "phase-two-epochs", epochs, allowed)
        order = torch.randperm(n)
        first, second = (examples.subset(h) for h in (order[: n // 2], order[n // 2 :]))
        v, head, _ = self.phase_one(parameters, first)
        before = within(PHASE_ONE, to_tensors(_arrays(v, head), self.device))
        model, loss = self.phase_two(parameters, v, head, second)
        combined = cast(CombinedRepresentation, model.representation)
        sources = within(SOURCES, combined.stacked(self._names_within()))
        trained = {n: to_numpy(value) for n, value in {**sources, **before}.items()}
        return {**_arrays(combined.basis, head), **trained}, loss

    def phase_one(
        self, parameters: NDArrays, examples: ExampleSet
    ) -> tuple[Tensor, nn.Linear, float]:
        """Train a head on the fixed features (section 5.3.1).

        Returns the basis, the head, and the mean loss over the last epoch.
        """
        examples = examples.without_augmentation()
        features = self.features(parameters, examples)
        tolerance = self.settings.rank_tolerance
        columns = to_numpy(features).astype(np.float64).T
        v = torch.from_numpy(basis([columns], tolerance)).float().to(self.device)
        outputs = len(self.task.classes) or examples.targets.shape[1]
        head = nn.Linear(v.shape[1], outputs).to(self.device)
        model = SplitModel(nn.Identity(), head)
        epochs = self.settings.head_epochs
        projected = ExampleSet(features @ v, one_per_row(examples.targets))
        loss = train(
            model, "head", projected, self.training_loss, epochs, self.settings
        )
        return v, head, loss

    def phase_two(
        self, parameters: NDArrays, v: Tensor, head: nn.Linear, examples: ExampleSet
    ) -> tuple[SplitModel, float]:
        """Train the whole model from the result of phase 1 (section 5.3.2).

        Returns the model and the mean loss over the last epoch. ``head`` is part of the
        model.
        """
        states = self._source_states(parameters)
        combined = CombinedRepresentation.of(
            self.model.representation,
            (under(REPRESENTATION, state) for state in states),
            v.clone(),
            has_positions(examples.targets),
        )
        model = SplitModel(combined.to(self.device), head)
        epochs, sgd = self.settings.phase_two_epochs, self.settings

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return self.training_loss(outputs, one_per_row(targets))

        return model, train(model, "all", examples, loss, epochs, sgd)

    def _names_within(self) -> list[str]:
        names = array_names(self, self.shared)
        return [name.removeprefix(REPRESENTATION) for name in names]

    def _source_states(self, parameters: NDArrays) -> Iterator[Tensors]:
        """Yield the representation of each source, given arrays of shape (m, …)."""
        names = array_names(self, self.shared)
        for source in zip(*parameters, strict=True):
            yield to_tensors(dict(zip(names, source, strict=True)), self.device)

    @torch.no_grad()
    def features(self, parameters: NDArrays, examples: ExampleSet) -> Tensor:
        """Return [φ_1(x) … φ_m(x)], shape (n, m k), given arrays of shape (m, …).

        If the examples are sequences with a class at every position, so are the rows.
        """
        columns, at_positions = [], has_positions(examples.targets)
        for state in self._source_states(parameters):
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
        """Test this target's model.

        After phase 2, the metrics include those of phase 1, with the suffix
        ``-phase-1``.
        """
        examples = test_examples(self.task, self.index)
        if len(examples) == 0:
            return 0.0, 0, {}
        trained = [saved.get(SOURCES + n) for n in self._names_within()]
        if trained[0] is None:
            loss, metrics = self._tested(parameters, saved, examples)
            return loss, len(examples), metrics
        loss, metrics = self._tested(cast(NDArrays, trained), saved, examples)
        start = len(PHASE_ONE)
        before = {n[start:]: a for n, a in saved.items() if n.startswith(PHASE_ONE)}
        first_loss, first = self._tested(parameters, before, examples)
        for name, value in {"loss": first_loss, **first}.items():
            metrics[f"{name}-phase-1"] = value
        return loss, len(examples), metrics

    def _tested(
        self, parameters: NDArrays, saved: Arrays, examples: ExampleSet
    ) -> tuple[float, Config]:
        """Return loss and metrics of a basis and a head on the features of sources."""
        names = "basis", "head.weight", "head.bias"
        tensors = to_tensors({name: saved[name] for name in names}, self.device)
        v, weight, bias = tensors.values()
        head = nn.Linear(v.shape[1], len(weight)).to(self.device)
        model = SplitModel(nn.Identity(), head)
        model.head.load_state_dict({"weight": weight, "bias": bias})
        projected = ExampleSet(
            self.features(parameters, examples) @ v, one_per_row(examples.targets)
        )
        return measure(self.task, model, projected)


def _arrays(v: Tensor, head: nn.Linear) -> Arrays:
    """Return a basis and a head as arrays to save."""
    return {
        "basis": to_numpy(v).copy(),
        "head.weight": to_numpy(head.weight).copy(),
        "head.bias": to_numpy(head.bias).copy(),
    }
