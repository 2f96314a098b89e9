"""Tasks: the model, the data of each client and the loss, made from settings."""

from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from task.base import BaseTask
from task.data.datasets import SOURCES, load_dataset
from task.data.partitions import Indices, partition
from task.examples import ExampleSet
from task.models import SplitModel, build_model
from task.settings import Setting, Settings, SettingsError, unknown
from task.tasks.linear import LinearTask
from task.tasks.multi_task import MULTI_TASKS, MultiTaskSetup
from task.tasks.transfer import TransferTask
from task.training import Loss

TASKS = (*SOURCES, "linear", "transfer", *MULTI_TASKS)

DEFAULT_MODELS = {
    "digits": "digits-cnn",
    "mnist": "digits-cnn",
    "emnist": "mlp",
    "femnist": "mlp",
    "cifar10": "cifar10-cnn",
    "cifar100": "cifar100-cnn",
    "image-folder": "cifar10-cnn",
    "arrays": "cifar10-cnn",
}

# Means and standard deviations for values of 0 to 1; the CIFAR ones are those of the
# authors' code.
RGB = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GREY = ((0.1307,), (0.3081,))
NORMALIZATION = {"cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))}

# Digits and letters must not be mirrored.
AUGMENTED = ("cifar10", "cifar100", "image-folder", "arrays")


class Task(Protocol):
    """What is learned: what every client needs to know."""

    @property
    def loss(self) -> Loss:
        """Of a batch's outputs and targets; the mean over the batch."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs."""

    @property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model; not to be changed."""

    @property
    def scratch_model(self) -> SplitModel:
        """One model for all clients of a process, whatever its content."""

    def initial_model(self) -> SplitModel:
        """Return a new model, the same for every client and every call.

        Returns
        -------
        SplitModel
            The common initial model.
        """

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
        """Return a client's test examples.

        Parameters
        ----------
        client : int
            The client, from 0.

        Returns
        -------
        ExampleSet
            The examples.
        """


class ImageTask(BaseTask):
    """Image classification with one data set that is split over clients.

    Parameters
    ----------
    settings : mapping
        All settings.
    num_clients : int
        Number of clients; 0 gives client 0 the whole data set (a device with its own
        folder).

    Raises
    ------
    SettingsError
        If the data, the partition or the model is not to be had.
    """

    def __init__(self, settings: Settings, num_clients: int) -> None:
        name = str(settings["task"])
        self.dataset = load_dataset(settings)
        self.classes = self.dataset.classes
        self.num_classes = len(self.classes)
        self.augment = bool(settings["augment"]) and name in AUGMENTED
        self.seed = int(settings["seed"])
        self.train, self.test = self._partition(settings, num_clients)
        height, width, channels = self.dataset.train.images.shape[1:]
        mean, std = NORMALIZATION.get(name, RGB if channels == 3 else GREY)
        self.mean, self.std = torch.tensor(mean) * 255, torch.tensor(std) * 255
        self.shape = (channels, height, width)
        self.model_name = str(settings["model"]) or DEFAULT_MODELS[name]
        # 0 leaves it to the algorithm; without one, the last layer is the head.
        self.head_layers = int(settings["head-layers"]) or 1
        self.model_head = str(settings["model-head"])
        self.loss: Loss = nn.functional.cross_entropy
        # Of the clients that were here last: cutting a client's images out takes time.
        self._examples = lru_cache(maxsize=32)(self._cut)

    def _partition(
        self, settings: Settings, num_clients: int
    ) -> tuple[Indices, Indices]:
        train, test = self.dataset.train, self.dataset.test
        if num_clients == 0:
            return [np.arange(len(train))], [np.arange(len(test))]
        natural = self.dataset.clients
        if not natural:
            return partition(
                train.labels, test.labels, self.num_classes, num_clients, settings
            )
        if num_clients > len(natural):
            raise SettingsError(
                f"num-clients is {num_clients}; the data is split over {len(natural)} "
                f"clients, {natural[0]} to {natural[-1]}"
            )
        parts = [
            [np.flatnonzero(part.owners == i) for i in range(num_clients)]
            for part in (train, test)
        ]
        for name, own in zip(natural, parts[0], strict=False):
            if len(own) == 0:
                raise SettingsError(f"client {name!r} has no training images")
        return parts[0], parts[1]

    def initial_model(self) -> SplitModel:
        """Return the common initial model, fixed by the seed.

        Returns
        -------
        SplitModel
            A new model.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return build_model(
                self.model_name,
                self.shape,
                self.num_classes,
                self.head_layers,
                self.model_head,
            )

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training images.

        Parameters
        ----------
        client : int
            The client, from 0.

        Returns
        -------
        ExampleSet
            The images, read from the cache.
        """
        return self._examples(client, True)

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test images.

        Parameters
        ----------
        client : int
            The client, from 0.

        Returns
        -------
        ExampleSet
            The images, never augmented.
        """
        # With test-partition "all" there is one set for everybody.
        shared = self.test[client] is self.test[0]
        return self._examples(0 if shared else client, False)

    def _cut(self, client: int, training: bool) -> ExampleSet:
        images = self.dataset.train if training else self.dataset.test
        chosen = (self.train if training else self.test)[client]
        return ExampleSet(
            torch.from_numpy(images.images[chosen]),
            torch.from_numpy(images.labels[chosen]),
            self.mean,
            self.std,
            self.augment and training,
        )


@lru_cache(maxsize=2)
def _build(settings: tuple[tuple[str, Setting], ...], num_clients: int) -> Task:
    values = dict(settings)
    if values["task"] == "linear":
        return LinearTask.from_settings(values, max(num_clients, 1))
    if values["task"] in MULTI_TASKS:
        return MultiTaskSetup.from_settings(values)
    if values["task"] == "transfer":
        return TransferTask.from_settings(values)
    return ImageTask(values, num_clients)


def build_task(settings: Settings, num_clients: int) -> Task:
    """Return the task that the settings name, the same object for the same settings.

    Parameters
    ----------
    settings : mapping
        All settings, as `task.settings.resolve` returns them.
    num_clients : int
        Number of clients that share the data; 0 gives all of it to client 0.

    Returns
    -------
    Task
        The task.

    Raises
    ------
    SettingsError
        If a setting is unknown or impossible.
    """
    if settings["task"] not in TASKS:
        raise unknown("task", settings["task"], TASKS)
    return _build(tuple(sorted(settings.items())), num_clients)
