"""Data of the configs: folders that are prepared once, and measures of clients.

A source is a function of the given folders, the folder of the runs and arguments from
the config; it returns settings. It must not change an existing folder.
"""

import contextlib
import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flwr_frl.clients.device.setup import newcomers
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import Setting
from flwr_frl.results.results import METRICS, read_json, read_rows
from flwr_frl.task.data.datasets import DataSettings, image_folder
from flwr_frl.task.data.partitions import (
    PartitionSettings,
    log_normal,
    partition,
    split,
)

Folders = Mapping[str, Path]
# Training examples that each client must have; with fewer, no batch is full.
LEAST_EXAMPLES = 10


def folder_of(folders: Folders, name: str = "data-dir") -> Path:
    """Return a folder that the command must be given."""
    if name not in folders:
        raise SettingsError(f"this benchmark needs --{name}")
    return folders[name].absolute()


def images(
    folders: Folders, output: Path, train: int, test: int, quality: int = 0
) -> dict[str, Setting]:
    """Return a folder of links to the first images of each class of CIFAR-10.

    With a JPEG ``quality``, it has copies that are compressed once more.
    """
    source = folder_of(folders)
    folder = output / f"images-{train}-{test}-{quality}"
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        for part, count in (("train", train), ("test", test)):
            for kind in sorted((source / part).iterdir()):
                (partial / part / kind.name).mkdir(parents=True)
                for image in sorted(kind.iterdir())[:count]:
                    link = partial / part / kind.name / image.name
                    if quality:
                        Image.open(image).save(link, "JPEG", quality=quality)
                    else:
                        link.symlink_to(image.resolve())
        partial.rename(folder)
    return {"data-dir": str(folder)}


def usable_seeds(settings: Mapping[str, Any], count: int) -> list[int]:
    """Return the first seeds that leave every client enough images.

    This is common practice for Dirichlet partitions, which may leave a client almost no
    images.
    """
    names = "partition", "classes-per-client", "dirichlet-alpha"
    own = {n.replace("-", "_"): settings[n] for n in names if n in settings}
    _, read = image_folder(DataSettings(data_dir=str(settings["data-dir"])))
    dataset = read()
    found: list[int] = []
    for seed in range(1000):
        if len(found) == count:
            return found
        with contextlib.suppress(SettingsError):
            drawn = PartitionSettings(seed=seed, **own)
            train, test = partition(dataset, settings["num-clients"], drawn)
            if min(map(len, train)) >= LEAST_EXAMPLES and min(map(len, test)) >= 1:
                found.append(seed)
    raise SettingsError(f"only {len(found)} of 1000 seeds can be used")


def mnist(folders: Folders, output: Path, train: int = 0) -> dict[str, Setting]:
    """Return MNIST as an image folder, with at most ``train`` images a class if given.

    The data folder is torchvision's root with the unpacked idx files in ``MNIST/raw``.
    """
    raw = folder_of(folders) / "MNIST" / "raw"
    place = output / (f"digits-{train}" if train else "digits")
    for part, name in (("train", "train"), ("t10k", "test")):
        if (place / name).is_dir():
            continue
        pixels = np.fromfile(raw / f"{part}-images-idx3-ubyte", np.uint8)[16:]
        labels = np.fromfile(raw / f"{part}-labels-idx1-ubyte", np.uint8)[8:]
        # Names continue after the test images, as in the first runs of the pages.
        first = len(np.fromfile(raw / "t10k-labels-idx1-ubyte", np.uint8)) - 8
        first = 0 if part == "t10k" else first
        written = np.zeros(10, int)
        for i, image in enumerate(pixels.reshape(-1, 28, 28)):
            if part == "train" and train and written[labels[i]] == train:
                continue
            written[labels[i]] += 1
            path = place / name / str(labels[i]) / f"{first + i:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return {"data-dir": str(place)}


def old_and_new_digits(
    labels: np.ndarray, num_clients: int, seed: int
) -> list[np.ndarray]:
    """Give digits below 5 to the clients that train, the others to the new ones.

    A fifth of the clients are new. Every client has three classes; see `log_normal`.
    """
    new = newcomers(num_clients, num_clients // 5, seed)
    settings = PartitionSettings(classes_per_client=3)
    rng = np.random.default_rng([seed, 0x0F16])
    rows_of: dict[int, np.ndarray] = {}
    for first in (0, 5):
        clients = [i for i in range(num_clients) if (i in new) == (first == 5)]
        rows = np.flatnonzero((labels >= first) & (labels < first + 5))
        proportions = log_normal(5, len(clients), settings, rng)
        parts = split(labels[rows] - first, proportions, rng)
        for client, part in zip(clients, parts, strict=True):
            rows_of[client] = rows[part]
    return [rows_of[client] for client in range(num_clients)]


def labelled(path: Path) -> list[tuple[str, str]]:
    """Return a product's sentences and their labels, leaving out mixed opinions."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        annotation, mark, text = line.partition("##")
        signs = set(re.findall(r"\[([+-])\d?\]", annotation))
        if mark and text.strip() and not line.startswith("*") and len(signs) < 2:
            names = {"+": "positive", "-": "negative"}
            rows.append((text.strip(), names.get("".join(signs), "neutral")))
    return rows


def reviews(
    folders: Folders, output: Path, rows: int, layers: int
) -> dict[str, Setting]:
    """Return a CSV table for each product, and the first layers of a BERT model.

    The data set is the customer reviews of Hu and Liu (KDD 2004), in its original files
    with an annotation in front of each sentence; each ``*.txt`` file is a product.
    """
    from transformers import AutoModel, AutoTokenizer

    texts, model = output / "texts", output / "model"
    texts.mkdir(parents=True, exist_ok=True)
    paths = sorted(folder_of(folders).rglob("*.txt"))
    products = {path.stem: labelled(path) for path in paths}
    products = {name: own for name, own in products.items() if len(own) >= rows}
    for name, own in products.items():
        order = np.random.default_rng(0).permutation(len(own))[:rows]
        with (texts / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["text", "label"])
            table.writerows(own[i] for i in order)
    if not model.is_dir():
        source = folder_of(folders, "model")
        options = {"local_files_only": True, "trust_remote_code": False}
        bert = AutoModel.from_pretrained(source, **options)
        bert.encoder.layer = bert.encoder.layer[:layers]
        bert.config.num_hidden_layers = layers
        bert.save_pretrained(model)
        AutoTokenizer.from_pretrained(source, **options).save_pretrained(model)
    return {
        "task": f"hf-text:{model}",
        "data-dir": str(texts),
        "num-clients": len(products),
    }


GUIDE = Path(__file__).resolve().parents[1] / "docs" / "your-task.md"
FILE = re.compile(r"<!-- file: (.*?) -->\n```\w+\n(.*?)```\n<!-- end -->", re.DOTALL)


def guide(
    folders: Folders, output: Path, folder: str = "", weights: str = ""
) -> dict[str, Setting]:
    """Return a folder of data that the files of the guide to custom tasks write."""
    home = output.absolute() / "guide"
    if not home.is_dir():
        for name, text in FILE.findall(GUIDE.read_text(encoding="utf-8")):
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        texts = (
            "from pathlib import Path; from mine.texts import written\n"
            "Path('texts').mkdir()\n"
            "for i in range(8): Path(f'texts/{i}.txt').write_text(written(i))"
        )
        paths = os.pathsep.join([str(home), str(GUIDE.parents[1])])
        environment = {**os.environ, "PYTHONPATH": paths}
        for words in (["-m", "mine.photos"], ["-c", texts]):
            command = [sys.executable, *words]
            subprocess.run(command, cwd=home, env=environment, check=True)
    sys.path.append(str(home))
    settings: dict[str, Setting] = {"data-dir": str(home / folder)} if folder else {}
    return settings | ({"weights": str(home / weights)} if weights else {})


# Measures of a run


def bytes_up(job: Any, result: Any) -> dict[str, Any]:
    """Return the kB that one client sends in a round."""
    rows = read_rows(job.run_folder / METRICS)
    sent = sum(row["bytes-up"] / row["clients"] for row in rows) / len(rows)
    return {"kB-up": sent / 1e3}


def clients(job: Any, result: Any) -> dict[str, Any]:
    """Return each client's final metrics by which clients are compared."""
    own = read_json(job.run_folder / "clients.json")
    names = "accuracy", "auroc", "rmse"
    kept = {c: {n: each.get(n) for n in names if n in each} for c, each in own.items()}
    return {"clients": kept}


def uploaded(job: Any, result: Any) -> dict[str, Any]:
    """Return the bytes that clients have sent in training."""
    rows = read_rows(job.run_folder / METRICS)
    return {"bytes-up": sum(row["bytes-up"] for row in rows)}


def targets(job: Any, result: Any) -> dict[str, Any]:
    """Return the mean accuracy of the clients that are no sources."""
    own = read_json(job.run_folder / "clients.json")
    # Eight of the twelve writers are sources.
    first = 8 if job.run_folder.name in ("local", "representation-transfer") else 0
    names = sorted(own)[first:]
    # The reply of a client whose model has diverged is rejected.
    return {"accuracy": float(np.mean([own[n].get("accuracy", np.nan) for n in names]))}
