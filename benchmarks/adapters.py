"""Full fine-tuning, LoRA adapters and head-only training on heterogeneous texts.

Each client holds sentences from the reviews of one product. A sentence is positive,
negative or neutral about the product's features. The data set is the customer reviews
of Hu and Liu (KDD 2004), in its original files with an annotation in front of each
sentence. The model consists of the first layers of a transformer and a linear head.

All rows share the clients, rounds, local epochs and learning rate. The learning rate is
the better of two on validation sets, for full fine-tuning and for shared LoRA.

Run ``python -m benchmarks.adapters --data-dir DIR --model FOLDER``. Each ``*.txt`` file
below DIR is a product. FOLDER contains a BERT model and its tokenizer.
"""

import argparse
import csv
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import markdown, write
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.common.settings import Setting

NAME = "adapters"
LAYERS, FROZEN = 2, 1
ROWS, TEST_FRACTION = 200, 0.6
RATE = 0.1
TARGETS = " ".join(
    f"layer.{i}.attention.self.{name}"
    for i in range(FROZEN, LAYERS)
    for name in ("query", "value")
)
LORA: dict[str, Setting] = {
    "adapters": "lora",
    "lora-targets": TARGETS,
    "frozen-layers": FROZEN,
}
# Algorithm and settings of each row
METHODS: dict[str, tuple[str, dict[str, Setting]]] = {
    "full fine-tuning": ("fedavg", {"frozen-layers": FROZEN}),
    "shared LoRA": ("fedavg", LORA),
    "FedSA-LoRA": ("fedsa-lora", LORA),
    "head only": ("fedavg", {"frozen-layers": -1}),
    "local LoRA": ("local", LORA),
}


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--output", default="results/adapters")
    return parser.parse_args()


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


def write_tables(source: Path, folder: Path) -> int:
    """Write a CSV table for each product, with the same rows in every run.

    Returns the number of products.
    """
    folder.mkdir(parents=True, exist_ok=True)
    products = {path.stem: labelled(path) for path in sorted(source.rglob("*.txt"))}
    products = {name: rows for name, rows in products.items() if len(rows) >= ROWS}
    for name, rows in products.items():
        order = np.random.default_rng(0).permutation(len(rows))[:ROWS]
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["text", "label"])
            table.writerows(rows[i] for i in order)
    return len(products)


def write_model(source: str, folder: Path) -> None:
    """Save the first layers of a BERT model and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModel.from_pretrained(source, **options)
    model.encoder.layer = model.encoder.layer[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)


class Table:
    """The page and the runs that it needs, finished or missing.

    Parameters
    ----------
    arguments : argparse.Namespace
        The command's arguments.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.place = Path(arguments.output).absolute()
        self.clients = write_tables(Path(arguments.data_dir), self.place / "texts")
        if not (self.place / "model").is_dir():
            write_model(arguments.model, self.place / "model")
        self.common: dict[str, Setting] = {
            "task": f"hf-text:{self.place / 'model'}",
            "data-dir": str(self.place / "texts"),
            "num-clients": self.clients,
            "num-server-rounds": arguments.rounds,
            "fraction-train": 1.0,
            "sequence-length": 24,
            "test-fraction": TEST_FRACTION,
            "learning-rate": RATE,
            "momentum": 0.9,
            "evaluate-every": 0,
            "evaluate-last": 1,
        }

    def job(self, method: str, seed: int) -> Job:
        """Return the job of one run."""
        algorithm, more = METHODS[method]
        place = self.place / "runs" / f"{method.replace(' ', '-').lower()}-{seed}"
        return Job(place, algorithm, {**self.common, **more, "seed": seed})

    def missing(self) -> Iterator[Job]:
        """Yield the unfinished runs, seed by seed."""
        for seed in range(self.arguments.seeds):
            for method in METHODS:
                job = self.job(method, seed)
                if finished(job) is None:
                    yield job

    def write(self) -> None:
        """Write the page."""
        rows: list[list[str]] = []
        results: dict[str, list[Any]] = {}
        seeds = "of a single seed"
        if self.arguments.seeds > 1:
            seeds = "mean ± standard deviation over the seeds from 0"
        for method in METHODS:
            jobs = [self.job(method, seed) for seed in range(self.arguments.seeds)]
            runs = [finished(job) for job in jobs]
            if any(run is None or "accuracy" not in run for run in runs):
                raise SystemExit(f"the runs of {method} are not finished")
            results[method] = runs
            rows.append([method, *self._cells(jobs, runs)])
        body = (
            f"{self.clients} clients, the products of two collections of customer "
            f"reviews, with {ROWS} sentences each, {TEST_FRACTION * 100:g} % of them "
            f"for testing; three classes. The model is the first {LAYERS} layers of a "
            "MiniLM and a linear head. The embeddings and all but the last "
            f"{LAYERS - FROZEN} of the layers are frozen in all rows, and all layers "
            "for a head only. All clients train in each of "
            f"{self.arguments.rounds} rounds of one epoch, with a learning rate of "
            f"{RATE}, the better of 0.03 and 0.1 on validation sets for the first two "
            "rows. *Up* is what one client sends in a round. *Accuracy* is the mean "
            f"over the clients' test sets in % after the last round, {seeds}; *CPU* "
            "is the mean CPU time of a run, with its evaluation.\n\n"
        )
        columns = ["", "up (kB)", "accuracy", "CPU (s)"]
        title = "Adapters: bytes, accuracy and CPU time on texts of different clients"
        seconds = sum(run["seconds"] for runs in results.values() for run in runs)
        data = {"methods": results, "seconds": seconds}
        write(NAME, title, body + markdown(columns, rows), data)

    def _cells(self, jobs: list[Job], runs: list[Any]) -> list[str]:
        """Return the cells of a row: bytes, accuracy and time."""
        accuracies = [100 * run["accuracy"] for run in runs]
        accuracy = f"{statistics.mean(accuracies):.1f}"
        if len(runs) > 1:
            accuracy += f" ± {statistics.stdev(accuracies):.1f}"
        up = self._bytes_up(jobs[0]) / self.clients / self.arguments.rounds
        seconds = statistics.mean(run["cpu-seconds"] for run in runs)
        return [f"{up / 1e3:,.1f}", accuracy, f"{seconds:.0f}"]

    def _bytes_up(self, job: Job) -> float:
        from flwr_frl.results.results import METRICS, read_rows

        rows = read_rows(job.place / job.algorithm / METRICS)
        return float(sum(row["bytes-up"] for row in rows))


def make_and_write() -> None:
    """Carry out the missing runs, then write the page."""
    table = Table(parse())
    carry_out_all(NAME, table.missing())
    table.write()


if __name__ == "__main__":
    raise SystemExit(exit_status(make_and_write))
