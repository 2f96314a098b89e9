"""Exported models, and predictions with a loaded one."""

import random

import animals
import numpy as np
import pytest
import torch
from command_line import ROOT
from pictures import write_images
from PIL import Image
from refusals import assert_says, code_of

from flwr_frl.clients.device.card import ImageCard
from flwr_frl.predict import Predictor, load_model, load_run
from flwr_frl.running import run
from flwr_frl.task.models.weights import load_weights

CLASSES = ("ant", "bee", "cat")


def predictor_of(name: str, size: int, channels: int) -> Predictor:
    torch.manual_seed(0)
    shape = (size, size, channels)
    built = {"model": name, "head_layers": 1, "classes": CLASSES}
    task = ImageCard(source="mnist", shape=shape, **built).task()
    model = task.initial_model()
    # A forward pass in training mode updates the running statistics of batch norms.
    model.train()(torch.randn(4, channels, size, size))
    return Predictor(model, task)


@pytest.fixture
def model(tmp_path):
    """The path of an exported model, and the model itself."""
    predictor = predictor_of("mlp", 8, 1)
    predictor.export(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", predictor


@pytest.fixture
def photos(tmp_path):
    """A folder of four photos, two of which do not have the model's size."""
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    write_images(folder, rng.integers(0, 256, (2, 8, 8), dtype=np.uint8))
    Image.fromarray(np.full((20, 30, 3), 60, np.uint8)).save(folder / "2, large.png")
    (folder / "more").mkdir()
    Image.fromarray(np.full((4, 4), 200, np.uint8)).save(folder / "more" / "3.png")
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [("digits-cnn", 8, 3), ("cifar10-cnn", 16, 3), ("resnet20", 8, 1), ("mlp", 8, 1)],
)
def test_an_exported_model_gives_the_same_outputs(name, size, channels, tmp_path):
    predictor = predictor_of(name, size, channels)
    predictor.export(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors")
    pixels = torch.randint(0, 256, (9, size, size, channels), dtype=torch.uint8)
    classes, probabilities = predictor(pixels)
    assert again(pixels).classes == classes
    assert np.array_equal(again(pixels).outputs, probabilities)
    # The preprocessing of the training, by hand
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    if channels == 1:
        mean, std = (0.1307,), (0.3081,)
    inputs = (pixels / 255 - torch.tensor(mean)) / torch.tensor(std)
    with torch.no_grad():
        by_hand = predictor.model(inputs.permute(0, 3, 1, 2)).softmax(1)
    np.testing.assert_allclose(probabilities, by_hand, atol=1e-5)


def test_every_damaged_model_is_refused(model):
    (path, predictor), rng = model, random.Random(0)
    data = path.read_bytes()
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged[: rng.choice([len(data), rng.randrange(len(data))])])
        assert code_of(load_model, path) == "model"
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    # Its arrays are not used as initial weights, either.
    line = "its checksum is wrong"
    assert_says(line, load_weights, predictor.model, str(path), "mlp")


def test_a_loaded_model_classifies_files_and_pixels(model, photos):
    path, predictor = model
    predict = load_model(path)
    assert predict.classes == CLASSES
    classes, probabilities = predict(photos)
    assert probabilities.shape == (4, 3)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-6)
    assert classes == [CLASSES[i] for i in probabilities.argmax(1)]
    # A single file, a list of files, and pixels
    expected = predictor(photos).outputs
    one = predict(str(photos / "1.png"))
    np.testing.assert_allclose(one.outputs, expected[1:2], atol=1e-6)
    two = predict([photos / "1.png", photos / "0.png"])
    np.testing.assert_allclose(two.outputs, expected[1::-1], atol=1e-6)
    small = np.stack([np.asarray(Image.open(photos / f"{i}.png")) for i in (0, 1)])
    pixels = predict(np.tile(small[..., None], (75, 1, 1, 1)))
    np.testing.assert_allclose(pixels.outputs[-2:], expected[:2], atol=1e-6)
    assert len(pixels.classes) == 150


def test_unsuitable_images_are_a_one_line_error(model):
    predictor, pixels = model[1], np.full((2, 8, 8, 1), 128, np.uint8)
    more = pixels / 255, pixels[0], pixels[:, 1:], pixels[:0], []
    for images in more:
        assert code_of(predictor, images) == "inputs"
    assert code_of(predictor, "nowhere.png") == "file"
    # The outputs for the second image overflow.
    predictor.task.mean, predictor.task.std = torch.tensor(128.0), torch.tensor(1e-38)
    pixels[1] = 255
    line = "input 1 cannot be predicted from: the model's output is not finite"
    assert_says(line, predictor, pixels)


def snippet(name: str) -> str:
    """Return the code of the deployment guide after a comment."""
    guide = (ROOT / "deploy" / "README.md").read_text()
    return guide.partition(f"<!-- {name} -->\n```python\n")[2].partition("```")[0]


def test_the_examples_in_the_deployment_guide(model, photos, monkeypatch):
    monkeypatch.chdir(photos.parent)
    namespace: dict = {}
    exec(snippet("predict"), namespace)
    assert len(namespace["classes"]) == 4
    assert namespace["probabilities"].shape == (4, 3)
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    exec(snippet("onnx"), namespace)
    session = onnxruntime.InferenceSession("model.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    (outputs,) = session.run(None, {"pixels": pixels})
    probabilities = torch.from_numpy(outputs).softmax(1)
    np.testing.assert_allclose(probabilities, model[1](pixels).outputs, atol=1e-4)


def test_a_model_with_additional_parts_is_not_exported(folders, tmp_path):
    settings = animals.settings_of(tmp_path, algorithm="fedcp", data_dir=str(folders))
    run("fedcp", settings, "inline")
    predictor = load_run(tmp_path / "results" / "fedcp", "000000")
    assert code_of(predictor.export, tmp_path / "model.safetensors") == "export"
    assert not (tmp_path / "model.safetensors").exists()
