"""Predictions for images from the files of a run."""

import json
import os
import shutil

import numpy as np
import pictures
import pytest
import torch
from animals import CLASSES, accuracy, of_device, reported, settings_of, write_images
from PIL import Image
from refusals import assert_says
from safetensors.numpy import load_file
from small_models import same_bits

from flwr_frl.clients.client_app import make_app
from flwr_frl.predict import Predictor, export, load_model, load_run, predict
from flwr_frl.predict.__main__ import main
from flwr_frl.predict.predictor import files_in
from flwr_frl.running import run
from flwr_frl.strategies import server_app
from flwr_frl.strategies.grids.simulation import InlineGrid

# Predictions equal the evaluations of the run


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
        loaded = load_run(output, client, data_dir=str(folders))
        assert loaded[1].classes == ("ant", "bee", "cat", "dog")
        assert accuracy(loaded, folders / folder) == pytest.approx(expected[client])
    if algorithm in ("fedavg", "scaffold"):
        # A global model needs no name of a client.
        unnamed, _ = load_run(output, data_dir=str(folders))
        assert same_bits(unnamed.state_dict(), loaded[0].state_dict())
    # Accuracies are neither perfect nor at chance, so the comparison is meaningful.
    assert 0.2 < np.mean(list(expected.values())) < 1


def test_errors_name_clients_by_their_folders(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="fedper", data_dir=str(folders))
    run("fedper", settings, "inline")
    output = tmp_path / "results" / "fedper"
    assert_says("unknown client 'zoe'; known: anna, bob", load_run, output, "zoe")
    for path in (output / "clients").rglob("*-*.safetensors"):
        path.rename(path.with_stem(path.stem.rpartition("-")[0] + "-00000099"))
    assert_says("has only states of round 99 and", load_run, output, "anna")
    shutil.rmtree(output / "clients")
    assert_says("client 'anna' has nothing of this run", load_run, output, "anna")


def test_folders_may_be_named_as_other_clients(tmp_path):
    root, kinds = tmp_path / "images", (("ant",), ("bee", "cat"), ("bee", "cat", "dog"))
    for number, classes in enumerate(kinds, 1):
        write_images(root / f"00000{number}", classes, number)
    more = {"algorithm": "fedrep", "data_dir": str(root), "num_clients": 3}
    run("fedrep", settings_of(tmp_path, **more), "inline")
    output = tmp_path / "results" / "fedrep"
    clients = json.loads((output / "clients.json").read_text())
    counts = {name: about["num-examples"] for name, about in clients.items()}
    assert counts == {"000001": 8, "000002": 16, "000003": 24}
    for name, about in clients.items():
        right = accuracy(load_run(output, name, data_dir=str(root)), root / name)
        assert right == pytest.approx(about["accuracy"])


def test_devices_have_their_own_classes(devices, folders):
    output = devices / "results" / "fedrep"
    expected = reported(output)
    for name, classes in CLASSES.items():
        classifier, card = of_device(devices, name)
        assert card.classes == classes
        assert classifier.model.head.out_features == len(classes)
        measured = accuracy((classifier, card), folders / name)
        assert measured == pytest.approx(expected[name])
    assert 0.5 < np.mean(list(expected.values())) <= 1
    # Only the heads differ.
    one, other = (of_device(devices, name)[0].model for name in CLASSES)
    shared = load_file(output / "checkpoint.safetensors")
    for name, value in one.representation.state_dict().items():
        assert torch.equal(value, other.representation.state_dict()[name])
        sent = shared[f"arrays/representation.{name}"]
        np.testing.assert_array_equal(value.numpy(), sent)


def test_a_flute_device_takes_its_classes_from_its_data(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="flute")
    grid = InlineGrid(make_app(settings), 2)
    for node, name in ((1, "x"), (2, "y")):
        grid.contexts[node].node_config = {
            "client-name": name,
            "data-dir": str(folders / "bob"),
        }
    server_app.run(grid, settings)
    output = tmp_path / "results" / "flute"
    expected = reported(output)
    for name in ("x", "y"):
        loaded = load_run(output, name, data_dir=str(folders / "bob"))
        assert loaded[1].classes == CLASSES["bob"]
        assert accuracy(loaded, folders / "bob") == pytest.approx(expected[name])


def test_devices_of_the_arrays_task_predict_as_evaluated(tmp_path):
    settings = settings_of(tmp_path, algorithm="fedrep", task="arrays")
    grid = InlineGrid(make_app(settings), 2)
    rng = np.random.default_rng(1)
    for node, count in ((1, 2), (2, 3)):
        root = tmp_path / f"data-{node}"
        root.mkdir()
        for part in ("train", "test"):
            labels = np.arange(12) % count
            images = rng.normal(60 + 90 * labels[:, None, None], 20, (12, 8, 8))
            pixels = images.clip(0, 255).astype(np.uint8)
            np.savez(root / f"{part}.npz", images=pixels, labels=labels)
        grid.contexts[node].node_config = {
            "client-name": f"pi-{node}",
            "data-dir": str(root),
            "state-dir": str(tmp_path / "state"),
        }
    server_app.run(grid, settings)
    for node, count in ((1, 2), (2, 3)):
        output = tmp_path / "results" / "fedrep"
        classifier, card = load_run(output, f"pi-{node}", str(tmp_path / "state"))
        assert card.classes == tuple("012")[:count]
        assert card.images.shape == (1, 8, 8)
        with np.load(tmp_path / f"data-{node}" / "test.npz") as test:
            pixels = torch.from_numpy(test["images"])[..., None]
            right = classifier(pixels).argmax(1).numpy() == test["labels"]
        expected = reported(output)[f"pi-{node}"]
        assert right.mean() == pytest.approx(expected)
        # A colour photo is converted to greyscale, as this model requires.
        photo = Image.fromarray(pixels[0, ..., 0].numpy()).convert("RGB")
        photo.save(tmp_path / "photo.png")
        (name,), _ = Predictor(classifier, card)(tmp_path / "photo.png")
        assert name == card.classes[int(classifier(pixels[:1]).argmax())]


def test_devices_whose_data_do_not_fit_are_refused_in_one_line(
    folders, tmp_path, caplog
):
    settings = settings_of(tmp_path, algorithm="fedrep")
    grid = InlineGrid(make_app(settings), 5)
    places = {"anna": folders / "anna", "bob": folders / "bob"}
    for name, pixels in (
        ("grey", np.zeros((8, 8), np.uint8)),
        ("large", np.zeros((16, 16, 3), np.uint8)),
    ):
        places[name] = tmp_path / name
        for part in ("train", "test"):
            pictures.write_images(places[name] / part / "ant", [pixels])
    places["nobody"] = tmp_path / "nobody"
    for context, (name, place) in zip(
        grid.contexts.values(), places.items(), strict=True
    ):
        context.node_config = {"client-name": name, "data-dir": str(place)}
    server_app.run(grid, settings)
    output = tmp_path / "results" / "fedrep"
    rows = [json.loads(r) for r in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [2, 2, 2]
    lines = [r.getMessage() for r in caplog.records if "takes no part" in r.message]
    refusals = {n: {line for line in lines if f"client {n} " in line} for n in places}
    assert not refusals["anna"] | refusals["bob"]
    for name, words in (
        ("grey", "its inputs are 1 x 8 x 8"),
        ("large", "its inputs are 3 x 16 x 16"),
        ("nobody", "expected a directory with train/<class>/*"),
    ):
        (line,) = refusals[name]
        assert words in line
        assert "\n" not in line
        # The server warns once, the node logs an error at every query.
        levels = [r.levelname for r in caplog.records if r.getMessage() == line]
        assert levels.count("WARNING") == 1
        assert levels.count("ERROR") >= 1


# Versions of the personal state


def test_prediction_ignores_unacknowledged_versions_and_changes_no_file(
    devices, tmp_path
):
    shutil.copytree(devices, tmp_path / "copy")
    root = tmp_path / "copy"
    (last,) = (root / "anna" / "animals" / "anna").glob("*-00000003.safetensors")
    later = last.with_name(last.name.replace("3.safe", "4.safe"))
    later.write_bytes(b"half a file")
    inherited = last.with_name("older-00000009.safetensors")
    inherited.write_bytes(b"of a run before")
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    classifier, _ = of_device(root, "anna")
    expected = load_file(last)["head.weight"]
    np.testing.assert_array_equal(classifier.model.head.weight.detach(), expected)
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_prediction_uses_the_newest_head_of_earlier_runs(devices, tmp_path):
    shutil.copytree(devices, tmp_path / "copy")
    root = tmp_path / "copy"
    states = root / "anna" / "animals" / "anna"
    # The rounds of an earlier run are unrelated to those of this run.
    for path in list(states.iterdir()):
        path.rename(path.with_name("earlier-9" + path.name[14:]))
    newest, *others = sorted(states.iterdir(), reverse=True)
    assert others
    # The device lost its clock before the last round.
    os.utime(newest, (0, 0))
    classifier, _ = of_device(root, "anna")
    expected = load_file(newest)["head.weight"]
    np.testing.assert_array_equal(classifier.model.head.weight.detach(), expected)


def test_a_closed_pipe_ends_the_command_without_error(devices, folders, nobody_reads):
    run = ["--checkpoint", str(devices / "results" / "fedrep"), "--client-name", "bob"]
    run += ["--state-dir", str(devices / "bob")]
    with nobody_reads():
        assert main([str(folders / "bob" / "test" / "cat"), *run]) == 0


def test_a_folder_of_class_folders_expands_to_their_images(folders):
    root = folders / "bob" / "test"
    files = files_in([root, root / "cat"])
    assert files == sorted(root.glob("*/*.png")) + sorted((root / "cat").glob("*.png"))


def test_images_of_another_size_and_colour_are_converted(devices, tmp_path):
    pixels = np.full((20, 30), 90, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    Image.fromarray(np.full((8, 8, 3), 90, np.uint8)).save(tmp_path / "usual.png")
    predictor = Predictor(*of_device(devices, "anna"))
    _, (one, other) = predictor([tmp_path / "grey.png", tmp_path / "usual.png"])
    np.testing.assert_array_equal(one, other)


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
    Image.fromarray(pixels).save(tmp_path / "red.png")
    Image.fromarray(pixels).convert("L").save(tmp_path / "grey.png")
    loaded = load_run(tmp_path / "results" / "fedavg", data_dir=str(root))
    export(*loaded, tmp_path / "model.safetensors")
    for model, card in (loaded, load_model(tmp_path / "model.safetensors")):
        photos = [tmp_path / "red.png", tmp_path / "grey.png"]
        _, (one, other) = Predictor(model, card)(photos)
        np.testing.assert_array_equal(one, other)


def test_images_with_a_custom_model(tmp_path, folders):
    settings = settings_of(
        tmp_path, algorithm="fedrep", task="flat_images:Flat", data_dir=str(folders)
    )
    run("fedrep", settings, "inline")
    place = tmp_path / "results" / "fedrep"
    exported = tmp_path / "own.safetensors"
    expected = reported(place)
    for name in CLASSES:
        options = {"task": "flat_images:Flat", "data_dir": str(folders)}
        loaded = load_run(place, name, **options)
        export(*loaded, exported)
        for model, card in (loaded, load_model(exported, **options)):
            images = sorted((folders / name / "test").glob("*/*.png"))
            rows = list(predict(model, card, images))
            pairs = zip(rows, images, strict=True)
            right = [row[1] == path.parent.name for row, path in pairs]
            assert np.mean(right) == pytest.approx(expected[name])

    # A saved head can only be used with the classes that it was trained for.
    copy = tmp_path / "copy"
    shutil.copytree(folders, copy)
    for part in ("train", "test"):
        (copy / "anna" / part / "bee").rename(copy / "anna" / part / "cow")
    named = {"data_dir": str(copy), "task": "flat_images:Flat"}
    assert_says("one with the classes ", load_run, place, "anna", **named)
