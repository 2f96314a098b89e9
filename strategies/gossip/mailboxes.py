"""Messages to the nodes of a graph, queued until the receiver has answered."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flwr_frl.strategies.gossip.mixing import Weights
from flwr_frl.strategies.server.replies import Arrays


class Pending(NamedTuple):
    """A queued message: its round, the neighbour that sent it, and its bytes."""

    round: int
    sender: str
    data: bytes


class Mailboxes:
    """A queue of messages for each node of a graph.

    Messages stay in a node's queue until it has answered, so a node that was offline
    receives the messages it missed.

    Parameters
    ----------
    names : sequence of str
        Names of the nodes 0 to n − 1.
    weights : ndarray, shape (n, n)
        The mixing matrix W.
    neighbours : sequence of sequence of int
        Each node's neighbours, in increasing order.

    Attributes
    ----------
    number : dict of str to int
        Each node's number, by name.
    pending : dict of str to list of Pending
        Each node's queue, oldest message first, by name.
    lost : set of str
        Nodes that were given up; they receive no more messages.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Weights,
        neighbours: Sequence[Sequence[int]],
    ) -> None:
        self.names = list(names)
        self.number = {name: i for i, name in enumerate(names)}
        self.weights = weights
        self.neighbours = neighbours
        self.pending: dict[str, list[Pending]] = {name: [] for name in names}
        self.lost: set[str] = set()

    def collect(
        self,
        server_round: int,
        sent: Mapping[str, bytes],
        relays: Callable[[bool], bool],
    ) -> None:
        """Clear the senders' queues, and queue their messages for their neighbours.

        Parameters
        ----------
        server_round : int
            The current round.
        sent : mapping of str to bytes
            The round's messages by sender; empty if a node has nothing to send.
        relays : callable
            Returns whether a neighbour receives messages, given whether it took part.
        """
        for name in sent:
            self.pending[name] = []
        for name, data in sent.items():
            if not data:
                continue
            message = Pending(server_round, name, data)
            for j in self.neighbours[self.number[name]]:
                neighbour = self.names[j]
                if neighbour not in self.lost and relays(neighbour in sent):
                    self.pending[neighbour].append(message)

    def lists_for(self, name: str) -> dict[str, Any]:
        """Return a node's messages as config entries, or {} if there are none.

        The entries are lists of equal length: ``relayed-rounds``, ``relayed-senders``,
        ``relayed-weights`` (w_ij) and ``relayed-data``.
        """
        i, pending = self.number[name], self.pending[name]
        if not pending:
            return {}
        senders = [message.sender for message in pending]
        columns = [self.number[sender] for sender in senders]
        return {
            "relayed-rounds": [message.round for message in pending],
            "relayed-senders": senders,
            "relayed-weights": self.weights[i, columns].tolist(),
            "relayed-data": [message.data for message in pending],
        }

    def lose(self, name: str) -> None:
        """Permanently give up a node."""
        self.lost.add(name)
        self.pending[name] = []

    def copy(self) -> "Mailboxes":
        """Return an independent copy."""
        copied = Mailboxes(self.names, self.weights, self.neighbours)
        copied.pending = {name: list(queue) for name, queue in self.pending.items()}
        copied.lost = set(self.lost)
        return copied

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the messages as uint8 arrays, and the rest as JSON values.

        A message in several queues is stored once.
        """
        arrays: Arrays = {}
        entries: list[list[Any]] = []
        keys: dict[int, str] = {}
        for name, messages in self.pending.items():
            for message in messages:
                key = keys.get(id(message))
                if key is None:
                    key = keys[id(message)] = f"pending-{len(keys)}"
                    arrays[key] = np.frombuffer(message.data, np.uint8)
                entries.append([key, name, message.round, message.sender])
        lost = sorted(self.lost)
        return arrays, {"names": self.names, "pending": entries, "lost": lost}

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Restore a saved state of the same nodes."""
        self.lost = {str(name) for name in values["lost"]}
        messages: dict[str, Pending] = {}
        for key, name, server_round, sender in values["pending"]:
            if key not in messages:
                data = arrays[key].tobytes()
                messages[key] = Pending(int(server_round), sender, data)
            self.pending[name].append(messages[key])
