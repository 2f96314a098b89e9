"""Representation transfer (Singh, UCLA 2024, ch. 5) for nonlinear models."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Arrays, Config, Evaluation, Reply, TrainingSettings
from flwr_frl.clients.device.conversions import Tensors, to_numpy, to_tensors, under
from flwr_frl.clients.device.evaluation import measure
from flwr_frl.clients.device.parameter_groups import REPRESENTATION, array_names
from flwr_frl.clients.device.traits import trained_representation
from flwr_frl.clients.representation_transfer import RoleSettings, TransferClient
from flwr_frl.common.settings import require, setting
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.frozen import copy_sharing_frozen
from flwr_frl.task.resident import test_examples
from flwr_frl.task.tasks.text import PositionwiseLinear
from flwr_frl.task.training.calls import evaluation_size
from flwr_frl.task.training.local_training import train
from flwr_frl.task.transfer import basis

# Prefixes of arrays that a target saves after phase 2 only.
SOURCES, PHASE_ONE = "representation.sources.", "phase-1."


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


class FeatureTransferClient(TransferClient, requires=(trained_representation,)):
    """Representation transfer for nonlinear models, which the theory does not cover.

    A source trains its whole model for ``source-epochs`` and sends the representation
    φ_i. A target's features are [φ_1(x) … φ_m(x)], projected onto an orthonormal basis
    of their span on the examples of phase 1 (the principal directions whose singular
    values are above ``rank-tolerance`` times the largest). Phase 1 trains a linear head
    on them for ``head-epochs``. Phase 2 (``phase-two-epochs``) then trains the whole
    model, from this initialisation, on other examples (section 5.3.2): the φ_i, the
    basis and the head. The target saves everything that it has trained.

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

    personal = "head"
    _settings_type = RoleTrainingSettings
    head_epochs: int = setting(10, ge=0)
    rank_tolerance: float = setting(0.01, gt=0, lt=1)
    source_epochs: int = setting(50, ge=0)
    phase_two_epochs: int = setting(0, ge=0)

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Train the whole model and save the head."""
        self._receive(parameters, config)
        loss = self.train("all", self.settings.source_epochs)
        self._save()
        return self._send(loss)

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return a model on the features of all m sources, given arrays (m, …).

        The result contains ``representation.basis``, of shape (features of all sources,
        q), and the linear head. After phase 2 it also contains the trained sources, and
        basis and head of phase 1 under ``phase-1.``. The loss is the mean over the last
        epoch.
        """
        examples, epochs = self.train_examples, self.settings.phase_two_epochs
        n, first = len(examples), examples
        if epochs:
            allowed = "0 for a target with one example, as each phase needs one"
            require(n > 1, "phase-two-epochs", epochs, allowed)
            order = torch.randperm(n)
            first, examples = (
                examples.subset(half) for half in (order[: n // 2], order[n // 2 :])
            )
        model, loss = self.phase_one(parameters, first)
        arrays = {name: to_numpy(t).copy() for name, t in model.state_dict().items()}
        learned = {n: a for n, a in arrays.items() if not n.startswith(SOURCES)}
        if not epochs:
            return learned, loss
        # Section 5.3.2
        loss = train(model, "all", examples, self._loss, epochs, self.settings)
        trained = {name: to_numpy(t) for name, t in model.state_dict().items()}
        return {**trained, **{PHASE_ONE + n: a for n, a in learned.items()}}, loss

    def phase_one(
        self, parameters: NDArrays, examples: ExampleSet
    ) -> tuple[SplitModel, float]:
        """Train a head on the fixed features (section 5.3.1).

        Returns the model and the mean loss over the last epoch.
        """
        examples = examples.without_augmentation()
        combined = self.combined(parameters, _has_positions(examples.targets)).eval()
        batches = examples.batches(evaluation_size(self.model, examples))
        with torch.no_grad():
            features = torch.cat([combined.features(x) for x, _ in batches])
            outputs = self.model.eval()(examples.first(1)).shape[1:2].numel()
        columns = to_numpy(features.flatten(0, -2)).astype(np.float64).T
        v = basis([columns], self.settings.rank_tolerance)
        combined.basis = nn.Parameter(torch.from_numpy(v).to(features))
        head = self.head(combined, outputs)
        projected = ExampleSet(features @ combined.basis.detach(), examples.targets)
        alone, epochs = SplitModel(nn.Identity(), head), self.settings.head_epochs
        loss = train(alone, "head", projected, self._loss, epochs, self.settings)
        return SplitModel(combined, head), loss

    def combined(
        self, parameters: NDArrays, at_positions: bool
    ) -> CombinedRepresentation:
        """Return the sources' representations, given arrays of shape (m, …)."""
        names = [n.removeprefix(REPRESENTATION) for n in array_names(self, self.shared)]
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

    def test_target(self, parameters: NDArrays, saved: Arrays) -> Evaluation:
        """Test this target's model.

        After phase 2, the metrics include those of phase 1, with the suffix
        ``-phase-1``.
        """
        examples = test_examples(self.task, self._index)
        if len(examples) == 0:
            return 0.0, 0, {}
        tensors = to_tensors(saved, self._device)
        before = under(PHASE_ONE, tensors)
        loss, metrics = self._tested(parameters, tensors, examples)
        if before:
            first_loss, first = self._tested(parameters, before, examples)
            for name, value in {"loss": first_loss, **first}.items():
                metrics[f"{name}-phase-1"] = value
        return loss, len(examples), metrics

    def _tested(
        self, parameters: NDArrays, saved: Tensors, examples: ExampleSet
    ) -> tuple[float, Config]:
        """Return loss and metrics of a saved model; sources not in it are received."""
        combined = self.combined(parameters, _has_positions(examples.targets))
        combined.basis = nn.Parameter(saved[f"{REPRESENTATION}basis"])
        model = SplitModel(combined, self.head(combined, len(saved["head.weight"])))
        model.load_state_dict(saved, strict=False)
        return measure(self.task, model, examples)


def _has_positions(targets: Tensor) -> bool:
    """Return True if each target is a sequence of classes."""
    return targets.ndim > 1 and not targets.is_floating_point()
