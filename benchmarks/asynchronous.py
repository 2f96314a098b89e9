"""Asynchronous rounds beside SRPFL and synchronous ones, by simulated time.

``python -m benchmarks.asynchronous`` runs the bundled digits;
``--data-dir DIR`` an image folder, for example CIFAR-10. All methods make about the
same number of client updates. A synchronous method's rounds do not depend on the
clients' speeds, so one run of it serves all speed models, and neither it nor SRPFL
depends on the communication time, which only their clocks add. Finished runs in
``--output`` are not made again.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import RESULTS, markdown, write
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.report.results import METRICS, read_json, read_rows
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.task.settings import Setting


class Method(NamedTuple):
    """An algorithm, its settings, and the synchronous method it is compared with."""

    algorithm: str
    reference: str
    settings: dict[str, Setting]


BUFFERED: dict[str, Setting] = {"async-base": "fedavg"}
METHODS = {
    "fedavg": Method("fedavg", "fedavg", {}),
    "flanp": Method("flanp", "fedavg", {}),
    "fedbuff": Method("fedbuff", "fedavg", {}),
    "fedasync": Method("fedasync", "fedavg", {}),
    "fedrep": Method("fedrep", "fedrep", {}),
    "srpfl": Method("srpfl", "fedrep", {}),
    "fedbuff/fedrep": Method("fedbuff", "fedrep", {"async-base": "fedrep"}),
    "flute": Method("flute", "flute", {}),
    "fedbuff/flute": Method("fedbuff", "flute", {"async-base": "flute"}),
}
SPEEDS: dict[str, dict[str, Setting]] = {
    "fixed": {"speed-model": "fixed"},
    "dynamic": {"speed-model": "dynamic"},
    "groups-10": {"speed-model": "groups", "straggler-fraction": 0.1},
    "groups-30": {"speed-model": "groups", "straggler-fraction": 0.3},
    "correlated": {"speed-model": "correlated", "partition": "class-groups"},
}
COMMUNICATION = (0, 10, 100)
# Line styles; synchronous methods have solid lines.
STYLES = {"flanp": "--", "srpfl": "--", "fedbuff": ":", "fedasync": "-."}


class Setup(NamedTuple):
    """What the runs have in common.

    Parameters
    ----------
    settings : dict
        Settings of all runs.
    clients, sampled : int
        Number of clients, and of those at work at a time.
    buffer : int
        Changes that make a version of FedBuff.
    rounds : int
        Rounds of the synchronous methods.
    output : Path
        Folder of the runs.
    """

    settings: dict[str, Setting]
    clients: int
    sampled: int
    buffer: int
    rounds: int
    output: Path


def job_of(setup: Setup, name: str, speeds: str, communication: int, seed: int) -> Job:
    """Return a run; it is the same for settings on which it does not depend."""
    method = METHODS[name]
    settings: dict[str, Setting] = {**setup.settings, **method.settings, "seed": seed}
    partition = {k: v for k, v in SPEEDS[speeds].items() if k == "partition"}
    settings |= partition
    place = [name.replace("/", "-"), *partition.values(), f"seed-{seed}"]
    per_version = {"fedbuff": setup.buffer, "fedasync": 1}.get(method.algorithm, 0)
    if method.algorithm != method.reference:
        settings |= SPEEDS[speeds]
        place.insert(1, speeds)
    every = int(setup.settings["evaluate-every"])
    if per_version:
        updates = setup.rounds * setup.sampled
        settings |= {
            "communication-time": float(communication),
            "concurrency": setup.sampled,
            "num-server-rounds": updates // per_version,
            "evaluate-every": every * setup.sampled // per_version,
        }
        if method.algorithm == "fedbuff":
            settings["buffer-size"] = setup.buffer
        place.insert(2, f"communication-{communication}")
    folder = setup.output.joinpath(*map(str, place))
    return Job(folder, method.algorithm, settings)


def rows_of(
    setup: Setup, name: str, speeds: str, communication: int, seed: int
) -> list[dict[str, Any]]:
    """Return the rows of a run, with its clock, client updates and bytes so far."""
    job = job_of(setup, name, speeds, communication, seed)
    rows = read_rows(job.place / METHODS[name].algorithm / METRICS)
    model = SpeedModel(
        str(SPEEDS[speeds]["speed-model"]),
        setup.clients,
        seed,
        float(SPEEDS[speeds].get("straggler-fraction", 0.1)),
    )
    sampler = Participation(setup.sampled / setup.clients, 1, seed)
    updates, size, clock = 0, 0.0, 0.0
    for row in rows:
        server_round = row["round"]
        updates += row["clients"] + row.get("dropped", 0)
        size += row["bytes-down"] + row["bytes-up"]
        if METHODS[name].algorithm == METHODS[name].reference:
            asked = sampler.sample(server_round, list(range(setup.clients)))
            clock += float(model.times(server_round)[asked].max()) + communication
            row["seconds-simulated"] = clock
        elif "version" not in row:
            row["seconds-simulated"] += communication * server_round
        row |= {"updates": updates, "megabytes": size / 1e6}
    return rows


def reached(rows: list[dict[str, Any]], level: float) -> dict[str, Any] | None:
    """Return the first tested row at a level of accuracy, or None."""
    return next((r for r in rows if r.get("accuracy", -1) >= level), None)


def final(rows: list[dict[str, Any]]) -> float:
    """Return the mean accuracy of the last tenth of the tests, at least one."""
    tested = [row["accuracy"] for row in rows if "accuracy" in row]
    return float(np.mean(tested[-max(1, len(tested) // 10) :]))


def jobs_of(setup: Setup, names: list[str], seeds: int) -> Iterator[Job]:
    """Return all runs, each once."""
    seen = set()
    for seed in range(seeds):
        for name in names:
            for speeds in SPEEDS:
                for communication in COMMUNICATION:
                    job = job_of(setup, name, speeds, communication, seed)
                    if job.place not in seen:
                        seen.add(job.place)
                        yield job


def table(
    setup: Setup, names: list[str], speeds: str, seeds: int
) -> tuple[str, dict[str, Any]]:
    """Return the table of a speed model, and its numbers."""
    lines, data = [], {}
    for name in names:
        method, cells, numbers = METHODS[name], [], {}
        for communication in COMMUNICATION:
            times, updates, sizes, finals = [], [], [], []
            for seed in range(seeds):
                of = partial(rows_of, setup, speeds=speeds, seed=seed)
                level = 0.95 * final(of(method.reference, communication=communication))
                rows = of(name, communication=communication)
                row = reached(rows, level) or {}
                times.append(row.get("seconds-simulated", np.nan))
                updates.append(row.get("updates", np.nan))
                sizes.append(row.get("megabytes", np.nan))
                finals.append(final(rows))
            numbers[str(communication)] = {
                "time": times,
                "updates": updates,
                "megabytes": sizes,
                "final": finals,
            }
            lost = int(np.isnan(times).sum())
            if lost == seeds:
                cells.append("not reached")
            else:
                count = f" ({seeds - lost} of {seeds} seeds)" if lost else ""
                cells.append(
                    f"{np.nanmean(times):.1f} / {np.nanmean(updates):.0f} / "
                    f"{np.nanmean(sizes):.0f}{count}"
                )
        at_end = [x for c in COMMUNICATION[:1] for x in numbers[str(c)]["final"]]
        worst = worst_tenth(setup, name, speeds, seeds)
        lines.append(
            [
                f"`{name}`",
                *cells,
                f"{100 * np.mean(at_end):.1f} ± {100 * np.std(at_end):.1f}",
                f"{100 * worst:.1f}",
            ]
        )
        data[name] = {**numbers, "worst": worst}
    heads = [f"C.T. {c}" for c in COMMUNICATION]
    return markdown(["method", *heads, "final (%)", "worst tenth (%)"], lines), data


def worst_tenth(setup: Setup, name: str, speeds: str, seeds: int) -> float:
    """Return the mean final accuracy of the worst tenth of the clients."""
    found = []
    for seed in range(seeds):
        job = job_of(setup, name, speeds, 0, seed)
        clients = read_json(job.place / METHODS[name].algorithm / "clients.json")
        values = sorted(c["accuracy"] for c in clients.values())
        found.append(float(np.mean(values[: max(1, len(values) // 10)])))
    return float(np.mean(found))


def shares(setup: Setup, seeds: int) -> str:
    """Return the table of staleness, and of slow clients' share of the updates."""
    lines = []
    for name in ("fedbuff", "fedasync", "fedbuff/fedrep"):
        for speeds in ("groups-10", "groups-30", "fixed"):
            ages: list[float] = []
            share, fair = [], []
            for seed in range(seeds):
                job = job_of(setup, name, speeds, 0, seed)
                rows = read_rows(job.place / METHODS[name].algorithm / METRICS)
                ages += [row["staleness-mean"] for row in rows]
                place = job.place / METHODS[name].algorithm / "clients.json"
                updates = np.array([c["updates"] for c in read_json(place).values()])
                model = SpeedModel(
                    str(SPEEDS[speeds]["speed-model"]),
                    setup.clients,
                    seed,
                    float(SPEEDS[speeds].get("straggler-fraction", 0.1)),
                )
                slow = np.argsort(model.times(1))[-setup.clients // 10 :]
                share.append(updates[slow].sum() / updates.sum())
                fair.append(len(slow) / setup.clients)
            most = max(ages)
            lines.append(
                [
                    f"`{name}`",
                    speeds,
                    f"{np.mean(ages):.1f}",
                    f"{most:.0f}",
                    f"{100 * np.mean(share):.1f}",
                    f"{100 * np.mean(fair):.0f}",
                ]
            )
    return markdown(
        [
            "method",
            "speeds",
            "mean staleness",
            "largest of a version",
            "slowest tenth's share of the updates (%)",
            "fair share (%)",
        ],
        lines,
    )


def plot(setup: Setup, names: list[str], speeds: str, path: Path) -> None:
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
        for name in names:
            method = METHODS[name]
            rows = [r for r in rows_of(setup, name, speeds, 0, 0) if "accuracy" in r]
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
    figure.savefig(path, dpi=150)


def main() -> int:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--data-dir", default="", help="an image folder")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--classes", type=int, default=2)
    parser.add_argument("--sampled", type=int, default=10)
    parser.add_argument("--buffer", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--evaluate-every", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--speeds", nargs="*", default=list(SPEEDS))
    parser.add_argument("--communication", nargs="*", type=int, default=[0, 10, 100])
    parser.add_argument("--output", default="results/asynchronous")
    arguments = parser.parse_args()
    global COMMUNICATION
    COMMUNICATION = tuple(arguments.communication)
    for speeds in SPEEDS.keys() - {*arguments.speeds}:
        del SPEEDS[speeds]
    settings: dict[str, Setting] = {
        "num-clients": arguments.clients,
        "classes-per-client": arguments.classes,
        "fraction-train": arguments.sampled / arguments.clients,
        "num-server-rounds": arguments.rounds,
        "evaluate-every": arguments.evaluate_every,
        "evaluate-last": 1,
    }
    name = "asynchronous"
    if arguments.data_dir:
        settings |= {"task": "image-folder", "data-dir": arguments.data_dir}
        name = "asynchronous-images"
    setup = Setup(
        settings,
        arguments.clients,
        arguments.sampled,
        arguments.buffer,
        arguments.rounds,
        Path(arguments.output),
    )

    def make() -> None:
        def waiting() -> list[Job]:
            jobs = jobs_of(setup, arguments.methods, arguments.seeds)
            return [job for job in jobs if finished(job) is None]

        carry_out_all("asynchronous", waiting(), waiting)
        tables, data = [], {}
        for speeds in SPEEDS:
            text, numbers = table(setup, arguments.methods, speeds, arguments.seeds)
            tables.append(f"## Speeds `{speeds}`\n\n{text}")
            data[speeds] = numbers
        shown = "groups-10" if "groups-10" in SPEEDS else next(iter(SPEEDS))
        plot(setup, arguments.methods, shown, RESULTS / f"{name}.png")
        body = BODY.format(
            task="CIFAR-10" if arguments.data_dir else "The bundled digits",
            seeds=f"{arguments.seeds} seeds" if arguments.seeds > 1 else "one seed",
            shown=shown,
            image=f"{name}.png",
            tables="\n".join(tables),
            shares=shares(setup, arguments.seeds) if len(SPEEDS) == 5 else "",
            clients=arguments.clients,
            classes=arguments.classes,
            sampled=arguments.sampled,
            buffer=arguments.buffer,
            rounds=arguments.rounds,
        )
        write(name, "Asynchronous rounds and SRPFL", body, data)

    return exit_status(make)


BODY = """Take asynchronous rounds if waiting costs more than anything else and slow
clients need not count: FedBuff reaches the level of synchronous rounds in the least
time if messages are cheap, but its slowest clients hardly contribute, and with very
slow ones it ends below. Take SRPFL if every client must count in the end, and
synchronous rounds if communication takes most of the time.

{task}, {clients} clients with {classes} classes each, {sampled} at work at a
time, {rounds} synchronous rounds or as many client updates, {seeds}. FedBuff makes a
version of {buffer} changes. Each cell has the simulated time (in mean client times),
the client updates and the megabytes until the accuracy first reaches 95 % of the final
one of the synchronous method (`fedavg`, `fedrep` or `flute`); C.T. is the communication
time of each message exchange. The final accuracy (mean ± standard deviation over the
seeds) is that of the last tenth of the tests, for C.T. = 0.

![Accuracy against simulated time, updates and bytes, speeds {shown}, seed 0]({image})

{tables}

## Staleness, and who contributes

{shares}
"""

if __name__ == "__main__":
    raise SystemExit(main())
