"""A client's examples as tensors, and the batches that are cut from them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

# Examples are prepared this many at a time: large enough that the preparation is a few
# tensor operations, small enough that a big client does not hold its data as floats.
CHUNK = 2048
PADDING = 4


@dataclass(frozen=True)
class ExampleSet:
    """Labelled examples of one client.

    Parameters
    ----------
    inputs : Tensor
        Images as uint8 of shape (n, height, width, channels), or float vectors of shape
        (n, dimension).
    targets : Tensor
        int64 classes of shape (n,), or float values of shape (n, 1).
    mean, std : Tensor, optional
        Per channel, in units of 0 to 255; images are normalised with them.
    augment : bool, default False
        Whether batches for training get a random crop (zero padding of 4) and a random
        horizontal flip, drawn for each image in each epoch.
    """

    inputs: Tensor
    targets: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    augment: bool = False

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.targets)

    def without_augmentation(self) -> Self:
        """Return the same examples, never augmented."""
        return replace(self, augment=False)

    def batches(
        self, batch_size: int, shuffle: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all examples once, in batches.

        Parameters
        ----------
        batch_size : int
            Examples a batch; the last one may be smaller.
        shuffle : bool, default False
            Whether to shuffle (and augment, where asked for) with torch's generator.

        Yields
        ------
        inputs : Tensor of float32
            Images are normalised, of shape (batch, channels, height, width), channels
            last in memory.
        targets : Tensor
            As in `targets`.
        """
        n = len(self)
        order = torch.randperm(n) if shuffle else torch.arange(n)
        step = max(1, CHUNK // batch_size) * batch_size
        for start in range(0, n, step):
            chosen = order[start : start + step]
            inputs = self._prepared(chosen, shuffle and self.augment)
            targets = self.targets[chosen]
            for i in range(0, len(chosen), batch_size):
                yield inputs[i : i + batch_size], targets[i : i + batch_size]

    def draw(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Draw a batch for one training step, augmented where asked for.

        Parameters
        ----------
        batch_size : int
            Examples, drawn uniformly and without one twice, with torch's generator; all
            where there are fewer.

        Returns
        -------
        inputs, targets : Tensor
            In the form of `batches`.
        """
        chosen = torch.randperm(len(self))[:batch_size]
        return self._prepared(chosen, self.augment), self.targets[chosen]

    def _prepared(self, chosen: Tensor, augment: bool) -> Tensor:
        inputs = self.inputs[chosen]
        if augment:
            inputs = random_crop_and_flip(inputs)
        if self.mean is not None and self.std is not None:
            # In place: new tensors would cost five times as much.
            inputs = inputs.float().sub_(self.mean).div_(self.std)
            inputs = inputs.permute(0, 3, 1, 2)
        return inputs


def random_crop_and_flip(images: Tensor, padding: int = PADDING) -> Tensor:
    """Crop each image at a random place of its zero-padded self, and flip every second.

    What ``RandomCrop(size, padding=4)`` and ``RandomHorizontalFlip()`` do to one image
    (FedRep, appendix A), for a whole batch in one gather. The images have the shape
    (n, height, width, channels); the new ones have that and the dtype, too.
    """
    n, height, width, _ = images.shape
    padded = torch.nn.functional.pad(images, (0, 0, *(padding,) * 4))
    top = torch.randint(0, 2 * padding + 1, (n, 1))
    left = torch.randint(0, 2 * padding + 1, (n, 1))
    flip = torch.rand(n, 1) < 0.5
    rows = top + torch.arange(height)
    across = torch.arange(width)
    columns = left + torch.where(flip, across.flip(0), across)
    return padded[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
