"""What tasks have in common: one initial model, and linear regression to train."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from task.examples import ExampleSet
from task.models import SplitModel

Matrix = npt.NDArray[np.float64]


class BaseTask(ABC):
    """A task whose clients all start from the same model."""

    @abstractmethod
    def initial_model(self) -> SplitModel:
        """Return a new model, the same for every client and every call.

        Returns
        -------
        SplitModel
            The common initial model.
        """

    @cached_property
    def scratch_model(self) -> SplitModel:
        """One model for all clients of a process, whatever its content."""
        return self.initial_model()

    @cached_property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model; not to be changed."""
        return self.initial_model().state_dict()


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
        """Return the mean squared error.

        Parameters
        ----------
        outputs, targets : Tensor, shape (n, 1)
            Predictions and values.

        Returns
        -------
        Tensor
            A scalar.
        """
        return nn.functional.mse_loss(outputs, targets)

    def initial_model(self) -> SplitModel:
        """Return Bᵀ and wᵀ as two bias-free linear layers.

        Returns
        -------
        SplitModel
            ``representation.weight`` of shape (rank, dimension), ``head.weight`` of
            shape (1, rank).
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return SplitModel(
                nn.Linear(self.dimension, self.rank, bias=False),
                nn.Linear(self.rank, 1, bias=False),
            )

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's first draw as its training set.

        Parameters
        ----------
        client : int
            The client, from 0.

        Returns
        -------
        ExampleSet
            The examples.
        """
        return _examples(*self.draw(client))

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples.

        Parameters
        ----------
        client : int
            The client, from 0.

        Returns
        -------
        ExampleSet
            ``test_samples`` examples.
        """
        return _examples(*self.draw(client, self.test_draw, self.test_samples))


def _examples(x: Matrix, y: Matrix) -> ExampleSet:
    return ExampleSet(torch.from_numpy(x).float(), torch.from_numpy(y[:, None]).float())
