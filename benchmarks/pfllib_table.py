"""PFLlib's methods on the clients that PFLlib ships, by PFLlib and by this package.

``python -m benchmarks.pfllib_table --pfllib DIR --python PYTHON`` runs PFLlib's
own ``main.py`` in ``DIR/system``, unchanged, and the algorithm of the same name here,
on ``DIR/dataset/MNIST``: the same clients, model, step size, batches and epochs, and
all clients in all rounds. PFLlib reports the best round; the page also has the mean of
the last ten rounds. Finished runs in ``--output`` are reused.
"""

import argparse
import json
import os
import re
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from torch import nn

from benchmarks.common import markdown, write
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.common.settings import Setting, resolve, setting
from flwr_frl.results.results import read_json, write_json
from flwr_frl.task import ExampleTask, SplitModel, build_task

CLIENTS = 20
LAST = 10
RATE = 0.05
COMMON: dict[str, Setting] = {
    "task": "benchmarks.pfllib_table:mnist",
    "num-clients": CLIENTS,
    "fraction-train": 1.0,
    "batch-size": 10,
    "learning-rate": RATE,
    "momentum": 0.0,
    "representation-epochs": 1,
    "head-epochs": 1,
    "evaluate-every": 1,
}


class Method(NamedTuple):
    """A method's name and arguments in PFLlib, and its settings in this package.

    PFLlib's ``main.py`` splits the model of some methods. Its ``DNN`` ends with a
    log-softmax, which the split model then applies to the features.
    """

    name: str
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = MappingProxyType({})
    is_split: bool = False


# FedALA's and FedDBE's authors also test with 20 clients, all in every round.
METHODS = {
    "fedavg": Method("FedAvg", is_split=True),
    "fedprox": Method("FedProx", ("-mu", "0.1"), {"proximal-mu": 0.1}),
    "scaffold": Method("SCAFFOLD"),
    "local": Method("Local"),
    "fedper": Method("FedPer", is_split=True),
    "fedrep": Method("FedRep", ("-pls", "1"), is_split=True),
    "ditto": Method("Ditto", ("-pls", "1", "-mu", "0.1"), {"ditto-lambda": 0.1}),
    "fedrod": Method("FedROD", is_split=True),
    "fedala": Method("FedALA"),
    "feddbe": Method(
        "FedDBE", ("-mo", "1", "-klw", "1"), {"dbe-kappa": 1.0}, is_split=True
    ),
}


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
    settings = {"task": "pfllib", "data-dir": data_dir, "num-clients": num_clients}
    data = build_task(resolve({**settings, "augment": False}), num_clients)
    return ExampleTask(
        model=partial(split_dnn, log_softmax),
        train=[data.train_examples(i) for i in range(num_clients)],
        test=[data.test_examples(i) for i in range(num_clients)],
        classes=data.classes,
    )


def there(method: Method, rounds: int, arguments: argparse.Namespace) -> list[float]:
    """Return PFLlib's accuracy by round; the first value is before the first round."""
    place = Path(arguments.output) / "pfllib" / f"{method.name}-{rounds}.json"
    if place.is_file():
        found: list[float] = read_json(place)
        return found
    values = {
        "-data": "MNIST",
        "-m": "DNN",
        "-algo": method.name,
        "-gr": rounds,
        "-nc": CLIENTS,
        "-lbs": 10,
        "-lr": RATE,
        "-ls": 1,
        "-dev": "cpu",
    }
    options = [str(word) for pair in values.items() for word in pair]
    done = subprocess.run(
        [arguments.python, "main.py", *options, *method.arguments],
        cwd=Path(arguments.pfllib) / "system",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = list(
        map(float, re.findall(r"Averaged Test Accuracy: ([\d.]+)", done.stdout))
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    write_json(place, found)
    return found


def here(job: Job) -> list[float]:
    """Return this package's accuracy by round, over all test examples as in PFLlib."""
    lines = (job.place / job.algorithm / "metrics.jsonl").read_text("utf-8")
    return [json.loads(line)["accuracy-weighted"] for line in lines.splitlines()]


def row(accuracies: list[float]) -> list[str]:
    """Return the mean of the last rounds and the best round, in %."""
    last, best = fmean(accuracies[-LAST:]), max(accuracies)
    return [f"{100 * last:.2f}", f"{100 * best:.2f}"]


def job_of(arguments: argparse.Namespace, algorithm: str, log_softmax: bool) -> Job:
    """Return the job of a run of this package."""
    settings: dict[str, Setting] = {
        **COMMON,
        **METHODS[algorithm].settings,
        "data-dir": str(Path(arguments.pfllib).resolve() / "dataset" / "MNIST"),
        "num-server-rounds": arguments.rounds,
    }
    if log_softmax:
        settings["log-softmax"] = True
    name = f"{algorithm}{'-split' if log_softmax else ''}-{arguments.rounds}"
    return Job(Path(arguments.output) / "here" / name, algorithm, settings)


BODY = """The same 20 clients of MNIST (the split that PFLlib's repository has,
Dirichlet), the model `DNN` (784, 100, 10), batches of 10, step size {rate}, one epoch,
all clients in each of {rounds} rounds, one seed. PFLlib is used as it is, with its own
initial weights and order of batches; its default step size, 0.005, is for 2,000
rounds. Accuracy in %, over all test examples of all clients. PFLlib prints the best
round, which is chosen by the test set; the mean of the last {last} rounds is what a
user gets.

PFLlib splits the model of `FedAvg`, `FedPer`, `FedRep`, `FedROD` and `FedDBE` into a
base and a head. Its `DNN` ends with a log-softmax, which then is the base's last layer:
the head gets the logarithms of 100 probabilities, with which this step size is too
large. *Here, PFLlib's features* has the same model; *here* has the features as they
are.

{table}
"""


def main() -> int:
    """Carry out the missing runs, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pfllib", required=True, help="a checkout of PFLlib")
    parser.add_argument("--python", required=True, help="with PFLlib's dependencies")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", default="results/pfllib")
    arguments = parser.parse_args()
    rounds, lines = arguments.rounds, []
    data: dict[str, Any] = {}

    def make() -> None:
        jobs = {
            name: [
                job_of(arguments, name, log_softmax)
                for log_softmax in ((False, True) if method.is_split else (False,))
            ]
            for name, method in METHODS.items()
        }
        missing = [j for own in jobs.values() for j in own if finished(j) is None]
        carry_out_all("here", missing)
        for algorithm, method in METHODS.items():
            found = {"pfllib": there(method, rounds, arguments)[1:]}
            plain, *split = map(here, jobs[algorithm])
            found |= {"here": plain} | ({"here-split": split[0]} if split else {})
            data[algorithm] = found
            # PFLlib's model applies no log-softmax to features if it is not split.
            same = split[0] if split else plain
            accuracies = [*row(plain), *row(same), *row(found["pfllib"])]
            lines.append([f"`{algorithm}`", f"`{method.name}`", *accuracies])
        places = "here", "here, PFLlib's features", "PFLlib"
        heads = [
            f"{what}, {place}" for place in places for what in ("last ten", "best")
        ]
        table = markdown(["algorithm", "in PFLlib", *heads], lines)
        body = BODY.format(rate=RATE, rounds=rounds, last=LAST, table=table)
        write("pfllib_table", "PFLlib's methods on PFLlib's clients", body, data)

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
