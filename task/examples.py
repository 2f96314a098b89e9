"""A client's examples as tensors, and the batches that are cut from them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flwr_frl.task.settings import SettingsError

# Examples are prepared this many at a time: large enough that the preparation is a few
# tensor operations, small enough that a big client does not hold its data as floats.
CHUNK = 2048
# Of large examples fewer, so that they have not more bytes than this as floats.
CHUNK_BYTES = 64 * 2**20
PADDING = 4


@dataclass(frozen=True)
class ExampleSet:
    """Labelled examples of one client.

    Parameters
    ----------
    inputs : Tensor
        Whatever the model takes, an example a row: float vectors (n, dimension), series
        (n, time, channels), tokens as int64 (n, time), images (n, height, width,
        channels), as uint8 with mean and std.
    targets : Tensor
        Whatever the loss takes: int64 classes of shape (n,), float values of shape
        (n, 1), ...
    mean, std : Tensor, optional
        Per channel, in the images' units; images are normalised with them, and come to
        the model as float32 of shape (batch, channels, height, width).
    augment : bool, default False
        Whether batches for training get a random crop (zero padding of 4) and a random
        horizontal flip, drawn for each image in each epoch.
    rows : Tensor, optional
        Which rows of the inputs are the examples, int64 of shape (n,), where they are
        not all in order. Inputs may then be mapped from a file that is larger than the
        memory: rows are read when their batch is made.
    device : torch.device, optional
        Where batches are put, with mean and std there already; by default where the
        inputs are.

    Raises
    ------
    SettingsError
        If there are not as many inputs as targets, or what is to be augmented is no
        images, or has its channels first.
    """

    inputs: Tensor
    targets: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    augment: bool = False
    rows: Tensor | None = None
    device: torch.device | None = None

    def __post_init__(self) -> None:
        """Check types and lengths."""
        for name in ("inputs", "targets"):
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise SettingsError(
                    f"{name} is of type {type(value).__name__}; it must be a tensor, "
                    "torch.from_numpy of an array"
                )
        kind = self.targets.dtype
        if not kind.is_floating_point and kind not in (torch.int64, torch.bool):
            # Torch's indexing takes bytes for yes and no.
            object.__setattr__(self, "targets", self.targets.long())
        n = len(self.inputs if self.rows is None else self.rows)
        if n != len(self.targets):
            raise SettingsError(
                f"there are {n} inputs and {len(self.targets)} targets; there must be "
                "one target an input"
            )
        shape, usual = tuple(self.inputs.shape), (1, 3, 4)
        if self.augment and (
            len(shape) != 4 or (shape[1] in usual and shape[3] not in usual)
        ):
            raise SettingsError(
                f"augment is True with inputs of shape {shape}; crops and flips want "
                "images (n, height, width, channels): inputs.permute(0, 2, 3, 1) where "
                "channels stand first"
            )

    @classmethod
    def from_dataset(
        cls,
        dataset: Iterable[Any],
        inputs: int | str | Sequence[int | str] = 0,
        targets: int | str = 1,
        **more: Any,
    ) -> Self:
        """Return the examples of a data set of torch or of Hugging Face.

        Parameters
        ----------
        dataset : iterable
            Its examples are tuples, as torch's are, or mappings, as Hugging Face's are,
            of arrays, numbers, lists of numbers or Pillow images.
        inputs, targets : int or str, default 0 and 1
            Where in an example they stand: a position, or the name of a column. Inputs
            of several columns, equally long, are stacked: (n, columns, ...).
        **more : Any
            ``mean``, ``std`` and ``augment``.

        Returns
        -------
        ExampleSet
            All examples, in memory. float64 becomes float32, and integers among the
            targets int64; targets that are single floats get the shape (n, 1), as a
            model's outputs have.

        Raises
        ------
        SettingsError
            If examples are not of equal shape, or are not numbers, or they are a
            loader's batches.
        """
        if isinstance(dataset, DataLoader):
            raise SettingsError(
                "from_dataset is given a DataLoader, which yields batches; it must be "
                "its dataset (loader.dataset)"
            )
        columns = [inputs] if isinstance(inputs, int | str) else list(inputs)
        drawn = [([row[c] for c in columns], row[targets]) for row in dataset]
        alone = isinstance(inputs, int | str)
        x = _stacked([x[0] if alone else x for x, _ in drawn], "inputs")
        y = _stacked([y for _, y in drawn], "targets")
        if not y.is_floating_point():
            y = y.long()
        elif y.ndim == 1:
            y = y[:, None]
        return cls(x, y, **more)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.targets)

    def without_augmentation(self) -> Self:
        """Return the same examples, never augmented."""
        return replace(self, augment=False)

    def first(self, count: int) -> Tensor:
        """Return the inputs of the first examples, in the form of `batches`."""
        return self._prepared(torch.arange(min(count, len(self))), augment=False)[0]

    def sample(self, share: float) -> Self:
        """Return a share of the examples, at least one, drawn with torch's generator.

        Parameters
        ----------
        share : float
            Above 0, at most 1; none is drawn twice.
        """
        chosen = torch.randperm(len(self))[: max(1, round(share * len(self)))]
        rows = chosen if self.rows is None else self.rows[chosen]
        return replace(self, targets=self.targets[chosen], rows=rows)

    @property
    def is_plain(self) -> bool:
        """Whether batches are cut from the inputs as they are, where they are."""
        there = self.device is None and self.rows is None
        return there and self.mean is None and not self.augment

    @property
    def place(self) -> torch.device:
        """Where batches are."""
        return self.inputs.device if self.device is None else self.device

    @property
    def num_bytes(self) -> int:
        """Memory that all examples take."""
        return len(self) * self.inputs[:1].nbytes + self.targets.nbytes

    def on(self, device: torch.device) -> Self:
        """Return the same examples, whose batches are put on a device one by one."""
        if device == self.place:
            return self
        mean, std = self._statistics(device)
        return replace(self, mean=mean, std=std, device=device)

    def moved(self, device: torch.device) -> Self:
        """Return the same examples, all of them on a device."""
        inputs = self.inputs if self.rows is None else self.inputs[self.rows]
        mean, std = self._statistics(device)
        return replace(
            self,
            inputs=inputs.to(device),
            targets=self.targets.to(device),
            mean=mean,
            std=std,
            rows=None,
            device=None,
        )

    def _statistics(self, device: torch.device) -> list[Tensor | None]:
        return [t if t is None else t.to(device) for t in (self.mean, self.std)]

    def batches(
        self, batch_size: int, shuffle: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all examples once, in batches.

        Parameters
        ----------
        batch_size : int
            Examples a batch; the last one may be smaller.
        shuffle : bool, default False
            Whether to shuffle (and augment, where asked for), with torch's generator
            of the CPU wherever the examples are.

        Yields
        ------
        inputs : Tensor
            Images with mean and std are normalised, float32 of shape (batch, channels,
            height, width), channels last in memory; the rest is as in `inputs`.
        targets : Tensor
            As in `targets`.
        """
        for inputs, targets in self.chunks(batch_size, shuffle):
            for i in range(0, len(targets), batch_size):
                yield inputs[i : i + batch_size], targets[i : i + batch_size]

    def stream(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled batches as `batches`, one epoch after the other without end.

        Without examples there are none.
        """
        while len(self):
            yield from self.batches(batch_size, shuffle=True)

    def chunks(
        self, batch_size: int, shuffle: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all examples once, as `batches`, many batches at a time."""
        n, step = len(self), self.chunk(batch_size)
        order = torch.randperm(n) if shuffle else torch.arange(n)
        for start in range(0, n, step):
            chosen = order[start : start + step]
            yield self._prepared(chosen, shuffle and self.augment)

    def chunk(self, batch_size: int) -> int:
        """Return how many examples are prepared at a time, in whole batches."""
        width = 4 * max(1, self.inputs[:1].numel())
        return max(1, min(CHUNK, CHUNK_BYTES // width) // batch_size) * batch_size

    def draw(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Draw a batch for one training step, augmented where asked for.

        Parameters
        ----------
        batch_size : int
            Examples, drawn uniformly and without one twice, with torch's generator of
            the CPU; all where there are fewer.

        Returns
        -------
        inputs, targets : Tensor
            In the form of `batches`.
        """
        chosen = torch.randperm(len(self))[:batch_size]
        return self._prepared(chosen, self.augment)

    def chosen(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch of those examples where a mask, of the CPU, says so.

        Augmented where asked for, in the form of `batches`.
        """
        return self._prepared(mask.nonzero().flatten(), self.augment)

    def _prepared(self, chosen: Tensor, augment: bool) -> tuple[Tensor, Tensor]:
        rows = chosen if self.rows is None else self.rows[chosen.to(self.rows.device)]
        inputs = self.inputs[rows.to(self.inputs.device)].to(self.place)
        if augment:
            inputs = random_crop_and_flip(inputs)
        if self.mean is not None and self.std is not None:
            # In place: new tensors would cost five times as much.
            inputs = inputs.float().sub_(self.mean).div_(self.std)
            inputs = inputs.permute(0, 3, 1, 2)
        return inputs, self.targets[chosen.to(self.targets.device)].to(self.place)


def random_crop_and_flip(images: Tensor, padding: int = PADDING) -> Tensor:
    """Crop each image at a random place of its zero-padded self, and flip every second.

    What ``RandomCrop(size, padding=4)`` and ``RandomHorizontalFlip()`` do to one image
    (FedRep, appendix A), for a whole batch in one gather. The images have the shape
    (n, height, width, channels); the new ones have that and the dtype, too. Drawn is
    on the CPU: the numbers do not depend on the device.
    """
    n, height, width, _ = images.shape
    padded = torch.nn.functional.pad(images, (0, 0, *(padding,) * 4))
    top = torch.randint(0, 2 * padding + 1, (n, 1))
    left = torch.randint(0, 2 * padding + 1, (n, 1))
    flip = torch.rand(n, 1) < 0.5
    rows = top + torch.arange(height)
    across = torch.arange(width)
    columns = left + torch.where(flip, across.flip(0), across)
    place = torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]
    return padded[tuple(index.to(images.device) for index in place)]


def _stacked(values: list[Any], what: str) -> Tensor:
    """Return values of equal shape as one tensor."""
    try:
        arrays = [np.asarray(value) for value in values]
        shapes = [array.shape for array in arrays]
        odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is not None:
            raise SettingsError(
                f"{what} of example {odd} have the shape {shapes[odd]}, those of "
                f"example 0 {shapes[0]}; they must be equal"
            )
        stacked = torch.from_numpy(np.stack(arrays))
    # Ragged lists, texts, other objects, and no examples at all.
    except (TypeError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(
            f"{what} cannot be put into a tensor: {' '.join(str(error).split())}"
        ) from None
    return stacked.float() if stacked.dtype == torch.float64 else stacked
