"""Information about a grid's nodes: connections, registered names, public keys."""

import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import INFO

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.flower_messages import fill
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
        get_nodes = getattr(grid, "get_nodes", None)
        named = [node for node in (get_nodes() if get_nodes else []) if node.name]
        count = Counter(node.name for node in named)
        own = {n.node_id: n.name for n in named if count[n.name] == 1}
        taken = set(own.values())
        kept = {node: name for node, name in self._names.items() if name not in taken}
        self._names = {**kept, **own}
        return [self.query(node, config) for node in nodes]

    def config(self, node: int) -> dict[str, str]:
        """Return the registered name for a message's config; nothing without one."""
        return {REGISTERED_NAME: self._names[node]} if node in self._names else {}

    def query(
        self, node: int, config: Mapping[str, str], kind: str = MessageType.QUERY
    ) -> Message:
        """Return a query to a node; empty values of the config are left out."""
        values = {name: value for name, value in config.items() if value}
        about = fill(ConfigRecord(), {**values, **self.config(node)})
        content = fill(RecordDict(), {CONFIG: about} if about else {})
        return Message(content, node, kind)


def keys_of(grid: Grid) -> dict[int, str]:
    """Return digests of the nodes' public keys, by node; empty without keys."""
    get_nodes = getattr(grid, "get_nodes", None)
    return {
        node.node_id: hashlib.sha256(node.public_key).hexdigest()
        for node in (get_nodes() if get_nodes else [])
        if node.public_key
    }
