"""Run and compare algorithms on a task, and write the results.

``python simulation.py`` compares FedAvg, FedRep and FLUTE on the bundled digits.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flwr_frl.listing import show_list
from flwr_frl.running import check, read_by, run
from flwr_frl.strategies.algorithms import short_name
from flwr_frl.strategies.report import seeds, tune
from flwr_frl.strategies.report.command_line import parse
from flwr_frl.strategies.report.output import archive_run, locked
from flwr_frl.strategies.report.page.serving import served_for
from flwr_frl.strategies.report.parallel import run_parallel
from flwr_frl.strategies.report.results import SUMMARY, is_written
from flwr_frl.strategies.report.tables import show
from flwr_frl.strategies.report.terminal import console, signals_as_ctrl_c
from flwr_frl.task.checkpoint import FILE as CHECKPOINT
from flwr_frl.task.run_cache import begin_run
from flwr_frl.task.settings import (
    Setting,
    Settings,
    SettingsError,
    defaults,
    require,
    resolve,
)

DEFAULT_ALGORITHMS = ("fedavg", "fedrep", "flute")

# The algorithm, the settings and the backend of a run.
PlannedRun = tuple[str, Settings, str]


def prepare(
    algorithms: Sequence[str], overrides: Settings, backend: str, count: int | None
) -> list[dict[str, Setting]]:
    """Return the checked settings of each of ``count`` seeds; of one run if None."""
    if count is None:
        return [check(algorithms, overrides, backend)]
    first = int(overrides.get("seed", defaults()["seed"]))
    planned = seeds.plan(overrides, count, algorithms, first, output_of(overrides))
    logged: set[str] = set()
    return [check(algorithms, settings, backend, logged) for settings in planned]


def output_of(overrides: Settings) -> str:
    """Return the output folder, which is by default that of the resumed run."""
    return str(overrides.get("output", overrides.get("resume") or defaults()["output"]))


def compare(
    algorithms: Sequence[str],
    runs: Sequence[Settings],
    backend: str,
    together: str | None,
    jobs: int,
) -> dict[str, dict[str, Any]]:
    """Run algorithms and return their summaries.

    Parameters
    ----------
    algorithms : sequence of str
        The algorithms.
    runs : sequence of mapping
        The settings of each seed, from `prepare`.
    backend : {"ray", "inline"}
        The backend.
    together : str, optional
        The output folder of several seeds.
    jobs : int
        The number of parallel runs.
    """
    planned = [(name, settings, backend) for settings in runs for name in algorithms]
    summaries = iter(_run_all(_summary, planned, jobs))
    by_seed = [{short_name(n): next(summaries) for n in algorithms} for _ in runs]
    if together is None:
        return by_seed[0]
    return seeds.combine(Path(together), runs, by_seed)


def tune_all(
    algorithms: Sequence[str],
    grid: str,
    overrides: Settings,
    backend: str,
    count: int | None,
    jobs: int,
) -> dict[str, dict[str, Any]]:
    """Tune algorithms on a grid and return the summaries of the best points."""
    former, output = str(overrides.get("resume", "")), output_of(overrides)
    exists = not former or Path(former).is_dir()
    require(exists, "resume", former, "a folder of results")

    def prepare_point(name: str, settings: Settings) -> list[dict[str, Setting]]:
        return prepare([name], read_by(name, algorithms, settings), backend, count)

    def run_points(points: Sequence[tune.PointRuns]) -> list[tune.Outcome]:
        planned = [(p.algorithm, run, backend) for p in points for run in p.settings]
        outcomes = iter(_run_all(_summary_or_error, planned, jobs))
        return [over_seeds(p, [next(outcomes) for _ in p.settings]) for p in points]

    def over_seeds(point: tune.PointRuns, outcomes: list[tune.Outcome]) -> tune.Outcome:
        failed = next((o for o in outcomes if isinstance(o, SettingsError)), None)
        if failed or count is None:
            return failed or outcomes[0]
        name = short_name(point.algorithm)
        by_seed: list[Any] = [{name: summary} for summary in outcomes]
        return seeds.combine(point.folder, point.settings, by_seed)[name]

    with served_for({**resolve(overrides, strict=False), "output": output}):
        points = tune.points(grid)
        tuned = tune.tune(
            algorithms, points, overrides, Path(output), prepare_point, run_points
        )
    tune.show_points(tuned)
    return {name: entry["test"] for name, entry in tuned.items()}


def _run_all(
    function: Callable[..., Any], planned: Sequence[PlannedRun], jobs: int
) -> list[Any]:
    """Run a function for each planned run, up to ``jobs`` in parallel.

    Earlier runs are archived before the first run starts. If the command is
    interrupted, its folders therefore hold only runs of this command.
    """
    for algorithm, settings, _ in planned:
        output, name = Path(str(settings["output"])), short_name(algorithm)
        if not settings["resume"] and (output / name / CHECKPOINT).is_file():
            with locked(output / name):
                archive_run(output, name)
    return run_parallel(function, planned, jobs)


def _summary(algorithm: str, settings: Settings, backend: str) -> dict[str, Any]:
    return run(algorithm, settings, backend).summary


def _summary_or_error(
    algorithm: str, settings: Settings, backend: str
) -> dict[str, Any] | SettingsError:
    try:
        return _summary(algorithm, settings, backend)
    except SettingsError as error:
        return error


def _have_begun(algorithms: Sequence[str], output: str) -> bool:
    """Return True if a run of one of the algorithms has a checkpoint."""
    names = [short_name(name) for name in algorithms]
    folders = [f for n in names for f in (n, f"{seeds.PREFIX}*/{n}")]
    return any(any(Path(output).glob(f"{f}/{CHECKPOINT}")) for f in folders)


@signals_as_ctrl_c()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; ``sys.argv`` by default.

    Returns
    -------
    int
        0 on success, 2 for invalid input, 1 if results could not be written, 130 if
        interrupted. Each failure prints one line to standard error.
    """
    # Custom tasks and algorithms are imported from here, as with `python -m`.
    sys.path.append(os.getcwd())
    begin_run()
    try:
        namespace, overrides = parse(arguments, __doc__)
        if namespace.list:
            show_list()
            return 0
        if not namespace.verbose:
            logging.getLogger("flwr").setLevel(logging.WARNING)
        algorithms = list(dict.fromkeys(namespace.algorithms))
        output = output_of(overrides)
        backend, count, jobs = namespace.backend, namespace.seeds, namespace.jobs
        require(jobs >= 1, "jobs", jobs, "at least 1")
        allowed = "1 with ray, which uses all cores for each run; set --backend inline"
        require(jobs == 1 or backend != "ray", "jobs", jobs, allowed)
        if jobs > 1:
            backend = "inline"
        tuning, evaluated_on, file = algorithms[:1] == ["tune"], "test", tune.FILE
        if tuning:
            names = algorithms[1:] or DEFAULT_ALGORITHMS
            summaries = tune_all(names, namespace.grid, overrides, backend, count, jobs)
        else:
            require(not namespace.grid, "grid", namespace.grid, "used with tune")
            algorithms = algorithms or list(DEFAULT_ALGORITHMS)
            runs = prepare(algorithms, overrides, backend, count)
            together = None if count is None else output
            with served_for({**runs[0], "output": output}):
                summaries = compare(algorithms, runs, backend, together, jobs)
            evaluated_on, file = str(runs[0]["evaluate-on"]), SUMMARY
    except KeyboardInterrupt:
        hint = f"; continue with --run-config 'resume=\"{output}\"'"
        begun = tuning or _have_begun(algorithms, output)
        print(f"interrupted{hint if begun else ''}", file=sys.stderr)
        return 130
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(summaries, evaluated_on)
    if not is_written(Path(output) / file, summaries):
        text = "results are missing because they could not be written; see the log"
        print(f"error: output is {output!r}; {text}", file=sys.stderr)
        return 1
    where = f"metrics, clients, summary, tables and plot: {output}"
    console().print(where, soft_wrap=True, markup=False)
    return 0
