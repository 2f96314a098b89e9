"""Hostile replies in the steps of secure aggregation."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from mutations import WORDS, Rng, bytes_of, content_of, pick
from replies import CLIENTS, LIAR, Outcome, is_finite_metric, settings_of, to

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.arrays import is_finite
from flwr_frl.common.secure.messages import SECURE
from flwr_frl.common.settings import build
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.secure import SecureGrid, SecureSettings

ROUNDS = 4


def hostile(rng: Rng, reply: Message) -> Message:
    """Return a corrupted reply, of which the record of the step is a frequent part."""
    kind = rng.integers(5)
    if kind == 0 or not reply.has_content():
        return Message(Error(2, pick(rng, WORDS)), reply_to=to(reply))
    content = RecordDict(dict(reply.content.items()))
    record: Any = content.get(SECURE)
    if kind > 2 and isinstance(record, ConfigRecord) and len(record) > 2:
        texts = {n: v for n, v in record.items() if n not in ("step", "session")}
        for name in rng.choice([*texts], int(rng.integers(1, len(texts) + 1))):
            text = texts[name]
            texts[name] = bytes_of(rng, text) if text else rng.bytes(16)
        content[SECURE] = ConfigRecord({**record, **texts})
    else:
        content = content_of(rng, content)
    return Message(content, reply_to=to(reply))


class Hostile(InlineGrid):
    """A grid in which one client corrupts some of its replies, in the first rounds."""

    rng: Rng
    is_hostile = True

    def _answers(self, messages: Any, timeout: Any) -> Any:
        for message in messages:
            [reply] = super()._answers([message], timeout)
            trains = message.metadata.message_type.startswith("train")
            liar = message.metadata.dst_node_id == LIAR and trains and self.is_hostile
            if liar and self.rng.integers(2):
                # NumPy or Flower's record types may refuse the corruption.
                with contextlib.suppress(Exception):
                    reply = hostile(self.rng, reply)
            yield reply


def attack(rng: Rng, outcome: Outcome, folder: Path, algorithm: str) -> None:
    """Run rounds with a hostile client, of which at most one may be lost.

    A client of whose share it cannot be told who is wrong may be left out, too.
    """
    more: dict[str, Any] = {"secure-aggregation": True, "num-server-rounds": ROUNDS}
    settings = settings_of(algorithm, cohort="off", **more)
    strategy, outcome.tried = build_strategy(settings), outcome.tried + 1
    what = f"{algorithm}/secure at {rng.bit_generator.state['state']['state']}"
    grid = Hostile(make_app(settings), CLIENTS)
    grid.rng = rng
    lost, last = 0, 0.0
    try:
        arrays = strategy.initialize(grid)
        secure = SecureGrid(grid, strategy, build(SecureSettings, settings), folder)
        for number in range(1, ROUNDS + 1):
            grid.is_hostile = number < ROUNDS
            asked = strategy.configure_train(number, arrays, ConfigRecord(), secure)
            replies = secure.send_and_receive(list(asked))
            new, metrics = strategy.aggregate_train(number, replies)
            values = {} if new is None else {n: a.numpy() for n, a in new.items()}
            numbers = dict(metrics or {})
            if not is_finite(*values.values()) or not all(
                map(is_finite_metric, numbers.values())
            ):
                outcome.fell.append(f"{what} made a result that is not finite")
            arrays = arrays if new is None else new
            last = float(numbers["clients"])
            lost += last == 0
            outcome.refused += numbers["rejected"] > 0
    except Exception as error:
        outcome.fell.append(f"{what} raised {error!r}"[:300])
        return
    if lost > 1 or last < CLIENTS - 2:
        outcome.fell.append(f"{what} lost {lost} rounds; the last has {last} clients")


def run(number: int, seed: int) -> Outcome:
    """Try this many runs with a hostile client."""
    outcome, rng = Outcome(), np.random.default_rng([seed, 4])
    with tempfile.TemporaryDirectory() as folder:
        for i in range(number):
            algorithm = ("fedavg", "scaffold", "fedrep")[i % 3]
            attack(rng, outcome, Path(folder), algorithm)
    return outcome
