"""Three registered devices: their names, images and results."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

CLASSES = 3
NAMES = ("000000", "000001", "000002")
TIMES = ("seconds", "seconds-simulated")
# A message to a registered SuperNode contains its name, which has this many bytes.
NAMED = len("registered-name") + len(NAMES[0])


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


def assert_same(found: list[dict], expected: list[dict], log: str) -> None:
    """Compare the rows of `NAMES` with those of a simulation, except for times."""
    assert len(found) == len(expected) > 0, log
    for ours, theirs in zip(without_times(found), without_times(expected), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("bytes-down", "bytes-evaluate"):
            more = ours.pop(name, 0) - theirs.pop(name, 0)
            assert more % NAMED == 0
        assert ours == pytest.approx(theirs, abs=1e-5)


def without_times(rows: list[dict]) -> list[dict]:
    return [{n: v for n, v in row.items() if n not in TIMES} for row in rows]
