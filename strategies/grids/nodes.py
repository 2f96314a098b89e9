"""Nodes as a grid shows them: their public keys, and apps without a query handler."""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from logging import INFO

from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.server.checks import several

# Flower's error for an app without a query handler, such as its templates.
ANSWERS_NO_QUERY = "No query function registered"

# Seconds between two looks at the connected nodes, and between two log messages.
POLL_INTERVAL, WAITING_INTERVAL = 0.5, 60.0


def connected_nodes(
    grid: Grid, awaited: int, name_of: Callable[[int], str]
) -> list[int]:
    """Return the connected nodes once their number is as awaited."""
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
    """Wait up to a minute, and until a time, for other nodes than these."""
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


def keys_of(grid: Grid) -> dict[int, str]:
    """Return digests of the public keys that the grid knows, by node."""
    get_nodes = getattr(grid, "get_nodes", None)
    return {
        node.node_id: hashlib.sha256(node.public_key).hexdigest()
        for node in (get_nodes() if get_nodes else [])
        if node.public_key
    }
