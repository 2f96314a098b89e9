"""Run algorithms on a task, compare them, write results.

``python simulation.py`` compares FedAvg, FedRep and FLUTE on the bundled digits.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_frl.running import check, read_by, run
from flwr_frl.strategies.algorithms import (
    ALGORITHMS,
    short_name,
)
from flwr_frl.strategies.report import seeds, tune
from flwr_frl.strategies.report.command_line import parse
from flwr_frl.strategies.report.output import locked, put_aside
from flwr_frl.strategies.report.page.serving import served_for
from flwr_frl.strategies.report.parallel import side_by_side
from flwr_frl.strategies.report.results import SUMMARY, is_written
from flwr_frl.strategies.report.tables import show
from flwr_frl.strategies.report.terminal import console, ended_as_by_ctrl_c
from flwr_frl.task.checkpoint import FILE as CHECKPOINT
from flwr_frl.task.remembered import forget
from flwr_frl.task.settings import (
    Setting,
    Settings,
    SettingsError,
    defaults,
    require,
    resolve,
)

DEFAULT_ALGORITHMS = ("fedavg", "fedrep", "flute")


def list_all() -> str:
    """Return the names of all algorithms, tasks and models, one a line."""
    from flwr_frl.task.models import MODELS
    from flwr_frl.task.tasks import TASKS

    lines = [f"algorithm  {n:<24} {about}" for n, (_, about) in ALGORITHMS.items()]
    lines += [f"task       {name}" for name in TASKS]
    lines += [f"model      {name:<14} {about}" for name, (_, about) in MODELS.items()]
    return "\n".join([*lines, "model      any classification model of torchvision"])


def prepare(
    algorithms: Sequence[str], given: Settings, backend: str, count: int | None
) -> list[dict[str, Setting]]:
    """Return the checked settings of each run of some algorithms.

    Without a ``count`` of seeds there is one.
    """
    if count is None:
        return [check(algorithms, given, backend)]
    first = int(given.get("seed", defaults()["seed"]))
    runs = seeds.plan(given, count, algorithms, first, output_of(given))
    said: set[str] = set()
    return [check(algorithms, own, backend, said) for own in runs]


def output_of(given: Settings) -> str:
    """Return where the results go: to what is resumed, if nothing else is said."""
    return str(given.get("output", given.get("resume") or defaults()["output"]))


def carry_out(
    algorithms: Sequence[str],
    runs: Sequence[Settings],
    backend: str,
    together: str | None,
    jobs: int,
) -> dict[str, dict[str, Any]]:
    """Run algorithms with what `prepare` has returned; return their summaries.

    ``together`` is the folder of several seeds, ``jobs`` how many run at a time.
    """
    each = [(name, settings, backend) for settings in runs for name in algorithms]
    _put_aside(each)
    found = iter(side_by_side(_summary, each, jobs))
    of_seeds = [{short_name(n): next(found) for n in algorithms} for _ in runs]
    if together is None:
        return of_seeds[0]
    return seeds.combine(Path(together), runs, of_seeds)


def _put_aside(each: Sequence[tuple[str, Settings, str]]) -> None:
    """Keep what earlier runs have left, all of it before the first of these begins.

    So what is interrupted finds only its own when it goes on.
    """
    for algorithm, settings, _ in each:
        output, name = Path(str(settings["output"])), short_name(algorithm)
        if not settings["resume"] and (output / name / CHECKPOINT).is_file():
            with locked(output / name):
                put_aside(output, name)


def tuned(
    algorithms: Sequence[str],
    grid: str,
    given: Settings,
    backend: str,
    count: int | None,
    jobs: int,
) -> dict[str, dict[str, Any]]:
    """Try algorithms on a grid, as ``tune`` says; return the summaries of the best."""
    former, output = str(given.get("resume", "")), output_of(given)
    there = not former or Path(former).is_dir()
    require(there, "resume", former, "a folder of results")

    def prepared(name: str, own: Settings) -> list[dict[str, Setting]]:
        return prepare([name], read_by(name, algorithms, own), backend, count)

    def carried_out(points: Sequence[tune.Runs]) -> list[tune.Found]:
        each = [(p.algorithm, own, backend) for p in points for own in p.settings]
        _put_aside(each)
        found = iter(side_by_side(_summary_or_failure, each, jobs))
        each_found = [[next(found) for _ in p.settings] for p in points]
        if count is None:
            return [own for (own,) in each_found]
        return list(map(tune.over_seeds, points, each_found))

    with served_for({**resolve(given, strict=False), "output": output}):
        points = tune.points(grid)
        found = tune.tune(
            algorithms, points, given, Path(output), prepared, carried_out
        )
    tune.show_points(found)
    return {name: own["test"] for name, own in found.items()}


def _summary(algorithm: str, settings: Settings, backend: str) -> dict[str, Any]:
    return run(algorithm, settings, backend).summary


def _summary_or_failure(
    algorithm: str, settings: Settings, backend: str
) -> dict[str, Any] | SettingsError:
    """Return a run's summary; a step size that diverges ends no other run."""
    try:
        return _summary(algorithm, settings, backend)
    except SettingsError as error:
        return error


def _have_begun(algorithms: Sequence[str], output: str) -> bool:
    """Return whether there is a checkpoint of one, of a run alone or of a seed."""
    names = [short_name(name) for name in algorithms]
    places = [p for n in names for p in (n, f"seed-*/{n}")]
    return any(any(Path(output).glob(f"{place}/{CHECKPOINT}")) for place in places)


@ended_as_by_ctrl_c()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; ``sys.argv`` by default.

    Returns
    -------
    int
        0; 2 for bad input, and 1 where results could not be written, after one line
        that says what is wrong.
    """
    # Tasks and algorithms of one's own are found in this folder, as by `python -m`.
    sys.path.append(os.getcwd())
    forget()
    try:
        namespace, given = parse(arguments, __doc__)
        if namespace.list:
            console().out(list_all(), highlight=False)
            return 0
        if not namespace.verbose:
            logging.getLogger("flwr").setLevel(logging.WARNING)
        algorithms, output = list(dict.fromkeys(namespace.algorithms)), output_of(given)
        backend, count, jobs = namespace.backend, namespace.seeds, namespace.jobs
        require(jobs >= 1, "jobs", jobs, "at least 1")
        allowed = "1 with ray, which uses all cores for each run; take --backend inline"
        require(jobs == 1 or backend != "ray", "jobs", jobs, allowed)
        if jobs > 1:
            backend = "inline"
        if algorithms[:1] == ["tune"]:
            tried = algorithms[1:] or DEFAULT_ALGORITHMS
            summaries = tuned(tried, namespace.grid, given, backend, count, jobs)
            evaluated_on = "test"
        else:
            require(not namespace.grid, "grid", namespace.grid, "used with tune")
            algorithms = algorithms or list(DEFAULT_ALGORITHMS)
            runs = prepare(algorithms, given, backend, count)
            together = None if count is None else output
            with served_for({**runs[0], "output": output}):
                summaries = carry_out(algorithms, runs, backend, together, jobs)
            evaluated_on = str(runs[0]["evaluate-on"])
    except KeyboardInterrupt:
        hint = f"; go on with --run-config 'resume=\"{output}\"'"
        begun = algorithms[:1] == ["tune"] or _have_begun(algorithms, output)
        print(f"interrupted{hint if begun else ''}", file=sys.stderr)
        return 130
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(summaries, evaluated_on)
    tuning = algorithms[:1] == ["tune"]
    if not is_written(Path(output) / (tune.FILE if tuning else SUMMARY), summaries):
        print(f"error: {output!r} lacks results, as the log says", file=sys.stderr)
        return 1
    where = f"metrics, clients, summary, tables and plot: {output}"
    console().print(where, soft_wrap=True, markup=False)
    return 0
