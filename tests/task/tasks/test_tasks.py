"""Tasks: examples of each client, and the common initial model."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flwr_frl.common.settings import SettingsError, build, resolve
from flwr_frl.task.data.datasets import SOURCES
from flwr_frl.task.tasks import TASKS, build_task
from flwr_frl.task.tasks import image as tasks
from flwr_frl.task.tasks.image import DEFAULT_MODELS, ImageTask


def digits(num_clients: int = 20, **overrides) -> ImageTask:
    names = {name.replace("_", "-"): value for name, value in overrides.items()}
    return build_task(resolve({"head-layers": 1, **names}), num_clients)


def test_every_image_task_has_a_model():
    others = {
        "hf",
        "hf-text",
        "text-folder",
        "linear",
        "transfer",
        "qcqp",
        "multi-task-logistic",
    }
    assert set(DEFAULT_MODELS) == set(SOURCES) == set(TASKS) - others


def test_clients_share_no_image_and_test_on_their_own_classes():
    task = digits()
    train = np.concatenate(task.train)
    test = np.concatenate(task.test)
    assert sorted(train.tolist()) == list(range(1438))
    assert sorted(test.tolist()) == list(range(359))
    for client in range(20):
        trained = set(task.train_examples(client).targets.tolist())
        tested = set(task.test_examples(client).targets.tolist())
        assert tested == trained
        assert len(trained) <= 2


def test_examples_are_images_of_the_data_set():
    task = digits()
    examples = task.train_examples(3)
    indices = task.train[3]
    assert np.array_equal(examples.inputs.numpy(), task.dataset.train.images[indices])
    assert examples.targets.tolist() == task.dataset.train.labels[indices].tolist()
    # Grey images: (pixel / 255 - 0.1307) / 0.3081
    ((inputs, _),) = task.test_examples(3).batches(1000)
    pixels = task.dataset.test.images[task.test[3], ..., 0] / 255
    np.testing.assert_allclose(
        inputs[:, 0].numpy(), (pixels - 0.1307) / 0.3081, rtol=1e-5, atol=1e-5
    )


def test_zero_clients_give_all_examples_to_client_0():
    task = digits(0)
    assert len(task.train_examples(0)) == 1438
    assert len(task.test_examples(0)) == 359


def test_seed_determines_the_initial_model():
    settings = resolve({"seed": 3, "head-layers": 1})
    first = digits(seed=3)
    again = build(partial(ImageTask, "digits"), settings, num_clients=20)
    assert again is not first
    state, same = first.initial_state, again.initial_state
    assert all(torch.equal(state[name], same[name]) for name in state)
    other = digits(seed=4).initial_state
    assert state.keys() == other.keys()
    assert not any(torch.equal(state[name], other[name]) for name in state)


def write_images(root: Path, client: str = "", classes: str = "ab") -> None:
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in classes:
            folder = root / client / part / name
            folder.mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 256, (16, 16, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")


def test_image_folders_are_augmented_for_training_only(tmp_path):
    write_images(tmp_path)
    names = {"task": "image-folder", "data-dir": str(tmp_path), "model": "mlp"}
    for augment in (True, False):
        task = build_task(resolve({**names, "augment": augment}), 2)
        assert task.train_examples(0).augment is augment
        assert not task.test_examples(0).augment
        # Mean and standard deviation of ImageNet, scaled to 0 to 255
        np.testing.assert_allclose(task.mean / 255, [0.485, 0.456, 0.406], rtol=1e-6)


def test_clients_of_a_split_folder_keep_their_own_images(code_of, tmp_path):
    for client, classes in (("x", "ab"), ("y", "b"), ("z", "ab")):
        write_images(tmp_path, client, classes)
    names = {"task": "image-folder", "data-dir": str(tmp_path), "model": "mlp"}
    task = build_task(resolve(names), 3)
    assert [len(task.train_examples(i)) for i in range(3)] == [8, 4, 8]
    assert set(task.train_examples(1).targets.tolist()) == {1}
    assert np.array_equal(np.sort(np.concatenate(task.train)), np.arange(20))
    # Fewer clients than folders use the first folders.
    assert len(build_task(resolve(names), 2).train) == 2
    assert code_of(lambda: build_task(resolve(names), 4)) == "num-clients"


def test_client_folder_without_training_images_is_an_error(code_of, tmp_path):
    write_images(tmp_path, "x")
    (tmp_path / "y" / "train").mkdir(parents=True)
    names = {"task": "image-folder", "data-dir": str(tmp_path), "model": "mlp"}
    assert code_of(lambda: build_task(resolve(names), 2)) == "data-dir"


def test_the_same_settings_give_the_same_object():
    settings = resolve({"seed": 11})
    assert build_task(settings, 10) is build_task(dict(reversed(settings.items())), 10)
    assert build_task(settings, 10) is not build_task(settings, 5)
    # Settings that the task does not declare do not create another task.
    assert build_task({**settings, "momentum": 0.9}, 10) is build_task(settings, 10)
    assert build_task({**settings, "seed": 12}, 10) is not build_task(settings, 10)


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
def test_invalid_settings_are_an_error(code_of, overrides, code):
    assert code_of(lambda: digits(**overrides).initial_model()) == code


# Images and models


def write_grey(root: Path, size: int = 16, mode: str = "L") -> None:
    for part in ("train", "test"):
        for i, name in enumerate("ab"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for k in range(4):
                pixels = np.full((size, size), 30 * (4 * i + k), np.uint8)
                pixels[0, 0] = 250
                Image.fromarray(pixels).convert(mode).save(folder / f"{k}.png")


def folder_task(root: Path, **more):
    names = {name.replace("_", "-"): value for name, value in more.items()}
    settings = {"task": "image-folder", "data-dir": str(root), "classes-per-client": 1}
    return build_task(resolve({**settings, "head-layers": 1, **names}), 2)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_grey_images_are_augmented_only_on_request(tmp_path, mode):
    write_grey(tmp_path, mode=mode)
    task = folder_task(tmp_path, model="mlp")
    assert not task.train_examples(0).augment
    assert task.unused_settings["augment"] == (
        "grey images and handwriting need augment-all=true"
    )
    asked = folder_task(tmp_path, model="mlp", augment_all=True)
    assert asked.train_examples(0).augment
    assert "augment" not in asked.unused_settings
    never = folder_task(tmp_path, model="mlp", augment_all=True, augment=False)
    assert never.unused_settings["augment-all"] == "augment is false"
    assert not never.train_examples(0).augment


def test_grey_images_become_rgb_for_a_model_of_torchvision(tmp_path):
    write_grey(tmp_path)
    task = folder_task(tmp_path, model="resnet18")
    assert task.shape == (3, 16, 16)
    assert task.notes == ("grey images become RGB, as resnet18 takes no others",)
    ((inputs, _),) = task.test_examples(0).batches(10)
    grey = task.dataset.test.images[task.test[0], ..., 0] / 255
    means, deviations = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = [(grey - m) / d for m, d in zip(means, deviations, strict=True)]
    np.testing.assert_allclose(inputs, np.stack(expected, 1), rtol=1e-4, atol=1e-5)
    assert task.initial_model()(inputs).shape == (len(inputs), 2)
    assert folder_task(tmp_path, model="mlp").shape == (1, 16, 16)
    line = r"model 'resnet18' does not fit inputs of shape \(1, 16, 16\)"
    with pytest.raises(SettingsError, match=line):
        folder_task(tmp_path, model="resnet18", grey_to_rgb=False).initial_model()


@pytest.mark.parametrize(
    ("size", "model", "noted"),
    [(8, "digits-cnn", False), (16, "cifar10-cnn", False), (105, "cifar10-cnn", True)],
)
def test_the_default_model_fits_or_a_note_names_a_setting(tmp_path, size, model, noted):
    write_grey(tmp_path, size)
    task = folder_task(tmp_path)
    assert task.model_name == model
    assert task.initial_model()(torch.zeros(2, *task.shape)).shape == (2, 2)
    line = (
        "images of 105 x 105 are large for the default model cifar10-cnn, and rounds "
        "take long: set image-size=32"
    )
    assert task.notes == ((line,) if noted else ())


def test_images_of_a_large_client_are_read_batch_by_batch(tmp_path, monkeypatch):
    write_grey(tmp_path)
    mapped = folder_task(tmp_path, model="mlp", seed=1)
    usual = [mapped.train_examples(client) for client in (0, 1)]
    monkeypatch.setattr(tasks, "COPIED", 0)
    mapped = ImageTask("image-folder", mapped.settings, 2)
    for client, some in enumerate(usual):
        others = mapped.train_examples(client)
        assert some.rows is None
        assert len(some.inputs) == 4
        # The inputs are those of the whole file, with images of both clients.
        assert len(others.inputs) == 8
        assert others.rows.tolist() == mapped.train[client].tolist()
        for (x, y), (u, v) in zip(some.batches(3), others.batches(3), strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)


def test_weights_setting_loads_the_initial_model(tmp_path):
    first = digits(seed=21).initial_model()
    torch.save(first.state_dict(), tmp_path / "first.pth")
    again = digits(seed=22, weights=str(tmp_path / "first.pth"))
    for name, value in again.initial_state.items():
        assert torch.equal(value, first.state_dict()[name])


@pytest.mark.parametrize(("most", "expected"), [(tasks.CACHED, 60), (0, 16)])
def test_images_of_many_clients_are_cached_up_to_a_size(most, expected, monkeypatch):
    monkeypatch.setattr(tasks, "CACHED", most)
    task = digits(60, seed=expected)
    # In reverse order, because the most recent clients are cached.
    for client in [*range(60), *reversed(range(60))]:
        task.train_examples(client)
    assert task._training_set.cache_info().hits == expected


def test_a_few_grey_images_at_the_beginning_do_not_make_a_folder_grey(tmp_path):
    write_grey(tmp_path, mode="RGB")
    for name, value, count in ("c", (9, 9, 9), 200), ("z", (9, 0, 0), 100):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        pixels = np.full((16, 16, 3), value, np.uint8)
        for i in range(count):
            Image.fromarray(pixels).save(folder / f"{i}.png")
    assert folder_task(tmp_path, partition="iid").natural
