"""Truncated, changed or incomplete folders in the cache are rebuilt."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from flwr_frl.task.data import datasets
from flwr_frl.task.data.cache import (
    BLOCK,
    BLOCKS,
    CHECKSUMS,
    PARTIAL,
    checksum,
    is_intact,
    remove_damaged,
    seal,
)
from flwr_frl.task.data.datasets import DataSettings, load_dataset


def digits(cache: Path):
    return load_dataset("digits", DataSettings(cache_dir=str(cache)))


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [change, Path.unlink, lambda p: os.truncate(p, 9)])
@pytest.mark.parametrize("name", ["train-images.npy", "classes.npy", CHECKSUMS])
def test_a_damaged_folder_is_rebuilt(tmp_path, spoil, name) -> None:
    before = digits(tmp_path)
    images, classes = np.array(before.train.images), before.classes
    (folder,) = tmp_path.iterdir()
    del before
    spoil(folder / name)
    assert not is_intact(folder)
    again = digits(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    assert is_intact(folder)
    np.testing.assert_array_equal(again.train.images, images)
    assert again.classes == classes


def test_folder_repaired_in_the_meantime_is_kept(tmp_path) -> None:
    digits(tmp_path)
    (folder,) = tmp_path.iterdir()
    # A process may have seen the damage before another one repaired the folder.
    remove_damaged(folder)
    assert is_intact(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_moved_aside_briefly_is_opened_afterwards(
    tmp_path, monkeypatch
) -> None:
    images = np.array(digits(tmp_path).train.images)
    (folder,) = tmp_path.iterdir()
    original = datasets._open

    def late(directory: Path):
        # Another process moves the folder aside, and back.
        monkeypatch.setattr(datasets, "_open", original)
        aside = directory.rename(tmp_path / "aside")
        try:
            return original(directory)
        finally:
            aside.rename(directory)

    monkeypatch.setattr(datasets, "_open", late)
    np.testing.assert_array_equal(digits(tmp_path).train.images, images)
    assert list(tmp_path.iterdir()) == [folder]


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


def test_large_files_are_checked_in_blocks_and_at_their_end(tmp_path) -> None:
    path = tmp_path / "large.npy"
    size = 3 * BLOCK * BLOCKS
    with path.open("wb") as file:
        file.truncate(size)
    before = checksum(path)
    with path.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"1")
    assert checksum(path) != before
    with path.open("r+b") as file:
        file.truncate(size - 1)
    assert checksum(path)[0] == size - 1
    seal(tmp_path)
    assert is_intact(tmp_path)
