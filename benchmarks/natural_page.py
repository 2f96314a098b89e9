"""Comparisons of clients, tables and the picture of ``benchmarks/natural.py``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest

from benchmarks.common import DIFFERENCES, markdown

# Measures of which lower values are better.
ERRORS = ("rmse",)
# Differences with a larger p-value are not coloured in the picture.
LEVEL = 0.05
REFERENCES = ("fedavg", "local")
# Colours on which white text is easier to read.
WHITE_TEXT = 0.75


class Outcome(NamedTuple):
    """An algorithm's runs on a task with its learning rate, by seed.

    ``values`` are the means over the clients and the last rounds, and ``clients`` each
    client's value after the last round. Both are empty if every learning rate diverged.
    If there is a single run, ``run`` has its settings, commit and CPU time. A row of an
    earlier page has its numbers as ``kept``, in place of the clients' values.
    ``commit`` is the commit of the runs.
    """

    rate: float
    values: list[float]
    clients: list[dict[str, float]]
    megabytes: float
    run: dict[str, Any] | None = None
    kept: dict[str, Any] | None = None
    commit: str = ""


class Results(NamedTuple):
    """The outcomes of all algorithms on a task, its title and protocol."""

    title: str
    measure: str
    seeds: int
    outcomes: dict[str, Outcome]
    rounds: int = 0
    fraction: float = 1.0

    @property
    def sign(self) -> int:
        """Return 1 if higher values are better, and -1 otherwise."""
        return -1 if self.measure in ERRORS else 1

    @property
    def scale(self) -> int:
        """Return the factor from values to those of the tables."""
        return 1 if self.measure in ERRORS else 100

    def text(self, value: float) -> str:
        """Format a value; large ones, of models that diverged, with an exponent."""
        digits = 3 if self.measure in ERRORS else 1
        value *= self.scale
        return f"{value:.{digits}f}" if value < 1000 else f"{value:.0e}"

    def mean(self, algorithm: str) -> float:
        """Return the mean over the seeds; NaN if every learning rate diverged."""
        values = self.outcomes[algorithm].values
        return float(np.mean(values)) if values else np.nan

    def spread(self, algorithm: str) -> str:
        """Return the mean and standard deviation over the seeds."""
        if not (values := self.outcomes[algorithm].values):
            return "diverged"
        mean = self.text(float(np.mean(values)))
        if self.seeds == 1:
            return mean
        return f"{mean} ± {self.text(float(np.std(values, ddof=1)))}"

    def against(self, algorithm: str, other: str) -> tuple[int, int] | None:
        """Return for how many clients an algorithm is better and worse than another."""
        if (kept := self.outcomes[algorithm].kept) is not None:
            counts = kept.get(f"against-{other}")
            return counts and (counts[0], counts[1])
        if algorithm == other or other not in self.outcomes:
            return None
        both = self.outcomes[algorithm].clients, self.outcomes[other].clients
        return compare(*both, self.sign) if all(both) else None

    def worst(self, algorithm: str) -> float:
        """Return the mean over the worst tenth of the clients, and over the seeds."""
        clients, kept = self.outcomes[algorithm].clients, self.outcomes[algorithm].kept
        if kept is not None:
            return float(kept["worst"])
        return float(np.mean([worst_decile(each, self.sign) for each in clients]))

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return the numbers of the task's table, by algorithm.

        Algorithms of which every learning rate diverged have none.
        """
        return {
            name: {
                "rate": outcome.rate,
                "values": outcome.values,
                "worst": self.worst(name),
                "megabytes": outcome.megabytes,
                "commit": outcome.commit,
                # With these, a later page can add other algorithms.
                **(
                    {"clients": outcome.clients, "run": outcome.run}
                    if outcome.run
                    else {}
                ),
                **{
                    f"against-{other}": counts
                    for other in REFERENCES
                    if (counts := self.against(name, other))
                },
            }
            if outcome.values
            else {}
            for name, outcome in self.outcomes.items()
        }

    def gain(self, algorithm: str) -> float:
        """Return the lead over FedAvg: points, or % of FedAvg's error."""
        one, other = self.mean(algorithm), self.mean("fedavg")
        return 100 * (1 - one / other if self.measure in ERRORS else one - other)


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p-value of a sign test; 1 if no client differs."""
    count = better + worse
    return float(binomtest(better, count).pvalue) if count else 1.0


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


def balance(counts: tuple[int, int] | None) -> float:
    """Return (better - worse) / clients that differ; 0 if it is not significant."""
    if counts is None or sign_test(*counts) >= LEVEL:
        return 0.0
    return (counts[0] - counts[1]) / sum(counts)


def order(tasks: Mapping[str, Results]) -> list[str]:
    """Return all algorithms, by the mean of `balance` against FedAvg over the tasks."""
    found: dict[str, list[float]] = {}
    for results in tasks.values():
        for name in results.outcomes:
            found.setdefault(name, [])
            if results.outcomes[name].values and name != "fedavg":
                found[name].append(balance(results.against(name, "fedavg")))
    means = {name: float(np.mean(v)) if v else 0.0 for name, v in found.items()}
    return sorted(means, key=lambda name: -means[name])


def summary_table(tasks: Mapping[str, Results]) -> str:
    """Return the table of all algorithms on all tasks; the best are bold."""
    best = {}
    for task, results in tasks.items():
        means = {name: results.mean(name) for name in results.outcomes}
        finite = {n: results.sign * v for n, v in means.items() if np.isfinite(v)}
        best[task] = max(finite, key=lambda name: finite[name])
    rows = []
    for name in order(tasks):
        row = [f"`{name}`"]
        for task, results in tasks.items():
            cell = results.spread(name) if name in results.outcomes else "n/a"
            row.append(f"**{cell}**" if best[task] == name else cell)
        rows.append(row)
    heads = [f"{task} ({results.measure})" for task, results in tasks.items()]
    return markdown(["algorithm", *heads], rows)


def task_table(results: Results) -> str:
    """Return the table of a task, the best algorithm first."""
    finished = [name for name, outcome in results.outcomes.items() if outcome.values]
    finished.sort(key=lambda name: -results.sign * results.mean(name))
    lines = []
    for name in finished:
        outcome = results.outcomes[name]
        against = []
        for other in REFERENCES:
            counts = results.against(name, other)
            text = "{} : {} (p = {:.2g})"
            against.append(text.format(*counts, sign_test(*counts)) if counts else "")
        lines.append(
            [
                f"`{name}`",
                results.spread(name),
                results.text(results.worst(name)),
                *against,
                f"{outcome.rate:g}",
                f"{outcome.megabytes:.1f}",
            ]
        )
    lines += [
        [f"`{name}`", "diverged", *[""] * 5]
        for name in results.outcomes
        if name not in finished
    ]
    unit = "" if results.measure in ERRORS else " (%)"
    heads = [
        "algorithm",
        f"{results.measure}{unit}",
        "worst tenth",
        "clients better : worse than `fedavg`",
        "than `local`",
        "learning rate",
        "MB",
    ]
    return markdown(heads, lines)


def plot(tasks: Mapping[str, Results], path: Path) -> None:
    """Draw for how many clients each algorithm is better than FedAvg, and its lead."""
    from matplotlib.figure import Figure

    names = [name for name in order(tasks) if name != "fedavg"]
    shares = np.full((len(names), len(tasks)), np.nan)
    figure = Figure(figsize=(1.35 * len(tasks) + 2.5, 0.29 * len(names) + 2))
    axes = figure.subplots()
    for column, results in enumerate(tasks.values()):
        for row, name in enumerate(names):
            outcome = results.outcomes.get(name)
            if outcome is None or not outcome.values:
                text = "" if outcome is None else "diverged"
                axes.text(column, row, text, ha="center", va="center", fontsize=7)
                continue
            shares[row, column] = balance(results.against(name, "fedavg"))
            gain = results.gain(name)
            axes.text(
                column,
                row,
                f"{gain:+.1f}" if gain > -1000 else "<-1000",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if abs(shares[row, column]) > WHITE_TEXT else "black",
            )
    image = axes.imshow(shares, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    axes.set_yticks(range(len(names)), names, fontsize=9)
    titles = [
        f"{task}\n{'% of error' if results.measure in ERRORS else 'points'}"
        for task, results in tasks.items()
    ]
    axes.set_xticks(range(len(tasks)), titles, fontsize=9)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    bar = figure.colorbar(image, orientation="horizontal", pad=0.02, aspect=45)
    bar.set_ticks(
        [-1, 0, 1], labels=["all worse", "as many better as worse", "all better"]
    )
    bar.set_label("clients, compared with FedAvg")
    figure.savefig(path, dpi=120, bbox_inches="tight")


TUNED = """The learning rate of each is the best of {rates} on validation sets,
a quarter of each client's training examples, with separate seeds (ten for `heart`,
whose sets are small, otherwise one). If the best is the smallest or largest of these,
a quarter or four times of it is tried as well. Learning rates with which a run
diverged, with any seed, are excluded: the loss was not finite, or the error was above
{diverged:g}."""
SAME = """The learning rate of each algorithm for `{task}` is the one chosen for
`{other}` on [the page of all tasks](natural.md): runs take too long to try several."""
BODY = """Where do personal heads help clients that really differ? The tasks:

{clients}

All algorithms have the same model, rounds, local epochs (2) and batches (16).
{differences}

{learning_rates}

Other hyper-parameters have their defaults; tuning them could change the order. `n/a`:
the algorithm needs classes or, if it is `flute-regression`, has no use for them.

{commits}

Not included: `srpfl` and `flanp`, which differ from their inner methods only in time,
and only if devices do; `fedbn`, because the models have no batch norm; `hf-maml`, whose
first-order form is `per-fedavg`; and algorithms for adapters, asynchronous rounds and
gossip.

![The lead of each algorithm over FedAvg on each task]({image})

The lead over FedAvg is in points of accuracy or AUROC, or in % of FedAvg's error, by
the means of the table below. The colour shows for how many clients the algorithm is
better than FedAvg; it is white if p ≥ {level} in a sign test, which is not corrected
for the number of comparisons. The rows are ordered by the mean of the colours.

## All tasks

The mean over the clients and the last five rounds (the last round for algorithms that
fine-tune after the training, `fedbabu` and those that end with `-ft`), ± its standard
deviation over the seeds; accuracy and AUROC in %, the best in bold.

{summary}
The tables below also have the mean over the worst tenth of the clients after the last
round, averaged over the seeds. Clients are compared pair by pair, by their mean over
the seeds after the last round, with a two-sided sign test. A client is left out if it
has no value with some seed, such as the AUROC of a test set with a single class.

"""


def commits(tasks: Mapping[str, Results]) -> str:
    """Return which rows are at which commit, the most frequent commit first."""
    rows: dict[str, dict[str, None]] = {}
    for results in tasks.values():
        for name, outcome in results.outcomes.items():
            if outcome.values:
                rows.setdefault(outcome.commit, {})[f"`{name}`"] = None
    first, *others = sorted(rows, key=lambda commit: -len(rows[commit]))
    exceptions = [f"{', '.join(rows[c])}, at commit {c}" for c in others]
    return "; ".join([f"Runs are at commit {first}", *exceptions]) + "."


def body(
    tasks: Mapping[str, Results],
    *,
    image: str,
    learning_rates: str,
) -> str:
    """Return the page below its heading."""
    clients = [
        f"- {task}: {results.title}; {results.rounds} rounds, each with "
        f"{100 * results.fraction:.0f} % of the clients"
        for task, results in tasks.items()
    ]
    text = BODY.format(
        clients="\n".join(clients),
        commits=commits(tasks),
        differences=DIFFERENCES,
        learning_rates=learning_rates,
        image=image,
        level=LEVEL,
        summary=summary_table(tasks),
    )
    for results in tasks.values():
        heading = f"{results.title[0].upper()}{results.title[1:]}"
        seeds = "One seed" if results.seeds == 1 else f"{results.seeds} seeds"
        text += f"## {heading}\n\n{seeds}.\n\n{task_table(results)}\n"
    return text
