"""Nodes as a grid shows them: their public keys, and apps without a query handler."""

import contextlib
import hashlib
import logging
from collections.abc import Iterator

from flwr.serverapp import Grid

# Flower's error for an app without a query handler, such as its templates.
ANSWERS_NO_QUERY = "No query function registered"


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
