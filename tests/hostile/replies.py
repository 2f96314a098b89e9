"""Hostile replies to strategies: one client must not disturb the others."""

import copy
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from mutations import WORDS, Rng, content_of, pick, scalar

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.arrays import is_finite
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import Settings, resolve
from flwr_frl.results.results import strict_json
from flwr_frl.strategies import ALGORITHMS, build_strategy
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.fedbuff import Asynchronous
from flwr_frl.strategies.grids import inbox
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import SimulatedArrivals, SpeedModel
from flwr_frl.strategies.server.loop import run_rounds

CLIENTS = 5
LIAR = 2
MODEL = "mlp"
LORA = {"adapters": "lora", "lora-rank": 2}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("fedsa-lora", "ffa-lora", "feddpa"), LORA),
    "fedbn": {"model": "resnet20"},
    "fedbuff": {"concurrency": 4, "buffer-size": 2, "upload-compressor": "qsgd-top-k"},
    "fedper": {"upload-compressor": "sign-rand-k"},
    "fedasync": {"concurrency": 4},
    "multi-task": {"task": "qcqp", "model": ""},
    "representation-transfer": {"num-sources": 3, "source-epochs": 1},
}


def settings_of(algorithm: str, **more: Any) -> Settings:
    """Return settings with which a round is fast."""
    settings: dict[str, Any] = {"algorithm": algorithm, "model": MODEL}
    settings |= {"num-clients": CLIENTS, "fraction-train": 1.0, "batch-size": 50}
    settings |= {"head-epochs": 1, "finetune-epochs": 1, "compressor-k": 0.2}
    settings |= {"initial-nodes": CLIENTS, **OWN.get(algorithm, {}), **more}
    return resolve(settings)


def adapted(strategy: Strategy, grid: Grid) -> Grid:
    """Return the grid of a run; with a clock if rounds close early."""
    if strategy._run.participation.waits_for_all:
        return grid
    speeds = SpeedModel("fixed", CLIENTS, seed=0)
    return SimulatedArrivals(grid, speeds, lambda node: node % CLIENTS)


@dataclass
class Outcome:
    """Result of hostile replies.

    ``fell`` describes the replies that had an effect that no reply may have.
    """

    tried: int = 0
    refused: int = 0
    fell: list[str] = field(default_factory=list)


class Target:
    """A strategy after an honest round, in which one reply is to be replaced."""

    def __init__(self, algorithm: str, kind: str) -> None:
        settings = settings_of(algorithm)
        self.grid: Grid = InlineGrid(make_app(settings), CLIENTS)
        self.strategy = build_strategy(settings)
        self.inner = getattr(self.strategy, "strategy", self.strategy)
        self.kind = kind
        arrays = self.strategy.initialize(self.grid)
        self.grid = adapted(self.inner, self.grid)
        configure = getattr(self.strategy, f"configure_{kind}")
        if kind == "evaluate":
            # Some algorithms have nothing to evaluate before the first round.
            messages = self.strategy.configure_train(
                1, arrays, ConfigRecord(), self.grid
            )
            replies = self.grid.send_and_receive(list(messages))
            trained, _ = self.strategy.aggregate_train(1, replies)
            arrays = arrays if trained is None else trained
        messages = list(configure(1, arrays, ConfigRecord(), self.grid))
        self.replies = list(self.grid.send_and_receive(messages))
        evaluates = kind == "evaluate"
        self.owner = self.inner._run.evaluation if evaluates else self.inner._run
        self.asked = self.owner.round
        self.before = self.inner._snapshot()
        self.arrived = self.inner._run.participation
        liars = [i for i, r in enumerate(self.replies) if self.is_liar(r)]
        self.place = liars[0] if liars else 0
        others = [r for i, r in enumerate(self.replies) if i != self.place]
        self.without, _ = self.result(others)

    def is_liar(self, reply: Message) -> bool:
        return reply.metadata.src_node_id == LIAR

    def result(self, replies: list[Message]) -> tuple[Any, Any]:
        """Aggregate replies in the state before them; return arrays and metrics."""
        # Entries of the state that were made since would survive.
        self.inner.state.clear()
        self.inner._restore(copy.deepcopy(self.before))
        asked = self.asked
        self.owner.round = round = copy.copy(asked)
        round.asked = dict(asked.asked)
        round.like, round.rejections, round.unused = dict(asked.like), [], {}
        round.replies, round.running = [], None
        if isinstance(self.arrived, Asynchronous):
            self.inner._run.participation = work = copy.copy(self.arrived)
            work._since, work.at_work = dict(work._since), dict(work.at_work)
            work._staleness = dict(work._staleness)
            # The grid does this for every client whose reply it delivers.
            for node in {r.metadata.src_node_id for r in replies} & work._since.keys():
                work.end(node)
        if self.kind == "train":
            arrays, metrics = self.strategy.aggregate_train(1, replies)
            state, _ = self.inner._snapshot()
            aggregated = (
                {} if arrays is None else {n: a.numpy() for n, a in arrays.items()}
            )
            return {**aggregated, **state}, metrics
        return {}, self.strategy.aggregate_evaluate(1, replies)

    def hostile(self, rng: Rng) -> list[Message]:
        """Return all replies, of which that of one client is corrupted."""
        reply = self.replies[self.place]
        kind = rng.integers(12)
        others = [r for i, r in enumerate(self.replies) if i != self.place]
        if not reply.has_content() or kind == 0:
            reason = pick(rng, WORDS)
            return [*others, Message(Error(2, reason), reply_to=to(reply))]
        changed = Message(content_of(rng, reply.content), reply_to=to(reply))
        about = changed.metadata
        if kind == 1:
            # In addition to the honest reply, which comes first
            return [*others, reply, changed]
        if kind == 2:
            about.__dict__["_src_node_id"] = int(pick(rng, (1, 3, 10**6, 0, 2**63)))
            return [*others, changed]
        return [*others, changed]

    def attack(self, rng: Rng, outcome: Outcome) -> None:
        """Try one hostile reply, and record its effects."""
        outcome.tried += 1
        state = rng.bit_generator.state["state"]["state"]
        try:
            replies = self.hostile(rng)
        except Exception:
            # Flower's record types refuse the content.
            outcome.refused += 1
            return
        what = f"{type(self.inner).__name__}/{self.kind} at {state}"
        try:
            with np.errstate(all="ignore"):
                arrays, metrics = self.result(replies)
        except SettingsError as error:
            outcome.fell.append(f"{what} ended the run: {error}")
            return
        except Exception as error:
            outcome.fell.append(f"{what} raised {error!r}"[:300])
            return
        if not is_finite(*arrays.values()):
            outcome.fell.append(f"{what} made a state that is not finite")
        rows = dict(metrics or {})
        if len(rows) > 60 or not all(map(is_finite_metric, rows.values())):
            outcome.fell.append(f"{what} put nonsense into the metrics")
        json.loads(strict_json(rows), parse_constant=refuse)
        rejections = self.owner.round.rejections
        for name, reason in rejections:
            if not f"{name}{reason}".isprintable() or len(reason) > 400:
                outcome.fell.append(f"{what} is not one line: {reason!r}"[:300])
        if rejections:
            outcome.refused += 1
            counted = len(replies) - len(rejections)
            if self.kind == "train" and counted == len(self.replies) - 1:
                same = arrays.keys() == self.without.keys() and all(
                    np.array_equal(arrays[n], v) for n, v in self.without.items()
                )
                if not same:
                    outcome.fell.append(f"{what} changed an honest aggregate")


def is_finite_metric(value: float | list[float]) -> bool:
    """Return whether a metric, one number or several, is finite."""
    return all(map(math.isfinite, value if isinstance(value, list) else [value]))


def to(reply: Message) -> Message:
    """Return a message that a copy of a reply can answer."""
    about = reply.metadata
    message = Message(RecordDict(), about.src_node_id, about.message_type)
    message.metadata.__dict__["_message_id"] = about.reply_to_message_id
    return message


def refuse(name: str) -> None:
    raise AssertionError(f"{name} in JSON")


def attack_properties(algorithm: str, rng: Rng, outcome: Outcome) -> None:
    """Corrupt the properties of one client; the others must remain available."""
    settings = settings_of(algorithm)
    app = make_app(settings)

    def answer(message: Message, context: Any) -> Message:
        reply = app(message, context)
        if context.node_id == LIAR and message.metadata.message_type == "query":
            record = reply.content.config_records["properties"]
            for _ in range(int(rng.integers(1, 4))):
                name = pick(rng, (*record, *WORDS[1:]))
                record[name] = scalar(rng)
        return reply

    outcome.tried += 1
    grid = InlineGrid(answer, CLIENTS)
    strategy = build_strategy(settings)
    try:
        nodes = strategy._identify(grid)
    except Exception as error:
        outcome.fell.append(f"{algorithm}/properties raised {error!r}"[:300])
        return
    if not {1, 3, 4, 5} <= set(nodes):
        outcome.fell.append(f"{algorithm}/properties shut out {nodes}")
    outcome.refused += LIAR not in nodes


class Renaming(InlineGrid):
    """Nodes of which two come and go, under any name; their training takes longer."""

    in_process = False
    hostile = (LIAR, CLIENTS + 1)

    def __init__(self, app: Any, rng: Rng) -> None:
        def answer(message: Message, context: Any) -> Message:
            reply = app(message, context)
            asks = message.metadata.message_type == MessageType.QUERY
            if asks and context.node_id in self.hostile:
                name = pick(rng, ("000000", "000001", "another"))
                reply.content.config_records["properties"]["client"] = name
            return reply

        super().__init__(answer, CLIENTS)
        self.contexts[CLIENTS + 1] = copy.deepcopy(self.contexts[LIAR])
        self.contexts[CLIENTS + 1].node_id = CLIENTS + 1
        self.rng = rng
        # Number of pulls that return nothing, by message id.
        self.late: dict[str, int] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes but some of the hostile ones."""
        away = {node for node in self.hostile if self.rng.integers(2)}
        return [node for node in self.contexts if node not in away]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, and draw when the hostile nodes' replies to training come."""
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for i, about in zip(ids, (m.metadata for m in messages), strict=True):
            trains = about.message_type == MessageType.TRAIN
            if trains and about.dst_node_id in self.hostile:
                self.late[i] = int(self.rng.integers(1, 40))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer the messages that are not late."""
        self.late = {i: pulls - 1 for i, pulls in self.late.items() if pulls}
        return super().pull_messages([i for i in message_ids if i not in self.late])


def attack_names(algorithm: str, rng: Rng, outcome: Outcome) -> None:
    """Rename two clients while a run trains; the honest ones must take part."""
    outcome.tried += 1
    settings = settings_of(algorithm)
    strategy = build_strategy(settings)
    grid = Inbox(Renaming(make_app(settings), rng), strategy._run.clients.name_of)
    try:
        with mock.patch.object(inbox, "PULL_INTERVAL", 0.0):
            arrays = strategy.initialize(grid)
            grid = strategy._adapt_grid(grid)
            work = isinstance(strategy._run.participation, Asynchronous)
            rounds = range(1, 30 if work else 7)
            run_rounds(strategy, grid, arrays, rounds, evaluated=lambda r: r % 2 == 0)
    except Exception as error:
        outcome.fell.append(f"{algorithm}/names raised {error!r}"[:300])
        return
    honest = {f"{node - 1:06}" for node in range(1, CLIENTS + 1) if node != LIAR}
    if missing := honest - strategy._run.clients.acknowledged.keys():
        outcome.fell.append(f"{algorithm}/names shut out {missing}")


def run(
    replies: int, seed: int, algorithms: Sequence[str] = tuple(ALGORITHMS)
) -> Outcome:
    """Try this many hostile replies, distributed over the algorithms."""
    outcome, rng = Outcome(), np.random.default_rng([seed, 1])
    both = [Target(a, kind) for a in algorithms for kind in ("train", "evaluate")]
    # Representation transfer evaluates no client before the targets have a model.
    targets = [target for target in both if target.replies]
    # Each of these attacks needs a new strategy.
    queries, runs = max(1, replies // 50), max(1, replies // 500)
    for i in range(queries):
        attack_properties(algorithms[i % len(algorithms)], rng, outcome)
    for i in range(runs):
        attack_names(algorithms[i % len(algorithms)], rng, outcome)
    for i in range(replies - queries - runs):
        targets[i % len(targets)].attack(rng, outcome)
    return outcome
