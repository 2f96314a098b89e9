"""PFLlib's methods on the clients that PFLlib ships, by PFLlib and by this package.

``python -m benchmarks.pfllib_table --pfllib DIR --pfllib-python PYTHON`` runs PFLlib's
own ``main.py`` in ``DIR/system``, unchanged, and the algorithm of the same name here,
on ``DIR/dataset/MNIST``: the same clients, model, step size, batches and epochs, and
all clients in all rounds. PFLlib reports the best round; the mean of the last ten
rounds stands beside it. Finished runs in ``--output`` are not made again.
"""

import argparse
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
from torch import nn

from benchmarks.common import markdown, write
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.strategies.report.results import read_json, write_json
from flwr_frl.task import ExampleTask, build_task
from flwr_frl.task.settings import Free, Setting, resolve

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
    """PFLlib's name and arguments of a method, and the settings of it here."""

    name: str
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = MappingProxyType({})


# FedALA's and FedDBE's authors also test with 20 clients, all in every round.
METHODS = {
    "fedavg": Method("FedAvg"),
    "fedprox": Method("FedProx", ("-mu", "0.1"), {"proximal-mu": 0.1}),
    "scaffold": Method("SCAFFOLD"),
    "local": Method("Local"),
    "fedper": Method("FedPer"),
    "fedrep": Method("FedRep", ("-pls", "1")),
    "ditto": Method("Ditto", ("-pls", "1", "-mu", "0.1"), {"ditto-lambda": 0.1}),
    "fedrod": Method("FedROD"),
    "fedala": Method("FedALA"),
    "feddbe": Method("FedDBE", ("-mo", "1", "-klw", "1"), {"dbe-kappa": 1.0}),
}


class DNN(nn.Module):
    """PFLlib's model ``DNN``: a hidden layer of 100."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc = nn.Linear(28 * 28, 100), nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.fc(self.fc1(x.flatten(1)).relu())
        return logits


def mnist(
    num_clients: int, *, data_dir: Annotated[str, Free("PFLlib's folder")] = ""
) -> ExampleTask:
    """Return the task: PFLlib's clients, with its model."""
    settings = {"task": "pfllib", "data-dir": data_dir, "num-clients": num_clients}
    data = build_task(resolve({**settings, "augment": False}), num_clients)
    return ExampleTask(
        model=DNN,
        head="fc",
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
        [arguments.pfllib_python, "main.py", *options, *method.arguments],
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
    """Return this package's accuracy by round, over all test examples as PFLlib's."""
    lines = (job.place / job.algorithm / "metrics.jsonl").read_text("utf-8")
    return [json.loads(line)["accuracy-weighted"] for line in lines.splitlines()]


def row(accuracies: list[float]) -> list[str]:
    """Return the mean of the last rounds and the best round, in %."""
    last, best = fmean(accuracies[-LAST:]), max(accuracies)
    return [f"{100 * last:.2f}", f"{100 * best:.2f}"]


BODY = """The same 20 clients of MNIST (the split that PFLlib's repository has,
Dirichlet), the model `DNN` (784, 100, 10), batches of 10, step size {rate}, one epoch,
all clients in each of {rounds} rounds, one seed. PFLlib is used as it is, with its own
initial weights and order of batches; its default step size, 0.005, is for 2,000
rounds. Accuracy in %, over all test examples of all clients. PFLlib prints the best
round, which is chosen by the test set; the mean of the last {last} rounds is what a
user gets.

{table}
"""


def main() -> int:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pfllib", required=True, help="a checkout of PFLlib")
    parser.add_argument("--pfllib-python", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", default="results/pfllib")
    arguments = parser.parse_args()
    rounds, lines = arguments.rounds, []
    data: dict[str, Any] = {}

    def make() -> None:
        jobs = {}
        for algorithm, method in METHODS.items():
            settings: dict[str, Setting] = {
                **COMMON,
                **method.settings,
                "data-dir": str(Path(arguments.pfllib).resolve() / "dataset" / "MNIST"),
                "num-server-rounds": rounds,
            }
            place = Path(arguments.output) / "here" / f"{algorithm}-{rounds}"
            jobs[algorithm] = Job(place, algorithm, settings)
        missing = [job for job in jobs.values() if finished(job) is None]
        carry_out_all("here", missing)
        for algorithm, method in METHODS.items():
            found = {"pfllib": there(method, rounds, arguments)[1:]}
            found["here"] = here(jobs[algorithm])
            data[algorithm] = found
            names = f"`{algorithm}`", f"`{method.name}`"
            lines.append([*names, *row(found["here"]), *row(found["pfllib"])])
        heads = "last ten, here", "best, here", "last ten, PFLlib", "best, PFLlib"
        table = markdown(["algorithm", "in PFLlib", *heads], lines)
        body = BODY.format(rate=RATE, rounds=rounds, last=LAST, table=table)
        write("pfllib_table", "PFLlib's methods on PFLlib's clients", body, data)

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
