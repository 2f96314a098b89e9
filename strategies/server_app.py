"""The Flower ServerApp: runs any algorithm and writes its results."""

from collections.abc import Mapping
from logging import INFO
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from flwr_frl.common import messages as keys
from flwr_frl.common.command_line import shorten_errors
from flwr_frl.common.errors import SettingsError, printable
from flwr_frl.common.settings import Settings, build, facts, is_path, resolve
from flwr_frl.common.text import one_line, short_name
from flwr_frl.results.comparison import write_paper
from flwr_frl.results.methods import compare
from flwr_frl.results.output import archive_run, locked, prepare_directory
from flwr_frl.results.report import Report
from flwr_frl.results.results import LOST, failure, log_os_errors, refuse_losses
from flwr_frl.results.trackers import About, Tracking
from flwr_frl.strategies.algorithms import build_strategy, settings_owners
from flwr_frl.strategies.base import Strategy, reliable_grid
from flwr_frl.strategies.grids.speeds import SimulatedArrivals, speed_model
from flwr_frl.strategies.server.checkpoint import Checkpoint, State
from flwr_frl.strategies.server.evaluation import check_newcomers
from flwr_frl.strategies.server.loop import KeepClients, Loop
from flwr_frl.strategies.server.run_settings import RunSettings
from flwr_frl.strategies.server.secure import SecureGrid, SecureSettings, check_secure


def serve(
    grid: Grid, settings: Settings, keep_clients: KeepClients | None = None
) -> dict[str, Any]:
    """Run the algorithm that the settings name, from its start or a checkpoint.

    Parameters
    ----------
    grid : Grid
        The grid.
    settings : mapping
        All settings.
    keep_clients : callable, optional
        Saves the state that simulated clients have in memory only. Called before the
        last checkpoint is written, which relies on this state.

    Returns
    -------
    dict
        The run's summary.

    Raises
    ------
    SettingsError
        If a setting is out of its range, there is nothing to resume, no round had a
        valid reply, ``max-empty-rounds`` consecutive rounds had none, or files of the
        run could not be written.
    """
    options, strategy = build(RunSettings, settings), checked_strategy(settings)
    name = short_name(options.algorithm)
    clients, privacy = strategy._run.clients, strategy._run.privacy
    clients.keyed = options.names_by_key
    clients.checkpoints = options.checkpoint_every > 0
    clients.round_timeout = options.round_timeout
    grid = reliable_grid(strategy, grid, options.round_timeout)
    place = Path(options.output) / name
    log(INFO, "results are written to %s", place.absolute())
    former = Path(options.resume) / name if options.resume else None
    if former:
        start = _resumed(strategy, settings, former)
    else:
        clients.run_token = uuid4().hex[:12]
        arrays = strategy.initialize(grid)
        start = Checkpoint(0, arrays, State({}, {}), 0.0, settings)
    nodes = strategy._identify(grid)
    if nodes and former is None:
        # Only at the start: a resumed run continues with the connected clients.
        strategy._check_clients(len(nodes))
        check_secure(strategy, settings, len(nodes))
    if former is None or former.resolve() != place.resolve():
        archive_run(place.parent, name)
    with locked(place.parent, name):
        # A resumed run keeps its privacy account and its clients' states.
        if privacy:
            privacy.run_token = clients.run_token
            privacy.keep_in(place, resumed=former is not None)
        prepare_directory(place, former)
        after = start.server_round
        about = About(name, clients.run_token, after, place.absolute(), settings)
        with Tracking(settings).of(about) as tracked:
            report = Report(settings, after=after, tracking=tracked)
            known = clients.known.values()
            reported = [client.properties.get(keys.TESTED_MODEL) for client in known]
            tested = [model for model in keys.TESTED_MODELS if model in reported]
            report.tested = " or ".join(tested)
            before = report.latest.get("seconds-simulated", 0.0)
            adapted = strategy._adapt_grid(_timed(grid, settings, nodes, before))
            secure = build(SecureSettings, settings)
            if secure.secure_aggregation:
                adapted = SecureGrid(adapted, strategy, secure, place, former)
            loop = Loop(strategy, options, report, start, keep_clients)
            joined = loop.run(adapted)
            summary = report.finish(*_final_clients(strategy, joined))
        refuse_losses(options.output, report.lost)
        return summary


def checked_strategy(settings: Settings) -> Strategy:
    """Build the strategy that the settings name, and check those of the run.

    Raises `SettingsError` as `serve`.
    """
    options = build(RunSettings, settings)
    # The tracker can be imported.
    Tracking(settings)
    strategy, algorithm = build_strategy(settings), options.algorithm
    check_newcomers(strategy, algorithm, options.new_clients, options.num_clients)
    return strategy


def _resumed(strategy: Strategy, settings: Settings, former: Path) -> Checkpoint:
    """Restore a strategy from the checkpoint in a folder, and return it."""
    checkpoint = Checkpoint.read(former, settings)
    strategy._restore(checkpoint.state)
    if strategy._run.privacy:
        strategy._run.privacy.read(former)
    strategy._run.clients.note_checkpoint(checkpoint.server_round)
    log(INFO, "going on after round %d", checkpoint.server_round)
    return checkpoint


def _timed(grid: Grid, settings: Settings, nodes: list[int], seconds: float) -> Grid:
    """Return a grid with the simulated speeds that the settings name, if any."""
    speeds = speed_model(settings, len(nodes))
    if speeds is None:
        return grid
    position = {node: i for i, node in enumerate(nodes)}

    def position_of(node: int) -> int:
        # A client that joins later has the speed of one of the initial clients.
        return position.setdefault(node, len(position)) % len(nodes)

    return SimulatedArrivals(grid, speeds, position_of, seconds)


def _final_clients(
    strategy: Strategy, joined: Mapping[str, Mapping[str, float]]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the final metrics and numbers of examples of clients and of newcomers.

    For a client that was busy in the last evaluation, ``evaluated-in`` is the round of
    its metrics.
    """
    clients, newcomers = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    run, evaluation = strategy._run, strategy._run.evaluation
    newest = max(evaluation.rounds.values(), default=0)
    for client in run.clients.known.values():
        name, label = client.name, run.clients.label(client.name)
        data: dict[str, Any] = {}
        if counts := class_counts(client.properties):
            data[keys.CLASS_COUNTS] = counts
        if model := client.properties.get(keys.MODEL):
            data[keys.MODEL] = one_line(model)
        for about in (keys.NUM_EXAMPLES, keys.NUM_TEST_EXAMPLES):
            data[about] = client.properties.get(about)
        if name in joined:
            newcomers[label] = {**joined[name], **data}
        elif not client.is_newcomer:
            metrics = evaluation.metrics.get(name, {})
            clients[label] = {n: v for n, v in metrics.items() if n not in data}
            data["last-round"] = run.clients.acknowledged.get(name, 0)
            if (updates := run.participation.updates) is not None:
                data["updates"] = updates.get(name, 0)
            if evaluation.rounds.get(name, newest) < newest:
                data["evaluated-in"] = evaluation.rounds[name]
            clients[label] |= data
    return dict(sorted(clients.items())), dict(sorted(newcomers.items()))


def class_counts(properties: Mapping[str, object]) -> dict[str, int]:
    """Return a client's number of examples by class; empty if absent or invalid."""
    names, counts = properties.get(keys.HELD_CLASSES), properties.get(keys.CLASS_COUNTS)
    if not isinstance(names, list) or not isinstance(counts, list):
        return {}
    pairs = list(zip(names, counts, strict=False))
    if any(type(n) is not str or type(c) is not int or c < 0 for n, c in pairs):
        return {}
    # Names of classes may differ in whitespace only, such as those of characters.
    return {printable(name): count for name, count in pairs}


def server_settings(given: Settings) -> Settings:
    """Return all settings that the server can know, with their defaults.

    Parameters
    ----------
    given : mapping
        The settings that the user has set.

    Returns
    -------
    mapping
        All settings, read-only. With third-party code, names that the strategy does not
        declare are left for the clients to check.

    Raises
    ------
    SettingsError
        If a name is unknown or a type is wrong.
    """
    foreign = any(is_path(given.get(name, "")) for name in facts("code"))
    return resolve(given, settings_owners, strict=not foreign)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the algorithm that the run config names, and write its results."""
    shorten_errors()
    settings = server_settings(context.run_config)
    summary = serve(grid, settings)
    output = Path(str(settings["output"]))
    with log_os_errors("the table and the figures"):
        write_paper(output, compare(output))
    if why := failure(short_name(str(settings["algorithm"])), summary):
        raise SettingsError(why, LOST)
    log(INFO, "finished: %s", summary)
