"""Run the rounds: train, evaluate, report, write checkpoints."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from flwr_frl.common.checkpoint import BEST_FILE, FILE
from flwr_frl.common.messages import NUM_EXAMPLES
from flwr_frl.common.settings import SettingsError
from flwr_frl.common.text import several
from flwr_frl.results.report import Report
from flwr_frl.results.results import best_round, stopped_early
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.simulated_arrivals import SimulatedArrivals
from flwr_frl.strategies.server.checkpoint import Checkpoint
from flwr_frl.strategies.server.run_settings import RunSettings
from flwr_frl.strategies.server.watch import Watch

# Called with the run's token and each client's last round that has counted; returns
# whether all states are written.
KeepClients = Callable[[str, Mapping[str, int]], bool]


def run_rounds(
    strategy: FlowerStrategy,
    grid: Grid,
    arrays: ArrayRecord,
    rounds: range,
    *,
    evaluated: Callable[[int], bool] = lambda server_round: True,
    timeout: float = 3600.0,
    after_round: Callable[[int, ArrayRecord, dict[str, Any]], object] | None = None,
) -> ArrayRecord:
    """Run a strategy's hooks for some rounds.

    Like Flower's ``Strategy.start``, but it can begin after a checkpoint, evaluate only
    some rounds, and report each round. It calls Flower's hooks only, so it also runs
    Flower's own strategies and wrappers.

    Parameters
    ----------
    strategy : FlowerStrategy
        The strategy.
    grid : Grid
        The grid.
    arrays : ArrayRecord
        Arrays that the first round sends.
    rounds : range
        The rounds.
    evaluated : callable
        Returns whether a round is evaluated; by default all are.
    timeout : float, default 3600
        Seconds to wait for replies.
    after_round : callable, optional
        Called with the round, the shared arrays and the round's metrics. If it returns
        True, this round is the last one.

    Returns
    -------
    ArrayRecord
        The shared arrays after the last round.
    """
    for server_round in rounds:
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        if hasattr(grid, "on_demand"):
            # In one process, clients train while their replies are averaged.
            grid.on_demand = getattr(strategy, "_averages_on_arrival", False)
        replies = grid.send_and_receive(messages, timeout=timeout)
        if hasattr(grid, "on_demand"):
            grid.on_demand = False
        aggregated, trained = strategy.aggregate_train(server_round, replies)
        metrics: dict[str, Any] = dict(trained or {})
        if aggregated is not None:
            arrays = aggregated
        elif not metrics.get("clients"):
            log(WARNING, "round %d has no valid reply: arrays stay", server_round)
        if evaluated(server_round):
            tested = evaluate(strategy, grid, arrays, server_round, timeout)
            # The cost of the evaluation is not part of the algorithm.
            bytes_evaluate = tested.pop("bytes-down", 0) + tested.pop("bytes-up", 0)
            tested["bytes-evaluate"] = bytes_evaluate
            # Clients' metrics must not replace the server's.
            tested.pop("round", None)
            metrics = {**tested, **metrics}
        if after_round is not None and after_round(server_round, arrays, metrics):
            break
    return arrays


def evaluate(
    strategy: FlowerStrategy,
    grid: Grid,
    arrays: ArrayRecord,
    server_round: int,
    timeout: float,
) -> dict[str, Any]:
    """Return the metrics of an evaluation by a strategy's hooks."""
    config = ConfigRecord()
    messages = strategy.configure_evaluate(server_round, arrays, config, grid)
    replies = grid.send_and_receive(messages, timeout=timeout)
    return dict(strategy.aggregate_evaluate(server_round, replies) or {})


class Start(NamedTuple):
    """Where a run begins: with the first round, or after a checkpoint.

    Parameters
    ----------
    arrays : ArrayRecord
        The shared arrays.
    after : int, default 0
        The last completed round.
    seconds : float, default 0
        Time that the run has taken so far.
    is_over : bool, default False
        True if all rounds have been completed, so at most the report is missing.
    """

    arrays: ArrayRecord
    after: int = 0
    seconds: float = 0.0
    is_over: bool = False


@dataclass
class Rounds:
    """Runs the rounds, and writes a row and checkpoints after each.

    Parameters
    ----------
    strategy : Strategy
        The strategy.
    settings : RunSettings
        Number of rounds, and which are evaluated.
    report : Report
        Receives the rows; its folder gets the checkpoints.
    clock : SimulatedArrivals or None
        The simulated time.
    start : Start
        Where the run begins.
    keep_clients : callable or None
        Saves simulated clients' states before the last checkpoint (`KeepClients`).
    """

    strategy: Strategy
    settings: RunSettings
    report: Report
    clock: SimulatedArrivals | None
    start: Start
    keep_clients: KeepClients | None

    def __post_init__(self) -> None:
        """Begin to measure the time."""
        self.watch = Watch(self.strategy, self.report)
        self._began = time.monotonic() - self.start.seconds
        self._grid: Grid | None = None
        # The checkpoint of the last round until it is written, in case the run ends.
        self._unwritten: Callable[[], Checkpoint] | None = None
        # Number of consecutive rounds without a valid reply.
        self._empty = 0

    def run(self, grid: Grid) -> ArrayRecord:
        """Run all rounds that are left, and return the arrays after the last one.

        If the resumed run is over, only an evaluation is run, as the report needs each
        client's metrics.

        Raises
        ------
        SettingsError
            If ``max-empty-rounds`` consecutive rounds had no valid reply, or no round
            had one.
        """
        self._grid = grid
        (arrays, after, *_), timeout = self.start, self.settings.round_timeout
        last = after if self.start.is_over else self.settings.num_server_rounds
        options: dict[str, Any] = {"evaluated": self.is_evaluated, "timeout": timeout}
        options["after_round"] = self._after_round
        try:
            with self.report.progress:
                rounds = range(after + 1, last + 1)
                arrays = run_rounds(self.strategy, grid, arrays, rounds, **options)
        except (Exception, KeyboardInterrupt, SystemExit):
            # The run can be resumed, regardless of what ended it.
            if self._unwritten is not None:
                self._write(self._unwritten(), last=True)
            raise
        if self.start.is_over:
            evaluate(self.strategy, grid, arrays, after, timeout)
        if not any(row.get("clients") for row in self.report.rows):
            why = self.strategy._run.round.failure or "nobody was asked"
            raise SettingsError(f"no round had a valid reply; {why}")
        return arrays

    def is_evaluated(self, server_round: int) -> bool:
        """Return whether a round is evaluated."""
        every, last = self.settings.evaluate_every, self.settings.evaluate_last
        if self.strategy._traits.evaluate_last_round_only:
            every, last = 0, 1
        due = every > 0 and server_round % every == 0
        return due or server_round > self.settings.num_server_rounds - last

    def _after_round(
        self, server_round: int, arrays: ArrayRecord, metrics: dict[str, Any]
    ) -> bool:
        """Report a round and write its checkpoints; return True if the run ends."""
        seconds, settings = time.monotonic() - self._began, self.settings
        tested = self._tested() if metrics.get("evaluated") else {}
        self.report.add(self._row(server_round, seconds, metrics), tested)
        self.watch.after_round()
        # No client is left to ask, as `RepresentationTransfer` reports.
        idle = metrics.get("asked") == 0
        self._empty = 0 if metrics.get("clients") or idle else self._empty + 1
        if 0 < settings.max_empty_rounds <= self._empty:
            why = self.strategy._run.round.failure or "nobody was asked"
            text = f"no valid reply in {self._empty} rounds in a row; {why}"
            raise SettingsError(text)
        # With FedAsync there may be as many rounds as replies.
        needed = settings.patience or settings.keep_best
        best, since = best_round(self.report.rows) if needed else (0, 0)
        if ends := stopped_early(self.report.rows, settings.patience):
            text = "the run ends: no better validation in %d evaluations since round %d"
            log(INFO, text, since, best)
        # Few snapshots are written, and only those are encoded.
        state, every = self.strategy._snapshot(), settings.checkpoint_every

        def checkpoint() -> Checkpoint:
            about = server_round, arrays, state(), seconds, self.report.settings
            return Checkpoint(*about)

        if settings.keep_best and best == server_round:
            with self.report.writing(BEST_FILE):
                checkpoint().write(self.report.directory, BEST_FILE)
        self._unwritten = checkpoint
        is_last = ends or server_round == settings.num_server_rounds
        if is_last or (every and server_round % every == 0):
            self._write(checkpoint(), is_last)
        return ends

    def _row(
        self, server_round: int, seconds: float, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the row of ``metrics.jsonl`` for a round."""
        about = {"round": server_round, "seconds": round(seconds, 3)}
        row, run = {**about, **metrics, **about}, self.strategy._run
        if self.clock is not None:
            row["seconds-simulated"] = self.clock.seconds
        label = run.clients.label
        if rejections := run.round.rejections:
            row["rejected-clients"] = [label(name) for name, _ in rejections]
        if run.round.silent and run.participation.waits_for_all:
            row["unanswered-clients"] = [label(name) for name in run.round.silent]
            log(WARNING, "no reply of clients %s", several(row["unanswered-clients"]))
        if silent := getattr(self._grid, "silent", []):
            row["silent-clients"] = list(silent)
        return row

    def _tested(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of each client that was tested, by its label."""
        tested = {}
        for reply in self.strategy._run.evaluation.replies:
            label = self.strategy._run.clients.label(reply.client)
            tested[label] = {**reply.metrics}
            tested[label].pop(NUM_EXAMPLES, None)
        return tested

    def _write(self, checkpoint: Checkpoint, last: bool) -> None:
        values = checkpoint.state.values
        if last and self.keep_clients:
            # Before the checkpoint is written, which relies on the clients' state.
            run, rounds = str(values["run"]), values["acknowledged"]
            if not self.keep_clients(run, rounds):
                self.report.lost.add(f"{self.report.algorithm}/clients")
        with self.report.writing(FILE):
            checkpoint.write(self.report.directory)
            # Only now: an interrupted write is repeated when the run ends.
            self._unwritten = None
            self.strategy._run.clients.note_checkpoint(checkpoint.server_round)
