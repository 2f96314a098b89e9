"""Clients that really differ: people, hospitals, schools, fields.

``python -m benchmarks.natural --data-dir DIR`` runs the algorithms on the tasks of
`benchmarks.natural_tasks`. For each algorithm and task, the learning rate is the best
of three on validation sets, a quarter of each client's training examples, with a
separate seed. Finished runs in ``--output`` are not repeated.
"""

import argparse
from collections.abc import Iterator
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import RESULTS, markdown, write
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.strategies.report.results import read_json
from flwr_frl.task.settings import Setting

RATES = (0.01, 0.05, 0.2)


class NaturalTask(NamedTuple):
    """A task: clients, fraction sampled, rounds, measure, title, rates and seeds."""

    clients: int
    fraction: float
    rounds: int
    measure: str
    title: str
    rates: tuple[float, ...] = RATES
    seeds: int = 5


TASKS = {
    "heart": NaturalTask(4, 1.0, 30, "auroc", "heart disease, 4 hospitals", seeds=10),
    "landmine": NaturalTask(29, 0.5, 40, "auroc", "landmines, 29 fields"),
    "school": NaturalTask(139, 0.2, 40, "rmse", "exam scores, 139 schools", seeds=10),
    "parkinson": NaturalTask(42, 0.5, 40, "rmse", "Parkinson, 42 patients", seeds=10),
    "wisdm": NaturalTask(36, 0.5, 40, "accuracy", "activities, 36 people"),
    "speech": NaturalTask(6, 1.0, 15, "accuracy", "spoken digits, 6 speakers"),
    "writers": NaturalTask(12, 0.5, 15, "accuracy", "written digits, 12 writers"),
    "roles": NaturalTask(
        30, 1 / 3, 15, "accuracy", "next characters, 30 roles", (0.2, 0.8, 3.2)
    ),
}
# Measures of which lower values are better.
ERRORS = ("rmse",)
ALGORITHMS = (
    "fedavg",
    "fedavg-ft",
    "fedprox",
    "local",
    "fedrep",
    "fedper",
    "lg-fedavg",
    "ditto",
    "apfl",
    "pfedme",
    "per-fedavg",
    "fedbabu",
    "fedala",
    "fed-mtl",
    "flute",
)
# Algorithms that need classes.
CLASSES = ("flute", "fedproto", "fedrod", "fedpac", "pfedfda", "gpfl")
# Seed of the runs by which a learning rate is chosen.
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
    """Return a run; with the tuning seed, it is evaluated on validation sets."""
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
    if seed == TUNING_SEED:
        settings |= {"validation-fraction": 0.25, "evaluate-on": "validation"}
    return Job(output / task / algorithm / f"{rate}-{seed}", algorithm, settings)


def value_of(job: Job, task: str) -> float:
    """Return a finished run's measure; NaN if it failed."""
    result = finished(job) or {}
    return float(result.get(TASKS[task].measure, np.nan))


def chosen_rate(output: Path, data_dir: str, task: str, algorithm: str) -> float:
    """Return the learning rate that is best on the validation sets."""
    rates = TASKS[task].rates
    jobs = [job_of(output, data_dir, task, algorithm, r, TUNING_SEED) for r in rates]
    values = [value_of(job, task) for job in jobs]
    sign = -1 if TASKS[task].measure in ERRORS else 1
    scores = np.nan_to_num([sign * value for value in values], nan=-np.inf)
    return rates[int(np.argmax(scores))]


def pairs_of(tasks: list[str], algorithms: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each task with each algorithm that can run on it."""
    for task in tasks:
        for algorithm in algorithms:
            if TASKS[task].measure == "accuracy" or algorithm not in CLASSES:
                yield task, algorithm


def clients_of(job: Job, measure: str) -> dict[str, float]:
    """Return each client's final measure; clients without one are left out."""
    clients = read_json(job.place / job.algorithm / "clients.json")
    return {n: c[measure] for n, c in clients.items() if c.get(measure) is not None}


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p-value of a sign test."""
    n, k = better + worse, min(better, worse)
    tail: int = sum(comb(n, i) for i in range(k + 1))
    return float(min(1.0, 2 * tail / 2**n))


def compare(
    clients: list[dict[str, float]], others: list[dict[str, float]], sign: int
) -> tuple[int, int]:
    """Return how many clients are better and worse, by their mean over the seeds."""
    names = set.intersection(*map(set, [*clients, *others]))
    better = worse = 0
    for name in names:
        pairs = zip(clients, others, strict=True)
        ahead = sign * float(np.mean([one[name] - other[name] for one, other in pairs]))
        # Rounding errors are no difference.
        better += ahead > 1e-9
        worse += ahead < -1e-9
    return better, worse


def worst_decile(clients: dict[str, float], sign: int) -> float:
    """Return the mean of the worst tenth of the clients, at least one."""
    values = sorted(clients.values(), key=lambda value: sign * value)
    return float(np.mean(values[: max(1, len(values) // 10)]))


def text(value: float, digits: int) -> str:
    """Format a number; large ones, of models that diverged, with an exponent."""
    return f"{value:.{digits}f}" if value < 1000 else f"{value:.0e}"


def table(
    output: Path, data_dir: str, task: str, algorithms: list[str]
) -> tuple[str, dict[str, Any]]:
    """Return a task's table, the best algorithm first, and its numbers."""
    about = TASKS[task]
    sign = -1 if about.measure in ERRORS else 1
    scale, digits = (1, 3) if about.measure in ERRORS else (100, 1)
    data: dict[str, Any] = {}
    finals: dict[str, list[dict[str, float]]] = {}
    diverged = []
    for algorithm in algorithms:
        rate = chosen_rate(output, data_dir, task, algorithm)
        jobs = [
            job_of(output, data_dir, task, algorithm, rate, seed)
            for seed in range(about.seeds)
        ]
        values = [value_of(job, task) for job in jobs]
        if failed := int(np.isnan(values).sum()):
            cell = f"diverged with {failed} of {about.seeds} seeds"
            diverged.append([f"`{algorithm}`", cell, "", "", "", f"{rate}", ""])
            continue
        finals[algorithm] = [clients_of(job, about.measure) for job in jobs]
        sizes = [(finished(job) or {})["bytes"] / 1e6 for job in jobs]
        data[algorithm] = {
            "rate": rate,
            "values": values,
            "worst": float(np.mean([worst_decile(c, sign) for c in finals[algorithm]])),
            "megabytes": float(np.mean(sizes)),
        }
    lines = []
    order = sorted(data, key=lambda name: -sign * float(np.mean(data[name]["values"])))
    for name in order:
        numbers = data[name]
        against = []
        for other in ("fedavg", "local"):
            if name == other or other not in finals:
                against.append("")
                continue
            better, worse = compare(finals[name], finals[other], sign)
            numbers[f"against-{other}"] = better, worse
            p = sign_test(better, worse)
            against.append(f"{better} : {worse} (p = {p:.2g})")
        scores = scale * np.array(numbers["values"])
        mean, spread = (text(v, digits) for v in (scores.mean(), scores.std(ddof=1)))
        lines.append(
            [
                f"`{name}`",
                f"{mean} ± {spread}",
                text(scale * numbers["worst"], digits),
                *against,
                f"{numbers['rate']}",
                f"{numbers['megabytes']:.1f}",
            ]
        )
    unit = "" if about.measure in ERRORS else " (%)"
    heads = [
        "algorithm",
        f"{about.measure}{unit}",
        "worst tenth",
        "clients better : worse than `fedavg`",
        "than `local`",
        "learning rate",
        "MB",
    ]
    return markdown(heads, lines + diverged), {name: data[name] for name in order}


def plot(data: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the measure of each algorithm, a panel for each task."""
    from matplotlib.figure import Figure

    columns = min(4, len(data))
    rows = -(-len(data) // columns)
    figure = Figure(figsize=(4 * columns, 3.5 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (task, numbers) in zip(panels, data.items(), strict=False):
        measure = TASKS[task].measure
        scale = 1 if measure in ERRORS else 100
        names = list(numbers)[::-1]
        if measure in ERRORS:
            limit = 3 * np.median([np.mean(numbers[n]["values"]) for n in names])
            names = [n for n in names if np.mean(numbers[n]["values"]) < limit]
        means = [scale * float(np.mean(numbers[n]["values"])) for n in names]
        spread = [scale * float(np.std(numbers[n]["values"], ddof=1)) for n in names]
        colours = {"fedavg": "C7", "local": "C3"}
        axes.barh(
            range(len(names)),
            means,
            xerr=spread,
            color=[colours.get(n, "C0") for n in names],
        )
        axes.set_yticks(range(len(names)), names, fontsize=8)
        low, high = min(means), max(means)
        margin = 0.15 * (high - low) + max(spread)
        axes.set_xlim(low - margin, high + margin)
        unit = "lower is better" if measure in ERRORS else "%"
        axes.set(title=TASKS[task].title, xlabel=f"{measure} ({unit})")
        axes.grid(alpha=0.3, axis="x")
    for axes in panels[len(data) :]:
        axes.remove()
    figure.savefig(path, dpi=120)


BODY = """Where do personal heads help clients that really differ? Tasks: {clients}.
All algorithms have the same model, rounds, local epochs (2) and batches (16).
The learning rate of each is the best of {rates} on
validation sets; one at an end of these may not be the best possible. Other
hyper-parameters have their defaults. The first column is the mean over the last five
rounds (`fedavg-ft` and `fedbabu`: the last round), ± its standard deviation over the
seeds. The worst tenth is the mean over the worst tenth of the clients after the last
round, averaged over the seeds. Clients are compared pair by pair, by their mean over
the seeds after the last round, with a two-sided sign test.

![Each algorithm on each task, the standard deviation over the seeds as a line]({image})

Algorithms that diverged with some seed are not in the picture; they did not with the
seed by which their learning rate was chosen.

{tables}
"""


def main() -> int:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithms", nargs="*", default=list(ALGORITHMS))
    parser.add_argument("--data-dir", required=True, help="the published files")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--name", default="natural", help="name of the page")
    parser.add_argument("--output", default="results/natural")
    arguments = parser.parse_args()
    output, data_dir = Path(arguments.output), arguments.data_dir
    pairs = list(pairs_of(arguments.tasks, arguments.algorithms))

    def tuning() -> list[Job]:
        jobs = [
            job_of(output, data_dir, task, algorithm, rate, TUNING_SEED)
            for task, algorithm in pairs
            for rate in TASKS[task].rates
        ]
        return [job for job in jobs if finished(job) is None]

    def waiting() -> list[Job]:
        jobs = [
            job_of(output, data_dir, *pair, chosen_rate(output, data_dir, *pair), seed)
            for pair in pairs
            for seed in range(TASKS[pair[0]].seeds)
        ]
        return [job for job in jobs if finished(job) is None]

    def make() -> None:
        carry_out_all("learning rates", tuning(), tuning)
        carry_out_all("natural", waiting(), waiting)
        tables, data = [], {}
        for task in arguments.tasks:
            names = [algorithm for t, algorithm in pairs if t == task]
            rows, numbers = table(output, data_dir, task, names)
            title = TASKS[task].title
            about = f"{title[0].upper()}{title[1:]}\n\n{TASKS[task].seeds} seeds."
            tables.append(f"## {about}\n\n{rows}")
            data[task] = numbers
        plot(data, RESULTS / f"{arguments.name}.png")
        body = BODY.format(
            clients="; ".join(TASKS[task].title for task in arguments.tasks),
            rates=" or ".join(sorted({str(TASKS[t].rates) for t in arguments.tasks})),
            image=f"{arguments.name}.png",
            tables="\n".join(tables),
        )
        write(arguments.name, "Clients that really differ", body, data)

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
