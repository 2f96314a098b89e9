"""Queues of neighbours' messages, for iterations that need one from each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from flwr.common import log

from flwr_frl.clients.base import Config
from flwr_frl.clients.gossip.relayed import exchanges

# Prefix of the messages in a node's saved state.
INBOX = "inbox."


@dataclass
class Inbox:
    """Unused messages of a node's neighbours, oldest first.

    Parameters
    ----------
    queues : dict of str to list of bytes
        Messages by the neighbour's name, in the order of the neighbours' numbers.
    refused : int, default 0
        Number of new messages from nodes that are not neighbours.
    """

    queues: dict[str, list[bytes]]
    refused: int = 0

    @classmethod
    def of(
        cls, saved: Mapping[str, npt.NDArray[Any]], config: Config, last_round: int
    ) -> Self:
        """Return an inbox with the saved messages and those that the server relays.

        Parameters
        ----------
        saved : mapping of str to ndarray
            The node's state, with the messages that `arrays` returned.
        config : dict
            The server's config.
        last_round : int
            The round of the state.
        """
        numbers = neighbours_of(config)
        names = sorted(numbers, key=lambda name: numbers[name])
        inbox = cls({name: _unpacked(saved.get(INBOX + name)) for name in names})
        for _, messages in exchanges(config, last_round):
            for message in messages:
                if message.sender in inbox.queues:
                    inbox.queues[message.sender].append(message.data)
                else:
                    text = "message of %r refused: not a neighbour"
                    log(WARNING, text, message.sender)
                    inbox.refused += 1
        return inbox

    @property
    def is_complete(self) -> bool:
        """True if there is a message from every neighbour."""
        return all(self.queues.values())

    def next_messages(self) -> list[tuple[str, bytes]]:
        """Remove and return each neighbour's oldest message, with its name."""
        return [(name, queue.pop(0)) for name, queue in self.queues.items()]

    def arrays(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Return the remaining messages for the node's state."""
        return {INBOX + n: _packed(queue) for n, queue in self.queues.items() if queue}


def neighbours_of(config: Config) -> dict[str, int]:
    """Return the numbers of a node's neighbours by name."""
    lists = cast(dict[str, list[Any]], config)
    names, numbers = lists["neighbours"], lists["neighbour-nodes"]
    return dict(zip(names, numbers, strict=True))


def _packed(queue: list[bytes]) -> npt.NDArray[np.uint8]:
    """Return messages as one array, each preceded by its length in four bytes."""
    framed = b"".join(len(data).to_bytes(4, "little") + data for data in queue)
    return np.frombuffer(framed, np.uint8)


def _unpacked(array: npt.NDArray[Any] | None) -> list[bytes]:
    data, messages = b"" if array is None else array.tobytes(), []
    while data:
        end = 4 + int.from_bytes(data[:4], "little")
        messages.append(data[4:end])
        data = data[end:]
    return messages
