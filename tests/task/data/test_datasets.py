"""Data sets from tiny files: content, cache and errors."""

import errno
import io
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from pictures import load, numbers
from PIL import Image
from refusals import code_of, refusal

from flwr_frl.common.errors import SettingsError
from flwr_frl.task.data import datasets
from flwr_frl.task.data.datasets import ABOUT, DataSettings, Pictures, load_dataset


def write_image(path: Path, value: int, mode: str = "RGB", size: tuple = (4, 3)):
    """Write an image whose first pixel numbers it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (*size[::-1], 3) if mode == "RGB" else size[::-1]
    pixels = (np.arange(np.prod(shape)).reshape(shape) + value).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def write_folder(root: Path, per_class: int = 2, classes: tuple = ("ant", "bee")):
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


def test_digits(tmp_path):
    from sklearn.datasets import load_digits

    dataset = load_dataset("digits", DataSettings(cache_dir=str(tmp_path)))
    # Of 1,797 images, numbers 4, 9, 14, ... are for testing: 359 images.
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    assert dataset.classes == tuple("0123456789")
    raw = load_digits()
    assert dataset.test.labels.tolist() == raw.target[4::5].tolist()
    # Values 0 to 16 become 0 to 255; 16 must not overflow to 0.
    expected = np.minimum(raw.images[4::5] * 16, 255)
    assert np.array_equal(dataset.test.images[..., 0], expected)


# Image folders


def test_an_image_folder(folder, tmp_path):
    (folder / "train" / "ant" / "notes.txt").write_text("no image")
    (folder / "README").write_text("no image")
    dataset = load(folder, tmp_path)
    assert (dataset.classes, dataset.clients) == (("ant", "bee"), ())
    assert numbers(dataset.train.images) == [0, 1, 10, 11]
    assert numbers(dataset.test.images) == [100, 101, 110, 111]
    assert dataset.train.labels.tolist() == [0, 0, 1, 1]
    assert dataset.train.owners is None
    # Images are 4 wide and 3 high. PNG is lossless, so every pixel must be equal.
    pixels = (np.arange(36).reshape(3, 4, 3) + 11).astype(np.uint8)
    assert np.array_equal(dataset.train.images[3], pixels)
    assert load(folder, tmp_path, image_size=6).train.images.shape == (4, 6, 6, 3)


def test_a_folder_that_is_split_over_clients(tmp_path):
    root = tmp_path / "images"
    # Anna has ants and bees, Bob only bees; Bob's label must still be that of bees.
    places = ("anna/train/ant/0", "anna/train/bee/0", "anna/test/ant/0")
    places += ("bob/train/bee/0", "bob/train/bee/1", "bob/test/bee/0")
    for number, place in enumerate(places, 1):
        write_image(root / f"{place}.png", number)
    dataset = load(root, tmp_path)
    assert (dataset.classes, dataset.clients) == (("ant", "bee"), ("anna", "bob"))
    for part, expected in (
        (dataset.train, ([1, 2, 4, 5], [0, 1, 1, 1], [0, 0, 1, 1])),
        (dataset.test, ([3, 6], [0, 1], [0, 1])),
    ):
        images, labels, owners = expected
        assert numbers(part.images) == images
        assert part.labels.tolist() == labels
        assert part.owners.tolist() == owners


def test_the_first_image_decides_the_size(folder, tmp_path):
    write_image(folder / "train" / "bee" / "z.png", 9, size=(8, 6))
    write_image(folder / "test" / "bee" / "z.png", 9, mode="L")
    dataset = load(folder, tmp_path)
    for part in (dataset.train, dataset.test):
        assert part.images.shape == (5, 3, 4, 3)
    # A grey image is converted to three equal channels.
    assert len(np.unique(dataset.test.images[4, 1, 2])) == 1


def test_num_classes_keeps_the_first_classes(tmp_path):
    write_folder(tmp_path / "images", classes=("ant", "bee", "cat"))
    dataset = load(tmp_path / "images", tmp_path, num_classes=2)
    assert dataset.classes == ("ant", "bee")
    assert numbers(dataset.train.images) == [0, 1, 10, 11]
    for wrong in (1, 4):
        call = (load, tmp_path / "images", tmp_path)
        assert code_of(*call, num_classes=wrong) == "num-classes"


# The cache


def test_a_folder_is_decoded_once_until_it_changes(folder, tmp_path, monkeypatch):
    calls = []
    write = Pictures.write
    counted = lambda *a: calls.append(1) or write(*a)  # noqa: E731
    monkeypatch.setattr(Pictures, "write", counted)
    first, second = load(folder, tmp_path), load(folder, tmp_path)
    assert calls == [1, 1]
    assert np.array_equal(first.train.images, second.train.images)
    assert first.classes == second.classes
    # Both are views of the same file.
    assert isinstance(second.train.images, np.memmap)
    assert first.train.images.filename == second.train.images.filename
    for number in (50, 60):
        write_image(folder / "train" / "ant" / "new.png", number)
        assert number in numbers(load(folder, tmp_path).train.images)


def test_cache_location_follows_the_environment(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load(folder, tmp_path, cache_dir="")
    assert len(list((tmp_path / "xdg" / "flwr-frl").iterdir())) == 1


def test_another_process_may_store_the_same_data_first(folder, tmp_path, monkeypatch):
    write = Pictures.write

    def write_late(*arguments):
        monkeypatch.setattr(Pictures, "write", write)
        load(folder, tmp_path)
        return write(*arguments)

    monkeypatch.setattr(Pictures, "write", write_late)
    assert len(load(folder, tmp_path).train) == 4
    assert len(list((tmp_path / "cache").iterdir())) == 1


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("writer", [(Pictures, "write"), (np, "save")])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_full_disk_or_interrupt_is_repaired(
    folder, tmp_path, monkeypatch, writer, error
):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(*writer, full)
    with pytest.raises((SettingsError, KeyboardInterrupt)) as caught:
        load(folder, tmp_path)
    assert getattr(caught.value, "code", "cache-dir") == "cache-dir"
    assert not [p for p in files_of(tmp_path / "cache") if p.suffix == ".partial"]
    monkeypatch.undo()
    assert len(load(folder, tmp_path).train) == 4


def test_decoded_images_do_not_fill_the_memory(tmp_path, monkeypatch):
    # Two images of 128 x 128 x 3 bytes per block, while all images have 1.6 or 6.3 MB
    monkeypatch.setattr(datasets, "BLOCK", 2 * 128 * 128 * 3)
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
    # Only memory of Python and NumPy is measured, not that of Pillow.
    assert peaks[1] < peaks[0] + 200_000
    assert peaks[1] < 1_000_000


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 9)])
@pytest.mark.parametrize("name", ["train-images.npy", "test-labels.npy", ABOUT])
def test_a_damaged_folder_is_rebuilt(tmp_path, spoil, name) -> None:
    place = DataSettings(cache_dir=str(tmp_path))
    before = load_dataset("digits", place)
    images, classes = np.array(before.train.images), before.classes
    (folder,) = tmp_path.iterdir()
    del before
    spoil(folder / name)
    again = load_dataset("digits", place)
    assert list(tmp_path.iterdir()) == [folder]
    np.testing.assert_array_equal(again.train.images, images)
    assert again.classes == classes


# Invalid settings, folders and images


def test_missing_or_empty_directories_are_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for root in ("", *(tmp_path / name for name in ("nowhere", "file", "empty"))):
        assert code_of(load, root, tmp_path) == "data-dir"


@pytest.mark.parametrize("part", ["train", "test"])
def test_missing_parts_are_an_error(folder, tmp_path, part):
    shutil.rmtree(folder / part)
    assert code_of(load, folder, tmp_path) == "data-dir"


def test_a_cache_that_is_a_file_is_an_error(folder, tmp_path):
    (tmp_path / "file").write_text("a file, not a directory")
    place = str(tmp_path / "file")
    assert code_of(load, folder, tmp_path, cache_dir=place) == "cache-dir"


def truncated_png() -> bytes:
    buffer, rng = io.BytesIO(), np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (3, 4, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()[:60]


@pytest.mark.parametrize("data", [b"", b"not an image", truncated_png()])
@pytest.mark.parametrize("name", ["bee/broken.png", "ant/-broken.png"])
def test_an_unreadable_image_is_named(folder, tmp_path, data, name):
    path = folder / "train" / name
    path.write_bytes(data)
    error = refusal(load, folder, tmp_path)
    assert (error.code, str(path) in str(error)) == ("data-dir", True)
    assert files_of(tmp_path / "cache") == []


def test_names_that_are_not_valid_utf_8(folder, tmp_path):
    for part in ("train", "test"):
        (folder / part / "bee").rename(folder / part / os.fsdecode(b"\xff\xfe"))
    image = folder / "train" / "ant" / "0.png"
    image.rename(image.with_name(os.fsdecode(b"0\xff.png")))
    for _ in range(2):
        # The second time from the cache
        dataset = load(folder, tmp_path)
        assert dataset.classes == ("ant", "\udcff\udcfe")
        assert numbers(dataset.train.images) == [0, 1, 10, 11]
