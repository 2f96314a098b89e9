"""Information about a grid's nodes: connections, registered names, public keys."""

import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import INFO
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.messages import CONFIG, REGISTERED_NAME
from flwr_frl.common.text import several

# Flower's error for an app without a query handler, such as its templates.
ANSWERS_NO_QUERY = "No query function registered"

# Seconds between two checks of the connected nodes, and between two log messages.
POLL_INTERVAL, WAITING_INTERVAL = 0.5, 60.0


def connected_nodes(
    grid: Grid, awaited: int, name_of: Callable[[int], str]
) -> list[int]:
    """Return the connected nodes once there are at least ``awaited``."""
    logged, at = -1, 0.0
    while len(nodes := sorted(grid.get_node_ids())) < awaited:
        if len(nodes) != logged or time.monotonic() - at >= WAITING_INTERVAL:
            logged, at = len(nodes), time.monotonic()
            text = "waiting for clients: %d of %d nodes are here%s"
            names = several([name_of(node) for node in nodes])
            log(INFO, text, logged, awaited, f": {names}" if names else "")
        time.sleep(POLL_INTERVAL)
    return nodes


def wait_for_change(grid: Grid, here: frozenset[int], until: float) -> None:
    """Wait until other nodes are connected, up to a minute and not beyond ``until``."""
    until = min(until, time.monotonic() + WAITING_INTERVAL)
    while here == frozenset(grid.get_node_ids()) and time.monotonic() < until:
        time.sleep(POLL_INTERVAL)


@contextlib.contextmanager
def without_query_errors() -> Iterator[None]:
    """Hide the tracebacks of missing query handlers.

    Flower's simulation logs them in the server's process.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        return ANSWERS_NO_QUERY not in record.getMessage()

    logger = logging.getLogger("flwr")
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


class RegisteredNames:
    """Names with which SuperNodes were registered (``flwr supernode register --name``).

    Each message contains the name, for clients without another one.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def queries(
        self, grid: Grid, nodes: Iterable[int], config: Mapping[str, str]
    ) -> list[Message]:
        """Read the names from the grid again, and return a query to each node.

        A name that several connected nodes share stays that of the node that had it
        first, or is not used. Nodes that are not connected keep their names.
        """
        named = {node.node_id: node.name for node in _nodes_of(grid) if node.name}
        count = Counter(named.values())
        own = {node: name for node, name in named.items() if count[name] == 1}
        kept = {n: name for n, name in self._names.items() if name not in own.values()}
        self._names = {**kept, **own}
        return [self.query(node, config) for node in nodes]

    def config(self, node: int) -> dict[str, str]:
        """Return the registered name for a message's config; nothing without one."""
        return {REGISTERED_NAME: self._names[node]} if node in self._names else {}

    def query(
        self, node: int, config: Mapping[str, str], kind: str = MessageType.QUERY
    ) -> Message:
        """Return a query to a node; empty values of the config are left out."""
        about = {**config, **self.config(node)}
        record = ConfigRecord({name: value for name, value in about.items() if value})
        content = RecordDict({CONFIG: record} if record else {})
        return Message(content, node, kind)


def keys_of(grid: Grid) -> dict[int, str]:
    """Return digests of the nodes' public keys, by node; empty without keys."""
    keys = {node.node_id: node.public_key for node in _nodes_of(grid)}
    return {n: hashlib.sha256(key).hexdigest() for n, key in keys.items() if key}


def _nodes_of(grid: Grid) -> list[Any]:
    """Return information about a grid's nodes; simulations have none."""
    return list(grid.get_nodes()) if hasattr(grid, "get_nodes") else []
