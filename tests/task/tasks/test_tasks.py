"""Tasks: examples of each client, and the common initial model."""

from pathlib import Path

import named_tasks
import numpy as np
import pytest
import torch
from pictures import write_images
from PIL import Image
from refusals import assert_says, code_of

from flwr_frl.task.tasks import image as tasks
from flwr_frl.task.tasks.image import ImageTask


def digits(num_clients: int = 20, task: str = "digits", **overrides) -> ImageTask:
    return named_tasks.task_of(task, num_clients, head_layers=1, **overrides)


def test_clients_share_no_image_and_test_on_their_own_classes():
    task = digits()
    for parts, total in ((task.train, 1438), (task.test, 359)):
        assert sorted(np.concatenate(parts).tolist()) == list(range(total))
    for client in range(20):
        trained = set(task.train_examples(client).targets.tolist())
        assert set(task.test_examples(client).targets.tolist()) == trained
        assert len(trained) <= 2
    alone = digits(0)
    assert len(alone.train_examples(0)) == 1438
    assert len(alone.test_examples(0)) == 359


def test_examples_are_images_of_the_data_set():
    task = digits()
    examples, indices = task.train_examples(3), task.train[3]
    assert np.array_equal(examples.inputs.numpy(), task.dataset.train.images[indices])
    assert examples.targets.tolist() == task.dataset.train.labels[indices].tolist()
    # Grey images: (pixel / 255 - 0.1307) / 0.3081
    ((inputs, _),) = task.test_examples(3).batches(1000)
    pixels = task.dataset.test.images[task.test[3], ..., 0] / 255
    expected = (pixels - 0.1307) / 0.3081
    np.testing.assert_allclose(inputs[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_seed_and_weights_determine_the_initial_model(tmp_path):
    task = digits(seed=3)
    again = ImageTask("digits", task.settings, 20)
    state, same = task.initial_state, again.initial_state
    assert all(torch.equal(state[name], same[name]) for name in state)
    other = digits(seed=4).initial_state
    assert not any(torch.equal(state[name], other[name]) for name in state)
    torch.save(state, tmp_path / "first.pth")
    loaded = digits(seed=4, weights=str(tmp_path / "first.pth")).initial_state
    assert all(torch.equal(state[name], loaded[name]) for name in state)


def write_coloured(root: Path, client: str = "", classes: str = "ab") -> None:
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in classes:
            images = rng.integers(0, 256, (4, 16, 16, 3), np.uint8)
            write_images(root / client / part / name, images)


def test_image_folders_are_augmented_for_training_only(tmp_path):
    write_coloured(tmp_path)
    for augment in (True, False):
        task = folder_task(tmp_path, augment=augment)
        assert task.train_examples(0).augment is augment
        assert not task.test_examples(0).augment
        # Mean and standard deviation of ImageNet, scaled to 0 to 255
        np.testing.assert_allclose(task.mean / 255, [0.485, 0.456, 0.406], rtol=1e-6)


def test_clients_of_a_split_folder_keep_their_own_images(tmp_path):
    for client, classes in (("x", "ab"), ("y", "b"), ("z", "ab")):
        write_coloured(tmp_path, client, classes)
    task = folder_task(tmp_path, 3)
    assert [len(task.train_examples(i)) for i in range(3)] == [8, 4, 8]
    assert set(task.train_examples(1).targets.tolist()) == {1}
    assert np.array_equal(np.sort(np.concatenate(task.train)), np.arange(20))
    # Fewer clients than folders use the first folders.
    assert len(folder_task(tmp_path, 2).train) == 2
    assert code_of(folder_task, tmp_path, 4) == "num-clients"
    write_images(tmp_path / "w" / "test" / "a", [np.zeros((4, 4), "u1")])
    assert_says("client w", folder_task, tmp_path, 4)


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ({"task": "digit"}, "task"),
        ({"classes_per_client": 11}, "classes-per-client"),
        ({"num_classes": 4, "classes_per_client": 5}, "classes-per-client"),
        ({"num_classes": 11}, "num-classes"),
        ({"model": "cnn"}, "model"),
    ],
)
def test_invalid_settings_are_an_error(overrides, code):
    assert code_of(lambda: digits(**overrides).initial_model()) == code


# Images and models


def write_grey(root: Path, size: int = 16, mode: str = "L") -> None:
    for part in ("train", "test"):
        for i, name in enumerate("ab"):
            pixels = [np.full((size, size), 30 * (4 * i + k), "u1") for k in range(4)]
            for image in pixels:
                image[0, 0] = 250
            images = [np.asarray(Image.fromarray(p).convert(mode)) for p in pixels]
            write_images(root / part / name, images)


def folder_task(root: Path, clients: int = 2, **more):
    usual = {"data_dir": str(root), "classes_per_client": 1, "model": "mlp"}
    return digits(clients, "image-folder", **{**usual, **more})


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_grey_images_are_not_augmented(tmp_path, mode):
    write_grey(tmp_path, mode=mode)
    assert not folder_task(tmp_path).train_examples(0).augment


def test_grey_images_become_rgb_for_a_model_of_torchvision(tmp_path):
    write_grey(tmp_path)
    task = folder_task(tmp_path, model="resnet18")
    assert task.shape == (3, 16, 16)
    ((inputs, _),) = task.test_examples(0).batches(10)
    grey = task.dataset.test.images[task.test[0], ..., 0] / 255
    means, deviations = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = [(grey - m) / d for m, d in zip(means, deviations, strict=True)]
    np.testing.assert_allclose(inputs, np.stack(expected, 1), rtol=1e-4, atol=1e-5)
    assert task.initial_model()(inputs).shape == (len(inputs), 2)
    assert folder_task(tmp_path).shape == (1, 16, 16)


@pytest.mark.parametrize(
    ("size", "model"), [(8, "digits-cnn"), (16, "cifar10-cnn"), (105, "cifar10-cnn")]
)
def test_the_default_model_fits_the_images(tmp_path, size, model):
    write_grey(tmp_path, size)
    task = folder_task(tmp_path, model="")
    assert task.model_name == model
    assert task.initial_model()(torch.zeros(2, *task.shape)).shape == (2, 2)


def test_images_of_a_large_client_are_read_batch_by_batch(tmp_path, monkeypatch):
    write_grey(tmp_path)
    copied = folder_task(tmp_path, seed=1)
    usual = [copied.train_examples(client) for client in (0, 1)]
    monkeypatch.setattr(tasks, "COPIED", 0)
    mapped = ImageTask("image-folder", copied.settings, 2)
    for client, some in enumerate(usual):
        others = mapped.train_examples(client)
        assert (some.rows, len(some.inputs)) == (None, 4)
        # The inputs are those of the whole file, with images of both clients.
        assert len(others.inputs) == 8
        assert others.rows.tolist() == mapped.train[client].tolist()
        for (x, y), (u, v) in zip(some.batches(3), others.batches(3), strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
