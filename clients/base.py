"""What all clients have in common: shared parts come and go, personal parts stay."""

import hashlib
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays, Scalar
from torch import nn

from clients.device.state import PersonalState
from task.models import Part
from task.neural_collapse import neural_collapse
from task.settings import Settings, require
from task.tasks.image import Task
from task.training import SGD, Regularizer, evaluate, train

Reply = tuple[NDArrays, int, dict[str, Scalar]]
Evaluation = tuple[float, int, dict[str, Scalar]]


class Client(NumPyClient):
    """A device: trains the shared part on its own data and keeps its personal part.

    Subclasses say what is shared and what is personal, and write `fit`.

    Parameters
    ----------
    task : Task
        The model, the data and the loss.
    index : int
        Which of the task's clients this is, from 0.
    state : PersonalState
        Where the personal part is kept.
    settings : mapping
        All settings.
    """

    shared: ClassVar[tuple[str, ...]] = ("representation.", "head.")
    personal: ClassVar[tuple[str, ...]] = ()
    # How many of a built-in model's layers are the head, where the settings say 0.
    head_layers: ClassVar[int] = 1

    def __init__(
        self,
        task: Task,
        index: int,
        state: PersonalState,
        settings: Settings,
    ) -> None:
        self.task = task
        self.index = index
        self.state = state
        self.settings = settings
        # Built once a process: `receive` overwrites all of it.
        self.model = task.scratch_model
        self.sgd = SGD.from_settings(settings)
        for name in ("head-epochs", "representation-epochs", "finetune-epochs"):
            value = settings[name]
            require(int(value) >= 0, name, value, "at least 0")

    def names(self, prefixes: tuple[str, ...]) -> list[str]:
        """Return the names of the model's arrays that begin with one of the prefixes.

        Parameters
        ----------
        prefixes : tuple of str
            ``shared`` or ``personal``.

        Returns
        -------
        list of str
            Names in the model's own order.
        """
        return [n for n in self.model.state_dict() if n.startswith(prefixes)]

    # Called by the server once: who is there, and with which model.

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return what the server needs to know about this client.

        Parameters
        ----------
        config : dict
            Ignored.

        Returns
        -------
        dict
            ``num-examples`` (training), ``num-test-examples``, and ``structure``: a
            digest of the shared arrays' names, shapes and dtypes.
        """
        structure = repr(self.structure()).encode()
        return {
            "num-examples": len(self.task.train_examples(self.index)),
            "num-test-examples": len(self.task.test_examples(self.index)),
            "structure": hashlib.sha256(structure).hexdigest()[:16],
        }

    def structure(self) -> list[object]:
        """Return what must be the same for all clients of a run.

        Returns
        -------
        list
            Names, shapes and dtypes of the shared arrays.
        """
        state = self.model.state_dict()
        structure: list[object] = [
            (name, tuple(state[name].shape), str(state[name].dtype))
            for name in self.names(self.shared)
        ]
        if "head." in self.shared:
            # A shared head's outputs must mean the same to all.
            structure.append(self.task.classes)
        return structure

    def get_parameters(self, config: dict[str, Scalar]) -> NDArrays:
        """Return the shared part of the common initial model.

        Parameters
        ----------
        config : dict
            Ignored.

        Returns
        -------
        list of ndarray
            In the order of ``names(shared)``.
        """
        initial = self.task.initial_state
        return [initial[name].numpy() for name in self.names(self.shared)]

    # The steps of which `fit` and `evaluate` are made.

    def receive(self, parameters: NDArrays) -> None:
        """Load the shared part from the server and the personal part from the state.

        A client that has kept nothing yet starts from the common initial model.

        Parameters
        ----------
        parameters : list of ndarray
            The shared arrays, in the order of ``names(shared)``.
        """
        state = dict(self.task.initial_state)
        personal = {
            name: tuple(state[name].shape) for name in self.names(self.personal)
        }
        state.update(_tensors(self.state.load(personal) or {}))
        names = self.names(self.shared)
        state.update(_tensors(dict(zip(names, parameters, strict=True))))
        self.model.load_state_dict(state)

    def train(
        self, part: Part, epochs: int, regularizer: Regularizer | None = None
    ) -> float:
        """Train a part of the model on this client's training examples.

        Parameters
        ----------
        part : {"head", "representation", "all"}
            What is trained; the rest stays as it is to the last bit.
        epochs : int
            Passes over the examples.
        regularizer : callable, optional
            Of a batch's features and the model; added to the loss.

        Returns
        -------
        float
            Mean loss over the last epoch.
        """
        examples = self.task.train_examples(self.index)
        if part == "head" and not self.settings["augment-head"]:
            examples = examples.without_augmentation()
        return train(
            self.model, part, examples, self.task.loss, epochs, self.sgd, regularizer
        )

    def keep(self, config: Mapping[str, Scalar]) -> None:
        """Keep the personal part as the version of this round.

        Parameters
        ----------
        config : mapping
            ``server-round``.
        """
        kept = self.personal_arrays()
        if kept:
            self.state.save(kept, int(config["server-round"]))

    def personal_arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return what `keep` keeps.

        Returns
        -------
        dict of str to ndarray
            The personal part of the model.
        """
        state = self.model.state_dict()
        return {name: state[name].numpy() for name in self.names(self.personal)}

    def send(self, loss: float) -> Reply:
        """Return the shared part as the reply of `fit`.

        Parameters
        ----------
        loss : float
            Training loss.

        Returns
        -------
        parameters : list of ndarray
            The shared arrays, in the order of ``names(shared)``.
        num_examples : int
            Number of training examples.
        metrics : dict
            ``train-loss``.
        """
        state = self.model.state_dict()
        arrays = [state[name].numpy() for name in self.names(self.shared)]
        n = len(self.task.train_examples(self.index))
        return arrays, n, {"train-loss": loss}

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> Evaluation:
        """Test the received shared part with this client's own personal part.

        Parameters
        ----------
        parameters : list of ndarray
            The shared arrays.
        config : dict
            Ignored.

        Returns
        -------
        loss : float
            Mean loss on this client's test examples.
        num_examples : int
            Number of test examples.
        metrics : dict
            ``accuracy``, 0 to 1, where targets are classes; ``global-nc2`` and
            ``local-nc2`` (`task.neural_collapse`) where the head is linear besides.
        """
        self.receive(parameters)
        return self.test()

    def test(self) -> Evaluation:
        """Test the model as it is.

        Returns
        -------
        tuple
            As `evaluate`.
        """
        examples = self.task.test_examples(self.index)
        loss, accuracy = evaluate(self.model, examples, self.task.loss)
        metrics: dict[str, Scalar] = {}
        if not examples.targets.is_floating_point():
            metrics["accuracy"] = accuracy
            metrics |= self._collapse()
        return loss, len(examples), metrics

    def _collapse(self) -> dict[str, Scalar]:
        """Return this client's terms of Global NC2 and Averaged Local NC2."""
        head = self.model.head
        if not isinstance(head, nn.Linear):
            return {}
        classes = class_mask(self.task, self.index, head)
        weight = head.weight.detach()[None]
        return {
            "global-nc2": neural_collapse(weight, classes).item(),
            "local-nc2": neural_collapse(weight, classes, local=True).item(),
        }


def class_mask(task: Task, index: int, head: nn.Linear) -> torch.Tensor:
    """Return which classes a client has in its training examples.

    Parameters
    ----------
    task : Task
        The task.
    index : int
        The client.
    head : nn.Linear
        A head with m outputs.

    Returns
    -------
    Tensor of bool, shape (1, m)
        The mask u_i.
    """
    mask = torch.zeros(1, head.out_features, dtype=torch.bool)
    mask[0, task.train_examples(index).targets] = True
    return mask


def _tensors(
    arrays: Mapping[str, npt.NDArray[np.generic]],
) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
