"""PFLlib's folders: partition, pixels, and invalid files."""

import os
from zipfile import ZipFile

import named_tasks
import numpy as np
import pytest
from refusals import assert_says, code_of, refusal


class Runs:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    # Like PFLlib, which stores the dictionary as an array of one object.
    np.savez_compressed(path, data=content)


def scaled(pixels):
    """Return images in [-1, 1], channels first, like ToTensor and Normalize(0.5)."""
    return ((pixels / 255 - 0.5) / 0.5).astype(np.float32).transpose(0, 3, 1, 2)


def clients(root, channels=1):
    """Write the clients 0, 2 and 10, and return their pixels and labels by part."""
    rng, written = np.random.default_rng(0), {"train": [], "test": []}
    for name, counts in {"0": (3, 2), "2": (4, 0), "10": (5, 1)}.items():
        for part, n in zip(("train", "test"), counts, strict=True):
            pixels = rng.integers(0, 256, (n, 8, 8, channels))
            labels = rng.integers(0, 4, n)
            labels[:1] = 3
            write(root / part / f"{name}.npz", {"x": scaled(pixels), "y": labels})
            written[part].append((pixels, labels))
    return written


def task_of(root, task="pfllib", **more):
    places = {"data_dir": str(root), "cache_dir": str(root / "cache")}
    return named_tasks.task_of(task, 3, **places, **more)


@pytest.mark.parametrize("channels", [1, 3])
def test_each_client_has_the_images_of_its_files(tmp_path, channels):
    written = clients(tmp_path, channels)
    task = task_of(tmp_path, augment=False)
    assert task.client_names == ("0", "2", "10")
    assert task.classes == ("0", "1", "2", "3")
    for part, of in (("train", task.train_examples), ("test", task.test_examples)):
        for client, (pixels, labels) in enumerate(written[part]):
            examples = of(client)
            assert examples.targets.tolist() == labels.tolist()
            # Pixels are stored as bytes, and reach the model as in the file.
            assert examples.inputs.numpy().tolist() == pixels.tolist()
            inputs = examples.first(len(labels)).numpy()
            np.testing.assert_allclose(inputs, scaled(pixels), atol=1e-6)
    assert task.initial_model()(task.train_examples(0).first(2)).shape == (2, 4)
    assert "partition" in task.unused_settings


def test_hostile_file_executes_nothing(tmp_path):
    clients(tmp_path)
    write(tmp_path / "train" / "2.npz", {"x": Runs(tmp_path / "made"), "y": 1})
    assert code_of(task_of, tmp_path) == "data-dir"
    assert not (tmp_path / "made").exists()


def change(path, edit) -> None:
    """Change the array file of an archive."""
    data = edit(ZipFile(path).read("data.npy"))
    with ZipFile(path, "w") as archive:
        archive.writestr("data.npy", data)


def test_bytes_are_not_read_as_objects(tmp_path):
    # The state of a dtype could make NumPy interpret bytes of a file as addresses.
    clients(tmp_path)
    path = tmp_path / "train" / "0.npz"
    zeros = np.zeros((3, 8, 8, 1))
    write(path, {"x": scaled(zeros), "y": np.zeros(3, np.int64)})
    change(path, lambda data: data.replace(b"i8", b"O8"))
    assert "values of type 'O8'" in str(refusal(task_of, tmp_path))


IMAGES, LABELS = scaled(np.zeros((3, 8, 8, 1))), np.arange(3)


@pytest.mark.parametrize(
    "content",
    [
        {"x": IMAGES},
        [1, 2],
        {"x": [1, 2, 3], "y": LABELS},
        # Sentences of different lengths are an array of objects.
        {"x": np.array([[1], [2, 3], []], object), "y": LABELS},
        {"x": np.array(1.0), "y": LABELS},
        {"x": IMAGES, "y": LABELS.astype(object)},
        {"x": IMAGES, "y": LABELS[:2]},
        {"x": IMAGES, "y": LABELS - 1},
        # As many names of classes would fill the memory.
        {"x": IMAGES, "y": LABELS + 10**12},
        {"x": IMAGES, "y": LABELS.astype(float)},
        {"x": IMAGES[:, 0], "y": LABELS},
        {"x": IMAGES * 2, "y": LABELS},
        {"x": IMAGES * 0.999, "y": LABELS},
        {"x": IMAGES * np.nan, "y": LABELS},
        {"x": IMAGES[:, :, 1:], "y": LABELS},
    ],
)
def test_invalid_files_are_an_error(tmp_path, content):
    clients(tmp_path)
    write(tmp_path / "train" / "10.npz", content)
    assert code_of(task_of, tmp_path) == "data-dir"


def test_invalid_folders_are_an_error(tmp_path):
    assert_says("<client>.npz", task_of, tmp_path)
    clients(tmp_path)
    (tmp_path / "test" / "2.npz").unlink()
    assert_says("both for every client", task_of, tmp_path)
    for part in ("train", "test"):
        (tmp_path / part / "2.npz").write_text("no archive")
    assert_says("cannot be read", task_of, tmp_path)
