"""The progress of a run: one log line per round, and ``status.json`` for the page."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from logging import INFO
from typing import Any

from flwr.common import log

from flwr_frl.common.files import write_atomically
from flwr_frl.common.text import several
from flwr_frl.results.output import log_os_errors
from flwr_frl.results.report import Report
from flwr_frl.results.results import STATUS, Row, describe, quality, strict_json
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
        # By name: nodes of the connected clients, when clients that have left were last
        # seen, and each client's last problem.
        self._connected: dict[str, int] = {}
        self._last_seen: dict[str, float] = {}
        self._problems: dict[str, str] = {}
        # When the status is written next.
        self._due = 0.0

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
            raise

    def after_round(self) -> None:
        """Log the round of the last row, and write the status if it is due."""
        row, (joined, left) = self.report.rows[-1], self._update_connected()
        training, evaluation = (
            self.strategy._run.round,
            self.strategy._run.evaluation.round,
        )
        silent = self._add_problems(training, f"round {row['round']}")
        if evaluation.number == row["round"]:
            self._add_problems(evaluation, f"evaluation of round {row['round']}")
        seconds = seconds_left(self.report.rows, self.rounds)
        number = int(row.get("clients", 0))
        counted = f"{number} client{'s' * (number != 1)}"
        described = describe(row, str(self.report.settings["evaluate-on"]))
        parts = [
            ", ".join(filter(None, [counted, described])),
            joined and f"joined: {several(joined)}",
            left and f"left: {several(left)}",
            silent and f"no reply from {several(silent)}",
            row.get("rejected") and f"{row['rejected']:g} rejected",
            seconds is not None and f"{timedelta(seconds=round(seconds))} left",
        ]
        text = "; ".join(part for part in parts if part)
        log(INFO, "round %d of %d: %s", row["round"], self.rounds, text)
        if time.monotonic() >= self._due:
            self._write("running")

    def end(self, state: str) -> None:
        """Write the final state of the run: ``finished`` or ``stopped``."""
        self._update_connected()
        self._write(state)

    def _update_connected(self) -> tuple[list[str], list[str]]:
        """Return the clients that have joined and left since the last call."""
        clients = self.strategy._run.clients
        # Nodes that still owe a reply are connected, too.
        names = {clients.name_of(node): node for node in clients.here | clients.busy}
        nodes, former = set(names.values()), set(self._connected.values())
        joined = [f"{clients.label_of(n)} (node {n})" for n in nodes - former]
        # A client may have reconnected as another node, or may have been named since.
        gone = [name for name, node in self._connected.items() if node not in nodes]
        left = sorted(set(gone) - names.keys())
        self._last_seen |= dict.fromkeys(left, time.time())
        self._connected = names
        return sorted(joined), [clients.label(name) for name in left]

    def _add_problems(self, round: Round, when: str) -> list[str]:
        """Note the problems of a round; return the clients that should have replied."""
        self._problems |= {name: f"{when}: {why}" for name, why in round.rejections}
        if round.trains and not self.strategy._run.participation.waits_for_all:
            return []
        self._problems |= dict.fromkeys(round.silent, f"{when}: no reply")
        return [self.strategy._run.clients.label(name) for name in round.silent]

    def _clients(self, measure: str) -> Iterator[dict[str, Any]]:
        """Yield the status of each client, sorted by name."""
        strategy, clients = self.strategy, self.strategy._run.clients
        updates = strategy._run.participation.updates
        properties = {row.name: row.properties for row in clients.known.values()}
        last_seen = self._last_seen | dict.fromkeys(self._connected, time.time())
        problems = self._problems | {
            row.name: f"takes no part: {row.refusal}"
            for row in clients.refused.values()
        }
        for name in sorted({*properties, *last_seen, *problems}):
            about, node = properties.get(name, {}), self._connected.get(name)
            yield {
                "client": clients.label(name),
                # A string, since JavaScript's numbers have too few digits.
                "node": None if node is None else str(node),
                "last-seen": last_seen.get(name),
                "last-round": strategy._run.clients.acknowledged.get(name, 0),
                "num-examples": about.get("num-examples"),
                "num-test-examples": about.get("num-test-examples"),
                "updates": None if updates is None else updates.get(name, 0),
                "quality": strategy._run.evaluation.metrics.get(name, {}).get(measure),
                "reason": problems.get(name, ""),
            }

    def _write(self, state: str) -> None:
        began, left = time.monotonic(), seconds_left(self.report.rows, self.rounds)
        every = self.strategy._run.evaluation.metrics.values()
        measure = quality({name for metrics in every for name in metrics})
        status = {
            "state": state,
            "rounds": self.rounds,
            "left": left if state == "running" else None,
            "measure": measure,
            "clients": list(self._clients(measure)),
        }
        with log_os_errors(STATUS):
            data = strict_json(status).encode()
            write_atomically(self.report.directory / STATUS, data, durable=False)
        now = time.monotonic()
        self._due = now + max(INTERVAL, WRITE_MULTIPLE * (now - began))


def seconds_left(rows: Sequence[Row], rounds: int) -> float | None:
    """Estimate the remaining time of a run from its last ten rounds, in seconds.

    Returns None before the second round and after the last one.
    """
    recent = rows[-11:]
    if len(recent) < 2 or (left := rounds - recent[-1]["round"]) <= 0:
        return None
    done = recent[-1]["round"] - recent[0]["round"]
    seconds: float = (recent[-1]["seconds"] - recent[0]["seconds"]) * left / done
    return max(0.0, seconds)
