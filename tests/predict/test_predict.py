"""Predictions for images from the files of a run."""

import shutil

import numpy as np
import pytest
from animals import CLASSES, accuracy, of_device, reported, settings_of, write_images
from PIL import Image
from refusals import assert_says, code_of
from safetensors.numpy import load_file
from small_models import same_bits

from flwr_frl.predict import load_model, load_run
from flwr_frl.running import run

ALGORITHMS = ("fedrep", "flute", "fedavg", "lg-fedavg", "local", "srpfl-flute")
# With parameter groups in addition to the model
GROUPS = ("scaffold", "ditto", "apfl")
# With messages of several models
SEVERAL = ("fedfomo", "fedproto", "fedala", "feddbe", "l2gd", "fedrod", "fedcp")


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *GROUPS, *SEVERAL])
def test_predictions_equal_the_last_evaluation(algorithm, folders, tmp_path):
    names = {"algorithm": algorithm, "data_dir": str(folders), "speed_model": "fixed"}
    run(algorithm, settings_of(tmp_path, **names), "inline")
    output = tmp_path / "results" / algorithm
    expected = reported(output)
    # Clients are named after their folders, both in the results and in `load_run`.
    assert list(expected) == sorted(CLASSES)
    for client, folder in zip(expected, sorted(CLASSES), strict=True):
        predictor = load_run(output, client, data_dir=folders)
        assert predictor.classes == ("ant", "bee", "cat", "dog")
        assert accuracy(predictor, folders / folder) == pytest.approx(expected[client])
    if algorithm in ("fedavg", "scaffold"):
        # A global model needs no name of a client.
        unnamed = load_run(output, data_dir=folders).model
        assert same_bits(unnamed.state_dict(), predictor.model.state_dict())
    # Accuracies are neither perfect nor at chance, so the comparison is meaningful.
    assert 0.2 < np.mean(list(expected.values())) < 1


def test_devices_have_their_own_classes(devices, folders):
    output = devices / "results" / "fedrep"
    expected = reported(output)
    shared = load_file(output / "checkpoint.safetensors")
    for name, classes in CLASSES.items():
        predictor = of_device(devices, name)
        assert predictor.classes == classes
        assert predictor.model.head.out_features == len(classes)
        measured = accuracy(predictor, folders / name)
        assert measured == pytest.approx(expected[name])
        # Only the heads differ.
        for part, value in predictor.model.representation.state_dict().items():
            sent = shared[f"arrays/representation.{part}"]
            np.testing.assert_array_equal(value.numpy(), sent)
    assert 0.5 < np.mean(list(expected.values())) <= 1


def test_prediction_ignores_unacknowledged_versions_and_changes_no_file(
    devices, tmp_path
):
    root = shutil.copytree(devices, tmp_path / "copy")
    (last,) = (root / "anna" / "animals" / "anna").glob("*-00000003.safetensors")
    later = last.with_name(last.name.replace("3.safe", "4.safe"))
    later.write_bytes(b"half a file")
    inherited = last.with_name("00000009-00000000-older-00000009.safetensors")
    inherited.write_bytes(b"of a run before")
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    model = of_device(root, "anna").model
    expected = load_file(last)["head.weight"]
    np.testing.assert_array_equal(model.head.weight.detach(), expected)
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_prediction_uses_the_newest_head_of_earlier_runs(devices, tmp_path):
    root = shutil.copytree(devices, tmp_path / "copy")
    states = root / "anna" / "animals" / "anna"
    # The rounds of an earlier run are unrelated to those of this run.
    for path in list(states.iterdir()):
        path.rename(path.with_name(f"{path.name[:18]}earlier-9{path.name[-19:]}"))
    newest, *others = sorted(states.iterdir(), reverse=True)
    assert others
    model = of_device(root, "anna").model
    expected = load_file(newest)["head.weight"]
    np.testing.assert_array_equal(model.head.weight.detach(), expected)


def test_colours_are_removed_if_the_training_images_are_grey(tmp_path):
    root = tmp_path / "grey"
    for name in CLASSES:
        write_images(root / name, ("ant", "dog"), 1)
    for path in root.rglob("*.png"):
        Image.open(path).convert("L").save(path)
    more = {"model": "resnet18", "num_server_rounds": 1, "head_epochs": 0}
    more |= {"representation_epochs": 1, "data_dir": str(root), "algorithm": "fedavg"}
    run("fedavg", settings_of(tmp_path, **more), "inline")
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[..., 0] = 200
    photos = [tmp_path / "red.png", tmp_path / "grey.png"]
    Image.fromarray(pixels).save(photos[0])
    Image.fromarray(pixels).convert("L").save(photos[1])
    predictor = load_run(tmp_path / "results" / "fedavg", data_dir=root)
    predictor.export(tmp_path / "model.safetensors")
    for each in (predictor, load_model(tmp_path / "model.safetensors")):
        _, (one, other) = each(photos)
        np.testing.assert_array_equal(one, other)


def test_images_with_a_custom_model(tmp_path, folders):
    named = {"task": "flat_images:Flat", "data_dir": str(folders)}
    run("fedrep", settings_of(tmp_path, algorithm="fedrep", **named), "inline")
    place = tmp_path / "results" / "fedrep"
    for name, expected in reported(place).items():
        predictor = load_run(place, name, **named)
        assert accuracy(predictor, folders / name) == pytest.approx(expected)
        assert code_of(predictor.export, tmp_path / "own.safetensors") == "export"
    # A saved head can only be used with the classes that it was trained for.
    copy = shutil.copytree(folders, tmp_path / "copy")
    for part in ("train", "test"):
        (copy / "anna" / part / "bee").rename(copy / "anna" / part / "cow")
    named["data_dir"] = str(copy)
    assert_says("one with the classes ", load_run, place, "anna", **named)
