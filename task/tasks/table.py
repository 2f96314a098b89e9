"""Learning from a table: classes or numbers, of single rows or of windows in time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_frl.common.errors import require
from flwr_frl.common.settings import Setting, setting
from flwr_frl.task.base import BaseTask
from flwr_frl.task.data.datasets import Dataset, load
from flwr_frl.task.data.tables import (
    ColumnSettings,
    DataFrame,
    read_inputs,
    table_files,
)
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.held_out import changed
from flwr_frl.task.tasks.image import ImageSettings, ImageTask, PartitionedTask

Array = npt.NDArray[Any]

# Default models of rows and of windows.
ROW_MODEL, WINDOW_MODEL = "mlp-2", "cnn-1d"
# Spread of a column, relative to its mean, below which it is constant up to rounding.
CONSTANT = 1e-6


@dataclass(frozen=True)
class TableSettings(ImageSettings, ColumnSettings):
    """Columns, partition, standardisation and model of a table.

    Parameters
    ----------
    standardize : {"global", "client", "none"}, default "global"
        Whether the columns of numbers, and labels that are numbers, are shifted and
        scaled to mean 0 and standard deviation 1 in the training data of all clients,
        or of each client. With ``global``, devices send the number, mean and deviation
        of each column, so it is refused with ``secure-aggregation`` and with noise for
        privacy.
    secure_aggregation : bool, default False
        Whether the server sees sums only.
    """

    standardize: Literal["global", "client", "none"] = setting("global")
    secure_aggregation: bool = setting(False)

    @staticmethod
    def check_settings(settings: "TableSettings") -> None:
        """Raise `SettingsError` if data leave a client that shares sums only."""
        valid = not settings.secure_aggregation or settings.standardize != "global"
        allowed = "client or none with secure-aggregation: its sums are not secure"
        require(valid, "standardize", settings.standardize, allowed)


@dataclass(frozen=True)
class Scaling:
    """Shift and scale of each input, and of labels that are numbers.

    Parameters
    ----------
    mean : tuple of float
        Means, which take the place of missing numbers.
    factor : tuple of float
        Inputs become (x - mean) · factor. The factor of a constant column is 0, so it
        has no effect if other data differ. Empty if inputs are not scaled.
    label_mean, label_std : float
        Labels become (y - mean) / std.
    """

    mean: tuple[float, ...]
    factor: tuple[float, ...] = ()
    label_mean: float = 0.0
    label_std: float = 1.0

    @classmethod
    def from_statistics(
        cls, mean: Array, std: Array, label_mean: float = 0.0, label_std: float = 1.0
    ) -> Self:
        """Return the scaling for means and standard deviations."""
        varies = std > CONSTANT * np.abs(mean)
        factor = np.where(varies, 1 / np.where(varies, std, 1), 0)
        both = (*mean.tolist(),), (*factor.tolist(),)
        return cls(*both, label_mean, label_std or 1.0)

    def inputs(self, values: Array) -> Tensor:
        """Return scaled inputs, float32; missing ones become the mean."""
        column = -1, *[1] * (values.ndim - 2)
        mean = np.reshape(self.mean, column)
        filled = np.where(np.isnan(values), mean, values)
        if self.factor:
            filled = (filled - mean) * np.reshape(self.factor, column)
        return torch.from_numpy(filled.astype(np.float32))

    def labels(self, values: Array) -> Tensor:
        """Return scaled labels, float32 of shape (n, 1)."""
        scaled = (values[:, None] - self.label_mean) / self.label_std
        return torch.from_numpy(scaled.astype(np.float32))


def column_statistics(values: Array) -> tuple[Array, Array, Array]:
    """Return numbers, means and standard deviations of the columns' finite cells.

    ``values`` has the shape (n, width) or (n, width, time).
    """
    axes, column = (0, *range(2, values.ndim)), (-1, *[1] * (values.ndim - 2))
    known = np.isfinite(values)
    number = known.sum(axes)
    count = np.maximum(number, 1)
    mean = np.where(known, values, 0).sum(axes, np.float64) / count
    centred = np.where(known, values - mean.reshape(column), 0)
    return number, mean, np.sqrt((centred**2).sum(axes) / count)


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - Σ(y - ŷ)² / Σ(y - ȳ)²; not finite if all targets are equal."""
    spread = (targets - targets.mean()).square().sum()
    return 1 - (targets - outputs).square().sum() / spread


def rmse(outputs: Tensor, targets: Tensor, *, unit: float) -> Tensor:
    """Return the root of the mean squared error, in units of the labels."""
    return (outputs - targets).square().mean().sqrt() * unit


class TableTask(PartitionedTask):
    """Classes or numbers, predicted from the columns of a table.

    Parameters
    ----------
    settings : TableSettings
        Partition, standardisation and model.
    num_clients : int
        Number of clients; 0 gives client 0 the whole data set, as on a device with its
        own data set.
    dataset : Dataset
        The table.
    scaling : Scaling, optional
        The scaling of all clients; by default that of the training data.
    statistics : sequence of float, default ()
        The `column_statistics` of all devices together.
    client : str, default ""
        Name of the only client whose rows `rows` reads; "" reads all.
    """

    def __init__(
        self,
        settings: TableSettings,
        num_clients: int,
        dataset: Dataset,
        scaling: Scaling | None = None,
        client: str = "",
        statistics: Sequence[float] = (),
    ) -> None:
        super().__init__(settings, num_clients, dataset)
        usual = WINDOW_MODEL if len(self.shape) == 2 else ROW_MODEL
        self.model_name = settings.model or usual
        valid = len(self.shape) == 2 or self.model_name != WINDOW_MODEL
        require(valid, "window", 0, f"above 0 for the model {self.model_name!r}")
        if self.model_name == ROW_MODEL and not settings.model:
            # LG-FedAvg's default are two layers, of which a representation needs one.
            self.head_layers = 1
        self.columns = dataset.columns
        self.client = client
        if statistics:
            width = self.shape[0] + (not self.classes)
            what, allowed = "the number of column statistics", f"{3 * width}"
            require(len(statistics) == 3 * width, what, len(statistics), allowed)
            _, mean, std = np.reshape(statistics, (3, width))
            label = () if self.classes else (float(mean[-1]), float(std[-1]))
            n = self.shape[0]
            scaling = Scaling.from_statistics(mean[:n], std[:n], *label)
        elif settings.standardize == "global" and not num_clients and not scaling:
            self.column_statistics = self._statistics()
        if len(self.shape) == 2:
            # Windows of a series follow each other.
            self.overlap = -(-self.shape[1] // (settings.stride or self.shape[1])) - 1
        self._scaling = lru_cache(None)(lambda client: scaling or self._fitted(client))
        if not self.classes:
            self.loss = nn.functional.mse_loss
            self.metrics = {"r2": r2}
            # Clients that differ in the unit have no common error.
            if settings.standardize != "client" or not num_clients:
                unit = self.scaling(0).label_std
                self.metrics = {"r2": r2, "rmse": partial(rmse, unit=unit)}

    def scaling(self, client: int) -> Scaling:
        """Return the scaling of a client's data."""
        return self._scaling(client if self.settings.standardize == "client" else 0)

    def _fitted(self, client: int) -> Scaling:
        """Return the scaling by the training data of a client, or of all."""
        part, standardize = self.dataset.train, self.settings.standardize
        rows: Any = self.train[client] if standardize == "client" else slice(None)
        _, mean, std = column_statistics(part.images[rows])
        if standardize == "none":
            # Only missing numbers are replaced.
            return Scaling((*mean.tolist(),))
        if self.classes:
            return Scaling.from_statistics(mean, std)
        labels = part.labels[rows]
        label = float(labels.mean(dtype=np.float64)), float(labels.std())
        return Scaling.from_statistics(mean, std, *label)

    def _statistics(self) -> list[float]:
        """Return the statistics of the inputs, and of labels that are numbers."""
        part = self.dataset.train
        tables = [part.images, *([] if self.classes else [part.labels[:, None]])]
        arrays = [np.stack(column_statistics(table)) for table in tables]
        return np.concatenate(arrays, axis=1).ravel().tolist()

    def _select(self, client: int, training: bool) -> ExampleSet:
        part = self.dataset.train if training else self.dataset.test
        rows = (self.train if training else self.test)[client]
        scaling, labels = self.scaling(client), self._labels(part.labels[rows], client)
        targets = torch.from_numpy(labels) if self.classes else scaling.labels(labels)
        return ExampleSet(scaling.inputs(part.images[rows]), targets)

    # Inputs and outputs of a trained model

    def prepared(self, inputs: Array) -> Tensor:
        """Return rows or windows, in the table's units, as the model takes them."""
        allowed = f"(n, {', '.join(map(str, self.shape))}): {', '.join(self.columns)}"
        valid = inputs.shape[1:] == self.shape
        require(valid, "the shape of the inputs", inputs.shape, allowed, "inputs")
        return self.scaling(0).inputs(inputs)

    def rows(self, source: Path | DataFrame) -> Iterator[tuple[str, Tensor]]:
        """Yield each row of a table with a header, or each window, with its place."""
        numbers, places = read_inputs(source, self.dataset, self.settings, self.client)
        yield from zip(places, self.prepared(numbers), strict=True)

    def numbers(self, outputs: Tensor) -> Tensor:
        """Return the outputs of a model in the unit of the labels."""
        scaling = self.scaling(0)
        return outputs * scaling.label_std + scaling.label_mean


def of_client(task: BaseTask, client: int, name: str) -> BaseTask:
    """Return a task with which one client's model is used on other data.

    The scaling of a table is then that client's, and so are the rows that it reads.
    """
    if not isinstance(task, TableTask):
        return task
    scaling = task.scaling(client)
    return changed(task, {"_scaling": lambda _: scaling, "client": name})


@dataclass(frozen=True)
class FromTable:
    """Make the task of a table: a `TableTask`, or an `ImageTask` for images.

    Parameters
    ----------
    name : str, default ""
        Name of a data set of the hub (see `table_files`); ``data-dir`` overrides it.
    """

    name: str = ""

    _settings_type: ClassVar[type] = TableSettings

    def __call__(
        self,
        settings: TableSettings,
        num_clients: int,
        column_statistics: Sequence[float] = (),
    ) -> PartitionedTask:
        """Return the task; with 0 clients, client 0 has the whole data set."""
        dataset = self._dataset(settings, not num_clients)
        if dataset.train.images.ndim == 4:
            # The defaults of image folders apply.
            return ImageTask("image-folder", settings, num_clients, dataset)
        return TableTask(settings, num_clients, dataset, statistics=column_statistics)

    def _dataset(self, settings: TableSettings, alone: bool) -> Dataset:
        return load(*table_files(self.name, settings, alone), settings)

    def defaults(self, settings: TableSettings) -> dict[str, Setting]:
        """Return the number of clients, if the table has them, and of a gradient norm.

        Without a limit, outliers among the inputs of a regression make SGD diverge.
        """
        dataset = self._dataset(settings, False)
        values: dict[str, Setting] = {}
        if dataset.clients:
            values["num-clients"] = len(dataset.clients)
        if not dataset.classes:
            values["max-gradient-norm"] = 1.0
        return values
