"""Devices with images of their own: digits as one folder a client."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

CLASSES = 3


def write_folders(root: Path, clients: int, train: int = 12, test: int = 6) -> None:
    """Write ``root/<client>/{train,test}/<class>/*.png``, named as partitions are."""
    digits = load_digits()
    for label in range(CLASSES):
        chosen = np.flatnonzero(digits.target == label)
        for i in range(clients):
            own = chosen[i * (train + test) : (i + 1) * (train + test)]
            for place, index in enumerate(own):
                part = "train" if place < train else "test"
                path = root / f"{i:06d}" / part / str(label) / f"{index:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = (digits.images[index] * 15.9).astype(np.uint8)
                Image.fromarray(pixels).save(path)
