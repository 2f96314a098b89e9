"""A model that leaves its device: the same logits, and nothing else needed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from animals import (
    CLASSES,
    of_device,
    settings_of,
)

from flwr_frl.clients.device.card import ImageModel, ModelCard
from flwr_frl.clients.predict import export, load_model, load_run
from flwr_frl.clients.predict.__main__ import main
from flwr_frl.running import run
from flwr_frl.task.models import build_model
from flwr_frl.task.settings import SettingsError


@pytest.mark.e2e
def test_an_exported_model_needs_nothing_else(devices, folders, tmp_path, capsys):
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
    assert {line[1] for line in lines} <= set(CLASSES["bob"])
    assert all(1 / 3 <= float(line[2]) <= 1 for line in lines)
    # Bit by bit, and in a process that never saw the run.
    pixels = torch.randint(0, 256, (7, 8, 8, 3), dtype=torch.uint8)
    one, other = of_device(devices, "bob"), load_model(path)
    assert one[1] == other[1]
    assert torch.equal(one[0](pixels), other[0](pixels))
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(path, alone)
    shutil.copytree(images, alone / "cat")
    result = subprocess.run(
        [sys.executable, "-m", "flwr_frl.clients.predict", "cat", "--model", path.name],
        cwd=alone,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert result.stdout == first.replace(images, "cat")


MODELS = [("digits-cnn", 8, 3), ("cifar10-cnn", 16, 3), ("resnet20", 8, 1)]


@pytest.mark.parametrize(("name", "size", "channels"), [*MODELS, ("mlp", 8, 1)])
def test_torch_export_gives_the_same_logits(name, size, channels, tmp_path):
    torch.manual_seed(0)
    shape = (channels, size, size)
    normal = (128.0,) * channels, (60.0,) * channels
    card = ModelCard(ImageModel(name, shape, ("a", "b", "c"), *normal))
    model = build_model(name, shape, 3)
    # As after training, statistics of batch norms included.
    model.train()(torch.randn(4, *shape))
    classifier = card.load(model.state_dict())
    for suffix in ("pt2", "safetensors"):
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
            # By hand, as in training.
            inputs = ((pixels.float() - 128) / 60).permute(0, 3, 1, 2)
            by_hand = model.eval()(inputs)
        torch.testing.assert_close(expected, by_hand, atol=1e-6, rtol=0)


def test_a_model_of_more_parts_is_exported_as_a_program_alone(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="fedcp", data_dir=str(folders))
    run("fedcp", settings, "inline")
    loaded = load_run(tmp_path / "results" / "fedcp", "000000")
    with pytest.raises(SettingsError, match=r"it must end with .pt2, as this algorit"):
        export(*loaded, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    export(*loaded, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    images = loaded[1].images.read_pixels(
        sorted((folders / sorted(CLASSES)[0]).glob("test/*/*"))
    )
    torch.testing.assert_close(program(images), loaded[0](images))
