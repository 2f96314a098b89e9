"""Truncated or incomplete folders in the cache are rebuilt."""

import os
from pathlib import Path

import numpy as np
import pytest

from flwr_frl.task.data.datasets import ABOUT, DataSettings, load_dataset


def digits(cache: Path):
    return load_dataset("digits", DataSettings(cache_dir=str(cache)))


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 9)])
@pytest.mark.parametrize("name", ["train-images.npy", "test-labels.npy", ABOUT])
def test_a_damaged_folder_is_rebuilt(tmp_path, spoil, name) -> None:
    before = digits(tmp_path)
    images, classes = np.array(before.train.images), before.classes
    (folder,) = tmp_path.iterdir()
    del before
    spoil(folder / name)
    again = digits(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    np.testing.assert_array_equal(again.train.images, images)
    assert again.classes == classes
