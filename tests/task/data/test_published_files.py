"""Published files of torchvision's data sets, and files of arrays."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torchvision
from pictures import load, numbers
from refusals import code_of, refusal

# Data sets of torchvision in their published files


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    magic = struct.pack(">HBB", 0, 8, array.ndim)
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(magic + sizes + array.astype(np.uint8).tobytes())


def write_mnist(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    halves = {}
    for part, prefix, n in (("train", "train", 30), ("test", "t10k", 20)):
        images = rng.integers(0, 256, (n, 28, 28))
        labels = np.arange(n) % 10
        write_idx(root / "MNIST" / "raw" / f"{prefix}-images-idx3-ubyte", images)
        write_idx(root / "MNIST" / "raw" / f"{prefix}-labels-idx1-ubyte", labels)
        halves[part] = (images, labels)
    return halves


def test_mnist(tmp_path):
    written = write_mnist(tmp_path / "data")
    dataset = load(tmp_path / "data", tmp_path, task="mnist")
    assert len(dataset.classes) == 10
    for part, half in (("train", dataset.train), ("test", dataset.test)):
        assert np.array_equal(half.images[..., 0], written[part][0])
        assert half.labels.tolist() == written[part][1].tolist()
        assert half.images.shape[1:] == (28, 28, 1)


def write_emnist(root: Path, split: str, labels: np.ndarray) -> None:
    for part in ("train", "test"):
        prefix = root / "EMNIST" / "raw" / f"emnist-{split}-{part}"
        images = np.zeros((len(labels), 28, 28))
        write_idx(Path(f"{prefix}-images-idx3-ubyte"), images)
        write_idx(Path(f"{prefix}-labels-idx1-ubyte"), labels)


def test_classes_of_emnist_splits(tmp_path):
    root = tmp_path / "data"
    write_emnist(root, "balanced", np.arange(47))
    # Labels of this split start at 1.
    write_emnist(root, "letters", np.arange(1, 27))
    balanced = load(root, tmp_path, task="emnist")
    assert balanced.train.labels.tolist() == list(range(47))
    assert balanced.classes[:12] == tuple("0123456789AB")
    ten = load(root, tmp_path, task="emnist", num_classes=10)
    assert ten.test.labels.tolist() == list(range(10))
    assert ten.classes == tuple("0123456789")
    letters = load(root, tmp_path, task="emnist", emnist_split="letters")
    assert letters.train.labels.tolist() == list(range(26))
    assert letters.classes == tuple("abcdefghijklmnopqrstuvwxyz")


def test_failed_downloads_and_truncated_files_are_an_error(tmp_path, monkeypatch):
    def refuse(self):
        raise RuntimeError("Error downloading train-images\nwith a second line")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", refuse)
    (tmp_path / "data").mkdir()
    assert code_of(load, tmp_path / "data", tmp_path, task="mnist") == "data-dir"
    write_mnist(tmp_path / "data")
    path = tmp_path / "data" / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    for kept in (1000, 17, 2, 0):
        os.truncate(path, kept)
        assert code_of(load, tmp_path / "data", tmp_path, task="mnist") == "data-dir"


# Arrays


def save_arrays(root: Path, part: str, **arrays):
    root.mkdir(exist_ok=True)
    np.savez(root / f"{part}.npz", **arrays)


@pytest.fixture
def arrays(tmp_path):
    """Six training and two test images of 4 x 3; the first value is their number."""
    root = tmp_path / "arrays"
    images = np.arange(8 * 3 * 4 * 3, dtype=np.uint8).reshape(8, 3, 4, 3)
    images[:, 0, 0, 0] = np.arange(8)
    labels = np.array([0, 1, 2, 0, 1, 2, 2, 0])
    names = np.array(["ant", "bee", "cat"])
    save_arrays(root, "train", images=images[:6], labels=labels[:6], classes=names)
    save_arrays(root, "test", images=images[6:], labels=labels[6:])
    return root


def test_arrays_of_a_device(arrays, tmp_path):
    # The name of the folder is not valid UTF-8.
    arrays = arrays.rename(arrays.with_name(os.fsdecode(b"\xff\xfe")))
    dataset = load(arrays, tmp_path, task="arrays")
    assert dataset.classes == ("ant", "bee", "cat")
    assert numbers(dataset.train.images) == [0, 1, 2, 3, 4, 5]
    assert numbers(dataset.test.images) == [6, 7]
    assert dataset.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert dataset.test.labels.tolist() == [2, 0]
    assert dataset.test.labels.dtype == np.int64
    assert dataset.train.images.shape == (6, 3, 4, 3)


def test_grey_arrays_without_names(tmp_path):
    root = tmp_path / "arrays"
    images = np.arange(2 * 5 * 4, dtype=np.uint8).reshape(2, 5, 4)
    # Class 1 is absent, but the head still has an output for it.
    for part in ("train", "test"):
        save_arrays(root, part, images=images, labels=np.array([2, 0], np.uint8))
    dataset = load(root, tmp_path, task="arrays")
    assert dataset.classes == ("0", "1", "2")
    assert dataset.train.images.shape == (2, 5, 4, 1)
    assert np.array_equal(dataset.train.images[..., 0], images)


class Harmful:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["images", "labels", "classes", ""])
def test_a_pickle_is_never_loaded(arrays, tmp_path, name):
    trap, path = tmp_path / "harm", arrays / "train.npz"
    if name:
        contents = dict(np.load(path))
        contents[name] = np.array([Harmful(trap)] * 6, dtype=object)
        save_arrays(arrays, "train", **contents)
        # Precondition: the pickle works.
        np.load(path, allow_pickle=True)[name]
        trap.unlink()
    else:
        path.write_bytes(pickle.dumps(Harmful(trap)))
    assert code_of(load, arrays, tmp_path, task="arrays") == "data-dir"
    assert not trap.exists()


WRONG_ARRAYS = [
    # As many names of classes would fill the memory.
    {"labels": np.full(6, 10**12), "classes": None},
    {"images": np.zeros((6, 3, 4, 3))},
    {"images": np.zeros((6, 12), np.uint8)},
    # Channels first
    {"images": np.zeros((6, 3, 8, 8), np.uint8)},
    {"images": np.zeros((0, 3, 4, 3), np.uint8)},
    # Another shape than in test.npz
    {"images": np.zeros((6, 3, 5, 3), np.uint8)},
    {"labels": np.arange(5)},
    {"labels": np.zeros(6)},
    {"labels": np.arange(6)},
    {"labels": np.array([0, 1, -1, 0, 0, 0])},
    {"classes": np.arange(3)},
    {"classes": np.array(["a", "b", "a"])},
    {"classes": np.array(["a", "b"])},
]


@pytest.mark.parametrize("change", WRONG_ARRAYS)
def test_invalid_arrays_are_an_error(arrays, tmp_path, change):
    present = {**np.load(arrays / "train.npz"), **change}
    present = {name: array for name, array in present.items() if array is not None}
    save_arrays(arrays, "train", **present)
    error = refusal(load, arrays, tmp_path, task="arrays")
    assert (error.code, str(arrays) in str(error)) == ("data-dir", True)
