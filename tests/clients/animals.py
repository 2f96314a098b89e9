"""Images of animals for two devices, and a run of FedRep on them."""

import json
from pathlib import Path

import numpy as np
import pictures
from named_tasks import dashed

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve
from flwr_frl.predict import Predictor, load_run
from flwr_frl.strategies import server_app
from flwr_frl.strategies.grids.simulation import InlineGrid

CLASSES = {"anna": ("ant", "bee"), "bob": ("bee", "cat", "dog")}
BRIGHTNESS = {"ant": 30, "bee": 90, "cat": 150, "dog": 220}


def write_images(root: Path, classes: tuple[str, ...], seed: int) -> None:
    """Write noisy images whose brightness depends on the class; classes overlap."""
    rng = np.random.default_rng(seed)
    for part, count in (("train", 8), ("test", 5)):
        for name in classes:
            pixels = rng.normal(BRIGHTNESS[name], 40, (count, 8, 8, 3)).clip(0, 255)
            pictures.write_images(root / part / name, pixels.astype(np.uint8))


def settings_of(tmp_path: Path, **more):
    usual = {"task": "image-folder", "model": "digits-cnn", "num-clients": 2}
    usual |= {"cache-dir": str(tmp_path / "cache"), "output": str(tmp_path / "results")}
    usual |= {"fraction-train": 1.0, "num-server-rounds": 3, "checkpoint-every": 2}
    usual |= {"head-epochs": 2, "learning-rate": 0.03}
    return resolve({**usual, **dashed(more)})


def train_on(places: dict[str, Path], settings, states: Path) -> Path:
    """Train on devices with their folders of data; return the folder of the run."""
    grid = InlineGrid(make_app(settings), len(places))
    for context, (name, place) in zip(
        grid.contexts.values(), places.items(), strict=True
    ):
        context.node_config = {
            "client-name": name,
            "data-dir": str(place),
            "state-dir": str(states / name),
        }
    server_app.serve(grid, settings)
    return Path(settings["output"]) / settings["algorithm"]


def accuracy(predictor: Predictor, root: Path) -> float:
    """Return the accuracy on a folder's test images; subfolders name the classes."""
    images = sorted((root / "test").glob("*/*.png"))
    pairs = zip(predictor(images).classes, images, strict=True)
    return float(np.mean([name == path.parent.name for name, path in pairs]))


def reported(output: Path) -> dict[str, float]:
    clients = json.loads((output / "clients.json").read_text())
    return {name: about["accuracy"] for name, about in clients.items()}


def of_device(root: Path, name: str) -> Predictor:
    return load_run(root / "results" / "fedrep", name, str(root / name))
