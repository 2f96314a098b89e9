"""Exported models: ONNX, torch.export, a file for `load`, and predictions as CSV."""

import csv
import json
import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec

import animals
import numpy as np
import pytest
import torch
from command_line import ROOT, one_error
from pictures import write_images
from PIL import Image
from refusals import assert_says, refusal, uninstall
from torch import nn

from flwr_frl.clients.device.card import ImageModel, ModelCard
from flwr_frl.predict import Predictor, export, load, load_model, load_run, predict
from flwr_frl.predict.__main__ import main
from flwr_frl.running import run
from flwr_frl.task.models import SplitModel, build_model
from flwr_frl.task.models.weights import load_weights

CLASSES = ("ant", "bee", "cat")


def classifier_of(name: str, size: int, channels: int):
    torch.manual_seed(0)
    shape = (channels, size, size)
    normal = (128.0,) * channels, (60.0,) * channels
    card = ModelCard(ImageModel(name, shape, CLASSES, *normal))
    model = build_model(name, shape, 3)
    # A forward pass in training mode updates the running statistics of batch norms.
    model.train()(torch.randn(4, *shape))
    return card.load(model.state_dict()), card


@pytest.fixture
def model(tmp_path):
    """The path of an exported model, and the model itself."""
    classifier, card = classifier_of("mlp", 8, 1)
    export(classifier, card, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", classifier


@pytest.fixture
def photos(tmp_path):
    """A folder of four photos, two of which do not have the model's size."""
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    write_images(folder, rng.integers(0, 256, (2, 8, 8), dtype=np.uint8))
    Image.fromarray(np.full((20, 30, 3), 60, np.uint8)).save(folder / "2, large.png")
    Image.fromarray(np.full((4, 4), 200, np.uint8)).save(folder / "3.png")
    (folder / "notes.txt").write_text("no image")
    return folder


# ONNX


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [("digits-cnn", 8, 3), ("cifar10-cnn", 16, 3), ("resnet20", 8, 1), ("mlp", 8, 1)],
)
def test_exported_models_give_the_same_logits(name, size, channels, tmp_path):
    classifier, card = classifier_of(name, size, channels)
    suffixes = ["pt2", "safetensors"]
    # ONNX is tested with ResNet-20 only, which has convolutions and batch norms.
    if name == "resnet20" and find_spec("onnxruntime"):
        suffixes.append("onnx")
    for suffix in suffixes:
        export(classifier, card, tmp_path / f"model.{suffix}")
    extra = {"card.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    assert ModelCard.from_metadata(json.loads(extra["card.json"])) == card
    again = load_model(tmp_path / "model.safetensors")
    assert again[1] == card
    for n in (1, 2, 9):
        pixels = torch.randint(0, 256, (n, size, size, channels), dtype=torch.uint8)
        with torch.no_grad():
            expected = classifier(pixels)
            assert torch.equal(again[0](pixels), expected)
            torch.testing.assert_close(program(pixels), expected, atol=1e-6, rtol=0)
            # The preprocessing of the training, by hand
            inputs = ((pixels.float() - 128) / 60).permute(0, 3, 1, 2)
            by_hand = classifier.model.eval()(inputs)
        torch.testing.assert_close(expected, by_hand, atol=1e-6, rtol=0)
        if "onnx" in suffixes:
            outputs = run_onnx(tmp_path / "model.onnx", pixels.numpy(), card)
            np.testing.assert_allclose(outputs, expected.numpy(), atol=1e-4)


def run_onnx(path, pixels, card):
    """Return the outputs of an ONNX file, and check that its metadata is the card."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert ModelCard.from_metadata(about) == card
    assert json.loads(about["classes"]) == list(CLASSES)
    (outputs,) = session.run(["outputs"], {"inputs": pixels})
    return outputs


TIED = """
import torch
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

def tied(num_clients):
    def build():
        model = SplitModel(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        model.head.weight = model.representation.weight
        return model
    sets = [ExampleSet(torch.ones(4, 3), torch.arange(4) % 3)]
    return ExampleTask(build, sets, sets)
"""


def test_a_model_with_tied_weights_is_exported(write_module, tmp_path):
    name = write_module("tied_weights", TIED) + ":tied"
    card = ModelCard.from_settings({"task": name}, 1)
    model = card.task.initial_model()
    export(model, card, tmp_path / "model.safetensors")
    again, _ = load_model(tmp_path / "model.safetensors", name)
    assert again.head.weight is again.representation.weight
    inputs = torch.arange(6.0).view(2, 3)
    assert torch.equal(again(inputs), model(inputs))


class Eigenvalues(nn.Module):
    """A module that ONNX has no operator for."""

    def forward(self, inputs):
        return torch.linalg.eigvals(inputs[:, 0]).real


def test_an_operator_missing_in_onnx_is_a_one_line_error(tmp_path):
    pytest.importorskip("onnxscript")
    classifier, card = classifier_of("mlp", 8, 1)
    classifier.model = SplitModel(Eigenvalues(), nn.Linear(8, 3))
    error = str(refusal(export, classifier, card, tmp_path / "model.onnx"))
    assert error.startswith("the model cannot be exported as .onnx")
    assert "linalg_eig" in error
    assert not (tmp_path / "model.onnx").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    uninstall(monkeypatch, "onnx", "onnxscript")
    call = (export, *classifier_of("mlp", 8, 1), tmp_path / "model.onnx")
    assert "pip install 'flwr-frl[onnx]'" in str(refusal(*call))


# Damaged files


def flipped(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def swapped(data: bytes, rng: random.Random) -> bytes:
    """Swap a part of the values with one at least 2 kB after it."""
    size = rng.choice([4, 256, 2048])
    first, second = sorted(rng.sample(range(2048, len(data) - size, 2048), 2))
    a, b = data[first : first + size], data[second : second + size]
    return b"".join(
        (data[:first], b, data[first + size : second], a, data[second + size :])
    )


@pytest.mark.parametrize("damage", [flipped, cut, swapped])
def test_every_damaged_model_is_refused(tmp_path, damage):
    path, rng = tmp_path / "model.safetensors", random.Random(0)
    classifier, card = classifier_of("mlp", 8, 1)
    export(classifier, card, path)
    data = path.read_bytes()
    for _ in range(100):
        path.write_bytes(damage(data, rng))
        refusal(load_model, path)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    # Its arrays are not used as initial weights, either.
    error = refusal(load_weights, classifier.model, str(path), "mlp")
    assert "cannot be read: its checksum is wrong" in str(error)


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_program_has_a_checksum_beside_it(tmp_path, monkeypatch, suffix):
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    path = tmp_path / f"model.{suffix}"
    export(*classifier_of("logistic", 8, 1), path)
    monkeypatch.chdir(tmp_path)
    check = ["sha256sum", "--check", "--status", f"model.{suffix}.sha256"]
    assert subprocess.run(check, check=False).returncode == 0
    path.write_bytes(flipped(path.read_bytes(), random.Random(0)))
    assert subprocess.run(check, check=False).returncode == 1


# Predictions from Python


def test_a_loaded_model_classifies_files_and_pixels(model, photos):
    path, by_hand = model
    classifier = load(path)
    assert classifier.classes == CLASSES
    classes, probabilities = classifier(photos)
    small = np.stack([np.asarray(Image.open(photos / f"{i}.png")) for i in (0, 1)])
    with torch.no_grad():
        expected = by_hand(torch.from_numpy(small)[..., None]).softmax(1).numpy()
    assert probabilities.shape == (4, 3)
    np.testing.assert_allclose(probabilities[:2], expected, atol=1e-6)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-6)
    assert classes == [CLASSES[i] for i in probabilities.argmax(1)]
    # A single file, a list of files, and pixels
    one = classifier(str(photos / "1.png"))
    np.testing.assert_allclose(one.probabilities, expected[1:], atol=1e-6)
    two = classifier([photos / "1.png", photos / "0.png"])
    np.testing.assert_allclose(two.probabilities, expected[::-1], atol=1e-6)
    pixels = classifier(small[..., None])
    np.testing.assert_allclose(pixels.probabilities, expected, atol=1e-6)


def test_more_images_than_one_batch_are_classified(model):
    path, by_hand = model
    pixels = np.random.default_rng(0).integers(0, 256, (150, 8, 8, 1), dtype=np.uint8)
    with torch.no_grad():
        expected = by_hand(torch.from_numpy(pixels)).softmax(1).numpy()
    predictions = load(path)(pixels)
    np.testing.assert_allclose(predictions.probabilities, expected, atol=1e-6)
    assert len(predictions.classes) == 150
    nothing = load(path)(pixels[:0])
    assert (nothing.classes, nothing.probabilities.shape) == ([], (0, 3))


@pytest.mark.parametrize(
    ("images", "line"),
    [
        (np.zeros((2, 8, 8, 1)), "images are float64 of shape (2, 8, 8, 1); they must"),
        (np.zeros((8, 8, 1), np.uint8), "they must be uint8 of shape (n, 8, 8, 1)"),
        (np.zeros((1, 9, 8, 1), np.uint8), "images are uint8 of shape (1, 9, 8, 1)"),
        ("nowhere.png", "there is no file or folder 'nowhere.png'"),
    ],
)
def test_unsuitable_images_are_a_one_line_error(model, images, line):
    assert_says(line, load(model[0]), images)


# Predictions as CSV


def test_images_with_outputs_that_are_not_finite_are_a_one_line_error(photos):
    classifier, card = classifier_of("logistic", 8, 1)
    with torch.no_grad():
        # White pixels overflow; grey ones, the mean of the normalisation, do not.
        classifier.model.head.weight.fill_(3e38)
    pixels = np.full((2, 8, 8, 1), 128, np.uint8)
    pixels[1] = 255
    white = photos / "white.png"
    Image.fromarray(pixels[1, :, :, 0]).save(white)
    line = "cannot be predicted from: the model's output is not finite"
    assert_says(f"image 1 {line}", Predictor(classifier, card), pixels)
    assert_says(f"white.png {line}", lambda: list(predict(classifier, card, [white])))


def test_a_folder_of_photos_gives_a_csv(model, photos, tmp_path, capsys):
    table = tmp_path / "out" / "classes.csv"
    command = [str(photos), "--model", str(model[0])]
    assert main([*command, "--csv", str(table)]) == 0
    assert capsys.readouterr().out == ""
    with table.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["input", "class", "probability"]
    names = ["0.png", "1.png", "2, large.png", "3.png"]
    assert [row[0] for row in rows] == [str(photos / name) for name in names]
    predictions = load(model[0])(photos)
    assert [row[1] for row in rows] == predictions.classes
    best = predictions.probabilities.max(1)
    assert [float(row[2]) for row in rows] == pytest.approx(best, abs=5e-5)
    # The CSV path has a file where a folder is needed.
    assert main([*command, "--csv", str(photos / "0.png" / "classes.csv")]) == 2
    assert "error: csv " in one_error(capsys.readouterr().err)


def test_the_example_in_the_deployment_guide(model, photos, monkeypatch):
    guide = ROOT / "deploy" / "README.md"
    lines = guide.read_text().partition("<!-- predict -->\n```python\n")[2]
    monkeypatch.chdir(photos.parent)
    namespace: dict = {}
    exec(lines.partition("```")[0], namespace)
    assert len(namespace["classes"]) == 4
    assert namespace["probabilities"].shape == (4, 3)


@pytest.mark.e2e
def test_an_exported_model_predicts_without_the_run(devices, folders, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    run = ["--checkpoint", str(devices / "results" / "fedrep"), "--client-name", "bob"]
    run += ["--state-dir", str(devices / "bob")]
    images = str(folders / "bob" / "test" / "cat")
    assert main([images, *run, "--export", str(path)]) == 0
    first = capsys.readouterr().out
    assert main([images, "--model", str(path)]) == 0
    assert capsys.readouterr().out == first
    lines = [line.split("\t") for line in first.splitlines()]
    assert [line[0] for line in lines] == [f"{images}/{i}.png" for i in range(5)]
    assert {line[1] for line in lines} <= set(animals.CLASSES["bob"])
    assert all(1 / 3 <= float(line[2]) <= 1 for line in lines)
    # Outputs are bitwise equal, and a process without the run prints the same lines.
    pixels = torch.randint(0, 256, (7, 8, 8, 3), dtype=torch.uint8)
    one, other = animals.of_device(devices, "bob"), load_model(path)
    assert one[1] == other[1]
    assert torch.equal(one[0](pixels), other[0](pixels))
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(path, alone)
    shutil.copytree(images, alone / "cat")
    command = [sys.executable, "-m", "flwr_frl.predict", "cat", "--model", path.name]
    where = {"cwd": alone, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    printed = subprocess.check_output(command, **where, text=True)
    assert printed == first.replace(images, "cat")


def test_a_model_with_additional_parts_is_exported_only_as_a_program(folders, tmp_path):
    settings = animals.settings_of(tmp_path, algorithm="fedcp", data_dir=str(folders))
    run("fedcp", settings, "inline")
    loaded = load_run(tmp_path / "results" / "fedcp", "000000")
    line = "it must end with .pt2, as this algorit"
    assert_says(line, export, *loaded, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    export(*loaded, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    images = loaded[1].images.read_pixels(
        sorted((folders / sorted(animals.CLASSES)[0]).glob("test/*/*"))
    )
    torch.testing.assert_close(program(images), loaded[0](images))
