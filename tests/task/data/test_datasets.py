"""Data sets from tiny files: content, cache, and what is wrong with them."""

import errno
import io
import os
import pickle
import shutil
import struct
import tracemalloc
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_frl.task.data import datasets, images
from flwr_frl.task.data.datasets import EMNIST_SPLITS, DataSettings, load_dataset
from flwr_frl.task.data.folders import ImageFolder
from flwr_frl.task.settings import SettingsError

DiskUsage = namedtuple("DiskUsage", "total used free")


def write_image(path: Path, value: int, mode: str = "RGB", size: tuple = (4, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = (np.arange(np.prod(shape)).reshape(shape) + value).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def write_folder(root: Path, per_class: int = 2, classes: tuple = ("ant", "bee")):
    """Write images whose first pixel numbers them."""
    for part in ("train", "test"):
        for c, name in enumerate(classes):
            for i in range(per_class):
                number = 100 * (part == "test") + 10 * c + i
                write_image(root / part / name / f"{i}.png", number)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "images"
    write_folder(root)
    return root


def load(root: Path, tmp_path: Path, **overrides):
    name = overrides.pop("task", "image-folder")
    places = {"data_dir": str(root), "cache_dir": str(tmp_path / "cache")}
    return load_dataset(name, DataSettings(**{**places, **overrides}))


def numbers(images: np.ndarray) -> list[int]:
    return images[:, 0, 0, 0].tolist()


# Digits


def test_digits(tmp_path):
    from sklearn.datasets import load_digits

    dataset = load_dataset("digits", DataSettings(cache_dir=str(tmp_path)))
    # 1,797 images; numbers 4, 9, 14, ... test: 359 of them.
    assert len(dataset.train) == 1438
    assert len(dataset.test) == 359
    assert dataset.classes == tuple("0123456789")
    assert dataset.train.images.shape == (1438, 8, 8, 1)
    raw = load_digits()
    assert dataset.test.labels.tolist() == raw.target[4::5].tolist()
    # Values 0 to 16 become 0 to 255, and 16 is not an overflown 0.
    expected = np.minimum(raw.images[4::5] * 16, 255)
    assert np.array_equal(dataset.test.images[..., 0], expected)
    assert dataset.test.images.max() == 255


# Image folders


def test_an_image_folder(folder, tmp_path):
    (folder / "train" / "ant" / "notes.txt").write_text("no image")
    (folder / "README").write_text("no image")
    dataset = load(folder, tmp_path)
    assert dataset.classes == ("ant", "bee")
    assert dataset.clients == ()
    assert numbers(dataset.train.images) == [0, 1, 10, 11]
    assert numbers(dataset.test.images) == [100, 101, 110, 111]
    assert dataset.train.labels.tolist() == [0, 0, 1, 1]
    assert dataset.train.owners.tolist() == [-1] * 4
    # Written 4 wide and 3 high; lossless, so every pixel must be the same.
    assert dataset.train.images.shape == (4, 3, 4, 3)
    pixels = (np.arange(36).reshape(3, 4, 3) + 11).astype(np.uint8)
    assert np.array_equal(dataset.train.images[3], pixels)
    assert load(folder, tmp_path, image_size=6).train.images.shape == (4, 6, 6, 3)


def test_a_folder_that_is_split_over_clients(tmp_path):
    root = tmp_path / "images"
    # Anna has ant and bee, Bob only bee; Bob's label must still be bee's.
    write_image(root / "anna" / "train" / "ant" / "0.png", 1)
    write_image(root / "anna" / "train" / "bee" / "0.png", 2)
    write_image(root / "anna" / "test" / "ant" / "0.png", 3)
    write_image(root / "bob" / "train" / "bee" / "0.png", 4)
    write_image(root / "bob" / "train" / "bee" / "1.png", 5)
    write_image(root / "bob" / "test" / "bee" / "0.png", 6)
    dataset = load(root, tmp_path)
    assert dataset.clients == ("anna", "bob")
    assert dataset.classes == ("ant", "bee")
    assert numbers(dataset.train.images) == [1, 2, 4, 5]
    assert dataset.train.labels.tolist() == [0, 1, 1, 1]
    assert dataset.train.owners.tolist() == [0, 0, 1, 1]
    assert numbers(dataset.test.images) == [3, 6]
    assert dataset.test.labels.tolist() == [0, 1]
    assert dataset.test.owners.tolist() == [0, 1]


def test_the_first_image_decides_the_size(folder, tmp_path):
    write_image(folder / "train" / "bee" / "z.png", 9, size=(8, 6))
    write_image(folder / "test" / "bee" / "z.png", 9, mode="L")
    dataset = load(folder, tmp_path)
    assert dataset.train.images.shape == (5, 3, 4, 3)
    assert dataset.test.images.shape == (5, 3, 4, 3)
    # A grey image becomes one of three equal channels.
    assert len(np.unique(dataset.test.images[4, 1, 2])) == 1


def test_only_the_first_classes(tmp_path):
    root = tmp_path / "images"
    write_folder(root, classes=("ant", "bee", "cat"))
    dataset = load(root, tmp_path, num_classes=2)
    assert dataset.classes == ("ant", "bee")
    assert numbers(dataset.train.images) == [0, 1, 10, 11]
    assert len(load(root, tmp_path, num_classes=3).classes) == 3
    for wrong in (1, 4):
        with pytest.raises(SettingsError, match=f"num-classes is {wrong}; .* 2 to 3"):
            load(root, tmp_path, num_classes=wrong)


@pytest.mark.parametrize("name", ["num_classes", "image_size"])
def test_negative_numbers(code_of, name):
    code = code_of(lambda: DataSettings(**{name: -1}))
    assert code == name.replace("_", "-")


# The cache


def test_images_are_decoded_once(folder, tmp_path, monkeypatch):
    calls = []
    write = datasets.write_images
    counted = lambda *a: calls.append(1) or write(*a)  # noqa: E731
    monkeypatch.setattr(datasets, "write_images", counted)
    first, second = load(folder, tmp_path), load(folder, tmp_path)
    assert calls == [1]
    assert np.array_equal(first.train.images, second.train.images)
    assert first.classes == second.classes
    # Both are views of one file.
    assert isinstance(second.train.images, np.memmap)
    assert first.train.images.filename == second.train.images.filename


def test_a_changed_folder_is_decoded_again(folder, tmp_path):
    assert len(load(folder, tmp_path).train) == 4
    write_image(folder / "train" / "ant" / "new.png", 50)
    assert 50 in numbers(load(folder, tmp_path).train.images)
    write_image(folder / "train" / "ant" / "new.png", 60, size=(4, 3))
    assert 60 in numbers(load(folder, tmp_path).train.images)


def test_the_cache_is_where_the_environment_says(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load(folder, tmp_path, cache_dir="")
    assert len(list((tmp_path / "xdg" / "flwr-frl").iterdir())) == 1


def test_another_process_may_store_the_same_data_first(folder, tmp_path, monkeypatch):
    write = datasets.write_images

    def write_late(*arguments):
        monkeypatch.setattr(datasets, "write_images", write)
        load(folder, tmp_path)
        return write(*arguments)

    monkeypatch.setattr(datasets, "write_images", write_late)
    assert len(load(folder, tmp_path).train) == 4
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_too_little_space(code_of, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(1000, 990, 10))
    assert code_of(lambda: load(folder, tmp_path)) == "cache-dir"
    assert list((tmp_path / "cache").glob("*")) == []


@pytest.mark.parametrize("written", [0, 1, 5])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_full_disk_and_an_interrupt_leave_nothing(
    folder, tmp_path, monkeypatch, written, error
):
    save, calls = np.save, []

    def fail(file, array, **options):
        calls.append(1)
        if len(calls) > written:
            file.write(b"half")
            raise error
        save(file, array, **options)

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises((SettingsError, KeyboardInterrupt)) as caught:
        load(folder, tmp_path)
    assert getattr(caught.value, "code", "cache-dir") == "cache-dir"
    assert list((tmp_path / "cache").glob("*")) == []
    monkeypatch.undo()
    assert len(load(folder, tmp_path).train) == 4


def test_a_disk_that_becomes_full_while_images_are_decoded(
    code_of, folder, tmp_path, monkeypatch
):
    class Full(io.BytesIO):
        def write(self, data):
            if memoryview(data).nbytes == 3 * 4 * 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    usual = Path.open
    full = lambda p, m="r", **o: Full() if m == "wb" else usual(p, m, **o)  # noqa: E731
    monkeypatch.setattr(Path, "open", full)
    assert code_of(lambda: load(folder, tmp_path)) == "cache-dir"
    assert not (tmp_path / "cache").exists()


def test_memory_does_not_grow_with_the_folder(tmp_path, monkeypatch):
    # Two images of 128 x 128 x 3 bytes at a time, where all of them have 1.6 or 6.3 MB.
    monkeypatch.setattr(images, "BLOCK", 2 * 128 * 128 * 3)
    peaks = []
    for per_class in (8, 32):
        root = tmp_path / str(per_class)
        write_folder(root, per_class)
        tracemalloc.start()
        dataset = load(root, tmp_path, image_size=128)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert dataset.train.images.shape == (2 * per_class, 128, 128, 3)
        first = Image.open(root / "train" / "bee" / "7.png").resize((128, 128))
        place = per_class + sorted(map(str, range(per_class))).index("7")
        assert np.array_equal(dataset.train.images[place], np.asarray(first))
    # Pillow's own memory is not counted: what is seen is what Python and NumPy hold.
    assert peaks[1] < peaks[0] + 200_000
    assert peaks[1] < 1_000_000


def test_a_folder_that_changes_while_it_is_decoded(folder, tmp_path, monkeypatch):
    shape = ImageFolder.shape

    def late(found):
        write_image(folder / "train" / "ant" / "new.png", 5)
        return shape(found)

    monkeypatch.setattr(ImageFolder, "shape", late)
    with pytest.raises(SettingsError, match="changed from 2 to 3 images"):
        load(folder, tmp_path)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_made(code_of, folder, tmp_path):
    (tmp_path / "cache").write_text("a file, not a directory")
    assert code_of(lambda: load(folder, tmp_path)) == "cache-dir"


# What can be wrong with a folder


@pytest.mark.parametrize("place", ["", "nowhere", "file", "empty"])
@pytest.mark.parametrize("task", ["image-folder", "arrays"])
def test_a_missing_or_empty_directory(code_of, tmp_path, place, task):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    root = tmp_path / place if place else ""
    assert code_of(lambda: load(root, tmp_path, task=task)) == "data-dir"


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_missing_half(code_of, folder, tmp_path, part):
    shutil.rmtree(folder / part)
    assert code_of(lambda: load(folder, tmp_path)) == "data-dir"


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_class_without_images(code_of, folder, tmp_path, part):
    (folder / part / "cat").mkdir()
    (folder / part / "cat" / "notes.txt").write_text("no image")
    assert code_of(lambda: load(folder, tmp_path)) == "data-dir"


def broken_png() -> bytes:
    """A PNG with a damaged chunk type, over which Pillow stumbles late."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", 4, 3, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(12) for _ in range(3)))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    half = len(pixels) // 2
    return start + chunk(b"IDAT", pixels[:half]) + b"\0\0\0\4\xec\xac\2\xb1" + bytes(8)


def huge_bmp() -> bytes:
    """A header that claims more pixels than Pillow is willing to decode."""
    return b"BM" + struct.pack(
        "<IHHIIiiHHIIiiII", *(54, 0, 0, 54, 40, 30000, 30000, 1, 24), *([0] * 6)
    )


def truncated_png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (3, 4, 3), np.uint8)
    ).save(buffer, "PNG")
    return buffer.getvalue()[:60]


UNREADABLE = [
    pytest.param(b"", id="empty"),
    pytest.param(b"not an image", id="text"),
    pytest.param(truncated_png(), id="truncated"),
    pytest.param(broken_png(), id="broken-chunk"),
    pytest.param(huge_bmp(), id="huge"),
]


@pytest.mark.parametrize("data", UNREADABLE)
@pytest.mark.parametrize("first", [False, True])
def test_unreadable_images_are_counted_and_named(folder, tmp_path, data, first):
    names = ["bee/broken.png", "bee/worse.png"]
    if first:
        names[0] = "ant/-broken.png"
    for name in names:
        (folder / "train" / name).write_bytes(data)
    with pytest.raises(SettingsError) as caught:
        load(folder, tmp_path)
    line = f"2 images cannot be read, the first is {folder / 'train' / names[0]}"
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_pipe_is_no_image(folder, tmp_path):
    whole = load(folder, tmp_path)
    os.mkfifo(folder / "train" / "ant" / "9.png")
    again = load(folder, tmp_path)
    assert numbers(again.train.images) == numbers(whole.train.images)


def test_names_that_are_no_text(folder, tmp_path):
    for part in ("train", "test"):
        (folder / part / "bee").rename(folder / part / os.fsdecode(b"\xff\xfe"))
    image = folder / "train" / "ant" / "0.png"
    image.rename(image.with_name(os.fsdecode(b"0\xff.png")))
    for _ in range(2):
        # Then from the cache.
        dataset = load(folder, tmp_path)
        assert dataset.classes == ("ant", "\udcff\udcfe")
        assert numbers(dataset.train.images) == [0, 1, 10, 11]


# Data sets of torchvision, from files as they publish them


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


def test_classes_of_emnist(tmp_path):
    root = tmp_path / "data"
    write_emnist(root, "balanced", np.arange(47))
    # Labels of this split begin with 1.
    write_emnist(root, "letters", np.arange(1, 27))
    whole = load(root, tmp_path, task="emnist")
    assert whole.train.labels.tolist() == list(range(47))
    assert whole.classes[:12] == tuple("0123456789AB")
    ten = load(root, tmp_path, task="emnist", num_classes=10)
    assert ten.test.labels.tolist() == list(range(10))
    assert ten.classes == tuple("0123456789")
    letters = load(root, tmp_path, task="emnist", emnist_split="letters")
    assert letters.train.labels.tolist() == list(range(26))
    assert letters.classes == tuple("abcdefghijklmnopqrstuvwxyz")


def test_the_splits_of_emnist_are_those_of_torchvision(code_of):
    from torchvision.datasets import EMNIST

    assert set(EMNIST_SPLITS) == set(EMNIST.splits)
    assert code_of(lambda: DataSettings(emnist_split="capitals")) == "emnist-split"


def test_no_network(code_of, tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    def refuse(self):
        raise RuntimeError("Error downloading train-images\nwith a second line")

    monkeypatch.setattr(MNIST, "download", refuse)
    (tmp_path / "data").mkdir()
    root = tmp_path / "data"
    assert code_of(lambda: load(root, tmp_path, task="mnist")) == "data-dir"


@pytest.mark.parametrize("kept", [0, 2, 17, 1000])
def test_a_truncated_file_of_torchvision(code_of, tmp_path, kept):
    root = tmp_path / "data"
    write_mnist(root)
    path = root / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:kept])
    assert code_of(lambda: load(root, tmp_path, task="mnist")) == "data-dir"


def test_an_unknown_task(code_of, tmp_path):
    assert code_of(lambda: load("", tmp_path, task="minst")) == "task"


# Arrays


def save_arrays(root: Path, part: str, **arrays):
    root.mkdir(exist_ok=True)
    np.savez(root / f"{part}.npz", **arrays)


@pytest.fixture
def arrays(tmp_path):
    """Six training and two test images of 4 x 3, numbered by their first value."""
    root = tmp_path / "arrays"
    images = np.arange(8 * 3 * 4 * 3, dtype=np.uint8).reshape(8, 3, 4, 3)
    images[:, 0, 0, 0] = np.arange(8)
    labels = np.array([0, 1, 2, 0, 1, 2, 2, 0])
    names = np.array(["ant", "bee", "cat"])
    save_arrays(root, "train", images=images[:6], labels=labels[:6], classes=names)
    save_arrays(root, "test", images=images[6:], labels=labels[6:])
    return root


def test_arrays_of_a_device(arrays, tmp_path):
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
    # Class 1 is not there; the head has an output for it all the same.
    for part in ("train", "test"):
        save_arrays(root, part, images=images, labels=np.array([2, 0], np.uint8))
    dataset = load(root, tmp_path, task="arrays")
    assert dataset.classes == ("0", "1", "2")
    assert dataset.train.images.shape == (2, 5, 4, 1)
    assert np.array_equal(dataset.train.images[..., 0], images)


def test_other_arrays_are_other_data(arrays, tmp_path):
    before = load(arrays, tmp_path, task="arrays")
    images = np.full((3, 3, 4, 3), 77, np.uint8)
    save_arrays(arrays, "test", images=images, labels=np.zeros(3, int))
    after = load(arrays, tmp_path, task="arrays")
    assert len(before.test) == 2
    assert numbers(after.test.images) == [77] * 3


class Harmful:
    """A pickle of this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["images", "labels", "classes", ""])
def test_a_pickle_is_never_loaded(code_of, arrays, tmp_path, name):
    trap, path = tmp_path / "harm", arrays / "train.npz"
    if name:
        contents = dict(np.load(path))
        contents[name] = np.array([Harmful(trap)] * 6, dtype=object)
        save_arrays(arrays, "train", **contents)
        # The trap works.
        np.load(path, allow_pickle=True)[name]
        trap.unlink()
    else:
        path.write_bytes(pickle.dumps(Harmful(trap)))
    assert code_of(lambda: load(arrays, tmp_path, task="arrays")) == "data-dir"
    assert not trap.exists()


WRONG_ARRAYS = [
    ({"images": np.zeros((6, 3, 4, 3))}, "type float64"),
    ({"images": np.zeros((6, 12), np.uint8)}, "must be uint8, n x height"),
    ({"images": np.zeros((6, 3, 8, 8), np.uint8)}, "channels first"),
    ({"images": np.zeros((0, 3, 4, 3), np.uint8)}, r"shape \(0, 3, 4, 3\)"),
    ({"images": np.zeros((6, 3, 5, 3), np.uint8)}, r"has the shape \(3, 5,"),
    ({"labels": np.arange(5)}, "must be 6 integers"),
    ({"labels": np.zeros(6)}, "type float64"),
    ({"labels": np.arange(6)}, "has the label 5"),
    ({"labels": np.array([0, 1, -1, 0, 0, 0])}, "has the label -1"),
    ({"classes": np.arange(3)}, "must be a list of strings"),
    ({"classes": np.array(["a", "b", "a"])}, "has a class twice"),
    ({"classes": np.array(["a", "b"])}, "must be from 0 to 1"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ARRAYS)
def test_arrays_that_are_wrong(arrays, tmp_path, change, message):
    save_arrays(arrays, "train", **{**np.load(arrays / "train.npz"), **change})
    with pytest.raises(SettingsError, match=message) as error:
        load(arrays, tmp_path, task="arrays")
    assert "\n" not in str(error.value)
    assert str(arrays) in str(error.value)


@pytest.mark.parametrize(
    "content", [None, {"labels": np.arange(3)}, b"no archive", np.arange(3), 300, 0]
)
def test_files_that_hold_no_arrays(code_of, arrays, tmp_path, content):
    path = arrays / "train.npz"
    if isinstance(content, int):
        content = path.read_bytes()[:content]
    path.unlink()
    if isinstance(content, dict):
        np.savez(path, **content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with path.open("wb") as file:
            np.save(file, content)
    assert code_of(lambda: load(arrays, tmp_path, task="arrays")) == "data-dir"
