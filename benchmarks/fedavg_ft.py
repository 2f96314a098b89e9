"""Ablation: why fine-tuned FedAvg is as accurate as methods with personal heads.

FedAvg-FT differs from FedRep, FedPer and FLUTE in two ways. Its head is fine-tuned on
the final representation, just before the test, while theirs are as old as the client's
last sampled round; and its representation was trained below one common head. Here the
clients of one training run are tested with several heads, so that both factors can be
changed separately. ``python -m benchmarks.fedavg_ft --data-dir DIR`` uses the clients,
images and rounds of ``benchmarks/papers_small.py``; ``--papers`` adds those of
``benchmarks/papers_tables.py``, 100 clients with 5 or 2 shards, half an hour a run.
Finished runs in ``--output`` are not repeated.
"""

import argparse
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import NDArrays, Scalar

from benchmarks.common import RESULTS, write
from benchmarks.fedavg_ft_page import AGE, FRESH, HEADS, INITIAL, OLD, OLD_TRAINED, body
from benchmarks.leaderboard_cells import partition_of, subset
from benchmarks.papers_small import CLASSES, CLIENTS, IMAGES, SETTINGS
from benchmarks.papers_tables import Tables
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.clients.base import Config, Evaluation, Reply
from flwr_frl.clients.device.conversions import Tensors, under, within
from flwr_frl.clients.device.parameter_groups import HEAD, Groups
from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.clients.fedper import FedPerClient
from flwr_frl.clients.fedrep import FedRepClient
from flwr_frl.clients.flute import FLUTEClient
from flwr_frl.clients.lg_fedavg import LGFedAvgClient
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.text import short_name
from flwr_frl.results.results import METRICS, read_rows
from flwr_frl.strategies.averaging import FedAvg, FedPer, LGFedAvg
from flwr_frl.strategies.fedrep import FedRep
from flwr_frl.strategies.flute import FLUTE

# Epochs of a head before a test, equal to the default of `finetune-epochs`.
EPOCHS = 10
# Groups of FedAvg's old heads, which are not part of the model.
RECEIVED, TRAINED = "old-received.", "old-trained."


class FreshHeads:
    """Mixin for clients that are also tested with heads trained before the test.

    ``accuracy-fresh`` starts from the head that the method tests, ``accuracy-initial``
    from that of the initial model; both have `EPOCHS`. Nothing is saved.
    """

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test as the method does, then with both heads."""
        loss, count, metrics = super().evaluate(parameters, config)
        self.train("head", EPOCHS)
        metrics[FRESH] = self.accuracy()
        self.model.head.load_state_dict(under(HEAD, self.task.initial_state))
        self.train("head", EPOCHS)
        metrics[INITIAL] = self.accuracy()
        return loss, count, metrics

    def accuracy(self) -> Scalar:
        """Return the accuracy of the current model on the test examples."""
        return self.test(self.model)[2]["accuracy"]


class FedAvgHeadsClient(FreshHeads, FedAvgClient):
    """FedAvg's client that also keeps the fine-tuned heads of its last sampled round.

    One is fine-tuned on the received model, as FedRep's, and one on the model after
    local training, as FedPer's. The reply is FedAvg's.
    """

    personal: Groups = (RECEIVED, TRAINED)

    def initial_group(self, group: str) -> Tensors:
        """Return the received head, as a client that was never sampled has no other."""
        return under(HEAD, self.received or self.task.initial_state)

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Reply as FedAvg, then fine-tune and save both heads."""
        reply = super().fit(parameters, config)
        self._keep_head(TRAINED)
        self.model.load(self.received)
        self._keep_head(RECEIVED)
        self.save()
        return reply

    def _keep_head(self, group: str) -> None:
        self.train("head", EPOCHS)
        head = self.model.head.state_dict()
        self.saved |= within(group, {name: t.clone() for name, t in head.items()})

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test the received representation with each head, and add the heads' age."""
        loss, count, metrics = super().evaluate(parameters, config)
        for group, name in ((RECEIVED, OLD), (TRAINED, OLD_TRAINED)):
            self.model.head.load_state_dict(under(group, self.saved))
            metrics[name] = self.accuracy()
        if self.state.round:
            metrics[AGE] = int(config[SERVER_ROUND]) - self.state.round
        return loss, count, metrics


class FedPerHeadsClient(FreshHeads, FedPerClient):
    """FedPer's client, tested with its own old head and fresh ones."""


class FedRepHeadsClient(FreshHeads, FedRepClient):
    """FedRep's client, tested with its own old head and fresh ones."""


class FLUTEHeadsClient(FreshHeads, FLUTEClient):
    """FLUTE's client, tested with the server's head for it and fresh ones."""


class LGFedAvgHeadsClient(FreshHeads, LGFedAvgClient):
    """LG-FedAvg's client, tested with the shared head and fresh ones."""


class FedAvgHeads(FedAvg, client="benchmarks.fedavg_ft:FedAvgHeadsClient"):
    """FedAvg, tested with several heads."""


class FedPerHeads(FedPer, client="benchmarks.fedavg_ft:FedPerHeadsClient"):
    """FedPer, tested with several heads."""


class FedRepHeads(FedRep, client="benchmarks.fedavg_ft:FedRepHeadsClient"):
    """FedRep, tested with several heads."""


class FLUTEHeads(FLUTE, client="benchmarks.fedavg_ft:FLUTEHeadsClient"):
    """FLUTE, tested with several heads."""


class LGFedAvgHeads(LGFedAvg, client="benchmarks.fedavg_ft:LGFedAvgHeadsClient"):
    """LG-FedAvg, tested with several heads."""


METHODS = {
    "fedavg": FedAvgHeads,
    "fedper": FedPerHeads,
    "fedrep": FedRepHeads,
    "flute": FLUTEHeads,
    "lg-fedavg": LGFedAvgHeads,
}
SMALL_CELLS = ("shards-2", "shards-5")
PAPERS_CELLS = ("100x5", "100x2")
# The order of the runs in `PAPERS_CELLS`, which take half an hour each.
PAPERS_METHODS = (("fedavg", "fedrep"), ("fedper", "flute", "lg-fedavg"))


def path_of(method: str) -> str:
    """Return the import path of a method's strategy, also if run as ``__main__``."""
    return f"benchmarks.fedavg_ft:{METHODS[method].__name__}"


class Ablation:
    """The runs of both sizes."""

    def __init__(self, data_dir: Path, output: Path, seeds: int) -> None:
        train = CLIENTS * IMAGES // CLASSES
        folder = subset(data_dir.absolute(), output, train, train // 2)
        self.output, self.seeds = output, seeds
        self.small = {**SETTINGS, "evaluate-every": 0, "data-dir": str(folder)}
        tuned = RESULTS / "leaderboard-tuned.json"
        about = {"data_dir": data_dir, "output": output, "tuned": tuned}
        self.tables = Tables(Namespace(**about, rounds=100, anew=True))

    def jobs(self, cell: str, method: str) -> list[Job]:
        """Return a method's runs in a cell, by seed."""
        seeds = range(self.seeds)
        if cell in PAPERS_CELLS:
            of_papers = [self.tables.job(cell, method, seed).settings for seed in seeds]
            settings = [{**each, "evaluate-every": 0} for each in of_papers]
        else:
            common = {**self.small, **partition_of(cell)}
            settings = [{**common, "seed": seed} for seed in seeds]
        return [
            Job(self.output / cell / f"{method}-{each['seed']}", path_of(method), each)
            for each in settings
        ]

    def missing(self, papers: bool) -> list[Job]:
        """Return the runs that are not finished, seed by seed."""
        jobs = [j for m in METHODS for c in SMALL_CELLS for j in self.jobs(c, m)]
        jobs.sort(key=lambda job: int(job.settings["seed"]))
        if papers:
            for methods in PAPERS_METHODS:
                cells = [(c, m) for c in PAPERS_CELLS for m in methods]
                large = [job for cell in cells for job in self.jobs(*cell)]
                jobs += sorted(large, key=lambda job: int(job.settings["seed"]))
        return [job for job in jobs if finished(job) is None]

    def measured(self, cell: str) -> dict[str, dict[str, Any]]:
        """Return each method's finished runs in a cell, by seed."""
        results: dict[str, dict[str, Any]] = {}
        for method in METHODS:
            for job in self.jobs(cell, method):
                if (run := finished(job)) is not None and "failed" not in run:
                    seed = str(job.settings["seed"])
                    about = ("commit", "cpu-seconds", "gpu")
                    results.setdefault(method, {})[seed] = means(job) | {
                        name: run[name] for name in about if name in run
                    }
        return results

    def write(self) -> None:
        """Write the page of all finished runs."""
        cells = {cell: self.measured(cell) for cell in (*SMALL_CELLS, *PAPERS_CELLS)}
        done = [
            run for m in cells.values() for runs in m.values() for run in runs.values()
        ]
        data = {"cells": cells, "seconds": sum(run["cpu-seconds"] for run in done)}
        title = "Why fine-tuned FedAvg is accurate: fresh and old heads"
        write("fedavg_ft", title, body(cells, EPOCHS), data)


def means(job: Job) -> dict[str, float]:
    """Return the means of each accuracy in %, and of the age, over the last rounds."""
    rows = read_rows(job.place / short_name(job.algorithm) / METRICS)
    tested = [row for row in rows if FRESH in row]
    scale = {**dict.fromkeys(HEADS, 100), AGE: 1}
    return {
        name: scale[name] * float(np.mean([row[name] for row in tested]))
        for name in scale
        if tested and name in tested[0]
    }


def main() -> int:
    """Make the runs that are missing, and write the page of all that are finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as an image folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--papers", action="store_true", help="also run 100 clients")
    parser.add_argument(
        "--page", action="store_true", help="only write the page of finished runs"
    )
    parser.add_argument("--output", default="results/fedavg_ft")
    arguments = parser.parse_args()
    output = Path(arguments.output).absolute()
    ablation = Ablation(Path(arguments.data_dir), output, arguments.seeds)

    def missing() -> list[Job]:
        return ablation.missing(arguments.papers)

    def make() -> None:
        try:
            if not arguments.page:
                carry_out_all("ablation", missing(), missing)
        finally:
            ablation.write()

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
