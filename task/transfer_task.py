"""The task ``transfer``: the data of `task.transfer` as what every algorithm trains."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from task.examples import ExampleSet
from task.linear import LinearTask
from task.models import SplitModel
from task.settings import Settings
from task.transfer import TEST_EXAMPLES, Matrix, TransferData


@dataclass(frozen=True)
class TransferTask(TransferData):
    """Table 5.1's sources and targets, with a linear split model.

    Parameters
    ----------
    **data
        As for `TransferData`.
    """

    loss = staticmethod(LinearTask.loss)

    @classmethod
    def from_settings(cls, settings: Settings) -> "TransferTask":
        """Return the task of ``dimension``, ``num-sources`` and so on.

        Parameters
        ----------
        settings : mapping
            All settings.

        Returns
        -------
        TransferTask
            The task.
        """
        return cls(
            dimension=int(settings["dimension"]),
            rank=int(settings["rank"]),
            num_sources=int(settings["num-sources"]),
            source_samples=int(settings["source-samples"]),
            target_samples=int(settings["target-samples"]),
            ratio_db=float(settings["ratio-db"]),
            tau=float(settings["tau"]),
            noise_variance=float(settings["noise-variance"]),
            seed=int(settings["seed"]),
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """None: the outputs are numbers."""
        return ()

    @cached_property
    def scratch_model(self) -> SplitModel:
        """One model for all clients of a process, whatever its content."""
        return self.initial_model()

    @cached_property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model; not to be changed."""
        return self.initial_model().state_dict()

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
        """Return a client's training samples.

        Parameters
        ----------
        client : int
            The client.

        Returns
        -------
        ExampleSet
            ``source_samples`` or ``target_samples`` examples.
        """
        return self._examples(*self.draw(client))

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test samples.

        Parameters
        ----------
        client : int
            The client.

        Returns
        -------
        ExampleSet
            500 examples.
        """
        return self._examples(*self.draw(client, 1, TEST_EXAMPLES))

    @staticmethod
    def _examples(x: Matrix, y: Matrix) -> ExampleSet:
        return ExampleSet(
            torch.from_numpy(x).float(), torch.from_numpy(y[:, None]).float()
        )
