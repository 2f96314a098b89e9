"""PFLlib's methods on the clients that PFLlib ships, by PFLlib and by this package.

The data folder is a checkout of PFLlib, whose ``main.py`` runs unchanged with the
Python of the environment variable PFLLIB_PYTHON: the same clients, model, step size,
batches and epochs, and all clients in all rounds. PFLlib reports the best round; the
page also has the mean of the last ten rounds.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn

from flwr_frl import simulate
from flwr_frl.common.settings import Setting, setting
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

LAST = 10


def split_dnn(log_softmax: bool) -> SplitModel:
    """Return PFLlib's ``DNN``, a hidden layer of 100, with or without log-softmax."""
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 100), nn.ReLU())
    if log_softmax:
        hidden.append(nn.LogSoftmax(dim=1))
    return SplitModel(hidden, nn.Linear(100, 10))


def mnist(
    num_clients: int,
    *,
    data_dir: Annotated[str, setting(form="PFLlib's folder")] = "",
    log_softmax: Annotated[bool, setting()] = False,
) -> ExampleTask:
    """Return the task: PFLlib's clients, with its model.

    Parameters
    ----------
    num_clients : int
        The number of clients.
    data_dir : str
        PFLlib's folder.
    log_softmax : bool, default False
        Whether features pass through a log-softmax, as in PFLlib's split models.
    """
    return ExampleTask(
        model=partial(split_dnn, log_softmax),
        train=[examples(data_dir, "train", i) for i in range(num_clients)],
        test=[examples(data_dir, "test", i) for i in range(num_clients)],
        classes=tuple("0123456789"),
    )


def examples(data_dir: str, part: str, client: int) -> ExampleSet:
    """Return the training or test examples of a client. The file is a pickle."""
    path = Path(data_dir, part, f"{client}.npz")
    data = np.load(path, allow_pickle=True)["data"].item()
    return ExampleSet(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))


def run(settings: Mapping[str, Setting], place: Path) -> dict[str, Any]:
    """Return the mean accuracy of the last rounds and that of the best round.

    ``pfllib`` has the method and its arguments there; ``library`` selects PFLlib, which
    splits the model of some methods. Its ``DNN`` ends with a log-softmax, which the
    split model then applies to the features.
    """
    own = dict(settings)
    arguments, root = str(own.pop("pfllib")).split(), Path(str(own["data-dir"]))
    if own.pop("library", "") == "PFLlib":
        accuracies = there(own, arguments, root / "system")
    else:
        own |= {"data-dir": str(root / "dataset" / "MNIST"), "output": str(place)}
        rows = simulate(str(own.pop("algorithm")), "inline", **own).rows
        # Over all test examples, as in PFLlib
        accuracies = [row["accuracy-weighted"] for row in rows]
    return {"accuracy": fmean(accuracies[-LAST:]), "best-round": max(accuracies)}


def there(own: Mapping[str, Any], arguments: list[str], folder: Path) -> list[float]:
    """Return PFLlib's accuracy by round."""
    values = {
        "-data": "MNIST",
        "-m": "DNN",
        "-algo": arguments[0],
        "-gr": own["num-server-rounds"],
        "-nc": own["num-clients"],
        "-lbs": own["batch-size"],
        "-lr": own["learning-rate"],
        "-ls": 1,
        "-dev": "cpu",
    }
    options = [str(word) for pair in values.items() for word in pair]
    done = subprocess.run(
        [
            os.environ.get("PFLLIB_PYTHON", sys.executable),
            *("main.py", *options, *arguments[1:]),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"Averaged Test Accuracy: ([\d.]+)", done.stdout)
    # The first value is before the first round.
    return list(map(float, found))[1:]
