"""Representation transfer (Singh, UCLA 2024, ch. 5): sources and targets."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import (
    Arrays,
    Client,
    Config,
    EvaluateResult,
    FitResult,
    TaskOf,
    TrainingSettings,
    trained_representation,
)
from flwr_frl.clients.device.evaluation import measure
from flwr_frl.clients.device.groups import REPRESENTATION, Groups, Shape, to_tensors
from flwr_frl.common.errors import require
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.settings import Checked, setting
from flwr_frl.task import transfer
from flwr_frl.task.examples import EVALUATION_BATCH, ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.frozen import copy_sharing_frozen
from flwr_frl.task.tasks.linear import RegressionTask, TransferTask
from flwr_frl.task.tasks.text import PositionwiseLinear
from flwr_frl.task.training.local_training import train

# Prefix of arrays that a target saves after phase 2 only.
SOURCES = "representation.sources."


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

    num_sources: int = setting(TransferTask.num_sources, ge=0, per_device=True)
    role: transfer.Role = setting(TransferTask.role, per_device=True)


@dataclass(frozen=True)
class RoleTrainingSettings(TrainingSettings, RoleSettings):
    """Local training of split models, and the roles of clients."""


class CombinedRepresentation(nn.Module):
    """Maps inputs x to [φ_1(x) … φ_m(x)] V.

    Parameters
    ----------
    sources : iterable of nn.Module
        The representations φ_i.
    at_positions : bool
        Whether there are features for every position of a sequence, (n, time, k).
        Otherwise the features of an example are flattened.

    Attributes
    ----------
    basis : Tensor, shape (features of all sources, q)
        V, empty until it is set.
    """

    def __init__(self, sources: Iterable[nn.Module], at_positions: bool) -> None:
        super().__init__()
        self.sources = nn.ModuleList(sources)
        self.basis = nn.Parameter(torch.empty(0))
        self.at_positions = at_positions

    def features(self, x: Tensor) -> Tensor:
        """Return [φ_1(x) … φ_m(x)]."""
        features = [source(x) for source in self.sources]
        if not self.at_positions:
            features = [z.flatten(1) for z in features]
        # NaN features of one source must not affect those of the others.
        return torch.nan_to_num(torch.cat(features, dim=-1), 0.0, 0.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projected features."""
        return self.features(x) @ self.basis


class FeatureTransferClient(Client, requires=(trained_representation,)):
    """A source, which sends its representation, or a target, which uses all of them.

    The theory does not cover these models, which need not be linear. A source trains
    its whole model for ``source-epochs`` and sends the representation φ_i. A target's
    features are [φ_1(x) … φ_m(x)], projected onto an orthonormal basis of their span on
    the examples of phase 1 (the principal directions whose singular values are above
    ``rank-tolerance`` times the largest). Phase 1 trains a linear head on them for
    ``head-epochs``. Phase 2 (``phase-two-epochs``) then trains the whole model, from
    this initialisation, on other examples (section 5.3.2): the φ_i, the basis and the
    head. The target saves everything that it has trained.

    Parameters
    ----------
    head_epochs : int, default 10
        Epochs of the head in phase 1.
    rank_tolerance : float, default 0.01
        Singular values below this fraction of the largest do not count towards the rank
        of a basis.
    source_epochs : int, default 50
        Epochs in which a source trains its whole model.
    phase_two_epochs : int, default 0
        Epochs of phase 2, in which a target trains its whole model, the sources'
        representations included, on a random half of its examples. Phase 1 then uses
        the other half only. 0 leaves phase 2 out.
    """

    shared: Any = "representation"
    personal: Any = "head"
    _settings_type: type = RoleTrainingSettings
    head_epochs: int = setting(10, ge=0)
    rank_tolerance: float = setting(0.01, gt=0, lt=1)
    source_epochs: int = setting(50, ge=0)
    phase_two_epochs: int = setting(0, ge=0)

    def _takes(self, name: str, shape: Shape, initial: Shape) -> bool:
        """Return True: targets receive all representations, stacked or as a basis."""
        return True

    @property
    def is_source(self) -> bool:
        """Whether this client is a source."""
        settings = self.settings
        return transfer.is_source(settings.role, self._index, settings.num_sources)

    @property
    def sent(self) -> Groups:
        """The representation for a source; nothing for a target."""
        return self.shared if self.is_source else ()

    def get_properties(self, config: Config) -> Config:
        """Add ``role``: ``source`` or ``target``."""
        role = "source" if self.is_source else "target"
        return {**super().get_properties(config), "role": role}

    def fit(self, parameters: NDArrays, config: Config) -> FitResult:
        """Fit a source's model and send its representation, or fit a target's model.

        A source receives the initial representation, a target those of all sources,
        combined.
        """
        if self.is_source:
            return self.fit_source(parameters, config)
        model, loss = self.fit_target(parameters)
        self._state.save(model, int(config[SERVER_ROUND]))
        return [], len(self.task.train_examples(self._index)), {"train-loss": loss}

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Test this target's model; report no examples before it has one."""
        model = self._state.load()
        if model is None or not len(self.task.test_examples(self._index)):
            return 0.0, 0, {}
        return self.test_target(parameters, model)

    def fit_source(self, parameters: NDArrays, config: Config) -> FitResult:
        """Train the whole model and save the head."""
        self._receive(parameters, config)
        return self._reply(self.train("all", self.settings.source_epochs))

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return a model on the features of all m sources, given arrays (m, …).

        The result contains ``representation.basis``, of shape (features of all sources,
        q), and the linear head. After phase 2 it also contains the trained sources. The
        loss is the mean over the last epoch.
        """
        examples, epochs = self.train_examples, self.settings.phase_two_epochs
        n, first = len(examples), examples
        if epochs:
            allowed = "0 for a target with one example, as each phase needs one"
            require(n > 1, "phase-two-epochs", epochs, allowed)
            order = torch.randperm(n)
            first = examples.subset(order[: n // 2])
            examples = examples.subset(order[n // 2 :])
        model, loss = self.phase_one(parameters, first)
        if epochs:  # Section 5.3.2
            loss = train(model, "all", examples, self.task.loss, epochs, self.settings)
        arrays = {name: t.numpy(force=True) for name, t in model.state_dict().items()}
        kept = (n for n in arrays if epochs or not n.startswith(SOURCES))
        return {name: arrays[name] for name in kept}, loss

    def phase_one(
        self, parameters: NDArrays, examples: ExampleSet
    ) -> tuple[SplitModel, float]:
        """Train a head on the fixed features (section 5.3.1).

        Returns the model and the mean loss over the last epoch.
        """
        examples = examples.without_augmentation()
        combined = self.combined(parameters, _has_positions(examples.targets)).eval()
        batches = examples.batches(EVALUATION_BATCH)
        with torch.no_grad():
            features = torch.cat([combined.features(x) for x, _ in batches])
            outputs = self.model.eval()(examples.first(1)).shape[1:2].numel()
        columns = features.flatten(0, -2).numpy(force=True).astype(np.float64).T
        v = transfer.basis([columns], self.settings.rank_tolerance)
        combined.basis = nn.Parameter(torch.from_numpy(v).to(features))
        head = self.head(combined, outputs)
        projected = ExampleSet(features @ combined.basis.detach(), examples.targets)
        alone, epochs = SplitModel(nn.Identity(), head), self.settings.head_epochs
        loss = train(alone, "head", projected, self.task.loss, epochs, self.settings)
        return SplitModel(combined, head), loss

    def combined(
        self, parameters: NDArrays, at_positions: bool
    ) -> CombinedRepresentation:
        """Return the sources' representations, given arrays of shape (m, …)."""
        names = [n.removeprefix(REPRESENTATION) for n in self._array_names(self.shared)]
        sources = []
        for arrays in zip(*parameters, strict=True):
            state = to_tensors(dict(zip(names, arrays, strict=True)), self._device)
            sources.append(copy_sharing_frozen(self.model.representation))
            sources[-1].load_state_dict(state, strict=False)
        return CombinedRepresentation(sources, at_positions)

    def head(self, combined: CombinedRepresentation, outputs: int) -> nn.Linear:
        """Return a new linear head of the projected features."""
        kind = PositionwiseLinear if combined.at_positions else nn.Linear
        head = kind(combined.basis.shape[1], outputs, dtype=combined.basis.dtype)
        return head.to(self._device)

    def test_target(self, parameters: NDArrays, saved: Arrays) -> EvaluateResult:
        """Test this target's model; sources that were not trained are received."""
        examples = self.task.resident("test", self._index)
        state = to_tensors(saved, self._device)
        combined = self.combined(parameters, _has_positions(examples.targets))
        combined.basis = nn.Parameter(state[f"{REPRESENTATION}basis"])
        model = SplitModel(combined, self.head(combined, len(state["head.weight"])))
        model.load_state_dict(state, strict=False)
        loss, metrics = measure(self.task, model, examples)
        return loss, len(examples), metrics


class RepresentationTransferClient(
    FeatureTransferClient, requires=(TaskOf(RegressionTask),)
):
    """Linear regression: sources fit y ≈ X B w and send B; targets learn in two phases.

    Source (equation 5.3): least squares determine only the product θ = B w, and any B
    whose span contains θ attains the minimum. We use the smallest: the direction
    B = θ / ‖θ‖, while the head w = ‖θ‖ stays on the client. With fewer samples than
    dimensions, θ is the least-norm solution.

    Target (section 5.3): phase 1 fits a head on V to the first half of the samples, and
    phase 2 fits all parameters to the second half (see ``descent_steps``). The model
    stays on the client.

    Tasks other than ``transfer`` use the `FeatureTransferClient`.

    Parameters
    ----------
    descent_steps : int, default 0
        Maximum number of gradient steps in phase 2; 0 uses the closed form.
    """

    task: RegressionTask
    personal: Any = ()
    _settings_type = RoleSettings
    descent_steps: int = setting(0, ge=0)

    def get_parameters(self, config: Config) -> NDArrays:
        """Return zeros in the shape (1, d) of the sources' Bᵀ."""
        return [np.zeros((1, self.task.dimension))]

    def fit_source(self, parameters: NDArrays, config: Config) -> FitResult:
        """Fit y ≈ X B w, save w of shape (1, 1), and send Bᵀ of shape (1, d)."""
        x, y = self.task.draw(self._index)
        theta = transfer.phase_two(np.zeros(x.shape[1]), x, y)
        norm = float(np.linalg.norm(theta))
        self._state.save({"head.weight": np.array([[norm]])}, int(config[SERVER_ROUND]))
        loss = float(np.mean((y - x @ theta) ** 2))
        # θ = 0 has no direction; B is then 0, too.
        return [theta[None] / (norm or 1.0)], len(y), {"train-loss": loss}

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return θ₁ as ``phase-1`` and θ₂ as ``phase-2``, given Vᵀ of shape (q, d).

        Both have the shape (d,). The loss is the mean squared error of θ₂ on all
        samples.
        """
        x, y = self.task.draw(self._index)
        x1, y1, x2, y2 = transfer.halves(x, y)
        first = transfer.phase_one(parameters[0].T, x1, y1)
        second = transfer.phase_two(first, x2, y2)
        if steps := self.settings.descent_steps:
            second = transfer.phase_two_descent(first, x2, y2, max_steps=steps)
        loss = float(np.mean((y - x @ second) ** 2))
        return {"phase-1": first, "phase-2": second}, loss

    def test_target(self, parameters: NDArrays, saved: Arrays) -> EvaluateResult:
        """Compare this target's model with θ*.

        The loss is the mean squared error of θ₂ on the test examples. The metrics are
        errors relative to that of θ* (Table 5.1): ``error`` (phase 2),
        ``error-phase-1``, and ``error-scratch`` of the least-norm model fitted to all
        samples without V.
        """
        x, y = self.task.draw(self._index)
        scratch = transfer.phase_two(np.zeros(x.shape[1]), x, y)
        models: Any = saved["phase-2"], saved["phase-1"], scratch
        best, *errors = self.task.errors(self._index, *models)
        names = "error", "error-phase-1", "error-scratch"
        metrics: Config = dict(zip(names, errors, strict=True))
        tested = self.task.test_examples(self._index)
        return errors[0] * best, len(tested), metrics


def _has_positions(targets: Tensor) -> bool:
    """Return True if each target is a sequence of classes."""
    return targets.ndim > 1 and not targets.is_floating_point()
