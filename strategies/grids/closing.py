"""When a round of training closes: with all replies, with the first ones, or never.

Before a round, a `Participation` gives its `Closing` to the grid by ``wait_for``:
`Inbox` on real nodes, `SimulatedArrivals` in simulation.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid


class Closing:
    """Close a round once enough valid replies have arrived; by default with all.

    Parameters
    ----------
    missing : float, default inf
        The number of valid replies.
    is_valid : callable, optional
        Returns whether a reply without error counts; by default, all do.

    Attributes
    ----------
    missing : float
        The number of replies that are missing.
    at_work : dict of int to (Message, float)
        Messages that await replies, by node, and when their replies are due.
    ready : deque of (Message, int)
        Replies that have arrived and were not needed so far, and the nodes asked.
    """

    # True if replies that arrive after the round's end belong to the next round.
    lasts = False
    # True if the round also waits for replies that it does not need.
    waits_for_rest = False

    def __init__(
        self,
        missing: float = math.inf,
        is_valid: Callable[[Message], bool] = lambda reply: True,
    ) -> None:
        self.missing, self.is_valid = missing, is_valid
        self.at_work: dict[int, tuple[Message, float]] = {}
        self.ready: deque[tuple[Message, int]] = deque()

    def begin(self, message: Message, due: float = 0.0) -> None:
        """Record that a message was sent, and when its node's reply is due."""
        self.at_work[message.metadata.dst_node_id] = message, due

    def end(self, node: int) -> bool:
        """Record that a node is done, or given up; return whether its reply is used."""
        self.at_work.pop(node, None)
        return True

    def take(self, reply: Message, is_used: bool) -> bool:
        """Count a valid reply that is used, and return whether it is."""
        if is_used and not reply.has_error() and self.is_valid(reply):
            self.missing -= 1
        return is_used

    def refill(self) -> list[Message]:
        """Return messages to send now, as other nodes are done."""
        return []


def delegate(attribute: str, name: str) -> Any:
    """Return a property that reads ``name`` from the object in ``attribute``."""
    return property(lambda self: getattr(getattr(self, attribute), name))


class GridDecorator(Grid):
    """A grid that passes all calls on to another grid, unless a subclass handles them.

    Parameters
    ----------
    grid : Grid
        The decorated grid.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    # `Grid` defines these, so that `__getattr__` is not called for them.
    set_run = delegate("grid", "set_run")
    run = delegate("grid", "run")
    create_message = delegate("grid", "create_message")
    get_node_ids = delegate("grid", "get_node_ids")
    get_nodes = delegate("grid", "get_nodes")
    push_messages = delegate("grid", "push_messages")
    pull_messages = delegate("grid", "pull_messages")
    send_and_receive = delegate("grid", "send_and_receive")

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["grid"], name)
