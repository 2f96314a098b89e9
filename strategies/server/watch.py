"""The progress of a run: one log line per round, and ``status.json`` for the page."""

import contextlib
import os
import platform
import time
from collections.abc import Collection, Iterator
from logging import INFO
from typing import Any

from flwr.common import log

from flwr_frl.common.files import write_atomically
from flwr_frl.common.text import several
from flwr_frl.results.output import log_os_errors
from flwr_frl.results.progress import describe, duration, seconds_left
from flwr_frl.results.report import Report
from flwr_frl.results.results import STATUS, quality, strict_json
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.server.round import Round

# The least time between two writes of the status: in seconds, and as a multiple of the
# time that a write takes, as the status has an entry for each client.
INTERVAL, WRITE_MULTIPLE = 1.0, 20.0


class Watch:
    """Report which clients are connected and how the run progresses.

    Parameters
    ----------
    strategy : Strategy
        The strategy, which manages the clients.
    report : Report
        The report of the run; ``status.json`` is written to its folder.
    """

    def __init__(self, strategy: Strategy, report: Report) -> None:
        self.strategy, self.report = strategy, report
        self.rounds = int(report.settings["num-server-rounds"])
        # Names of the connected clients by node, and at the last update the set of
        # these nodes and the number of identified clients.
        self._connected: dict[int, str] = {}
        self._updated: tuple[Collection[int], int] = (frozenset(), 0)
        # By name: when clients that have left were last seen, and each client's last
        # problem.
        self._last_seen: dict[str, float] = {}
        self._problems: dict[str, str] = {}
        self._written = self._write_seconds = 0.0

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Watch a run. An exception in the context marks the run as stopped."""
        joined, _ = self._update_connected()
        log(INFO, "connected clients: %s", several(joined) or "none yet")
        self._write("running")
        try:
            yield
        except BaseException:
            self.end("stopped")
            self.report.write_csv()
            raise

    def after_round(self) -> None:
        """Log the round of the last row, and write the status if it is due."""
        row, (joined, left) = self.report.rows[-1], self._update_connected()
        training, evaluation = self.strategy.round, self.strategy.evaluation.round
        self._add_problems(training, f"round {row['round']}")
        if evaluation.number == row["round"]:
            self._add_problems(evaluation, f"evaluation of round {row['round']}")
        label, awaited = self.strategy.clients.label, training.silent
        waits = self.strategy.participation.waits_for_all
        silent = [label(name) for name in awaited] if waits else []
        seconds = seconds_left(self.report.rows, self.rounds)
        clients = int(row.get("clients", 0))
        count = f"{clients} client{'s' * (clients != 1)}"
        described = describe(row, str(self.report.settings["evaluate-on"]))
        parts = [
            ", ".join(filter(None, [count, described])),
            joined and f"joined: {several(joined)}",
            left and f"left: {several(left)}",
            silent and f"no reply from {several(silent)}",
            row.get("rejected") and f"{row['rejected']:g} rejected",
            seconds is not None and f"{duration(seconds)} left",
        ]
        text = "; ".join(part for part in parts if part)
        log(INFO, "round %d of %d: %s", row["round"], self.rounds, text)
        interval = max(INTERVAL, WRITE_MULTIPLE * self._write_seconds)
        if time.monotonic() - self._written >= interval:
            self._write("running")

    def end(self, state: str) -> None:
        """Write the final state of the run: ``finished`` or ``stopped``."""
        self._update_connected()
        self._write(state)

    def _update_connected(self) -> tuple[list[str], list[str]]:
        """Return the clients that have joined and left since the last call."""
        clients = self.strategy.clients
        # Nodes that still owe a reply are connected, too.
        nodes = clients.here | clients.busy if clients.busy else clients.here
        # Usually the same set; comparing 100,000 nodes takes 5 ms.
        former, self._updated = self._updated, (nodes, len(clients.known))
        if former == self._updated:
            return [], []
        names = {node: self.strategy.clients.name_of(node) for node in sorted(nodes)}
        new = nodes - self._connected.keys()
        joined = [f"{clients.label_of(node)} (node {node})" for node in new]
        gone = {name for node, name in self._connected.items() if node not in nodes}
        # A client may have reconnected as another node, or may have been named since.
        left = sorted(gone.difference(names.values()))
        self._last_seen |= dict.fromkeys(left, time.time())
        self._connected = names
        return sorted(joined), [clients.label(name) for name in left]

    def _add_problems(self, round: Round, when: str) -> None:
        if self.strategy.participation.waits_for_all or not round.trains:
            self._problems |= dict.fromkeys(round.silent, f"{when}: no reply")
        self._problems |= {n: f"{when}: {why}" for n, why in round.rejections}

    def _clients(self, measure: str) -> list[dict[str, Any]]:
        """Return the status of each client, sorted by name."""
        strategy, now = self.strategy, time.time()
        manager = strategy.clients
        nodes = {name: node for node, name in self._connected.items()}
        properties = {c.name: c.properties for c in manager.known.values()}
        refused = {
            client.name: f"takes no part: {client.refusal}"
            for client in manager.refused.values()
        }
        updates = strategy.participation.updates or {}
        counts = strategy.participation.updates is not None
        names = {*nodes, *self._last_seen, *properties, *self._problems, *refused}
        return [
            {
                "client": manager.label(name),
                # A string, since JavaScript's numbers have too few digits.
                "node": str(nodes[name]) if name in nodes else None,
                "last-seen": now if name in nodes else self._last_seen.get(name),
                "last-round": strategy.ledger.acknowledged.get(name, 0),
                "num-examples": properties.get(name, {}).get("num-examples"),
                "num-test-examples": properties.get(name, {}).get("num-test-examples"),
                **({"updates": updates.get(name, 0)} if counts else {}),
                "quality": strategy.evaluation.metrics.get(name, {}).get(measure),
                "reason": refused.get(name) or self._problems.get(name, ""),
            }
            for name in sorted(names)
        ]

    def _write(self, state: str) -> None:
        began, left = time.monotonic(), seconds_left(self.report.rows, self.rounds)
        every = self.strategy.evaluation.metrics.values()
        measure = quality({name for metrics in every for name in metrics})
        status = {
            "state": state,
            # A page on the same machine can tell whether the process was killed.
            "host": platform.node(),
            "process": os.getpid(),
            "rounds": self.rounds,
            "written": time.time(),
            "left": left if state == "running" else None,
            "measure": measure,
            "clients": self._clients(measure),
        }
        with log_os_errors(STATUS):
            data = strict_json(status).encode()
            write_atomically(self.report.directory / STATUS, data, durable=False)
        self._written = time.monotonic()
        self._write_seconds = self._written - began
