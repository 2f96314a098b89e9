"""Helpers of tests that load data sets."""

from pathlib import Path

import numpy as np

from flwr_frl.task.data.datasets import DataSettings, load_dataset


def load(root: Path, tmp_path: Path, **overrides):
    name = overrides.pop("task", "image-folder")
    places = {"data_dir": str(root), "cache_dir": str(tmp_path / "cache")}
    return load_dataset(name, DataSettings(**{**places, **overrides}))


def numbers(images: np.ndarray) -> list[int]:
    return images[:, 0, 0, 0].tolist()
