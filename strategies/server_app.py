"""The Flower ServerApp: runs any strategy, round by round, and writes what it did."""

import time
from collections.abc import Callable
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, Context, UserConfig
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from strategies import SRPFL, BaseStrategy, build_strategy, speed_model
from strategies.grids.arrivals import RealArrivals, SimulatedArrivals
from strategies.server.checkpoint import FILE as CHECKPOINT
from strategies.server.checkpoint import Checkpoint
from strategies.server.report import Report, read_summary
from task.settings import Settings, SettingsError, require, resolve


def run_rounds(
    strategy: Strategy,
    grid: Grid,
    arrays: ArrayRecord,
    rounds: range,
    *,
    evaluated: Callable[[int], bool] = lambda server_round: True,
    timeout: float = 3600.0,
    after_round: Callable[[int, ArrayRecord, dict[str, Any]], None] | None = None,
) -> ArrayRecord:
    """Run a strategy's hooks for some rounds.

    As Flower's ``Strategy.start``, but it can begin after a checkpoint, evaluate only
    some rounds, and report each one. It calls nothing but the hooks, so it runs
    Flower's own strategies and wrappers as well.

    Parameters
    ----------
    strategy : Strategy
        The strategy.
    grid : Grid
        The grid.
    arrays : ArrayRecord
        What the first round sends.
    rounds : range
        The rounds.
    evaluated : callable
        Whether a round is evaluated; all are by default.
    timeout : float, default 3600
        Seconds to wait for replies.
    after_round : callable, optional
        Called with the round, the shared arrays and the round's metrics.

    Returns
    -------
    ArrayRecord
        The shared arrays after the last round.
    """
    for server_round in rounds:
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages, timeout=timeout)
        aggregated, trained = strategy.aggregate_train(server_round, replies)
        if aggregated is None:
            log(WARNING, "round %d has no valid reply: arrays stay", server_round)
        else:
            arrays = aggregated
        metrics: dict[str, Any] = dict(trained or {})
        if evaluated(server_round):
            messages = strategy.configure_evaluate(
                server_round, arrays, ConfigRecord(), grid
            )
            replies = grid.send_and_receive(messages, timeout=timeout)
            tested: dict[str, Any] = dict(
                strategy.aggregate_evaluate(server_round, replies) or {}
            )
            # What evaluation costs is no part of the algorithm.
            tested["bytes-evaluate"] = tested.pop("bytes-down", 0) + tested.pop(
                "bytes-up", 0
            )
            # What a client says in an evaluation cannot replace what is known here.
            tested.pop("round", None)
            metrics = {**tested, **metrics}
        if after_round is not None:
            after_round(server_round, arrays, metrics)
    return arrays


def run(
    grid: Grid,
    settings: Settings,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run the algorithm that the settings name, from its start or a checkpoint.

    Parameters
    ----------
    grid : Grid
        The grid.
    settings : mapping
        All settings.
    prepare : callable, optional
        Called when all has been checked, before anything is written or trained.

    Returns
    -------
    dict
        The run's summary.

    Raises
    ------
    SettingsError
        If a setting is out of its range, there is nothing to resume, or
        ``max-empty-rounds`` rounds in a row had no valid reply.
    """
    check(settings)
    strategy = build_strategy(settings)
    num_rounds = int(settings["num-server-rounds"])
    start, seconds_before = 0, 0.0
    began = time.monotonic()
    if settings["resume"]:
        former = Checkpoint.read(
            Path(str(settings["resume"])) / str(settings["algorithm"]), settings
        )
        strategy.load_state_dict(*former.state)
        arrays, start = former.arrays, former.server_round
        seconds_before = former.seconds
        mark_checkpoint(strategy, start)
        log(INFO, "going on after round %d", start)
        if start >= num_rounds:
            return read_summary(settings)
    else:
        _base(strategy).run_token = uuid4().hex[:12]
        arrays = strategy.initialize(grid)
    nodes = strategy.identify(grid)
    if isinstance(strategy, SRPFL):
        sampled = len(strategy.sample(1, nodes))
        require(
            strategy.initial_nodes <= sampled,
            "initial-nodes",
            strategy.initial_nodes,
            f"at most {sampled}, the number of sampled clients",
        )
    prepare()
    report = Report(settings, after=start)
    if not settings["resume"]:
        # Nobody shall go on from another run's checkpoint.
        (report.directory / CHECKPOINT).unlink(missing_ok=True)
    speeds = speed_model(settings, len(nodes))
    clock = None
    if speeds is not None:
        position = {node: i for i, node in enumerate(nodes)}

        def position_of(node: int) -> int:
            # One that has come later is as fast as one of the first.
            return position.setdefault(node, len(position)) % len(nodes)

        clock = SimulatedArrivals(
            grid,
            speeds,
            float(settings["communication-time"]),
            position_of,
            report.latest("seconds-simulated") or 0.0,
        )
        grid = clock
    elif isinstance(strategy, SRPFL):
        grid = RealArrivals(grid)
    every, last = int(settings["evaluate-every"]), int(settings["evaluate-last"])
    if strategy.evaluated_once:
        every, last = 0, 1

    empty, limit = 0, int(settings["max-empty-rounds"])

    def evaluated(server_round: int) -> bool:
        due = every > 0 and server_round % every == 0
        return due or server_round > num_rounds - last

    def after_round(
        server_round: int, arrays: ArrayRecord, metrics: dict[str, Any]
    ) -> None:
        nonlocal empty
        seconds = seconds_before + time.monotonic() - began
        about = {"round": server_round, "seconds": round(seconds, 3)}
        row = {**about, **metrics, **about}
        if clock is not None:
            row["seconds-simulated"] = clock.seconds
        if strategy.rejections:
            row["rejected-clients"] = [name for name, _ in strategy.rejections]
        # SRPFL does not wait for everybody.
        if strategy.silent and not isinstance(strategy, SRPFL):
            log(WARNING, "no reply of clients %s", ", ".join(strategy.silent))
            row["unanswered-clients"] = strategy.silent
        report.add(row)
        # A strategy that has nobody left to ask says so.
        idle = metrics.get("asked") == 0
        empty = 0 if metrics.get("clients") or idle else empty + 1
        if limit and empty >= limit:
            silent = [(name, "no answer") for name in strategy.silent]
            name, reason = [*strategy.rejections, *silent, ("", "nobody asked")][0]
            raise SettingsError(
                f"no valid reply in {empty} rounds in a row; client {name}: {reason}"
            )
        interval = strategy.checkpoint_every
        if interval and (server_round % interval == 0 or server_round == num_rounds):
            state = strategy.state_dict()
            checkpoint = Checkpoint(server_round, arrays, state, seconds, settings)
            try:
                checkpoint.write(report.directory)
                mark_checkpoint(strategy, server_round)
            except OSError as error:
                log(ERROR, "checkpoint of round %d not kept: %s", server_round, error)

    with report.progress:
        run_rounds(
            strategy,
            grid,
            arrays,
            range(start + 1, num_rounds + 1),
            evaluated=evaluated,
            timeout=float(settings["round-timeout"]),
            after_round=after_round,
        )
    if limit and not any(row.get("clients") for row in report.rows):
        raise SettingsError("no round had a valid reply; the log says why")
    return report.finish(_final_clients(strategy))


def mark_checkpoint(strategy: BaseStrategy, server_round: int) -> None:
    """Tell a strategy, or the one that it wraps, of a checkpoint that was written.

    Parameters
    ----------
    strategy : BaseStrategy
        The strategy.
    server_round : int
        The checkpoint's round.
    """
    _base(strategy).checkpointed = server_round


def _base(strategy: BaseStrategy) -> BaseStrategy:
    """Return the strategy that SRPFL wraps, or the strategy itself."""
    wrapped: Any = strategy.strategy if isinstance(strategy, SRPFL) else strategy
    base: BaseStrategy = wrapped
    return base


def check(settings: Settings) -> None:
    """Check the settings of the run itself.

    Parameters
    ----------
    settings : mapping
        All settings.

    Raises
    ------
    SettingsError
        If one is out of its range.
    """
    for name, least in (
        ("num-server-rounds", 1),
        ("evaluate-every", 0),
        ("evaluate-last", 0),
        ("checkpoint-every", 0),
        ("max-empty-rounds", 0),
        ("torch-threads", 1),
    ):
        require(int(settings[name]) >= least, name, settings[name], f"at least {least}")
    timeout = float(settings["round-timeout"])
    require(timeout > 0, "round-timeout", timeout, "above 0 seconds")
    require(bool(settings["output"]), "output", settings["output"], "a directory")


def _final_clients(strategy: BaseStrategy) -> dict[str, dict[str, Any]]:
    """Return each client's final metrics with its numbers of examples."""
    clients = {}
    for participant in strategy.participants.values():
        metrics = dict(strategy.client_metrics.get(participant.name, {}))
        metrics.pop("num-examples", None)
        clients[participant.name] = {
            **metrics,
            "num-examples": participant.properties.get("num-examples"),
            "num-test-examples": participant.properties.get("num-test-examples"),
            "last-round": strategy.acknowledged.get(participant.name, 0),
        }
    return dict(sorted(clients.items()))


def make_app(
    run_config: UserConfig | None = None,
    finished: Callable[[dict[str, Any]], None] = lambda summary: None,
) -> ServerApp:
    """Return the ServerApp.

    Parameters
    ----------
    run_config : UserConfig, optional
        Settings; by default those of the context, as ``flwr run`` gives them.
    finished : callable, optional
        Called with the run's summary.

    Returns
    -------
    ServerApp
        The app.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        given = context.run_config if run_config is None else run_config
        summary = run(grid, resolve(given))
        log(INFO, "finished: %s", summary)
        finished(summary)

    return app


app = make_app()
