"""Tasks whose clients are people, hospitals, schools, roles and fields, for `natural`.

Each function is written like a user's custom task: it reads a public data set as
published and returns an `ExampleTask`. Unless stated otherwise, a quarter of each
client's examples is its test set, drawn with the seed, and features are standardised
with the training examples of all clients.
"""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel, setting
from flwr_frl.task.tasks.text import CHARACTERS, PositionwiseLinear, RecurrentText

Seed = Annotated[int, setting(ge=0)]
Folder = Annotated[str, setting(form="a directory with the published files")]
Table = tuple[np.ndarray, np.ndarray]
# Clients with fewer examples are excluded.
LEAST = 8


def auroc(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the area under the ROC curve of two classes; NaN if there is only one.

    It is the share of pairs of a positive and a negative example that are ranked
    correctly, with ties counted as one half.
    """
    score = outputs[:, 1] - outputs[:, 0]
    positive, negative = score[targets == 1], score[targets == 0]
    if len(positive) == 0 or len(negative) == 0:
        return torch.tensor(torch.nan)
    difference = positive[:, None] - negative[None, :]
    return ((difference > 0).float() + 0.5 * (difference == 0).float()).mean()


def rmse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the root-mean-square error."""
    return (outputs - targets).square().mean().sqrt()


def task_of(
    tables: dict[str, Table],
    seed: int,
    hidden: int = 32,
    classes: int = 0,
    score: str = "",
) -> ExampleTask:
    """Return a task with one table per client; 0 classes mean regression."""
    tables = {name: table for name, table in tables.items() if len(table[0]) >= LEAST}
    tests = {}
    for i, name in enumerate(sorted(tables)):
        count = len(tables[name][0])
        order = np.random.default_rng([seed, i]).permutation(count)
        tests[name] = np.isin(np.arange(count), order[: count // 4])
    seen = np.concatenate([x[~tests[n]] for n, (x, _) in tables.items()])
    mean = np.nanmean(seen, axis=0)
    deviation = np.nanstd(seen, axis=0)
    deviation[deviation == 0] = 1.0
    train, test = {}, {}
    for name, (x, y) in tables.items():
        # Missing values are replaced by the mean over all clients.
        inputs = np.nan_to_num((x - mean) / deviation)
        held = tests[name]
        train[name], test[name] = (
            ExampleSet(
                torch.from_numpy(inputs[rows].astype("f4")),
                torch.from_numpy(y[rows] if classes else y[rows, None].astype("f4")),
            )
            for rows in (~held, held)
        )
    width = len(mean)

    def model() -> SplitModel:
        representation = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        return SplitModel(representation, nn.Linear(hidden, classes or 1))

    metrics = {"auroc": auroc} if score == "auroc" else {"rmse": rmse}
    kind: dict[str, Any] = {"loss": nn.functional.mse_loss, "metrics": metrics}
    if classes:
        kind = {"classes": tuple(map(str, range(classes)))}
        kind |= {"metrics": metrics} if score else {}
    return ExampleTask(model=model, train=train, test=test, seed=seed, **kind)


def by_person(rows: list[tuple[str, list[float], float]]) -> dict[str, Table]:
    """Return each person's features and targets."""
    people = sorted({person for person, _, _ in rows})
    return {
        person: (
            np.array([x for p, x, _ in rows if p == person]),
            np.array([y for p, _, y in rows if p == person]),
        )
        for person in people
    }


def number(text: str) -> float:
    """Return a number, or NaN if it is missing."""
    return np.nan if text.strip() in ("", "?", "-9") else float(text)


def wisdm(num_clients: int, *, data_dir: Folder = "", seed: Seed = 0) -> ExampleTask:
    """Build the activity recognition task: 36 people, 43 features, 6 activities."""
    with (Path(data_dir) / "wisdm.csv").open() as file:
        lines = list(csv.DictReader(file))
    features = [name for name in lines[0] if name not in ("UNIQUE_ID", "user", "class")]
    names = sorted({line["class"] for line in lines})
    rows = [
        (
            line["user"].zfill(2),
            [number(line[name]) for name in features],
            names.index(line["class"]),
        )
        for line in lines
    ]
    return task_of(by_person(rows), seed, hidden=64, classes=len(names))


def heart(num_clients: int, *, data_dir: Folder = "", seed: Seed = 0) -> ExampleTask:
    """Build the heart disease task: four hospitals, 13 features, healthy or ill, AUROC.

    Missing values are replaced by the mean; 13 further features indicate them.
    """
    tables = {}
    for path in sorted((Path(data_dir) / "heart").glob("processed.*.data")):
        with path.open() as file:
            lines = list(csv.reader(file))[1:]
        x = np.array([[number(cell) for cell in line[:13]] for line in lines])
        y = np.array([int(float(line[13]) > 0) for line in lines])
        tables[path.suffixes[0][1:]] = np.column_stack([x, np.isnan(x)]), y
    return task_of(tables, seed, hidden=16, classes=2, score="auroc")


def school(num_clients: int, *, data_dir: Folder = "", seed: Seed = 0) -> ExampleTask:
    """Build the exam score task: 139 schools, 28 features, one score, regression.

    The score is in units of 10 points.
    """
    from scipy.io import loadmat

    data = loadmat(Path(data_dir) / "school.mat")
    pairs = zip(data["X"][0], data["Y"][0], strict=True)
    tables = {
        f"{i:03d}": (x.astype("f8"), y[:, 0] / 10) for i, (x, y) in enumerate(pairs)
    }
    return task_of(tables, seed, hidden=16)


def landmine(num_clients: int, *, data_dir: Folder = "", seed: Seed = 0) -> ExampleTask:
    """Build the landmine detection task: 29 fields, 9 features, mine or not, AUROC."""
    from scipy.io import loadmat

    data = loadmat(Path(data_dir) / "LandmineData.mat")
    pairs = zip(data["feature"][0], data["label"][0], strict=True)
    tables = {
        f"{i:02d}": (x.astype("f8"), y[:, 0].astype("i8"))
        for i, (x, y) in enumerate(pairs)
    }
    return task_of(tables, seed, hidden=16, classes=2, score="auroc")


def parkinson(
    num_clients: int, *, data_dir: Folder = "", seed: Seed = 0
) -> ExampleTask:
    """Build the Parkinson task: 42 patients, 16 voice measures, motor UPDRS.

    The data set is Parkinson telemonitoring, and the score is in units of 10 points.
    Age, sex and test time are excluded, because they identify the patients.
    """
    with (Path(data_dir) / "parkinsons_updrs.data").open() as file:
        lines = list(csv.DictReader(file))
    left_out = ("subject#", "age", "sex", "test_time", "motor_UPDRS", "total_UPDRS")
    features = [name for name in lines[0] if name not in left_out]
    rows = [
        (
            line["subject#"].zfill(2),
            [float(line[name]) for name in features],
            float(line["motor_UPDRS"]) / 10,
        )
        for line in lines
    ]
    return task_of(by_person(rows), seed, hidden=32)


def speech(num_clients: int, *, data_dir: Folder = "", seed: Seed = 0) -> ExampleTask:
    """Build the spoken digits task: 6 speakers, 3,000 log-mel images, a small CNN.

    Of 50 repetitions, 20 random ones are for training and 10 for testing, because there
    are many examples of each digit.
    """
    data = np.load(Path(data_dir) / "spoken-digits.npz")
    images = torch.from_numpy(data["features"]).float().div(255).sub(0.5)[:, None]
    digits = torch.from_numpy(data["digit"])
    rng = np.random.default_rng(seed)
    order = rng.permutation(50)
    train, test = {}, {}
    for i, name in enumerate(data["speakers"]):
        mine = data["speaker"] == i
        repetition = data["index"]
        for sets, chosen in ((train, order[:20]), (test, order[40:])):
            rows = torch.from_numpy(mine & np.isin(repetition, chosen))
            sets[str(name)] = ExampleSet(images[rows], digits[rows])

    return digits_of(train, test, partial(small_cnn, (40, 48)), seed)


def small_cnn(shape: tuple[int, int]) -> SplitModel:
    """Return a CNN of two convolutions and two linear layers, for ten digits."""
    representation = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(64),
        nn.ReLU(),
    )
    representation(torch.zeros(1, 1, *shape))
    return SplitModel(representation, nn.Linear(64, 10))


def digits_of(
    train: Any, test: Any, model: Callable[[], SplitModel], seed: int
) -> ExampleTask:
    """Return a task whose classes are the digits."""
    digits = tuple("0123456789")
    return ExampleTask(model=model, train=train, test=test, classes=digits, seed=seed)


def roles(num_clients: int, *, data_dir: Folder = "", seed: Seed = 0) -> ExampleTask:
    """Build the next-character task on Shakespeare's plays: 30 roles, a small GRU."""
    return next_characters(data_dir, seed, 30, RecurrentFeatures, 64)


def leaf_roles(
    num_clients: int, *, data_dir: Folder = "", seed: Seed = 0
) -> ExampleTask:
    """Build the task of 139 roles with LEAF's model, an LSTM with two layers of 256.

    These are all roles with 10,000 characters or more.
    """

    def representation() -> nn.Module:
        return RecurrentText(len(CHARACTERS), 8, 256, every_position=True)

    return next_characters(data_dir, seed, 139, representation, 256)


def next_characters(
    data_dir: str,
    seed: int,
    num_clients: int,
    representation: Callable[[], nn.Module],
    width: int,
) -> ExampleTask:
    """Return the task of predicting the next character at every position.

    The clients are the longest roles. Their first 10,000 characters are divided into
    windows of 80 as in LEAF, but without overlap. The last quarter is the test set.
    """
    files = sorted((Path(data_dir) / "shakespeare-roles").glob("*.txt"))
    texts = {path.stem: path.read_text("utf-8") for path in files}
    places = {character: i for i, character in enumerate(CHARACTERS)}
    train, test = {}, {}
    for name in sorted(texts, key=lambda name: -len(texts[name]))[:num_clients]:
        codes = torch.tensor([places.get(c, 0) for c in texts[name][:10_000]])
        windows = codes.unfold(0, 81, 80)
        cut = 3 * len(windows) // 4
        for sets, chosen in ((train, windows[:cut]), (test, windows[cut:])):
            sets[name] = ExampleSet(chosen[:, :-1].clone(), chosen[:, 1:].clone())

    def model() -> SplitModel:
        head = PositionwiseLinear(width, len(CHARACTERS))
        return SplitModel(representation(), head)

    return ExampleTask(
        model=model, train=train, test=test, classes=tuple(CHARACTERS), seed=seed
    )


class RecurrentFeatures(nn.Module):
    """An embedding and a GRU of width 64, with the states at all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 16)
        self.gru = nn.GRU(16, 64, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return features of shape (n, time, 64)."""
        features: torch.Tensor = self.gru(self.embedding(tokens))[0]
        return features


def writers(num_clients: int, *, data_dir: Folder = "", seed: Seed = 0) -> ExampleTask:
    """Build the FEMNIST digits task: 12 writers, 28 x 28 grey images, a small CNN."""
    train, test = {}, {}
    for folder in sorted((Path(data_dir) / "femnist").iterdir()):
        paths = sorted(folder.glob("train/*/*.png"))
        pixels = np.stack([np.asarray(Image.open(path).convert("L")) for path in paths])
        images = torch.from_numpy(pixels).float().div(255).sub(0.5)[:, None]
        digits = torch.tensor([int(path.parent.name) for path in paths])
        rng = np.random.default_rng([seed, len(train)])
        order = torch.from_numpy(rng.permutation(len(paths)))
        cut = len(paths) // 4
        for sets, chosen in ((test, order[:cut]), (train, order[cut:])):
            sets[folder.name] = ExampleSet(images[chosen], digits[chosen])

    return digits_of(train, test, partial(small_cnn, (28, 28)), seed)
