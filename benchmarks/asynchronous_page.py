"""Tables and plots of ``benchmarks/asynchronous.py``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.asynchronous import (
    LIMITS,
    METHODS,
    SPEEDS,
    Run,
    Setup,
    job_of,
    limited_speeds,
    times_of,
)
from benchmarks.common import RESULTS, markdown
from flwr_frl.results.results import METRICS, read_json, read_rows
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.participation import Participation

# Line styles; synchronous methods have solid lines.
STYLES = {"flanp": "--", "srpfl": "--", "fedbuff": ":", "fedasync": "-."}
# Methods whose staleness and shares of the updates are shown
SHOWN = ("fedbuff", "fedasync", "fedbuff/fedrep")
# The histogram's last bar includes all larger values.
LARGEST = 20
Rows = list[dict[str, Any]]


def speeds_of(setup: Setup, speeds: str, seed: int) -> SpeedModel:
    """Return the speed model that the runs use."""
    settings = SPEEDS[speeds]
    stragglers = float(settings.get("straggler-fraction", 0.1))
    name = str(settings["speed-model"])
    return SpeedModel(name, setup.data.clients, seed, stragglers)


def rows_of(setup: Setup, run: Run) -> Rows:
    """Return a run's rows, with cumulative simulated time, client updates and bytes."""
    data, method = setup.data, METHODS[run.name]
    rows = read_rows(job_of(setup, run).place / method.algorithm / METRICS)
    model = speeds_of(setup, run.speeds, run.seed)
    sampler = Participation(data.sampled / data.clients, 1, run.seed)
    updates, size, clock = 0, 0.0, 0.0
    for row in rows:
        server_round = row["round"]
        updates += row["clients"] + row.get("dropped", 0)
        size += row["bytes-down"] + row["bytes-up"]
        if method.algorithm == method.reference:
            asked = sampler.sample(server_round, list(range(data.clients)))
            computing = float(model.times(server_round)[asked].max())
            clock += computing + run.communication
            row["seconds-simulated"] = clock
        elif "version" not in row:
            row["seconds-simulated"] += run.communication * server_round
        row |= {"updates": updates, "megabytes": size / 1e6}
    return rows


def reached(rows: Rows, level: float) -> dict[str, Any]:
    """Return the first row that reaches an accuracy, or an empty dictionary."""
    return next((r for r in rows if r.get("accuracy", -1) >= level), {})


def final(rows: Rows) -> float:
    """Return the mean accuracy of the last tenth of the tests, at least one."""
    tested = [row["accuracy"] for row in rows if "accuracy" in row]
    return float(np.mean(tested[-max(1, len(tested) // 10) :]))


def clients_of(setup: Setup, run: Run) -> list[dict[str, Any]]:
    """Return each client's final metrics, in the order of the clients."""
    place = job_of(setup, run).place / METHODS[run.name].algorithm / "clients.json"
    clients: dict[str, dict[str, Any]] = read_json(place)
    return list(clients.values())


def worst_tenth(setup: Setup, run: Run) -> float:
    """Return the mean final accuracy of the worst tenth of the clients."""
    values = sorted(client["accuracy"] for client in clients_of(setup, run))
    return float(np.mean(values[: max(1, len(values) // 10)]))


def comparison(setup: Setup, run: Run) -> dict[str, float]:
    """Return a run's numbers at 95 % of its reference's accuracy and at its end."""
    reference = run._replace(name=METHODS[run.name].reference)
    rows = rows_of(setup, run)
    row = reached(rows, 0.95 * final(rows_of(setup, reference)))
    return {
        "time": row.get("seconds-simulated", np.nan),
        "updates": row.get("updates", np.nan),
        "megabytes": row.get("megabytes", np.nan),
        "final": final(rows),
        "worst": worst_tenth(setup, run),
        "total-time": rows[-1]["seconds-simulated"],
    }


def mean(numbers: Sequence[float]) -> float:
    """Return the mean of the numbers that are not NaN; there must be at least one."""
    return float(np.nanmean(numbers))


def table(setup: Setup, speeds: str) -> tuple[str, dict[str, Any]]:
    """Return the table of a speed model, and its numbers."""
    lines, data = [], {}
    for name in METHODS:
        cells, numbers = [f"`{name}`"], {}
        for communication in times_of(setup.data, speeds):
            found = [
                comparison(setup, Run(name, speeds, communication, seed))
                for seed in range(setup.seeds)
            ]
            columns = {key: [one[key] for one in found] for key in found[0]}
            numbers[str(communication)] = columns
            missed = int(np.isnan(columns["time"]).sum())
            if missed == setup.seeds:
                cells.append("not reached")
                continue
            count = f" ({setup.seeds - missed} of {setup.seeds} seeds)"
            at = [mean(columns[key]) for key in ("time", "updates", "megabytes")]
            text = f"{at[0]:.1f} / {at[1]:.0f} / {at[2]:.0f}"
            cells.append(text + (count if missed else ""))
        ends = numbers["0"]
        accuracy = f"{100 * mean(ends['final']):.1f}"
        if setup.seeds > 1:
            accuracy += f" ± {100 * np.std(ends['final']):.1f}"
        total, worst = mean(ends["total-time"]), 100 * mean(ends["worst"])
        lines.append([*cells, accuracy, f"{worst:.1f}", f"{total:.0f}"])
        data[name] = numbers
    heads = [f"C.T. {c}" for c in times_of(setup.data, speeds)]
    heads = ["method", *heads, "final (%)", "worst tenth (%)", "time at the end"]
    return markdown(heads, lines), data


def staleness_of(setup: Setup, run: Run) -> dict[int, int]:
    """Return the number of a run's accepted changes by their staleness."""
    return Counter(age for row in rows_of(setup, run) for age in row["staleness"])


def histogram(setup: Setup, path: Path) -> None:
    """Draw the distribution of the changes' staleness for each speed model."""
    from matplotlib.figure import Figure

    speeds = limited_speeds(setup.data)
    figure = Figure(figsize=(4 * len(speeds), 3.2), layout="constrained")
    panels = figure.subplots(1, len(speeds), squeeze=False)[0]
    for axes, name in zip(panels, speeds, strict=True):
        ages: Counter[int] = Counter()
        for seed in range(setup.seeds):
            ages.update(staleness_of(setup, Run("fedbuff", name, 0, seed)))
        shown = range(min(max(ages), LARGEST) + 1)
        heights = np.array([ages[age] for age in shown], dtype=float)
        heights[-1] += sum(count for age, count in ages.items() if age > LARGEST)
        axes.bar(shown, heights / sum(ages.values()))
        axes.set(
            title=f"fedbuff, {name}", xlabel=f"staleness (last bar: ≥ {shown[-1]})"
        )
        # Few changes have a large staleness.
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.2%}")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def sharing(setup: Setup, run: Run) -> dict[str, float]:
    """Return the staleness of a run's changes and the slow clients' share of them."""
    rows = rows_of(setup, run)
    updates = np.array([client["updates"] for client in clients_of(setup, run)])
    model = speeds_of(setup, run.speeds, run.seed)
    slow = np.argsort(model.times(1))[-max(1, setup.data.clients // 10) :]
    dropped = sum(row["dropped"] for row in rows)
    return {
        "staleness-mean": float(np.mean([row["staleness-mean"] for row in rows])),
        "staleness-max": max(row["staleness-max"] for row in rows),
        "dropped": dropped / (dropped + updates.sum()),
        "share": updates[slow].sum() / updates.sum(),
        "without": float(np.mean(updates == 0)),
        "final": final(rows),
        "worst": worst_tenth(setup, run),
    }


def shares(setup: Setup) -> tuple[str, dict[str, Any]]:
    """Return the table of staleness and of the slow clients' share, and its numbers."""
    lines, data = [], {}
    limited = [("fedbuff", limit) for limit in LIMITS]
    for speeds in limited_speeds(setup.data):
        for name, limit in [*((name, -1) for name in SHOWN), *limited]:
            found = [
                sharing(setup, Run(name, speeds, 0, seed, limit))
                for seed in range(setup.seeds)
            ]
            of = {key: [one[key] for one in found] for key in found[0]}
            method = f"`{name}`" + (f", `max-staleness={limit}`" * (limit >= 0))
            lines.append(
                [
                    speeds,
                    method,
                    f"{mean(of['staleness-mean']):.1f}",
                    f"{max(of['staleness-max']):.0f}",
                    *(
                        f"{100 * mean(of[key]):.1f}"
                        for key in ("dropped", "share", "without", "final", "worst")
                    ),
                ]
            )
            data[f"{speeds} {name} {limit}"] = of
    heads = [
        "speeds",
        "method",
        "mean staleness",
        "largest",
        "dropped (%)",
        "slowest tenth's share (%)",
        "clients without an update (%)",
        "final (%)",
        "worst tenth (%)",
    ]
    return markdown(heads, lines), data


def plot(setup: Setup, speeds: str) -> str:
    """Draw accuracy against simulated time, client updates and bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    axes_of = {
        "seconds-simulated": "simulated time (mean client times)",
        "updates": "client updates",
        "megabytes": "data sent (MB)",
    }
    for axes, (key, label) in zip(panels, axes_of.items(), strict=True):
        for name, method in METHODS.items():
            rows = rows_of(setup, Run(name, speeds, 0, 0))
            rows = [row for row in rows if "accuracy" in row]
            axes.plot(
                [row[key] for row in rows],
                [row["accuracy"] for row in rows],
                label=name,
                color=f"C{list(METHODS).index(method.reference)}",
                ls=STYLES.get(method.algorithm, "-"),
                lw=1.5 if name == method.reference else 2,
            )
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    # Times differ by orders of magnitude.
    panels[0].set_xscale("log")
    panels[0].set_ylabel("accuracy, mean over clients")
    panels[0].yaxis.set_major_formatter("{x:.0%}")
    panels[-1].legend(fontsize=8)
    name = f"{setup.data.page}.png"
    figure.savefig(RESULTS / name, dpi=150)
    return name


def page_of(setup: Setup) -> tuple[str, str, dict[str, Any]]:
    """Return the title, the text and the numbers of the page."""
    data, tables, numbers = setup.data, [], {}
    for speeds in data.speeds:
        text, numbers[speeds] = table(setup, speeds)
        tables.append(f"## Speeds `{speeds}`\n\n{text}")
    share_table, numbers["shares"] = shares(setup)
    histogram(setup, RESULTS / f"{data.page}-staleness.png")
    left_out = ", ".join(f"`{name}`" for name in SPEEDS if name not in data.speeds)
    body = BODY.format(
        left_out=f" Speeds that were not run: {left_out}." if left_out else "",
        title=data.title,
        seeds=f"{setup.seeds} seeds" if setup.seeds > 1 else "one seed",
        spread="mean ± standard deviation over the seeds"
        if setup.seeds > 1
        else "in %",
        image=plot(setup, "groups-10"),
        tables="\n".join(tables),
        shares=share_table,
        page=data.page,
        sampled=data.sampled,
        buffer=data.buffer,
        rounds=data.rounds,
    )
    return "Asynchronous rounds and SRPFL", body, numbers


BODY = """Where training takes longer than messages, take FedBuff over a method with
personal heads: it needs a third of the time of synchronous rounds or less, and ends
close to them unless some clients are far slower than the rest, which it leaves behind,
or the base is FedRep on images, where it ends up to 6 points lower; there, take SRPFL
while messages are cheap and synchronous rounds if they are not; for a single global
model, FedBuff saves as much time and ends between 13 points below and 6 above.

{title}; {seeds}.
{sampled} clients are at work at a time, in {rounds} synchronous rounds or for as many
client updates. FedBuff makes a version of {buffer} changes.{left_out}
Each cell has the simulated time (in mean client times), the client updates and the
megabytes until the accuracy first reaches 95 % of the final one of the synchronous
method (`fedavg`, `fedrep` or `flute`); C.T. is the communication time of each message
exchange. The final accuracy ({spread}) is that of the last tenth of the tests; it, the
worst tenth of the clients and the time at the end are for C.T. = 0.

![Accuracy against simulated time, updates and bytes, speeds groups-10, seed 0]({image})

{tables}

## Staleness, and who contributes

The slowest tenth of the clients would have a tenth of the updates if all were equally
fast. `max-staleness` drops older changes, and so takes from the slow clients what they
have.

{shares}

![Shares of the changes by staleness, all seeds]({page}-staleness.png)
"""
