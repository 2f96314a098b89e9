"""Who is there and how a run goes on, while it does: a line a round, and a file.

``status.json`` beside ``metrics.jsonl`` is what the page shows of a run that goes on.
"""

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.strategies.hooks import RunHooks
from flwr_frl.strategies.report.results import STATUS, Row, quality, strict_json
from flwr_frl.strategies.server.checks import several
from flwr_frl.strategies.server.pending_round import PendingRound
from flwr_frl.task.files import write_atomically

# Seconds between two writings of the file, and how many times what the last one took:
# it has a line for each client.
INTERVAL, SHARE = 1.0, 20.0


class Watch:
    """Tells who has come, who has left and how far the run is.

    Parameters
    ----------
    strategy : RunHooks
        The strategy, which knows the clients.
    directory : Path
        Where ``status.json`` is written.
    rounds : int
        How many rounds there will be.
    evaluated_on : {"test", "validation"}
        What losses of evaluations are of.
    """

    def __init__(
        self,
        strategy: RunHooks,
        directory: Path,
        rounds: int,
        evaluated_on: str = "test",
    ) -> None:
        self.strategy, self.directory, self.rounds = strategy, directory, rounds
        self.evaluated_on = evaluated_on
        # Names of those that are there by node, when the others were last seen, and
        # what was last wrong with a client.
        self._here: dict[int, str] = {}
        self._known = 0
        self._gone: dict[str, float] = {}
        self._wrong: dict[str, str] = {}
        self._written = self._took = 0.0

    @contextlib.contextmanager
    def over(self, rows: list[Row]) -> Iterator[None]:
        """Watch a run: one that is left by an error has ``stopped``."""
        self.begin(rows)
        try:
            yield
        except BaseException:
            self.end("stopped", rows)
            raise

    def begin(self, rows: list[Row]) -> None:
        """Say who is there before the first round."""
        joined, _ = self._changes()
        log(INFO, "clients that are here: %s", several(joined) or "none yet")
        self._write("running", rows)

    def after_round(self, rows: list[Row]) -> None:
        """Say in one line how the round of the last row went."""
        row, (joined, left) = rows[-1], self._changes()
        exchange = self.strategy.training
        self._note(exchange, f"round {row['round']}")
        # That of the evaluation, where there was one.
        latest = getattr(self.strategy, "pending", exchange)
        if latest is not exchange:
            self._note(latest, f"evaluation of round {row['round']}")
        silent = exchange.silent if self.strategy.waits_for_all else []
        parts = [
            _numbers(row, self.evaluated_on),
            joined and f"joined: {several(joined)}",
            left and f"left: {several(left)}",
            silent and f"no answer of {several(silent)}",
            row.get("rejected") and f"{row['rejected']:g} rejected",
        ]
        if (seconds := seconds_left(rows, self.rounds)) is not None:
            parts.append(f"{duration(seconds)} left")
        text = "; ".join(part for part in parts if part)
        log(INFO, "round %d of %d: %s", row["round"], self.rounds, text)
        if time.monotonic() - self._written >= max(INTERVAL, SHARE * self._took):
            self._write("running", rows)

    def end(self, state: str, rows: list[Row]) -> None:
        """Note how the run has ended: ``finished`` or ``stopped``."""
        self._changes()
        self._write(state, rows)

    def _changes(self) -> tuple[list[str], list[str]]:
        """Return who has come and who has left since the last call."""
        participants = self.strategy.clients
        nodes, known = participants.here, len(participants.known)
        if nodes == self._here.keys() and known == self._known:
            return [], []
        names = {node: self.strategy.name_of(node) for node in sorted(nodes)}
        # One that has said its name since has been there.
        joined = [f"{names[n]} (node {n})" for n in nodes - self._here.keys()]
        away = {name for node, name in self._here.items() if node not in nodes}
        left = sorted(away.difference(names.values()))
        self._gone |= dict.fromkeys(left, time.time())
        self._here, self._known = names, known
        return sorted(joined), left

    def _note(self, exchange: PendingRound, when: str) -> None:
        """Keep why a client's reply did not count."""
        if self.strategy.waits_for_all or when.startswith("evaluation"):
            self._wrong |= dict.fromkeys(exchange.silent, f"{when}: no answer")
        self._wrong |= {n: f"{when}: {why}" for n, why in exchange.rejections}

    def _clients(self) -> list[dict[str, Any]]:
        """Return what is known of each client, in the order of their names."""
        strategy, now = self.strategy, time.time()
        participants, measure = strategy.clients, self._measure()
        nodes = {name: node for node, name in self._here.items()}
        about = {p.name: p.properties for p in participants.known.values()}
        refused = {
            strategy.name_of(n): f"takes no part: {why}"
            for n, why in participants.refusals.items()
        }
        clients = []
        for name in sorted({*nodes, *self._gone, *about, *self._wrong, *refused}):
            metrics = strategy.client_metrics.get(name, {})
            own = about.get(name, {})
            clients.append(
                {
                    "client": participants.label(name),
                    # JavaScript's numbers are too short for it.
                    "node": str(nodes[name]) if name in nodes else None,
                    "last-seen": now if name in nodes else self._gone.get(name),
                    "last-round": strategy.ledger.acknowledged.get(name, 0),
                    "num-examples": own.get("num-examples"),
                    "num-test-examples": own.get("num-test-examples"),
                    "quality": metrics.get(measure),
                    "reason": refused.get(name) or self._wrong.get(name, ""),
                }
            )
        return clients

    def _measure(self) -> str:
        """Return the metric by which the clients are shown."""
        every = self.strategy.client_metrics.values()
        return quality({name for metrics in every for name in metrics})

    def _write(self, state: str, rows: list[Row]) -> None:
        began = time.monotonic()
        status = {
            "state": state,
            # By which a page on this machine sees that it is killed.
            "host": platform.node(),
            "process": os.getpid(),
            "rounds": self.rounds,
            "written": time.time(),
            "left": seconds_left(rows, self.rounds) if state == "running" else None,
            "measure": self._measure(),
            "clients": self._clients(),
        }
        try:
            data = strict_json(status).encode()
            write_atomically(self.directory / STATUS, data, durable=False)
        except OSError as error:
            log(WARNING, "%s not written: %s", STATUS, error)
        self._written = time.monotonic()
        self._took = self._written - began


def _numbers(row: Row, evaluated_on: str) -> str:
    """Return how many clients counted, the loss and the quality of a round."""
    clients = int(row.get("clients", 0))
    parts = [f"{clients} client{'s' * (clients != 1)}"]
    if row.get("train-loss") is not None:
        parts.append(f"train loss {row['train-loss']:.4g}")
    name = quality(row)
    if row.get(name) is not None:
        form = "{:.2%}" if name == "accuracy" else "{:.4g}"
        label = f"{evaluated_on} loss" if name == "loss" else name
        parts.append(f"{label} {form.format(row[name])}")
    return ", ".join(parts)


def seconds_left(rows: Sequence[Row], rounds: int) -> float | None:
    """Return how long the other rounds will take, at the pace of the last ten.

    None before the second round, and where none is left.
    """
    timed = (row for row in reversed(rows) if row.get("seconds") is not None)
    recent = list(islice(timed, 11))[::-1]
    if len(recent) < 2 or (left := rounds - recent[-1]["round"]) <= 0:
        return None
    done = recent[-1]["round"] - recent[0]["round"]
    seconds: float = (recent[-1]["seconds"] - recent[0]["seconds"]) * left / done
    return max(0.0, seconds)


def duration(seconds: float) -> str:
    """Return a time in its two largest units: ``3 h 20 min``."""
    whole = round(seconds)
    for unit, size, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
