"""Run one algorithm in simulation, from Python or for the command line."""

import os
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flwr.common import log

from flwr_frl.arguments import FLAGS
from flwr_frl.backend import choose_backend
from flwr_frl.clients.algorithms import owners
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.setup import DeviceSettings
from flwr_frl.clients.simulated import keep, try_out
from flwr_frl.common.checkpoint import FILE as CHECKPOINT
from flwr_frl.common.run_cache import begin_run
from flwr_frl.common.settings import (
    Declared,
    Maker,
    Setting,
    Settings,
    SettingsError,
    build,
    declared,
    defaults,
    is_path,
    require,
    resolve,
)
from flwr_frl.common.text import short_name
from flwr_frl.results.page import served_for
from flwr_frl.results.results import (
    LOST,
    METRICS,
    Row,
    failure,
    read_rows,
)
from flwr_frl.results.trackers import Tracking
from flwr_frl.strategies import server_app
from flwr_frl.strategies.algorithms import (
    build_strategy,
    check_names,
    simulation_defaults,
)
from flwr_frl.strategies.grids.simulation import InlineGrid, RayGrid
from flwr_frl.strategies.grids.speeds import SpeedSettings, speed_model
from flwr_frl.strategies.server.checkpoint import Checkpoint
from flwr_frl.strategies.server.newcomers import check_newcomers
from flwr_frl.strategies.server.run_settings import RunSettings
from flwr_frl.task.devices import find
from flwr_frl.task.models.adapters import AdapterSettings

__all__ = ["Run", "simulate"]

BACKENDS = ("auto", "inline", "ray")
# Classes that declare the settings of all algorithms.
OF_ALL: tuple[Maker, ...] = (
    RunSettings,
    DeviceSettings,
    SpeedSettings,
    AdapterSettings,
)
YEAR = 365 * 86400.0


class Run(NamedTuple):
    """A finished run.

    Parameters
    ----------
    summary : dict
        The algorithm's part of ``summary.json``.
    rows : list of dict
        The rows of ``metrics.jsonl``, one per round, without clients' metrics.
    """

    summary: dict[str, Any]
    rows: list[Row]


def simulate(
    algorithm: str | type,
    backend: str = "auto",
    **settings: Setting | Path | Sequence[str] | np.generic | Callable[..., Any],
) -> Run:
    """Run one algorithm in simulation.

    Parameters
    ----------
    algorithm : str or type
        The algorithm's name, the import path of its strategy, or the strategy class.
        Workers of ``ray`` must be able to import it; a class that is defined in the
        script or notebook itself only runs ``inline``.
    backend : {"auto", "inline", "ray"}, default "auto"
        ``ray`` uses all cores, ``inline`` only this process, and ``auto`` the one that
        is expected to finish first (`flwr_frl.backend.choose_backend`). The numbers
        agree to rounding, and to the last bit with ``cohort="off"``.
    **settings
        Settings, with ``_`` in place of ``-``. ``rounds``, ``clients`` and ``fraction``
        have the names of the command line. ``task`` may be a function; the restriction
        on the algorithm with ``ray`` holds for it as well. Values may also be a `Path`,
        a list of strings, which are joined by commas, or numbers of NumPy.

    Returns
    -------
    Run
        ``summary`` and ``rows``.

    Raises
    ------
    SettingsError
        If a setting is unknown, missing or out of its range, or the run fails. If most
        replies of the last rounds were lost, the results are written nevertheless.

    Examples
    --------
    >>> run = simulate("fedrep", num_clients=20, rounds=30)
    >>> run.summary["accuracy"]
    """
    begin_run()
    options: dict[str, Any] = {}
    for argument, value in settings.items():
        name = argument.replace("_", "-")
        options[FLAGS.get(name, name)] = _plain(value)
    if "task" in options:
        options["task"] = import_path(options["task"], "task", backend)
    algorithm = import_path(algorithm, "algorithm", backend)
    checked = check([algorithm], options, backend)
    with served_for(checked):
        made = run(algorithm, checked, backend)
    if why := failure(short_name(algorithm), made.summary):
        raise SettingsError(why, LOST)
    return made


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


def run(algorithm: str, settings: Settings, backend: str) -> Run:
    """Run one algorithm with settings that `check` has returned."""
    output = Path(str(settings["output"])).resolve()
    choice = {**settings, "algorithm": algorithm, "output": str(output)}
    directory = Path(str(settings["resume"])) / short_name(algorithm)
    if settings["resume"] and not (directory / CHECKPOINT).is_file():
        log(WARNING, "%s has no checkpoint and starts now", algorithm)
        choice["resume"] = ""
    if backend == "auto":
        backend = choose_backend(choice)
    kind = RayGrid if backend == "ray" else InlineGrid
    # The settings may include those of the command's other algorithms.
    app = make_app(choice, strict=False)
    grid = kind(app, int(settings["num-clients"]))

    def keep_clients(run_token: str, acknowledged: Mapping[str, int]) -> bool:
        return keep(grid.contexts_with_state(), choice, run_token, acknowledged)

    summary = server_app.run(grid, choice, keep_clients)
    return Run(summary, read_rows(output / short_name(algorithm) / METRICS))


def output_of(given: Settings) -> str:
    """Return the output folder, by default that of the resumed run, if any."""
    output = given.get("output", given.get("resume") or defaults()["output"])
    return os.path.expanduser(str(output))


def _makers(algorithms: Sequence[str], settings: Settings) -> list[Maker]:
    """Return the classes and functions that declare settings of algorithms and task."""
    each = (owners({**settings, "algorithm": algorithm}) for algorithm in algorithms)
    return [*OF_ALL, *(maker for makers in each for maker in makers)]


def _declared_by(algorithms: Sequence[str], settings: Settings) -> dict[str, Declared]:
    made = (declared(maker).items() for maker in _makers(algorithms, settings))
    return {name: setting for each in made for name, setting in each}


def check(
    algorithms: Sequence[str],
    given: Settings,
    backend: str,
    logged: set[str] | None = None,
    others: Sequence[str] = (),
) -> Settings:
    """Check everything that can be checked before a run, and decode the data.

    Parameters
    ----------
    algorithms : sequence of str
        The algorithms.
    given : mapping
        The settings that are not defaults.
    backend : str
        The backend.
    logged : set of str, optional
        Warnings that have already been logged; new ones are added.
    others : sequence of str
        Algorithms of other runs of the command, whose settings may be given, too.

    Returns
    -------
    mapping
        All settings, read-only.

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
    given = {**given, "output": given.get("output", output_of(given))}
    for algorithm in algorithms:
        named = {**defaults(), **given, "algorithm": algorithm}
        given = {**simulation_defaults(named), **given}
    every = [*algorithms, *others]
    settings = resolve(given, lambda named: _makers(every, named))
    used, known = (_declared_by(each, settings) for each in (algorithms, every))
    # Settings that this algorithm does not read get their defaults, so that runs that
    # do the same also have the same settings.
    unread = {n: each.default for n, each in known.items() if n not in used}
    settings = {**settings, **unread}
    build(RunSettings, settings).check_validation(settings)
    _check_machine(settings, backend)
    _check_resume(algorithms, settings)
    tried = [_tried_out({**settings, "algorithm": name}) for name in algorithms]
    # Without duplicates, in order.
    warnings = dict.fromkeys(note for _, notes in tried for note in notes)
    for name, value in given.items():
        # A setting is unused if no algorithm uses it.
        reasons = [unused.get(name, "") for unused, _ in tried]
        if name not in known:
            where = f"{', '.join(algorithms)} on {settings['task']}"
            reasons = [f"it is not read by {where}"]
        elif name not in used:
            continue
        if all(reasons):
            warnings[f"{name}={value} does nothing: {reasons[-1]}"] = None
    logged = set() if logged is None else logged
    for warning in warnings:
        if warning not in logged:
            log(WARNING, "%s", warning)
    logged.update(warnings)
    # Paths are made absolute, since workers run in other folders.
    folders = {name: str(settings[name]) for name in ("data-dir", "cache-dir")}
    absolute = {n: str(Path(f).expanduser().resolve()) for n, f in folders.items() if f}
    return MappingProxyType({**settings, **absolute})


def _check_machine(settings: Settings, backend: str) -> None:
    """Check that the device exists and that the output folder can be written."""
    # The machines of a Ray cluster may have other devices.
    if backend == "inline" or not os.environ.get("RAY_ADDRESS"):
        find(str(settings["device"]))
    output = Path(str(settings["output"])).absolute()
    existing = next(path for path in (output, *output.parents) if path.exists())
    usable = existing.is_dir() and os.access(existing, os.W_OK)
    require(usable, "output", settings["output"], f"writable; {str(existing)!r} is not")


def _check_resume(algorithms: Sequence[str], settings: Settings) -> None:
    """Read the checkpoints that will be resumed; at least one must exist."""
    if not settings["resume"]:
        return
    places = {n: Path(str(settings["resume"])) / short_name(n) for n in algorithms}
    begun = [n for n, place in places.items() if (place / CHECKPOINT).is_file()]
    for name in begun or algorithms:
        Checkpoint.read(places[name], {**settings, "algorithm": name})


def _tried_out(settings: Settings) -> tuple[dict[str, str], list[str]]:
    """Build everything that a run builds, so that all of its checks are made.

    Returns the unused settings, with the reasons, and the notes of the tasks.
    """
    num_clients, newcomers = int(settings["num-clients"]), int(settings["new-clients"])
    awaited = int(settings["min-available-nodes"])
    allowed = f"at most {num_clients}, the number of clients"
    require(awaited <= num_clients, "min-available-nodes", awaited, allowed)
    strategy = build_strategy(settings)
    check_newcomers(strategy, str(settings["algorithm"]), newcomers, num_clients)
    strategy._check_clients(num_clients - newcomers)
    Tracking(settings)
    speed_model(settings, num_clients - newcomers)
    unsaved = {**settings, "checkpoint-every": 0, "resume": ""}
    tasks = [client.task for client in try_out(unsaved, num_clients)]
    if settings["validation-fraction"]:
        for i in range(1, num_clients):
            tasks[0].check(i)
    elif is_path(settings["task"]):
        # A third-party task may have fewer clients than the run.
        tasks[0].check(num_clients - 1)
    unused: dict[str, str] = {}
    for task in tasks:
        unused |= getattr(task, "unused_settings", {})
    unused |= strategy._unused_settings
    read = _declared_by([str(settings["algorithm"])], settings)
    for name, setting in read.items():
        for other, values in setting.facts.unused_if.items():
            if other in read and settings[other] in values:
                unused[name] = f"{other} is {settings[other]!r}"
    return unused, [note for task in tasks for note in task.notes]
