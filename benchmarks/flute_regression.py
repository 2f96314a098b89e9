"""FLUTE for regression on schools and patients, with and without its regularizer.

``python -m benchmarks.flute_regression --data-dir DIR`` compares `flute-regression`
with other algorithms on two tasks of `benchmarks.natural`. Without its regularizer,
`flute-regression` is FedPer. Learning rates and the regularizer's step size are chosen
as in `benchmarks.natural`, on validation sets with a separate seed. Finished runs in
``--output`` are reused.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import markdown, write
from benchmarks.natural import (
    RATES,
    TASKS,
    TUNING_SEED,
    clients_of,
    job_of,
    value_of,
)
from benchmarks.natural_page import compare, sign_test, worst_decile
from benchmarks.runs import Job, carry_out_all, exit_status, finished

CHOSEN = ("school", "parkinson")
ALGORITHMS = ("flute-regression", "fedper", "fedrep", "fedavg-ft", "fedavg", "local")
# Step sizes η_r of the regularizer
STEPS = (0.0005, 0.002, 0.008)
# A run with a larger error has diverged.
DIVERGED = 10.0


class Choice(NamedTuple):
    """A learning rate, and the step size of the regularizer (0: no regularizer)."""

    rate: float
    step: float


def choices(algorithm: str) -> list[Choice]:
    """Return the candidates for validation."""
    steps = STEPS if algorithm == "flute-regression" else (0.0,)
    return [Choice(rate, step) for rate in RATES for step in steps]


def job(
    output: Path, data: str, task: str, name: str, choice: Choice, seed: int
) -> Job:
    """Return the job of a run."""
    run = job_of(output, data, task, name, choice.rate, seed)
    if not choice.step:
        return run
    settings = {**run.settings, "regularizer-learning-rate": choice.step}
    return run._replace(place=run.place / f"{choice.step}", settings=settings)


def best(output: Path, data: str, task: str, name: str, seeds: int) -> Choice:
    """Return the choice with the lowest error on the validation sets.

    Choices with a diverged run, with any seed, are excluded.
    """

    def error(choice: Choice) -> float:
        runs = [
            job(output, data, task, name, choice, seed)
            for seed in (TUNING_SEED, *range(seeds))
        ]
        values = [value_of(run, task) for run in runs if finished(run) is not None]
        return values[0] if all(value < DIVERGED for value in values) else np.inf

    return min(choices(name), key=error)


def row(
    task: str, name: str, choice: Choice, runs: dict[str, list[Job]]
) -> tuple[list[str], dict[str, Any]]:
    """Return an algorithm's row of the table, and its numbers."""
    measure = TASKS[task].measure
    values = [value_of(run, task) for run in runs[name]]
    clients = {n: [clients_of(r, measure) for r in jobs] for n, jobs in runs.items()}
    worst = float(np.mean([worst_decile(c, -1) for c in clients[name]]))
    better, worse = compare(clients["flute-regression"], clients[name], -1)
    p = sign_test(better, worse)
    numbers = {**choice._asdict(), "values": values, "worst": worst}
    against = ""
    if name != "flute-regression":
        numbers |= {"better": better, "worse": worse}
        against = f"{better} : {worse} (p = {p:.2g})"
    spread = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    chosen = f"{choice.rate}" + (f", η_r {choice.step}" if choice.step else "")
    return [f"`{name}`", spread, f"{worst:.3f}", against, chosen], numbers


BODY = """Root-mean-square error on each client's test set, mean over the clients
(lower is better), of {seeds} seeds ± their standard deviation. `flute-regression` adds
the regularizer of FLUTE's linear case, with a network's features, to `fedper`: without
the regularizer they are the same. All have the same model, rounds, local epochs and
batches. Learning rates, of {rates}, and the regularizer's step size η_r, of {steps},
are chosen on validation sets, among those with which none of the algorithm's runs has
diverged. Clients are compared pair by pair, by their mean over the seeds, with a
two-sided sign test. The worst tenth is the mean over the worst tenth of the clients.

{tables}
The regularizer makes no significant difference to `fedper` on either task. Diverged
runs: {diverged}.
"""


def main() -> int:
    """Carry out the missing runs, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="published files")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", default="results/flute_regression")
    arguments = parser.parse_args()
    output, data_dir, seeds = (
        Path(arguments.output),
        arguments.data_dir,
        arguments.seeds,
    )

    def missing(jobs: Iterable[Job]) -> list[Job]:
        return [run for run in jobs if finished(run) is None]

    def tuning() -> list[Job]:
        return missing(
            job(output, data_dir, task, name, choice, TUNING_SEED)
            for task in CHOSEN
            for name in ALGORITHMS
            for choice in choices(name)
        )

    def of_seeds(task: str, name: str) -> list[Job]:
        choice = best(output, data_dir, task, name, seeds)
        return [
            job(output, data_dir, task, name, choice, seed) for seed in range(seeds)
        ]

    def waiting() -> list[Job]:
        return missing(
            run
            for task in CHOSEN
            for name in ALGORITHMS
            for run in of_seeds(task, name)
        )

    def diverged() -> list[str]:
        found = []
        for task in CHOSEN:
            for name in ALGORITHMS:
                for choice in choices(name):
                    runs = [
                        job(output, data_dir, task, name, choice, seed)
                        for seed in (TUNING_SEED, *range(seeds))
                    ]
                    runs = [run for run in runs if finished(run) is not None]
                    bad = [run for run in runs if not value_of(run, task) < DIVERGED]
                    if bad:
                        text = f"`{name}` on {task} with {choice.rate}"
                        text += f" and η_r {choice.step}" if choice.step else ""
                        found.append(f"{text} in {len(bad)} of {len(runs)} runs")
        return found

    def make() -> None:
        carry_out_all("learning rates", tuning(), tuning)
        # If a choice diverges with one of the seeds, the next best one replaces it.
        while left := waiting():
            carry_out_all("regression", left[:1], waiting)
        tables, data = [], dict[str, dict[str, Any]]()
        heads = ["algorithm", "error", "worst tenth"]
        heads += ["clients for which `flute-regression` is better : worse"]
        heads += ["learning rate"]
        for task in CHOSEN:
            runs = {name: of_seeds(task, name) for name in ALGORITHMS}
            data[task], lines = {}, []
            for name in ALGORITHMS:
                choice = best(output, data_dir, task, name, seeds)
                line, data[task][name] = row(task, name, choice, runs)
                lines.append(line)
            title = TASKS[task].title
            text = markdown(heads, lines)
            tables.append(f"## {title[0].upper()}{title[1:]}\n\n{text}")
        body = BODY.format(
            seeds=seeds,
            rates=", ".join(map(str, RATES)),
            steps=", ".join(map(str, STEPS)),
            diverged="; ".join(diverged()),
            tables="\n".join(tables),
        )
        write("flute_regression", "FLUTE's regularizer for regression", body, data)

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
