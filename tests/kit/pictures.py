"""Folders of images, and data sets that are loaded from them."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from flwr_frl.task.data.datasets import Dataset, DataSettings, load_dataset


def write_images(folder: Path, images: Iterable[np.ndarray], suffix="png") -> None:
    """Write images as ``0.png``, ``1.png`` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, pixels in enumerate(images):
        Image.fromarray(pixels).save(folder / f"{i}.{suffix}")


def load(root: Path, tmp_path: Path, **overrides) -> Dataset:
    name = overrides.pop("task", "image-folder")
    places = {"data_dir": str(root), "cache_dir": str(tmp_path / "cache")}
    return load_dataset(name, DataSettings(**{**places, **overrides}))


def numbers(images: np.ndarray) -> list[int]:
    """Return the first pixel of each image, which numbers them in tests."""
    return images[:, 0, 0, 0].tolist()
