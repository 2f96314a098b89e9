"""Published files of torchvision's data sets."""

import os
import struct
from pathlib import Path

import numpy as np
import torchvision
from pictures import load
from refusals import code_of


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
