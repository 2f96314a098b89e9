"""A client's examples as tensors, and the batches that are cut from them."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from flwr_frl.common.errors import SettingsError, require

# Examples are prepared in chunks: large enough that a chunk takes few tensor
# operations, small enough that a large client never holds all its data as floats.
CHUNK = 2048
# Upper limit of a chunk's size as float32, in bytes.
CHUNK_BYTES = 64 * 2**20
PADDING = 4
EVALUATION_BATCH = 50
# The class that cross-entropy ignores by default.
IGNORED = -100

# Maps a batch's outputs and targets to the mean loss over the batch.
Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]
Crops = tuple[Tensor, ...]


@dataclass(frozen=True)
class ExampleSet:
    """Labelled examples of one client.

    Parameters
    ----------
    inputs : Tensor
        Model inputs, one example per row: float vectors (n, dimension), series (n,
        time, channels), int64 tokens (n, time), or uint8 images (n, height, width,
        channels) with mean and std.
    targets : Tensor
        Targets as the loss expects them: int64 classes (n,), float values (n, 1), ...
    mean, std : Tensor, optional
        Per-channel statistics in the images' units. Images are normalised with them
        and reach the model as float32 (batch, channels, height, width).
    augment : bool, default False
        Apply a random crop (zero padding of 4) and a random horizontal flip to each
        image of a training batch, drawn anew in every epoch.
    rows : Tensor, optional
        Rows of the inputs that are the examples, int64 (n,); all rows in order by
        default. Inputs may be a memory-mapped file larger than the memory: rows are
        read when their batch is prepared.
    device : torch.device, optional
        Device of the batches, by default that of the inputs; mean and std are already
        there. `replace` keeps it.
    drop_single : bool, default False
        Leave out the last batch of a training epoch if it has a single example, for
        models whose batch norms cannot train on one.

    Raises
    ------
    SettingsError
        If inputs and targets differ in number, or ``augment`` is set for inputs that
        are not images with their channels last.
    """

    inputs: Tensor
    targets: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    augment: bool = False
    rows: Tensor | None = None
    device: torch.device | None = None
    drop_single: bool = False

    def __post_init__(self) -> None:
        """Check types and lengths, and set the device."""
        for name in ("inputs", "targets"):
            if not isinstance(value := getattr(self, name), Tensor):
                require(False, name, value, "a tensor")
        if self.device is None:
            object.__setattr__(self, "device", self.inputs.device)
        dtype = self.targets.dtype
        if not dtype.is_floating_point and dtype not in (torch.int64, torch.bool):
            # torch would take uint8 targets for a mask when it indexes with them.
            object.__setattr__(self, "targets", self.targets.long())
        n = len(self.inputs if self.rows is None else self.rows)
        if n != len(self.targets):
            line = f"there are {n} inputs and {len(self.targets)} targets"
            raise SettingsError(f"{line}; expected one target per input")
        if self.augment:
            shape, channels = tuple(self.inputs.shape), (1, 3, 4)
            valid = len(shape) == 4 and (
                shape[3] in channels or shape[1] not in channels
            )
            allowed = "images (n, height, width, channels) with augment=True; apply "
            allowed += "inputs.permute(0, 2, 3, 1) if channels come first"
            require(valid, "the shape of the inputs", shape, allowed, "augment")

    @classmethod
    def from_dataset(
        cls,
        dataset: Iterable[Any] | TorchDataset[Any],
        inputs: int | str | Sequence[int | str] = 0,
        targets: int | str = 1,
        **more: Any,
    ) -> Self:
        """Return the examples of a PyTorch or Hugging Face data set.

        Parameters
        ----------
        dataset : torch.utils.data.Dataset or iterable
            Its examples are tuples (PyTorch) or mappings (Hugging Face) of arrays,
            numbers, lists of numbers or Pillow images. Without ``__iter__``, they are
            those at the indices below its length, as in a DataLoader.
        inputs, targets : int or str, default 0 and 1
            Position or column name of inputs and targets in an example. Several input
            columns of equal length are stacked: (n, columns, ...).
        **more : Any
            ``mean``, ``std`` and ``augment``.

        Returns
        -------
        ExampleSet
            All examples, in memory. float64 becomes float32 and integer targets become
            int64; scalar float targets get the shape (n, 1) of a model's outputs.

        Raises
        ------
        ValueError
            If examples differ in shape. A DataLoader yields batches; pass its
            ``dataset``.
        """
        source: Any = dataset
        is_iterable = hasattr(source, "__iter__")
        rows = source if is_iterable else (source[i] for i in range(len(source)))
        xs, ys = [], []
        for row in rows:
            if isinstance(inputs, int | str):
                xs.append(np.asarray(row[inputs]))
            else:
                xs.append(np.stack([np.asarray(row[column]) for column in inputs]))
            ys.append(np.asarray(row[targets]))
        x, y = (torch.from_numpy(np.stack(values)) for values in (xs, ys))
        x = x.float() if x.dtype == torch.float64 else x
        y = y.float() if y.dtype == torch.float64 else y
        if not y.is_floating_point():
            y = y.long()
        elif y.ndim == 1:
            y = y[:, None]
        return cls(x, y, **more)

    def __len__(self) -> int:
        """Return the number of examples."""
        # `len` of a tensor goes through torch's dispatcher.
        return self.targets.shape[0]

    def without_augmentation(self) -> Self:
        """Return the same examples, never augmented."""
        return replace(self, augment=False)

    def first(self, count: int) -> Tensor:
        """Return the inputs of the first examples, prepared as in `batches`."""
        return self._prepared(torch.arange(min(count, len(self))), augment=False)[0]

    def sample(self, share: float) -> Self:
        """Return a random share of the examples, at least one, without replacement.

        Parameters
        ----------
        share : float
            Above 0, at most 1. Drawn with torch's CPU generator.
        """
        return self.subset(
            torch.randperm(len(self))[: max(1, round(share * len(self)))]
        )

    def subset(self, index: Tensor | npt.NDArray[np.int64]) -> Self:
        """Return the examples at some indices, without copying inputs."""
        index = torch.as_tensor(index)
        rows = index if self.rows is None else self.rows[index]
        return replace(self, targets=self.targets[index], rows=rows)

    @cached_property
    def form(self) -> Hashable:
        """Equal for examples whose batches can be stacked."""
        x, y = self.inputs, self.targets
        statistics = (self.mean, self.std)
        transform = [
            None if each is None else (*each.flatten().tolist(),) for each in statistics
        ]
        return x.shape[1:], x.dtype, y.shape[1:], y.dtype, self.augment, *transform

    @property
    def num_bytes(self) -> int:
        """Size of all examples in bytes."""
        return len(self) * self.inputs[:1].nbytes + self.targets.nbytes

    def on(self, device: torch.device) -> Self:
        """Return the same examples, with each batch moved to a device."""
        if device == self.device:
            return self
        return replace(self, device=device, **self._statistics(device))

    def moved(self, device: torch.device) -> Self:
        """Return the same examples, all of them on a device."""
        inputs = self.inputs if self.rows is None else self.inputs[self.rows]
        examples = {"inputs": inputs.to(device), "targets": self.targets.to(device)}
        changes = examples | self._statistics(device)
        return replace(self, rows=None, device=device, **changes)

    def _statistics(self, device: torch.device) -> dict[str, Any]:
        if self.mean is None or self.std is None:
            return {}
        return {"mean": self.mean.to(device), "std": self.std.to(device)}

    def batches(self, batch_size: int, shuffle: bool = False) -> Iterator[Batch]:
        """Yield all examples once, in batches.

        Parameters
        ----------
        batch_size : int
            Examples per batch; the last batch may be smaller.
        shuffle : bool, default False
            Yield batches for training: shuffled with torch's CPU generator wherever
            the examples are, and augmented if ``augment`` is set.

        Yields
        ------
        inputs : Tensor
            Images with mean and std are normalised, float32 (batch, channels, height,
            width), channels last in memory; other inputs as in ``inputs``.
        targets : Tensor
            As in ``targets``.
        """
        n, step = len(self), self.chunk(batch_size)
        order = torch.randperm(n) if shuffle else torch.arange(n)
        for start in range(0, n, step):
            rows = order[start : start + step]
            inputs, targets = self._prepared(rows, shuffle and self.augment)
            if shuffle and self.drop_single and len(targets) % batch_size == 1:
                # Only now: augmentation has drawn for the dropped example as well.
                inputs, targets = inputs[:-1], targets[:-1]
            for i in range(0, len(targets), batch_size):
                yield inputs[i : i + batch_size], targets[i : i + batch_size]

    def stream(self, batch_size: int) -> Iterator[Batch]:
        """Yield shuffled batches as `batches`, epoch after epoch without end.

        Without examples, nothing is yielded.
        """
        while len(self):
            yield from self.batches(batch_size, shuffle=True)

    def chunk(self, batch_size: int) -> int:
        """Return the number of examples prepared at a time, a multiple of a batch."""
        width = 4 * max(1, self.inputs.shape[1:].numel())
        return max(1, min(CHUNK, CHUNK_BYTES // width) // batch_size) * batch_size

    def drawn(self, batch_size: int) -> tuple[Tensor, ...]:
        """Draw an epoch as `batches` does: the order, and the `crops` of each place."""
        n, step = len(self), self.chunk(batch_size)
        order = torch.randperm(n)
        if not self.augment:
            return (order,)
        of_chunks = [crops(min(step, n - start)) for start in range(0, n, step)]
        return order, *(torch.cat(each) for each in zip(*of_chunks, strict=True))

    def draw(self, batch_size: int) -> Batch | None:
        """Draw a batch for one training step, augmented if ``augment`` is set.

        Parameters
        ----------
        batch_size : int
            Examples, drawn uniformly without replacement with torch's CPU generator;
            all of them if there are fewer.

        Returns
        -------
        tuple of Tensor or None
            Inputs and targets as in `batches`; None without examples.
        """
        if len(self) == 0:
            return None
        return self._prepared(torch.randperm(len(self))[:batch_size], self.augment)

    def chosen(self, mask: Tensor) -> Batch:
        """Return the examples of a CPU mask, augmented if ``augment`` is set."""
        return self._prepared(mask.nonzero().flatten(), self.augment)

    def _prepared(self, chosen: Tensor, augment: bool) -> Batch:
        rows = chosen if self.rows is None else self.rows[chosen.to(self.rows.device)]
        inputs = self.inputs[rows.to(self.inputs.device)].to(self.device)
        if augment:
            inputs = cropped(inputs, *crops(len(inputs)))
        targets = self.targets[chosen.to(self.targets.device)].to(self.device)
        return self.normalised(inputs), targets

    def normalised(self, inputs: Tensor) -> Tensor:
        """Return rows of ``inputs`` in the model's form; may modify them in place."""
        if self.mean is not None and self.std is not None:
            # In place: allocating new tensors takes five times as long.
            inputs = inputs.float().sub_(self.mean).div_(self.std)
            inputs = inputs.permute(0, 3, 1, 2)
        return inputs


def count_targets(targets: Tensor) -> int:
    """Return the number of targets that cross-entropy does not ignore."""
    if targets.is_floating_point():
        return len(targets)
    return int((targets != IGNORED).sum())


def are_classes(targets: Tensor, width: torch.Size) -> bool:
    """Return True if targets are classes: integers, for more than one output."""
    return not targets.is_floating_point() and width.numel() > 1


def crops(count: int) -> Crops:
    """Draw the first row and column of each crop, and whether to flip the image.

    Each is of shape (count, 1). They are drawn on the CPU, so they do not depend on the
    device.
    """
    top = torch.randint(0, 2 * PADDING + 1, (count, 1))
    left = torch.randint(0, 2 * PADDING + 1, (count, 1))
    return top, left, torch.rand(count, 1) < 0.5


def cropped(images: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Crop each zero-padded image at a random place, and flip half of them.

    Equals ``RandomCrop(size, padding=4)`` and ``RandomHorizontalFlip()`` (FedRep,
    appendix A), for a whole batch in one gather.

    Parameters
    ----------
    images : Tensor, shape (n, height, width, channels)
        The images.
    top, left, flip : Tensor, shape (n, 1)
        The result of `crops`.

    Returns
    -------
    Tensor
        The new images, of the same shape and dtype.
    """
    n, height, width, _ = images.shape
    padded = torch.nn.functional.pad(images, (0, 0, *(PADDING,) * 4))
    rows = top + torch.arange(height, device=top.device)
    across = torch.arange(width, device=top.device)
    columns = left + torch.where(flip, across.flip(0), across)
    index = torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]
    return padded[tuple(i.to(images.device) for i in index)]
