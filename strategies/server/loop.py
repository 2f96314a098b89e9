"""Run the rounds: train, evaluate, report, write checkpoints.

After each round one line is logged, and at most once a second ``status.json`` is
written for the page.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from flwr_frl.common.checkpoint import FILE
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.files import write_atomically
from flwr_frl.common.messages import NUM_EXAMPLES, NUM_TEST_EXAMPLES, TESTED_MODEL
from flwr_frl.common.text import several
from flwr_frl.results.report import Report
from flwr_frl.results.results import STATUS, describe, log_os_errors, strict_json
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.server.checkpoint import Checkpoint
from flwr_frl.strategies.server.evaluation import let_join
from flwr_frl.strategies.server.run_settings import RunSettings

# Lists of clients in the row of a round.
LISTS = ("rejected-clients", "unanswered-clients", "silent-clients")
# Called with the run's token and each client's last round that has counted; returns
# whether all states are written.
KeepClients = Callable[[str, Mapping[str, int]], bool]
# The least time between two writes of the status: in seconds, and as a multiple of the
# time that a write takes, as the status has an entry for each client.
INTERVAL, WRITE_MULTIPLE = 1.0, 20.0


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
        Called with the round, the shared arrays and the round's metrics.

    Returns
    -------
    ArrayRecord
        The shared arrays after the last round.
    """
    if hasattr(grid, "on_demand"):
        # In one process, clients train while their replies are averaged.
        grid.on_demand = getattr(strategy, "_averages_on_arrival", False)
    for server_round in rounds:
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages, timeout=timeout)
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
            for name in ("round", *LISTS):
                tested.pop(name, None)
            metrics = {**tested, **metrics}
        if after_round is not None:
            after_round(server_round, arrays, metrics)
    return arrays


def evaluate(
    strategy: FlowerStrategy,
    grid: Grid,
    arrays: ArrayRecord,
    server_round: int,
    timeout: float,
) -> dict[str, Any]:
    """Return the metrics of an evaluation by a strategy's hooks."""
    messages = strategy.configure_evaluate(server_round, arrays, ConfigRecord(), grid)
    replies = grid.send_and_receive(messages, timeout=timeout)
    return dict(strategy.aggregate_evaluate(server_round, replies) or {})


@dataclass
class Loop:
    """Runs the rounds, and reports and saves each.

    Parameters
    ----------
    strategy : Strategy
        The strategy.
    settings : RunSettings
        Number of rounds, and which are evaluated.
    report : Report
        Receives the rows; its folder gets the checkpoints and the status.
    start : Checkpoint
        The state from which the run continues; of round 0 for a new run.
    keep_clients : callable or None
        Saves simulated clients' states before the last checkpoint (`KeepClients`).
    """

    strategy: Strategy
    settings: RunSettings
    report: Report
    start: Checkpoint
    keep_clients: KeepClients | None

    def __post_init__(self) -> None:
        """Begin to measure the time."""
        self._began = time.monotonic() - self.start.seconds
        self._grid: Any = None
        # The checkpoint of the last round until it is written, in case the run ends.
        self._unwritten: Checkpoint | None = None
        # Number of consecutive rounds without a valid reply.
        self._empty = 0
        self._connected = frozenset[int]()
        # When the status is written next.
        self._due = 0.0

    def run(self, grid: Grid) -> dict[str, dict[str, float]]:
        """Run all rounds that are left, let newcomers join, and keep the status.

        If the resumed run is over, only an evaluation is run, as the report needs each
        client's metrics.

        Returns
        -------
        dict
            The newcomers' metrics (`let_join`).

        Raises
        ------
        SettingsError
            If ``max-empty-rounds`` consecutive rounds had no valid reply, or no round
            had one.
        """
        joined, _ = self._update_connected()
        log(INFO, "connected clients: %s", several(joined) or "none yet")
        self.write_status("running")
        try:
            newcomers = self._run(grid)
        except BaseException as error:
            # The run can be resumed, regardless of what ended it.
            ended = isinstance(error, (Exception, KeyboardInterrupt, SystemExit))
            if ended and self._unwritten is not None:
                self._write(self._unwritten, last=True)
            self.write_status("stopped")
            raise
        self.write_status("finished")
        return newcomers

    def _run(self, grid: Grid) -> dict[str, dict[str, float]]:
        self._grid, settings, after = grid, self.settings, self.start.server_round
        rounds = range(after + 1, self.settings.num_server_rounds + 1)
        with self.report.progress:
            arrays = run_rounds(
                self.strategy,
                grid,
                self.start.arrays,
                rounds,
                evaluated=self.is_evaluated,
                timeout=settings.round_timeout,
                after_round=self._after_round,
            )
        if not rounds:
            evaluate(self.strategy, grid, arrays, after, settings.round_timeout)
        if not any(row.get("clients") for row in self.report.rows):
            raise SettingsError(f"no round had a valid reply; {self._failure}")
        if not settings.new_clients:
            return {}
        last = max(after, settings.num_server_rounds)
        return let_join(self.strategy, grid, arrays, last, settings.round_timeout)

    @property
    def _failure(self) -> str:
        return self.strategy._run.round.failure or "nobody was asked"

    def is_evaluated(self, server_round: int) -> bool:
        """Return whether a round is evaluated."""
        every, last = self.settings.evaluate_every, self.settings.evaluate_last
        if self.strategy._traits.evaluate_last_round_only:
            every, last = 0, 1
        due = every > 0 and server_round % every == 0
        return due or server_round > self.settings.num_server_rounds - last

    def _after_round(
        self, server_round: int, arrays: ArrayRecord, metrics: dict[str, Any]
    ) -> None:
        """Report a round, and write its checkpoint if it is due."""
        seconds, settings = time.monotonic() - self._began, self.settings
        self._add_row(server_round, seconds, metrics)
        # No client is left to ask, as `RepresentationTransfer` reports.
        idle = metrics.get("asked") == 0
        self._empty = 0 if metrics.get("clients") or idle else self._empty + 1
        if 0 < settings.max_empty_rounds <= self._empty:
            text = f"no valid reply in {self._empty} rounds in a row"
            raise SettingsError(f"{text}; {self._failure}")
        state, every = self.strategy._snapshot(), settings.checkpoint_every
        about = server_round, arrays, state, seconds, self.report.settings
        self._unwritten = checkpoint = Checkpoint(*about)
        is_last = server_round == settings.num_server_rounds
        if is_last or (every and server_round % every == 0):
            self._write(checkpoint, is_last)

    def _add_row(
        self, server_round: int, seconds: float, metrics: dict[str, Any]
    ) -> None:
        """Report a round: its row, its log line and, if it is due, the status."""
        run, clients = self.strategy._run, self.strategy._run.clients
        waits = run.participation.waits_for_all
        about = {"round": server_round, "seconds": round(seconds, 3)}
        row = {**about, **metrics, **about}
        # With simulated speeds, the grid has a clock.
        if hasattr(self._grid, "seconds"):
            row["seconds-simulated"] = self._grid.seconds
        rejected = [clients.label(name) for name, _ in run.round.rejections]
        silent = [clients.label(name) for name in run.round.silent if waits]
        lists = rejected, silent, getattr(self._grid, "silent", [])
        row |= {n: names for n, names in zip(LISTS, lists, strict=True) if names}
        tested = {}
        for reply in run.evaluation.replies if metrics.get("evaluated") else ():
            values = {n: v for n, v in reply.metrics.items() if n != NUM_EXAMPLES}
            tested[clients.label(reply.client)] = values
        self.report.add(row, tested)
        evaluation = run.evaluation.round
        for each, when in ((run.round, "round"), (evaluation, "evaluation of round")):
            if each.number == server_round:
                missing = each.silent if waits or each is evaluation else []
                problems = dict([*each.rejections, *((n, "no reply") for n in missing)])
                rows = clients.by_name() if problems else {}
                for name in problems.keys() & rows:
                    _, client = rows[name]
                    client.problem = f"{when} {server_round}: {problems[name]}"
        joined, left = self._update_connected()
        number = int(row.get("clients", 0))
        counted = f"{number} client{'s' * (number != 1)}"
        described = describe(row)
        rounds = self.settings.num_server_rounds
        parts = [
            ", ".join(filter(None, [counted, described])),
            joined and f"joined: {several(joined)}",
            left and f"left: {several(left)}",
            silent and f"no reply from {several(silent)}",
            row.get("rejected") and f"{row['rejected']:g} rejected",
        ]
        text = "; ".join(part for part in parts if part)
        log(INFO, "round %d of %d: %s", server_round, rounds, text)
        if time.monotonic() >= self._due:
            self.write_status("running")

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

    # The status.

    def _update_connected(self) -> tuple[list[str], list[str]]:
        """Return the clients that have joined and left since the last call."""
        clients, former = self.strategy._run.clients, self._connected
        self._connected = now = clients.connected
        if now == former:
            return [], []
        joined = [f"{clients.label_of(node)} (node {node})" for node in now - former]
        left = []
        for name, (node, row) in clients.by_name().items():
            # A client may have reconnected as another node.
            if node in former - now:
                row.left = time.time()
                left.append(clients.label(name))
        return sorted(joined), sorted(left)

    def write_status(self, state: str) -> None:
        """Write ``status.json`` of a running, finished or stopped run."""
        began, run, clients = time.monotonic(), self.strategy._run, []
        self._update_connected()
        updates = run.participation.updates
        for name, (node, row) in sorted(run.clients.by_name().items()):
            is_here = node in self._connected
            client = {
                "client": run.clients.label(name),
                # A string, since JavaScript's numbers have too few digits.
                "node": str(node) if is_here else None,
                "last-seen": time.time() if is_here else row.left,
                "last-round": run.clients.acknowledged.get(name, 0),
                NUM_EXAMPLES: row.properties.get(NUM_EXAMPLES),
                NUM_TEST_EXAMPLES: row.properties.get(NUM_TEST_EXAMPLES),
                "updates": None if updates is None else updates.get(name, 0),
                "reason": row.problem,
            }
            if row.refusal:
                client["reason"] = f"takes no part: {row.refusal}"
            clients.append(client)
        # Simulated clients have no connections, which the page would show.
        status = {"state": state, "devices": self.keep_clients is None}
        status |= {"settings": self.report.config, TESTED_MODEL: self.report.tested}
        with log_os_errors(STATUS):
            data = strict_json({**status, "clients": clients}).encode()
            write_atomically(self.report.directory / STATUS, data, durable=False)
        now = time.monotonic()
        self._due = now + max(INTERVAL, WRITE_MULTIPLE * (now - began))
