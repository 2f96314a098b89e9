"""SRPFL's Figures 3 to 8: accuracy against simulated time.

The communication time C.T. does not affect which clients train, so one run yields the
curves of all C.T.: its clock plus C.T. for each round. ``--fraction 0.2`` is the
paper's partial participation.

Fine-tuning for a test does not affect training, so FedAvg-FT's run also yields FedAvg's
curve, and FLANP-FT's run FLANP's. A base algorithm waits for all sampled clients, so
speeds only affect its clock, and one run serves all speed models.

A run in the output folder, or on a page with the same settings, is reused; the page
names the commit of each run. An interrupted run is resumed from its last checkpoint.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.config import parse_config_args

from benchmarks.common import COMMIT, RESULTS, markdown, write
from benchmarks.runs import kept
from flwr_frl import simulate
from flwr_frl.common.checkpoint import FILE as CHECKPOINT
from flwr_frl.common.settings import Setting, Settings, resolve
from flwr_frl.results.output import archive_run
from flwr_frl.results.results import METRICS as METRICS_FILE
from flwr_frl.results.results import read_json, read_rows, write_json
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.participation import Participation

PAIRS = {
    "srpfl": "fedrep",
    "lg-srpfl": "lg-fedavg",
    "flanp": "fedavg",
    "flanp-ft": "fedavg-ft",
}
ALL = (*PAIRS, *PAIRS.values())
COMMUNICATION = (0, 10, 100)
# File next to a run, with its settings and its commit
ABOUT = "run.json"
# Settings that do not affect any result, and those that do not affect base algorithms
PLACES = ("data-dir", "output", "checkpoint-every")
OF_SRPFL = ("speed-model", "initial-nodes", "rounds-per-stage")
# Entries of a run's rows that a page contains
METRICS = ("round", "seconds", "seconds-simulated", "accuracy", "accuracy-global")
CLIENTS = 100
Rows = list[dict[str, Any]]
# ``settings``, ``commit`` and ``rows``
Run = dict[str, Any]


def run(arguments: argparse.Namespace, algorithm: str, rounds: int) -> Run:
    """Return a run, from an earlier call or a page if there is one."""
    tuned = f"{algorithm}-ft"
    if tuned in ALL:
        found = run(arguments, tuned, rounds)
        return found | {"rows": [globally(row) for row in found["rows"]]}
    is_base = algorithm in PAIRS.values()
    speed_model = "fixed" if is_base else arguments.speed_model
    output = Path(arguments.output) / (
        f"{speed_model}-{arguments.fraction}-{rounds}"
        f"-{arguments.stage}-{arguments.initial_nodes}-{arguments.seed}"
        f"{arguments.name and '-' + arguments.name}"
    )
    settings: dict[str, Setting] = {
        "task": "image-folder",
        "data-dir": arguments.data_dir,
        "num-clients": CLIENTS,
        "classes-per-client": 5,
        "fraction-train": arguments.fraction,
        "num-server-rounds": rounds,
        "evaluate-every": arguments.evaluate_every,
        "evaluate-last": 1,
        "head-epochs": 1,
        "seed": arguments.seed,
        "speed-model": speed_model,
        "initial-nodes": arguments.initial_nodes,
        "rounds-per-stage": str(arguments.stage),
        "output": str(output),
        "checkpoint-every": 5,
        # For fine-tuned algorithms, features are computed once. Otherwise, 10 epochs of
        # fine-tuning for each evaluation would take most of the time.
        "augment-head": not algorithm.endswith("-ft"),
        **parse_config_args([arguments.run_config]),
        **parse_config_args([arguments.own_config.get(algorithm, "")]),
    }
    # The figures need a curve, not only the last round.
    if algorithm.endswith("-ft"):
        kind = settings_owners(resolve({"algorithm": algorithm}))[-1]
        kind.traits = replace(kind.traits, evaluate_last_round_only=False)
    indifferent = (*PLACES, *OF_SRPFL) if is_base else PLACES
    own = {name: settings[name] for name in settings if name not in indifferent}
    found = there(output / algorithm, own) or on_page(algorithm, own)
    if found is None:
        make(arguments.backend, algorithm, output / algorithm, settings, own)
        found = there(output / algorithm, own)
        assert found is not None
    if is_base:
        speeds = SpeedModel(arguments.speed_model, CLIENTS, arguments.seed)
        set_clock(
            found["rows"], speeds, Participation(arguments.fraction, 1, arguments.seed)
        )
    return found


def make(
    backend: str, algorithm: str, folder: Path, settings: Settings, own: Settings
) -> None:
    """Carry out or resume a run; ``own`` are the settings that affect it."""
    about, commit = folder / ABOUT, COMMIT
    former = read_json(about) if about.is_file() else {}
    if (folder / CHECKPOINT).is_file() and former.get("settings") == own:
        settings = {**settings, "resume": str(folder.parent)}
        commit = former["commit"]
        commit += "" if COMMIT in commit else f", {COMMIT}"
    else:
        # Otherwise, rows of an earlier run would be taken for this run's if it ended
        # early.
        archive_run(folder.parent, algorithm)
        (folder / METRICS_FILE).unlink(missing_ok=True)
    write_json(about, {"settings": own, "commit": commit})
    simulate(algorithm, backend, **settings)


def there(folder: Path, settings: Settings) -> Run | None:
    """Return a completed run from a folder, if it has these settings."""
    about = folder / ABOUT
    if not about.is_file() or (found := read_json(about))["settings"] != settings:
        return None
    rows = read_rows(folder / METRICS_FILE)
    if not rows or rows[-1]["round"] != settings["num-server-rounds"]:
        return None
    return found | {"rows": [{n: r[n] for n in METRICS if n in r} for r in rows]}


def on_page(algorithm: str, settings: Settings) -> Run | None:
    """Return a run from one of the pages, if it has these settings."""
    for path in sorted(RESULTS.glob("srpfl_time-*.json")):
        found: Run | None = kept(read_json(path).get("made", {}).get(algorithm))
        if found is not None and found["settings"] == settings:
            return found
    return None


def globally(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the accuracy before fine-tuning."""
    if "accuracy-global" in row:
        return row | {"accuracy": row["accuracy-global"]}
    return row


def set_clock(rows: Rows, speeds: SpeedModel, sampler: Participation) -> None:
    """Set the simulated clock of rounds that wait for all sampled clients."""
    seconds = 0.0
    for row in rows:
        asked = sampler.sample(row["round"], list(range(speeds.num_clients)))
        seconds += float(speeds.times(row["round"])[asked].max())
        row["seconds-simulated"] = seconds


def curve(rows: Rows, communication: float) -> tuple[list[float], list[float]]:
    """Return simulated times and accuracies of the evaluated rounds."""
    points = [
        (row["seconds-simulated"] + communication * row["round"], row["accuracy"])
        for row in rows
        if "accuracy" in row
    ]
    return [time for time, _ in points], [accuracy for _, accuracy in points]


def time_to(rows: Rows, level: float, communication: float) -> float:
    """Return when a level is first reached (interpolated between tests), or NaN."""
    times, accuracies = curve(rows, communication)
    for i, accuracy in enumerate(accuracies):
        if accuracy >= level:
            first = max(i - 1, 0)
            window = slice(first, i + 1)
            return float(np.interp(level, accuracies[window], times[window]))
    return np.nan


def at_time(rows: Rows, last: dict[str, Any], final: float) -> str:
    """Return a longer run's accuracy gain at the base's finishing time."""
    limit = last["seconds-simulated"]
    done = [r for r in rows if "accuracy" in r and r["seconds-simulated"] <= limit]
    if not done:
        return ""
    ahead = 100 * (done[-1]["accuracy"] - final)
    return f"{ahead:+.2f} (round {done[-1]['round']})"


def main() -> None:
    """Carry out missing runs, and write ``results/srpfl_time-<speeds>-<fraction>``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithms", nargs="*", default=ALL)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as image folder")
    parser.add_argument("--speed-model", default="fixed")
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument(
        "--longer",
        nargs="*",
        default=[],
        metavar="NAME=ROUNDS",
        help="a longer run of an SRPFL variant, up to the base's time",
    )
    parser.add_argument("--stage", type=int, default=10, help="rounds of a stage")
    parser.add_argument("--initial-nodes", type=int, default=10)
    parser.add_argument("--evaluate-every", type=int, default=2)
    parser.add_argument("--run-config", default="", help="further settings")
    parser.add_argument(
        "--own-config",
        nargs="*",
        type=lambda text: text.split(":", 1),
        default=[],
        metavar="NAME:SETTINGS",
        help="further settings of one algorithm",
    )
    parser.add_argument(
        "--shown-data",
        default="CIFAR-10, 100 clients, 5 shards each",
        help="the page's description of data that --run-config changes",
    )
    parser.add_argument("--name", default="", help="suffix of the results' names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="ray")
    parser.add_argument("--output", default="results/srpfl")
    arguments = parser.parse_args()
    arguments.own_config = dict(arguments.own_config)
    runs = {
        name: run(arguments, name, arguments.rounds) for name in arguments.algorithms
    }
    longer = {
        name: run(arguments, name, int(rounds))["rows"]
        for name, rounds in (text.split("=") for text in arguments.longer)
    }
    overview = [
        (
            f"`{name}`",
            f"{100 * made['rows'][-1]['accuracy']:.2f}",
            f"{made['rows'][-1]['seconds-simulated']:.1f}",
            f"{made['rows'][-1]['seconds']:.0f}",
            made["commit"],
        )
        for name, made in runs.items()
    ]
    ratios, data = [], {}
    for fast, base in PAIRS.items():
        if fast not in runs or base not in runs:
            continue
        final = runs[base]["rows"][-1]["accuracy"]
        level = 0.95 * final
        entry: dict[str, Any] = {
            "final": {fast: runs[fast]["rows"][-1]["accuracy"], base: final},
            "level": level,
        }
        for communication in COMMUNICATION:
            both = (runs[n]["rows"] for n in (fast, base))
            times = [time_to(rows, level, communication) for rows in both]
            entry[f"C.T. {communication}"] = times
        data[fast] = entry
        ratios.append(
            (
                f"`{fast}` / `{base}`",
                f"{100 * level:.2f}",
                *(
                    f"{a:.1f} / {b:.1f} = {a / b:.2f}"
                    for a, b in (entry[f"C.T. {c}"] for c in COMMUNICATION)
                ),
                f"{100 * (entry['final'][fast] - final):+.2f}",
                at_time(longer.get(fast, []), runs[base]["rows"][-1], final),
            )
        )
    name = f"srpfl_time-{arguments.speed_model}-{arguments.fraction:g}"
    name += f"-{arguments.name}" if arguments.name else ""
    further = f"{arguments.run_config}, " if arguments.run_config else ""
    for algorithm, settings in arguments.own_config.items():
        further += f"`{algorithm}` with {settings}, "
    body = (
        f"{arguments.shown_data}, {arguments.fraction:.0%} per round, "
        f"{arguments.rounds} rounds, one head epoch and one representation epoch, "
        f"speeds `{arguments.speed_model}`, {further}n0 = {arguments.initial_nodes}, "
        f"doubled every {arguments.stage} rounds, seed {arguments.seed}. Times are "
        "simulated; the unit is the mean time of a client. `fedavg` and `flanp` are "
        "the runs of their `-ft` variants, tested before fine-tuning. A base "
        "algorithm waits for all sampled clients, so one run serves all speed "
        "models, which change only its clock.\n\n"
        + markdown(
            ("run", "final accuracy (%)", "time, C.T. = 0", "real seconds", "commit"),
            overview,
        )
        + "\nTime to 95 % of the base algorithm's final accuracy (interpolated "
        f"between the evaluations, every {arguments.evaluate_every} rounds), and the "
        "difference in final accuracy in points: after the same number of rounds, "
        "and, from a longer run of the same schedule, at the base's final simulated "
        "time:\n\n"
        + markdown(
            (
                "",
                "level (%)",
                *(f"C.T. = {c}" for c in COMMUNICATION),
                "final, same rounds",
                "final, same time",
            ),
            ratios,
        )
        + f"\n![accuracy against time]({name}.png)\n"
    )
    curves = {n: longer.get(n, made["rows"]) for n, made in runs.items()}
    data["curves"] = {n: curve(rows, 0) for n, rows in curves.items()}
    # A global method's run is that of its -ft variant.
    data["made"] = {n: made for n, made in runs.items() if f"{n}-ft" not in ALL}
    write(name, "SRPFL, accuracy against simulated time", body, data)
    plot(curves, f"{name}.png")


def plot(runs: dict[str, Rows], name: str) -> None:
    """Plot accuracy against time for each C.T."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(COMMUNICATION), sharey=True)
    colours = {base: f"C{i}" for i, base in enumerate(PAIRS.values())}
    for axes, communication in zip(panels, COMMUNICATION, strict=True):
        for algorithm, rows in runs.items():
            base = PAIRS.get(algorithm, algorithm)
            axes.plot(
                *curve(rows, communication),
                label=algorithm,
                color=colours.get(base, "black"),
                ls="-" if algorithm in PAIRS else "--",
            )
        axes.set(xlabel="simulated time", title=f"C.T. = {communication}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy, mean over clients")
    panels[0].yaxis.set_major_formatter("{x:.0%}")
    panels[-1].legend(fontsize=8)
    figure.savefig(RESULTS / name, dpi=150)


if __name__ == "__main__":
    main()
