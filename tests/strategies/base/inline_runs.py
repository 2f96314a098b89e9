"""Runs of given settings in this process."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType, Metadata
from named_tasks import dashed

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import Settings, resolve
from flwr_frl.results.results import Row, read_rows
from flwr_frl.strategies.algorithms import short_name
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server_app import serve


class Lossy(InlineGrid):
    """Loses the training reply of node 3 in round 2."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        def is_lost(about: Metadata) -> bool:
            here = about.message_type, about.src_node_id, about.group_id
            return here == (MessageType.TRAIN, 3, "2")

        replies = super().send_and_receive(messages, timeout=timeout)
        return [reply for reply in replies if not is_lost(reply.metadata)]


def settings_of(usual: Mapping[str, Any], /, **more: Any) -> Settings:
    """Return all settings: the usual ones, changed by keyword arguments."""
    return resolve({**usual, **dashed(more)})


def rows_of(settings: Settings, grid: InlineGrid | None = None) -> list[Row]:
    """Run and return the rows of ``metrics.jsonl``."""
    clients = int(settings["num-clients"])
    serve(grid or InlineGrid(make_app(settings), clients), settings)
    return rows_in(Path(str(settings["output"])), str(settings["algorithm"]))


def rows_in(output: Path, algorithm: str = "fedavg") -> list[Row]:
    return read_rows(output / short_name(algorithm) / "metrics.jsonl")
