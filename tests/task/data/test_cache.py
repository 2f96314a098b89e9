"""Truncated or incomplete folders in the cache are rebuilt."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from flwr_frl.task.data.cache import ABOUT, PARTIAL
from flwr_frl.task.data.datasets import DataSettings, load_dataset


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


def test_old_partial_folders_are_removed(tmp_path) -> None:
    old, new = tmp_path / f"{PARTIAL}old", tmp_path / f"{PARTIAL}new"
    foreign = tmp_path / ".partial-download"
    for folder in (old, new, foreign):
        folder.mkdir()
        (folder / "train-images.npy").write_bytes(b"half")
    long_ago = time.time() - 3700
    for path in (old / "train-images.npy", foreign / "train-images.npy", old, foreign):
        os.utime(path, (long_ago, long_ago))
    digits(tmp_path)
    # Another process may still write the new one; the last one is another program's.
    assert [p.exists() for p in (old, new, foreign)] == [False, True, True]
