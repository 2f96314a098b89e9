"""Messages of a graph's nodes, until their neighbours have answered for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import numpy as np
from flwr.common import log

from flwr_frl.strategies.gossip.mixing import Weights
from flwr_frl.strategies.server.replies import Arrays


@dataclass(frozen=True)
class Pending:
    """A message that a node has not yet answered for.

    Parameters
    ----------
    round : int
        In which it was sent.
    sender : str
        Name of the neighbour that sent it.
    data : bytes
        The message itself.
    """

    round: int
    sender: str
    data: bytes


class Mailboxes:
    """One for each node of a graph, with what its neighbours have sent it.

    What a node has not answered for stays until it does, so a node that was away makes
    up for what it missed.

    Parameters
    ----------
    names : sequence of str
        Names of the nodes 0 to n − 1.
    weights : ndarray, shape (n, n)
        The mixing matrix W; w_ij ≠ 0 makes i and j neighbours.
    neighbours : sequence of sequence of int
        Of each node, in increasing order.

    Attributes
    ----------
    lost : set of str
        Nodes that the others go on without.
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
        """Put each node's message where its neighbours will get it.

        ``sent`` is by the sender's name; a sender has answered for all it was sent.
        ``relays`` says whether a neighbour gets a message, given whether it took part.
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
        """Return what a node is sent, as lists of the same length; {} for nothing.

        They are ``relayed-rounds``, ``relayed-senders``, ``relayed-weights`` (w_ij) and
        ``relayed-data``.
        """
        i, pending = self.number[name], self.pending[name]
        if not pending:
            return {}
        senders = [message.sender for message in pending]
        places = [self.number[sender] for sender in senders]
        return {
            "relayed-rounds": [message.round for message in pending],
            "relayed-senders": senders,
            "relayed-weights": self.weights[i, places].tolist(),
            "relayed-data": [message.data for message in pending],
        }

    def lose(self, name: str, reason: str) -> None:
        """Go on without a node for good; the log says why."""
        log(
            WARNING,
            "client %s is lost, as %s; its neighbours go on with what it sent last",
            name,
            reason,
        )
        self.lost.add(name)
        self.pending[name] = []

    def copy(self) -> "Mailboxes":
        """Return mailboxes with the same messages, that what follows leaves alone."""
        copied = Mailboxes(self.names, self.weights, self.neighbours)
        copied.pending = {name: list(held) for name, held in self.pending.items()}
        copied.lost = set(self.lost)
        return copied

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the messages as arrays of bytes, and the rest as JSON can hold it.

        A message that several neighbours have not answered for is one array.
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
        """Go back to a saved state of the same nodes."""
        self.lost = {str(name) for name in values["lost"]}
        messages: dict[str, Pending] = {}
        for key, name, server_round, sender in values["pending"]:
            if key not in messages:
                data = arrays[key].tobytes()
                messages[key] = Pending(int(server_round), sender, data)
            self.pending[name].append(messages[key])
