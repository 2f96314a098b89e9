"""Images of animals for two devices, and a run of FedRep on them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from flwr_frl.common.settings import resolve
from flwr_frl.predict import Predictor, load_run

CLASSES = {"anna": ("ant", "bee"), "bob": ("bee", "cat", "dog")}
BRIGHTNESS = {"ant": 30, "bee": 90, "cat": 150, "dog": 220}


def write_images(root: Path, classes: tuple[str, ...], seed: int) -> None:
    """Write noisy images whose brightness depends on the class; classes overlap."""
    rng = np.random.default_rng(seed)
    for part, count in (("train", 8), ("test", 5)):
        for name in classes:
            for i in range(count):
                pixels = rng.normal(BRIGHTNESS[name], 40, (8, 8, 3)).clip(0, 255)
                path = root / part / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path)


def settings_of(tmp_path: Path, **more):
    return resolve(
        {
            "task": "image-folder",
            "model": "digits-cnn",
            "cache-dir": str(tmp_path / "cache"),
            "output": str(tmp_path / "results"),
            "num-clients": 2,
            "fraction-train": 1.0,
            "num-server-rounds": 3,
            "checkpoint-every": 2,
            "head-epochs": 2,
            "learning-rate": 0.03,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
    )


def accuracy(loaded, root: Path) -> float:
    """Return the accuracy on a folder's test images; subfolders name the classes."""
    images = sorted((root / "test").glob("*/*.png"))
    predicted, _ = Predictor(*loaded)(images)
    return float(
        np.mean([n == p.parent.name for n, p in zip(predicted, images, strict=1)])
    )


def reported(output: Path) -> dict[str, float]:
    clients = json.loads((output / "clients.json").read_text())
    return {name: about["accuracy"] for name, about in clients.items()}


def of_device(root: Path, name: str):
    return load_run(root / "results" / "fedrep", name, str(root / name))
