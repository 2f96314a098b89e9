"""Small generated data sets, one for each kind of folder that a task reads."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flwr_frl.task.data.datasets import PARTS, Dataset, ImageSet
from flwr_frl.task.tasks.image import ImageTask


def write_all(directory: Path) -> None:
    """Write the folders of `benchmarks.same_numbers`, identical in every call."""
    write_arrays(directory / "arrays", side=16, counts=(240, 80))
    write_images(directory / "images")
    write_texts(directory / "text", directory / "tweets")
    write_table(directory / "table")


def write_arrays(directory: Path, side: int, counts: tuple[int, int]) -> None:
    """Write training and test images of four learnable classes, for `Arrays`."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 200, (4, side, side, 3))
    for part, n in zip(("train", "test"), counts, strict=True):
        labels = np.arange(n) % 4
        images = patterns[labels] + rng.integers(0, 56, (n, side, side, 3))
        np.savez(directory / f"{part}.npz", images=images.astype("u1"), labels=labels)


class Arrays(ImageTask):
    """Classification of the images that `write_arrays` has written."""

    def __init__(self, settings: Any, num_clients: int) -> None:
        files = [np.load(Path(settings.data_dir) / f"{part}.npz") for part in PARTS]
        train, test = (ImageSet(file["images"], file["labels"]) for file in files)
        dataset = Dataset(train, test, tuple("0123"))
        super().__init__("arrays", settings, num_clients, dataset)


def write_images(directory: Path) -> None:
    """Write 8 x 8 images of three clients and two classes, for ``image-folder``."""
    rng = np.random.default_rng(1)
    for client in ("ann", "bob", "eve"):
        for part, count in (("train", 8), ("test", 4)):
            for name, brightness in (("dark", 60), ("light", 190)):
                folder = directory / client / part / name
                folder.mkdir(parents=True, exist_ok=True)
                for i in range(count):
                    pixels = rng.normal(brightness, 40, (8, 8, 3)).clip(0, 255)
                    Image.fromarray(pixels.astype("u1")).save(folder / f"{i}.png")


def write_texts(texts: Path, tweets: Path) -> None:
    """Write ten clients' texts and ten clients' labelled texts, for ``text-folder``."""
    rng = np.random.default_rng(2)
    words = np.array(["the", "cat", "sat", "on", "a", "mat", "and", "saw", "no", "rat"])
    for directory in (texts, tweets):
        directory.mkdir(parents=True, exist_ok=True)
    for client in range(10):
        lines = [" ".join(rng.choice(words, 5)) for _ in range(20)]
        (texts / f"client-{client}.txt").write_text("\n".join(lines))
        rows = ["label,text", *(f"{int('cat' in line)},{line}" for line in lines)]
        (tweets / f"client-{client}.csv").write_text("\n".join(rows))


def write_table(directory: Path) -> None:
    """Write a table with two numeric columns and a class, for the task ``table``."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    rows = ["width,height,kind"]
    for i in range(200):
        width, height = rng.normal(2 * (i % 2), 1, 2).round(3)
        rows.append(f"{width},{height},{('low', 'high')[i % 2]}")
    (directory / "rows.csv").write_text("\n".join(rows))
