"""What a task is, and what tasks have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from task.examples import ExampleSet
from task.models import SplitModel
from task.training import Loss

Matrix = npt.NDArray[np.float64]


class Task(Protocol):
    """What is learned: what every client needs to know."""

    @property
    def loss(self) -> Loss:
        """Of a batch's outputs and targets; the mean over the batch."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs; none for numbers."""

    @property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model; not to be changed."""

    @property
    def scratch_model(self) -> SplitModel:
        """One model for all clients of a process, whatever its content."""

    @property
    def idle_settings(self) -> Mapping[str, str]:
        """Settings that do nothing here, by name, and why."""

    def initial_model(self) -> SplitModel:
        """Return a new model, the same for every client and every call."""

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training examples.

        Parameters
        ----------
        client : int
            The client, from 0.

        Returns
        -------
        ExampleSet
            The examples.
        """

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples, as `train_examples`."""


class BaseTask(ABC):
    """A task whose clients all start from the same model."""

    # Why local training has nothing to train on, where it has not.
    untrainable: ClassVar[str] = ""

    @property
    def idle_settings(self) -> Mapping[str, str]:
        """Settings that do nothing here, by name, and why."""
        return {}

    @abstractmethod
    def initial_model(self) -> SplitModel:
        """Return a new model, the same for every client and every call."""

    @cached_property
    def scratch_model(self) -> SplitModel:
        """One model for all clients of a process, whatever its content."""
        return self.initial_model()

    @cached_property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model; not to be changed."""
        return self.initial_model().state_dict()


@dataclass(frozen=True, eq=False)
class ExampleTask(BaseTask):
    """A task from examples that are there: a model, data and a loss of one's own.

    Parameters
    ----------
    model : callable
        Returns a new `SplitModel`; what it draws at random is fixed by the seed.
    train, test : sequence of ExampleSet
        Examples of each client.
    loss : callable, default cross-entropy
        Of a batch's outputs and targets; the mean over the batch.
    classes : tuple of str, default ()
        Names of the classes, in the order of the outputs; none for numbers.
    seed : int, default 0
        Fixes the initial model.
    """

    model: Callable[[], SplitModel]
    train: Sequence[ExampleSet]
    test: Sequence[ExampleSet]
    loss: Loss = nn.functional.cross_entropy
    classes: tuple[str, ...] = ()
    seed: int = 0

    def initial_model(self) -> SplitModel:
        """Return a new model with the seed's initial values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.model()

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training examples."""
        return self.train[client]

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples."""
        return self.test[client]


class RegressionTask(BaseTask):
    """Linear regression y ≈ wᵀ Bᵀ x on drawn examples, for training by SGD.

    Subclasses have ``dimension``, ``rank`` and ``seed``, and write `draw`.
    """

    dimension: int
    rank: int
    seed: int
    # The draw that is the test set, and its size.
    test_draw: ClassVar[int]
    test_samples: ClassVar[int]

    @abstractmethod
    def draw(
        self, client: int, draw: int = 0, samples: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """Draw examples of a client.

        Parameters
        ----------
        client : int
            The client, from 0.
        draw : int, default 0
            Which batch: the same number gives the same examples; 0 is the training set.
        samples : int, optional
            How many; as many as the client has for training by default.

        Returns
        -------
        x : ndarray, shape (samples, dimension)
            Inputs.
        y : ndarray, shape (samples,)
            Outputs.
        """

    @property
    def classes(self) -> tuple[str, ...]:
        """None: the outputs are numbers."""
        return ()

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of (n, 1) outputs and targets."""
        return nn.functional.mse_loss(outputs, targets)

    def initial_model(self) -> SplitModel:
        """Return Bᵀ (rank × dimension) and wᵀ as linear layers without biases."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return SplitModel(
                nn.Linear(self.dimension, self.rank, bias=False),
                nn.Linear(self.rank, 1, bias=False),
            )

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's draw 0."""
        return _examples(*self.draw(client))

    def test_examples(self, client: int) -> ExampleSet:
        """Return ``test_samples`` examples of a client's draw ``test_draw``."""
        return _examples(*self.draw(client, self.test_draw, self.test_samples))


def _examples(x: Matrix, y: Matrix) -> ExampleSet:
    return ExampleSet(torch.from_numpy(x).float(), torch.from_numpy(y[:, None]).float())
