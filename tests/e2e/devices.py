"""Image folders of devices: the digits, with one folder per client."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 3


def write_folders(
    root: Path,
    clients: int,
    train: int = 12,
    test: int = 6,
    classes: int = CLASSES,
    own_names: bool = False,
) -> None:
    """Write ``root/<client>/{train,test}/<class>/*.png``, with the names of partitions.

    With ``own_names`` every client names the digits differently, so that the heads of
    other clients are useless to it.
    """
    # Imported here: scikit-learn is slower to import than all else in these tests.
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label in range(classes):
        chosen = np.flatnonzero(digits.target == label)
        for i in range(clients):
            selected = chosen[i * (train + test) : (i + 1) * (train + test)]
            name = str((label + i) % classes if own_names else label)
            for place, index in enumerate(selected):
                part = "train" if place < train else "test"
                path = root / f"{i:06d}" / part / name / f"{index:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = (digits.images[index] * 15.9).astype(np.uint8)
                Image.fromarray(pixels).save(path)
