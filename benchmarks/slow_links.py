"""Bytes that a client receives and sends in a round.

Sizes are those of real messages in a settled round. They depend on the model and not on
the images, so random images are used.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from flwr.app import Message, MessageType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from flwr_frl.clients.algorithms import complete
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds

NODES = 4


class RecordingGrid(InlineGrid):
    """Keeps the training messages of one round and their replies."""

    server_round = 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return all replies; keep messages and replies if they belong to the round."""
        sent = list(messages)
        replies = list(super().send_and_receive(sent, timeout=timeout))
        metadata = sent[0].metadata if sent else None
        if (
            metadata is not None
            and metadata.message_type == MessageType.TRAIN
            and metadata.group_id == str(self.server_round)
        ):
            self.kept = sent, replies
        return replies


def size(messages: list[Message]) -> tuple[int, int]:
    """Return the size of the largest message.

    Parameters
    ----------
    messages : list of Message
        Messages to or from the clients, of nearly the same size.

    Returns
    -------
    values : int
        Bytes of the arrays' values, or of the vectors that gossip compresses.
    overhead : int
        Bytes of the rest as serialised by Flower: names, headers, settings, metrics.
    """
    sizes = []
    for message in messages:
        objects = get_all_nested_objects(message).values()
        total = sum(len(o.deflate()) for o in objects)
        values = sum(
            int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize
            for record in message.content.array_records.values()
            for array in record.values()
        )
        for record in message.content.config_records.values():
            vectors = [record.get("message", b""), *record.get("relayed-data", [])]
            values += sum(map(len, vectors))
        sizes.append((values, total - values))
    return max(sizes)


def run(given: Mapping[str, Setting], place: Path) -> dict[str, int]:
    """Return the sizes of what a client receives and sends in ``measured-round``."""
    own = dict(given)
    server_round = int(own.pop("measured-round"))
    if own.get("task") == "arrays":
        images = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)
        for part in ("train", "test"):
            np.savez(place / f"{part}.npz", images=images, labels=np.arange(40) % 10)
        own["data-dir"] = str(place)
    own |= {"num-clients": NODES, "fraction-train": 1.0, "initial-nodes": NODES}
    settings = complete(resolve(own))
    grid = RecordingGrid(make_app(dict(settings)), NODES)
    grid.server_round = server_round
    strategy = build_strategy(settings)
    arrays = strategy.initialize(grid)
    rounds = range(1, server_round + 1)
    run_rounds(strategy, grid, arrays, rounds, evaluated=lambda _: False)
    if strategy._run.round.rejections:
        raise RuntimeError(str(strategy._run.round.rejections))
    received, sent = map(size, grid.kept)
    names = "receives", "receives-overhead", "sends", "sends-overhead"
    return dict(zip(names, (*received, *sent), strict=True))
