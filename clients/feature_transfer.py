"""Representation transfer (Singh, UCLA 2024, ch. 5) for nonlinear models."""

from collections.abc import Iterator
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
from flwr_frl.task.models.combined import (
    CombinedRepresentation,
    has_positions,
    one_per_row,
)
from flwr_frl.task.resident import test_examples
from flwr_frl.task.training.calls import evaluation_size
from flwr_frl.task.training.local_training import train
from flwr_frl.task.transfer import basis

# Prefixes of arrays that a target saves after phase 2.
SOURCES, PHASE_ONE = "sources.", "phase-1."


@dataclass(frozen=True)
class RoleTrainingSettings(TrainingSettings, RoleSettings):
    """Local training of split models, and the roles of clients."""


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
        """Return a linear head on the features of all m sources, given arrays (m, …).

        The result contains ``basis``, shape (features of all sources, q),
        ``head.weight`` and ``head.bias``. After phase 2 it also contains the trained
        ``sources.`` arrays (m, …), and basis and head of phase 1 under ``phase-1.``.
        The loss is the mean over the last epoch.
        """
        examples, epochs = self.train_examples, self.settings.phase_two_epochs
        n, first = len(examples), examples
        if epochs:
            allowed = "0 for a target with one example, as each phase needs one"
            require(n > 1, "phase-two-epochs", epochs, allowed)
            order = torch.randperm(n)
            first, second = examples.subset(order[: n // 2]), order[n // 2 :]
        v, head, loss = self.phase_one(parameters, first)
        saved = _arrays(v, head)
        if not epochs:
            return saved, loss
        before = {PHASE_ONE + name: array for name, array in saved.items()}
        combined, loss = self.phase_two(parameters, v, head, examples.subset(second))
        sources = combined.stacked(self._names_within())
        trained = {SOURCES + name: to_numpy(value) for name, value in sources.items()}
        return {**_arrays(combined.basis, head), **trained, **before}, loss

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
        v = torch.from_numpy(basis([columns], tolerance)).to(features)
        outputs = len(self.task.classes) or self._num_outputs(examples)
        head = nn.Linear(v.shape[1], outputs, dtype=v.dtype).to(self._device)
        model = SplitModel(nn.Identity(), head)
        epochs = self.settings.head_epochs
        projected = ExampleSet(features @ v, one_per_row(examples.targets))
        loss = train(model, "head", projected, self._loss, epochs, self.settings)
        return v, head, loss

    def phase_two(
        self, parameters: NDArrays, v: Tensor, head: nn.Linear, examples: ExampleSet
    ) -> tuple[CombinedRepresentation, float]:
        """Train the whole model from the result of phase 1 (section 5.3.2).

        Returns the representation and the mean loss over the last epoch; ``head``
        trains, too.
        """
        states = self._source_states(parameters)
        combined = CombinedRepresentation.of(
            self.model.representation,
            (under(REPRESENTATION, state) for state in states),
            v.clone(),
            has_positions(examples.targets),
        )
        model = SplitModel(combined.to(self._device), head)
        epochs, sgd = self.settings.phase_two_epochs, self.settings

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return self._loss(outputs, one_per_row(targets))

        return combined, train(model, "all", examples, loss, epochs, sgd)

    @torch.no_grad()
    def _num_outputs(self, examples: ExampleSet) -> int:
        """Return the number of outputs of the task's model."""
        outputs: Tensor = self.model.eval()(examples.first(1))
        return outputs.shape[1:2].numel()

    def _names_within(self) -> list[str]:
        names = array_names(self, self.shared)
        return [name.removeprefix(REPRESENTATION) for name in names]

    def _source_states(self, parameters: NDArrays) -> Iterator[Tensors]:
        """Yield the representation of each source, given arrays of shape (m, …)."""
        names = array_names(self, self.shared)
        for source in zip(*parameters, strict=True):
            yield to_tensors(dict(zip(names, source, strict=True)), self._device)

    @torch.no_grad()
    def features(self, parameters: NDArrays, examples: ExampleSet) -> Tensor:
        """Return [φ_1(x) … φ_m(x)], shape (n, m k), given arrays of shape (m, …).

        For sequences with a class at every position, there is a row for each position.
        """
        columns, at_positions = [], has_positions(examples.targets)
        for state in self._source_states(parameters):
            self.model.load_state_dict(state, strict=False)
            self.model.eval()
            batches = examples.batches(evaluation_size(self.model, examples))
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
        examples = test_examples(self.task, self._index)
        if len(examples) == 0:
            return 0.0, 0, {}
        before = {
            name.removeprefix(PHASE_ONE): array
            for name, array in saved.items()
            if name.startswith(PHASE_ONE)
        }
        if not before:
            loss, metrics = self._tested(parameters, saved, examples)
            return loss, len(examples), metrics
        trained: NDArrays = [saved[SOURCES + name] for name in self._names_within()]
        loss, metrics = self._tested(trained, saved, examples)
        first_loss, first = self._tested(parameters, before, examples)
        for name, value in {"loss": first_loss, **first}.items():
            metrics[f"{name}-phase-1"] = value
        return loss, len(examples), metrics

    def _tested(
        self, parameters: NDArrays, saved: Arrays, examples: ExampleSet
    ) -> tuple[float, Config]:
        """Return loss and metrics of a saved basis and head on sources' features."""
        names = "basis", "head.weight", "head.bias"
        tensors = to_tensors({name: saved[name] for name in names}, self._device)
        v, weight, bias = tensors.values()
        head = nn.Linear(v.shape[1], len(weight), dtype=v.dtype).to(self._device)
        head.load_state_dict({"weight": weight, "bias": bias})
        features = self.features(parameters, examples) @ v
        projected = ExampleSet(features, one_per_row(examples.targets))
        return measure(self.task, SplitModel(nn.Identity(), head), projected)


def _arrays(v: Tensor, head: nn.Linear) -> Arrays:
    """Return a basis and a head as arrays to save."""
    return {
        "basis": to_numpy(v).copy(),
        "head.weight": to_numpy(head.weight).copy(),
        "head.bias": to_numpy(head.bias).copy(),
    }
