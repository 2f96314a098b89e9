"""Run algorithms in simulation: `simulate` from Python, `execute` from a command."""

import contextlib
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from logging import DEBUG, WARNING
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from flwr.common import log
from flwr.common.logger import update_console_handler
from rich.console import Console

from flwr_frl.cli import FLAGS
from flwr_frl.clients.algorithms import client_class, owners
from flwr_frl.clients.app import keep, make_app, try_out
from flwr_frl.clients.device.setup import DeviceSettings
from flwr_frl.common.checkpoint import FILE as CHECKPOINT
from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.run_cache import begin_run, run_cache
from flwr_frl.common.settings import (
    Maker,
    Resolved,
    Setting,
    Settings,
    declared,
    defaults,
    is_path,
    resolve,
)
from flwr_frl.common.text import short_name
from flwr_frl.results.comparison import write_paper
from flwr_frl.results.methods import compare
from flwr_frl.results.results import LOST, failure
from flwr_frl.results.runs import read_run
from flwr_frl.results.sweep import TUNED, Point, Sweep, have_begun, points_of, tune
from flwr_frl.results.tables import cells, legend, terminal
from flwr_frl.run import Run, Runs
from flwr_frl.strategies import server_app
from flwr_frl.strategies.algorithms import check_names, simulation_defaults
from flwr_frl.strategies.grids.simulation import InlineGrid, RayGrid
from flwr_frl.strategies.grids.speeds import SpeedModel, speed_model
from flwr_frl.strategies.server.checkpoint import Checkpoint
from flwr_frl.strategies.server.run_settings import RunSettings
from flwr_frl.strategies.server.secure import SecureSettings, check_secure
from flwr_frl.task.base import Task
from flwr_frl.task.devices import find
from flwr_frl.task.models.adapters import AdapterSettings
from flwr_frl.task.tasks import build_task, task_defaults
from flwr_frl.task.training import captured

__all__ = ["Run", "Runs", "simulate"]

BACKENDS = ("auto", "inline", "ray")
DEFAULT_ALGORITHMS = ("fedavg", "fedrep", "flute")
# Classes that declare the settings of all algorithms.
OF_ALL = RunSettings, DeviceSettings, SecureSettings, SpeedModel, AdapterSettings
YEAR = 365 * 86400.0
# Fewest trainings of clients with which Ray, whose start takes 15 s, is the faster
# backend for a large model.
MANY_TRAININGS = 200


@overload
def simulate(
    algorithm: str | type, backend: str = ..., seeds: int | None = ..., **settings: Any
) -> Run: ...
@overload
def simulate(
    algorithm: Sequence[str | type],
    backend: str = ...,
    seeds: int | None = ...,
    **settings: Any,
) -> Runs: ...
def simulate(
    algorithm: str | type | Sequence[str | type],
    backend: str = "auto",
    seeds: int | None = None,
    **settings: Setting | Path | Sequence[str] | np.generic | Callable[..., Any],
) -> Run | Runs:
    """Run one or more algorithms in simulation.

    The output folder has the same files as after a command.
    Flower's INFO messages are hidden; ``logging.getLogger("flwr").setLevel("INFO")``
    shows them.

    Parameters
    ----------
    algorithm : str, type, or sequence of them
        The algorithm's name, the import path of its strategy, or the strategy class.
        Workers of ``ray`` must be able to import it; a class that is defined in the
        script or notebook itself only runs ``inline``.
    backend : {"auto", "inline", "ray"}, default "auto"
        ``ray`` uses all cores and ``inline`` only this process. ``auto`` is ``ray`` on
        a cluster, with several GPUs, and on several cores for long runs of models with
        more than 50,000 values. The numbers agree to rounding, and to the last bit with
        ``cohort="off"``.
    seeds : int, optional
        Number of seeds to run, starting at ``seed``; by default one.
    **settings
        Settings, with ``_`` in place of ``-``. ``rounds``, ``clients`` and ``fraction``
        have the names of the command line. ``task`` may be a function; the restriction
        on the algorithm with ``ray`` holds for it as well. Values may also be a `Path`,
        a list of strings, which are joined by commas, or numbers of NumPy.

    Returns
    -------
    Run or Runs
        The results; for a sequence of algorithms, a dictionary of their `Run`.

    Raises
    ------
    SettingsError
        If a setting is unknown, missing or out of its range, or a run fails. If most
        replies of the last rounds were lost, the results are written nevertheless.

    Examples
    --------
    >>> run = simulate("fedrep", num_clients=20, rounds=30)
    >>> run.summary["accuracy"]
    >>> simulate(["fedavg", "fedrep"], seeds=5, rounds=30).plot()
    """
    begin_run()
    options: dict[str, Any] = {}
    for argument, value in settings.items():
        name = argument.replace("_", "-")
        options[FLAGS.get(name, name)] = _plain(value)
    if "task" in options:
        options["task"] = import_path(options["task"], "task", backend)
    several: Any = algorithm if isinstance(algorithm, list | tuple) else None
    names = [
        import_path(each, "algorithm", backend)
        for each in ([algorithm] if several is None else several)
    ]
    unique = len(set(map(short_name, names))) == len(names) > 0
    require(unique, "algorithm", algorithm, "one or more, with different names")
    options["output"] = output_of(options)
    sweep = sweep_of(names, backend, _plain(seeds))
    with hidden_info():
        made, errors = carry_out(names, options, sweep)
    if errors:
        raise errors[0]
    for name, each in made.items():
        if why := failure(name, each.summary):
            raise SettingsError(why, LOST)
    return next(iter(made.values())) if several is None else made


@contextlib.contextmanager
def hidden_info() -> Iterator[None]:
    """Hide Flower's INFO messages, unless the level of its logger was changed."""
    logger = logging.getLogger("flwr")
    level = logger.level
    # Flower itself sets the level DEBUG, and INFO for its handler.
    logger.setLevel(WARNING if level == DEBUG else level)
    try:
        yield
    finally:
        logger.setLevel(level)


def sweep_of(
    algorithms: Sequence[str], backend: str, seeds: int | None, jobs: int = 1
) -> Sweep:
    """Return a `Sweep` that checks settings for, and runs, some algorithms."""
    # Neither a file nor a pipe receives the codes of colours.
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    update_console_handler(colored=coloured)
    checked = partial(check, backend=backend, others=algorithms)
    return Sweep(checked, partial(run, backend=backend), seeds, jobs)


def carry_out(
    algorithms: Sequence[str], given: Settings, sweep: Sweep
) -> tuple[Runs, list[SettingsError]]:
    """Run algorithms, each with one or more seeds, and write the files for a paper.

    Returns the results, and the errors of algorithms without results.

    Raises
    ------
    SettingsError
        If a setting is invalid, or no algorithm has results.
    """
    group = sweep.plan(algorithms, given)
    (outcome,) = sweep.carry_out([group])
    runs, errors = Runs(), list[SettingsError]()
    for algorithm, (name, summary) in zip(algorithms, outcome.items(), strict=True):
        if isinstance(summary, SettingsError):
            errors.append(summary)
            continue
        each = []
        for settings in group.settings:
            directory = Path(str(settings["output"])).resolve() / name
            each.append(read_run(directory, known={**settings, "algorithm": algorithm}))
        runs[name] = Run(dict(summary), each)
    if not runs:
        raise errors[0]
    folder = group.folder.resolve()
    write_paper(folder, compare(folder))
    return runs, errors


def _plain(value: Any) -> Any:
    """Convert NumPy numbers, paths and lists of strings to values of settings."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return ",".join(value)
    return str(value) if isinstance(value, Path) else value


def import_path(named: Any, setting: str, backend: str) -> str:
    """Return the import path of a class or function that is given as a setting.

    Raises `SettingsError` for a lambda, for objects defined in a function, and with
    ``ray`` for those of the script, which workers cannot import.
    """
    if not isinstance(named, str):
        allowed = "a name, an import path, or a class or function at its module's top"
        require("<" not in getattr(named, "__qualname__", "<"), setting, named, allowed)
        named = f"{named.__module__}:{named.__qualname__}"
    allowed = "of a module that workers can import, or with backend='inline'"
    require(backend != "ray" or "__main__:" not in named, setting, named, allowed)
    return str(named)


def run(algorithm: str, settings: Settings, backend: str) -> dict[str, Any]:
    """Run an algorithm with settings that `check` returned; return its summary."""
    output = Path(str(settings["output"])).resolve()
    name = short_name(algorithm)
    resume = settings["resume"]
    if resume and not (Path(str(resume)) / name / CHECKPOINT).is_file():
        log(WARNING, "%s has no checkpoint and starts now", algorithm)
        resume = ""
    of_run = {"algorithm": algorithm, "output": str(output), "resume": resume}
    choice = Resolved({**settings, **of_run})
    if backend == "auto":
        backend = choose_backend(choice)
    kind = RayGrid if backend == "ray" else InlineGrid
    grid = kind(make_app(choice), int(settings["num-clients"]))

    def keep_clients(run_token: str, acknowledged: Mapping[str, int]) -> bool:
        return keep(grid.contexts_with_state(), choice, run_token, acknowledged)

    try:
        return server_app.serve(grid, choice, keep_clients)
    finally:
        captured.forget()


def choose_backend(settings: Settings) -> str:
    """Return ``ray`` or ``inline`` for a run with the backend ``auto``.

    Ray is chosen on a cluster (``RAY_ADDRESS``), with several GPUs, and on several
    cores for long runs of models with more than 50,000 values. It is never chosen if
    it is not installed, or cannot import the algorithm or the task.
    """
    names = (str(settings["algorithm"]), str(settings["task"]))
    if find_spec("ray") is None or any(n.startswith("__main__:") for n in names):
        return "inline"
    device = str(settings["device"])
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if os.environ.get("RAY_ADDRESS") or gpus > 1:
        return "ray"
    # macOS does not have the first function.
    usable = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))
    if len(usable(0)) == 1 or gpus or device not in ("auto", "cpu"):
        return "inline"
    clients = float(settings["num-clients"]) * float(settings["fraction-train"])
    trainings = max(1.0, clients) * float(settings["num-server-rounds"])
    model = build_task(settings, int(settings["num-clients"])).scratch_model
    return "ray" if model.is_large and trainings >= MANY_TRAININGS else "inline"


def output_of(given: Settings) -> str:
    """Return the output folder, by default that of the resumed run, if any."""
    output = given.get("output", given.get("resume") or defaults()["output"])
    return os.path.expanduser(str(output))


def _task_defaults(algorithms: Sequence[str], settings: Settings) -> dict[str, Setting]:
    """Return the defaults of the task, without those that an algorithm refuses."""
    named = task_defaults(settings)
    kinds = [client_class({**settings, "algorithm": name}) for name in algorithms]
    if any(kind._traits.assumes_sgd for kind in kinds):
        named.pop("max-gradient-norm", None)
    return named


def _warn_of_newer_data(checkpoint: Path, data_dir: str) -> None:
    """Warn if data were written after the checkpoint of a run that is resumed."""
    root = Path(data_dir).expanduser()
    for path in (root, *root.rglob("*")) if data_dir else ():
        if path.is_file() and path.stat().st_mtime > checkpoint.stat().st_mtime:
            text = f"{str(path)!r} was written after {str(checkpoint)!r}: the resumed "
            _warn(text + "run may have other examples than before")
            return


@run_cache(maxsize=None)
def _warn(line: str) -> None:
    """Log a warning, once per command."""
    log(WARNING, "%s", line)


def check(
    algorithms: Sequence[str], given: Settings, backend: str, others: Sequence[str] = ()
) -> Resolved:
    """Check everything that can be checked before a run, and decode the data.

    Parameters
    ----------
    algorithms : sequence of str
        The algorithms.
    given : mapping
        The settings that are not defaults.
    backend : str
        The backend.
    others : sequence of str
        Algorithms of other runs of the command, whose settings may be given, too.

    Returns
    -------
    Resolved
        All settings.

    Raises
    ------
    SettingsError
        If a setting is unknown, missing or out of its range.
    """
    require(backend in BACKENDS, "backend", backend, "auto, inline or ray")
    check_names(algorithms)
    # No simulated client is ever lost, so a round needs no timeout. Clients that fail
    # to answer would also fail later, so a few empty rounds end the run.
    given = {"max-empty-rounds": 3, "round-timeout": YEAR, **given}

    def makers(named: Settings) -> list[Maker]:
        every = [owners({**named, "algorithm": n}) for n in (*algorithms, *others)]
        return [*OF_ALL, *chain.from_iterable(every)]

    # Names and types are checked before the task reads its data.
    named = resolve(given, makers)
    own = _task_defaults(algorithms, named) | simulation_defaults(named, algorithms)
    settings = resolve({**own, **given}, makers)
    # The machines of a Ray cluster may have other devices.
    if backend == "inline" or not os.environ.get("RAY_ADDRESS"):
        find(str(settings["device"]))
    places = {n: Path(str(settings["resume"])) / short_name(n) for n in algorithms}
    begun = [n for n, place in places.items() if (place / CHECKPOINT).is_file()]
    for name in (begun or algorithms) if settings["resume"] else ():
        Checkpoint.read(places[name], {**settings, "algorithm": name})
        _warn_of_newer_data(places[name] / CHECKPOINT, str(settings["data-dir"]))
    tasks: list[Task] = []
    for name in algorithms:
        try:
            tasks += _tried_out(Resolved({**settings, "algorithm": name}))
        except SettingsError as error:
            if len(algorithms) > 1:
                error.args = (f"{name}: {error}",)
            raise
    for note in chain.from_iterable(task.notes for task in tasks):
        _warn(note)
    read = {n: s for maker in makers(settings) for n, s in declared(maker).items()}
    where = f"{', '.join(algorithms)} on {settings['task']}"
    for name, value in given.items():
        if name not in read:
            reasons = [f"it is not read by {where}"]
        else:
            # A task's setting is unused if no algorithm's task uses it.
            reasons = [task.unused_settings.get(name, "") for task in tasks]
            for other, values in read[name].unused_if.items():
                if settings[other] in values:
                    reasons = [f"{other} is {settings[other]!r}"]
        if all(reasons):
            _warn(f"{name}={value} does nothing: {reasons[-1]}")
    # Paths are made absolute, since workers run in other folders.
    folders = {
        name: str(Path(str(settings[name])).expanduser().resolve())
        for name in ("data-dir", "cache-dir")
        if settings[name]
    }
    return Resolved({**settings, **folders})


def _tried_out(settings: Resolved) -> list[Task]:
    """Build everything that a run builds, so that all of its checks are made.

    Returns the tasks of the clients, one for each of ``client-models``.
    """
    num_clients, newcomers = int(settings["num-clients"]), int(settings["new-clients"])
    awaited = int(settings["min-available-nodes"])
    allowed = f"at most {num_clients}, the number of clients"
    require(awaited <= num_clients, "min-available-nodes", awaited, allowed)
    strategy = server_app.checked_strategy(settings)
    strategy._check_clients(num_clients - newcomers)
    check_secure(strategy, settings, num_clients - newcomers)
    speed_model(settings, num_clients - newcomers)
    unsaved = Resolved({**settings, "checkpoint-every": 0, "resume": ""})
    tasks = [client.task for client in try_out(unsaved, num_clients)]
    if settings["validation-fraction"]:
        for i in range(1, num_clients):
            tasks[0].check(i)
    elif is_path(settings["task"]):
        # A third-party task may have fewer clients than the run.
        tasks[0].check(num_clients - 1)
    return tasks


# The commands of the command line


def execute(namespace: Namespace, overrides: Settings) -> int:
    """Make the runs that a command line asks for, and show their results.

    Parameters
    ----------
    namespace : Namespace
        The arguments.
    overrides : mapping
        The settings among them.

    Returns
    -------
    int
        0 on success, 2 if an algorithm has no results, 3 if a run lost most replies of
        its last rounds, 130 if interrupted.

    Raises
    ------
    SettingsError
        If something is invalid, or results could not be written.
    """
    backend, jobs = namespace.backend, namespace.jobs
    valid = jobs == 1 or (jobs > 1 and backend != "ray")
    allowed = "at least 1, and 1 with ray, which uses all cores for each run"
    require(valid, "jobs", jobs, allowed)
    backend = "inline" if jobs > 1 else backend
    output, tuning = output_of(overrides), namespace.tunes
    overrides = {**overrides, "output": output}
    chosen = overrides.get("algorithm")
    default = [str(chosen)] if chosen else [*DEFAULT_ALGORITHMS]
    algorithms = list(dict.fromkeys(namespace.algorithms)) or default

    sweep = sweep_of(algorithms, backend, namespace.seeds, jobs)
    summaries: Mapping[str, Any]
    errors = list[SettingsError]()
    try:
        with contextlib.nullcontext() if namespace.verbose else hidden_info():
            if tuning:
                points = points_of(" ".join(namespace.grid))
                summaries = _tune(algorithms, points, overrides, sweep)
            else:
                runs, errors = carry_out(algorithms, overrides, sweep)
                summaries = {name: run.summary for name, run in runs.items()}
    except KeyboardInterrupt:
        hint = f"; continue with --run-config 'resume=\"{output}\"'"
        begun = tuning or have_begun(Path(output), algorithms)
        print(f"interrupted{hint if begun else ''}", file=sys.stderr)
        return 130
    if tuning:
        text = terminal(cells(summaries)) + legend(summaries)
        files = TUNED
    else:
        # Runs have resolved the folder, too.
        text = str(compare(Path(output).resolve()))
        files = "metrics, clients, summary, table and figures"
    print(text)
    Console().print(f"{files}: {output}", soft_wrap=True, markup=False)
    # Failures are printed last.
    sys.stdout.flush()
    reasons = [failure(name, summary) for name, summary in summaries.items()]
    for reason in filter(None, [*reasons, *errors]):
        print(f"error: {reason}", file=sys.stderr)
    return 2 if errors else 3 if any(reasons) else 0


def _tune(
    algorithms: Sequence[str], points: list[Point], overrides: Settings, sweep: Sweep
) -> dict[str, Any]:
    """Tune algorithms and return the summaries of the best points."""
    former, output = str(overrides.get("resume", "")), Path(str(overrides["output"]))
    exists = not former or Path(former).is_dir()
    require(exists, "resume", former, "a folder of results")
    tuned = tune(algorithms, points, overrides, output.resolve(), sweep)
    for name, entry in tuned.items():
        picked = " ".join(f"{n}={value}" for n, value in entry["picked"].items())
        print(f"{name}: {picked} is the best of {len(points)} points")
    return {name: entry["test"] for name, entry in tuned.items()}
