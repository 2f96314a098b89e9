"""Clients that really differ: people, hospitals, schools, fields.

``python -m benchmarks.natural --data-dir DIR`` runs the algorithms on the tasks of
`benchmarks.natural_tasks`. The learning rate of each is chosen on validation sets, a
quarter of each client's training examples, with a separate seed. Finished runs in
``--output``, or single ones on the page, are not repeated. If algorithms are named, the
rows of all others are those of the existing page. ``fedavg`` and ``local``, with which
clients are compared, then run again with the page's learning rates.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import RESULTS, write
from benchmarks.natural_page import (
    ERRORS,
    REFERENCES,
    SAME,
    TUNED,
    Outcome,
    Results,
    body,
    plot,
)
from benchmarks.runs import (
    RESULT,
    Job,
    alike,
    carry_out_all,
    exit_status,
    finished,
    kept,
    of_page,
)
from flwr_frl.common.settings import Setting
from flwr_frl.results.results import read_json

RATES = (0.01, 0.05, 0.2)
# Factor by which the learning rates are extended, and the most that are tried.
FACTOR, MOST_RATES = 4, 4
# A run with a larger error has diverged.
DIVERGED = 10.0


class NaturalTask(NamedTuple):
    """A task: clients, fraction sampled, rounds, measure, title, rates and seeds.

    Learning rates are chosen by as many runs as there are tuning seeds, or are those of
    another task, ``same_rates``, on the page of all tasks.
    """

    clients: int
    fraction: float
    rounds: int
    measure: str
    title: str
    rates: tuple[float, ...] = RATES
    seeds: int = 5
    tuning_seeds: int = 1
    same_rates: str = ""


TASKS = {
    # The validation sets of four hospitals are too small for a single seed.
    "heart": NaturalTask(
        4, 1.0, 30, "auroc", "heart disease, 4 hospitals", seeds=10, tuning_seeds=10
    ),
    "landmine": NaturalTask(29, 0.5, 40, "auroc", "landmines, 29 fields"),
    "school": NaturalTask(139, 0.2, 40, "rmse", "exam scores, 139 schools"),
    "parkinson": NaturalTask(42, 0.5, 40, "rmse", "Parkinson, 42 patients"),
    "wisdm": NaturalTask(36, 0.5, 40, "accuracy", "activities, 36 people"),
    "speech": NaturalTask(6, 1.0, 15, "accuracy", "spoken digits, 6 speakers"),
    "writers": NaturalTask(12, 0.5, 15, "accuracy", "written digits, 12 writers"),
    "roles": NaturalTask(
        30, 1 / 3, 15, "accuracy", "next characters, 30 roles", (0.2, 0.8, 3.2)
    ),
    # A run takes five minutes, so that one for each learning rate is too slow.
    "leaf_roles": NaturalTask(
        *(139, 0.1, 15, "accuracy", "next characters, 139 roles, LEAF's LSTM"),
        seeds=1,
        same_rates="roles",
    ),
}
ALGORITHMS = (
    *("fedavg", "fedprox", "scaffold", "feddyn", "moon"),
    *("fedavg-ft", "scaffold-ft", "per-fedavg"),
    *("fedrep", "fedper", "fedbabu", "lg-fedavg", "flute", "flute-star"),
    *("flute-regression", "fedrod", "fedcp", "fedpac", "fedas", "gpfl", "pfedfda"),
    *("feddbe", "fedproto", "knn-per", "ditto", "apfl", "pfedme", "fedala", "fedamp"),
    *("fedfomo", "l2gd", "fed-mtl", "ifca", "pfedhn", "local"),
)
# Algorithms that need classes.
CLASSES = (
    *("flute", "flute-star", "fedproto", "fedrod", "fedpac", "pfedfda", "gpfl"),
    "knn-per",
)
REGRESSION = ("flute-regression",)
# First seed of the runs by which a learning rate is chosen.
TUNING_SEED = 1000
COMMON: dict[str, Setting] = {
    "batch-size": 16,
    "representation-epochs": 2,
    "head-epochs": 2,
    "evaluate-every": 0,
    "evaluate-last": 5,
    "finetune-epochs": 10,
}


def job_of(
    output: Path, data_dir: str, task: str, algorithm: str, rate: float, seed: int
) -> Job:
    """Return a run; with a tuning seed, it is evaluated on validation sets."""
    about = TASKS[task]
    settings: dict[str, Setting] = {
        **COMMON,
        "task": f"benchmarks.natural_tasks:{task}",
        "data-dir": data_dir,
        "num-clients": about.clients,
        "fraction-train": about.fraction,
        "num-server-rounds": about.rounds,
        "learning-rate": rate,
        "seed": seed,
    }
    if seed >= TUNING_SEED:
        settings |= {"validation-fraction": 0.25, "evaluate-on": "validation"}
    return Job(output / task / algorithm / f"{rate}-{seed}", algorithm, settings)


def missing(jobs: Iterable[Job]) -> list[Job]:
    """Return the runs that are not finished."""
    return [job for job in jobs if finished(job) is None]


def value_of(job: Job, task: str) -> float:
    """Return a finished run's measure; NaN if it failed or is not finite."""
    value = (finished(job) or {}).get(TASKS[task].measure)
    return np.nan if value is None else float(value)


def diverged(job: Job, task: str) -> bool:
    """Return whether a run is finished and failed or has a large error."""
    if finished(job) is None:
        return False
    value = value_of(job, task)
    return bool(np.isnan(value) or (TASKS[task].measure in ERRORS and value > DIVERGED))


def clients_of(job: Job, measure: str) -> dict[str, float]:
    """Return each client's final measure; clients without one are left out."""
    clients = read_json(job.place / job.algorithm / "clients.json")
    return {n: c[measure] for n, c in clients.items() if c.get(measure) is not None}


def pairs_of(tasks: list[str], algorithms: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each task with each algorithm that can run on it."""
    for task in tasks:
        excluded = CLASSES if TASKS[task].measure in ERRORS else REGRESSION
        for name in algorithms:
            if name not in excluded:
                yield task, name


def choice_of_rates(tasks: list[str]) -> str:
    """Return how the learning rates of these tasks are chosen."""
    abouts = {task: TASKS[task] for task in tasks}
    same = [
        SAME.format(task=task, other=about.same_rates)
        for task, about in abouts.items()
        if about.same_rates
    ]
    if len(same) == len(abouts):
        return "\n\n".join(same)
    others = "".join(
        f" ({str(about.rates).strip('()')} for `{task}`)"
        for task, about in abouts.items()
        if about.rates != RATES
    )
    rates = str(RATES).strip("()") + others
    return "\n\n".join([TUNED.format(rates=rates, diverged=DIVERGED), *same])


class Runs:
    """An algorithm's runs on a task."""

    def __init__(self, output: Path, data_dir: str, task: str, algorithm: str) -> None:
        self.task, self.about, self.algorithm = task, TASKS[task], algorithm
        self.of_pair = output, data_dir, task, algorithm
        # A learning rate that is not chosen anew.
        self.rate: float | None = None

    def of(self, rate: float) -> list[Job]:
        """Return the runs with a learning rate, for all seeds."""
        seeds = range(self.about.seeds)
        return [job_of(*self.of_pair, rate, seed) for seed in seeds]

    def tuning(self, rate: float) -> list[Job]:
        """Return the runs by which a learning rate is judged."""
        seeds = range(TUNING_SEED, TUNING_SEED + self.about.tuning_seeds)
        return [job_of(*self.of_pair, rate, seed) for seed in seeds]

    def score(self, rate: float) -> float:
        """Return how good a learning rate is on the validation sets.

        It is -inf if a run with this learning rate has diverged.
        """
        jobs = self.tuning(rate)
        if any(diverged(job, self.task) for job in (*jobs, *self.of(rate))):
            return -np.inf
        sign = -1 if self.about.measure in ERRORS else 1
        return sign * float(np.mean([value_of(job, self.task) for job in jobs]))

    def choose(self) -> tuple[float | None, list[Job]]:
        """Return the learning rate, and the runs that are missing.

        The rate is None if all those tried have diverged, or if runs by which it is
        chosen are missing.
        """
        if self.rate:
            return self.rate, missing(self.of(self.rate))
        if same := self.about.same_rates:
            page = of_page(RESULTS / "natural.json")["tasks"][same]
            rate = page[self.algorithm].get("rate")
            return rate, missing(self.of(rate)) if rate else []
        rates = sorted(self.about.rates)
        while not (jobs := missing(job for rate in rates for job in self.tuning(rate))):
            scores = [self.score(rate) for rate in rates]
            # Lower rates are tried if all have diverged.
            best = rates[int(np.argmax(scores))]
            beyond = {rates[0]: best / FACTOR, rates[-1]: best * FACTOR}.get(best)
            if beyond is None or len(rates) == MOST_RATES:
                chosen = best if np.isfinite(max(scores)) else None
                return chosen, missing(self.of(best)) if chosen else []
            rates = sorted([*rates, beyond])
        return None, jobs

    def seconds(self) -> float:
        """Return the CPU time of all runs, also of those with other learning rates."""
        folder = self.of(self.about.rates[0])[0].place.parent
        found = map(read_json, folder.glob(f"*/{RESULT}"))
        return float(sum(result["cpu-seconds"] for result in found))

    def outcome(self) -> Outcome:
        """Return the results with the chosen learning rate."""
        rate, _ = self.choose()
        if rate is None:
            return Outcome(np.nan, [], [], np.nan)
        jobs = self.of(rate)
        results, run = [finished(job) or {} for job in jobs], None
        commits = {result["commit"] for result in results}
        if len(jobs) == 1:
            settings = {n: v for n, v in jobs[0].settings.items() if n != "data-dir"}
            run = {n: results[0][n] for n in ("commit", "cpu-seconds")}
            run["settings"] = settings
        return Outcome(
            rate,
            [value_of(job, self.task) for job in jobs],
            [clients_of(job, self.about.measure) for job in jobs],
            float(np.mean([result["bytes"] / 1e6 for result in results])),
            run,
            commit=", ".join(sorted(commits)),
        )

    def on_page(self, page: Mapping[str, Any]) -> Outcome | None:
        """Return the results of an earlier page, if it has the same single run."""
        of_algorithm = page.get("tasks", {}).get(self.task, {}).get(self.algorithm, {})
        run = kept(of_algorithm.get("run"))
        if run is None or of_algorithm["rate"] != self.choose()[0]:
            return None
        (job,) = self.of(of_algorithm["rate"])
        if not alike(run["settings"], job.settings):
            return None
        names = ("rate", "values", "clients", "megabytes")
        row = {name: of_algorithm[name] for name in names}
        return Outcome(**row, run=run, commit=run["commit"])

    def kept(self, page: Mapping[str, Any]) -> Outcome | None:
        """Return the row of an existing page, which may have diverged.

        None for an algorithm with which clients are compared; it gets the row's rate.
        """
        row = page["tasks"][self.task][self.algorithm]
        if not row:
            return Outcome(np.nan, [], [], np.nan)
        if self.algorithm in REFERENCES:
            self.rate = row["rate"]
            return None
        return Outcome(
            *(row["rate"], row["values"], row.get("clients", []), row["megabytes"]),
            row.get("run"),
            kept=row,
            commit=row.get("commit", page["about"]["commit"]),
        )


def main() -> int:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithms", nargs="*", default=list(ALGORITHMS))
    parser.add_argument("--data-dir", required=True, help="the published files")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--name", default="natural", help="name of the page")
    parser.add_argument("--output", default="results/natural")
    arguments = parser.parse_args()
    pairs = list(pairs_of(arguments.tasks, list(ALGORITHMS)))
    all_runs = [
        Runs(Path(arguments.output), arguments.data_dir, *pair) for pair in pairs
    ]

    def make() -> None:
        page = of_page(RESULTS / f"{arguments.name}.json")
        named = arguments.algorithms
        earlier = {
            runs: runs.on_page(page) if runs.algorithm in named else runs.kept(page)
            for runs in all_runs
        }
        for runs in all_runs:
            # Each run can change which learning rate is the best.
            while not earlier[runs] and (jobs := runs.choose()[1]):
                carry_out_all(f"{runs.task}, {runs.algorithm}", jobs[:1])
        tasks: dict[str, Results] = {}
        seconds = 0.0
        for runs in all_runs:
            about = runs.about
            protocol = about.seeds, {}, about.rounds, about.fraction
            empty = Results(about.title, about.measure, *protocol)
            found = tasks.setdefault(runs.task, empty)
            outcome = earlier[runs] or runs.outcome()
            found.outcomes[runs.algorithm] = outcome
            seconds += outcome.run["cpu-seconds"] if outcome.run else runs.seconds()
        image = f"{arguments.name}.png"
        plot(tasks, RESULTS / image)
        text = body(tasks, image=image, learning_rates=choice_of_rates(arguments.tasks))
        data = {
            "tasks": {task: results.numbers() for task, results in tasks.items()},
            "seconds": seconds,
        }
        write(arguments.name, "Clients that really differ", text, data)

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
