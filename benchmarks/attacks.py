"""Attacks of Byzantine clients, for `benchmarks.liars`.

The first clients are the attackers. They know the arrays that the server sent, the
result of their own training, and the replies of all honest clients.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType

from flwr_frl.strategies.grids.simulation import InlineGrid

CLIENTS = 10
BACKDOOR = "backdoor"
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Known(NamedTuple):
    """An attacker's knowledge of one array in a round.

    Parameters
    ----------
    sent : ndarray
        Values that the server sent.
    own : ndarray
        Values after the attacker's own training.
    honest : ndarray
        Replies of the honest clients, shape (clients, ...).
    attackers : int
        Number of attackers.
    """

    sent: Floats
    own: Floats
    honest: Floats
    attackers: int


def little_is_enough(known: Known, z: float) -> Floats:
    """Return the honest mean minus z standard deviations, entry by entry."""
    return np.asarray(known.honest.mean(axis=0) - z * known.honest.std(axis=0))


def inner_product(known: Known, epsilon: float) -> Floats:
    """Return the sent values minus ε times the mean honest change."""
    return np.asarray(known.sent - epsilon * (known.honest.mean(axis=0) - known.sent))


def model_replacement(known: Known) -> Floats:
    """Scale the change by n/f, so that f of n clients replace the mean."""
    scale = CLIENTS / known.attackers
    return np.asarray(known.sent + scale * (known.own - known.sent))


def least_suspicious(n: int, f: int) -> float:
    """Return ALIE's z for f attackers of n (Baruch et al., NeurIPS 2019).

    If s = ⌊n/2 + 1⌋ − f honest clients are farther from the mean than the attackers,
    the attackers belong to a majority: Φ(z) = (n − f − s) / (n − f).
    """
    s = n // 2 + 1 - f
    return NormalDist().inv_cdf((n - f - s) / (n - f))


ATTACKS: dict[str, Callable[[Known], Floats]] = {
    "1e30": lambda known: np.full_like(known.own, 1e30),
    "sign flip": lambda known: -known.own,
    "ALIE z": lambda known: little_is_enough(
        known, least_suspicious(CLIENTS, known.attackers)
    ),
    "ALIE 1.5": lambda known: little_is_enough(known, 1.5),
    "IPM 0.5": lambda known: inner_product(known, 0.5),
    "IPM 3": lambda known: inner_product(known, 3.0),
    BACKDOOR: model_replacement,
}


class AttackedGrid(InlineGrid):
    """A grid whose first clients apply an attack to the arrays that they share."""

    def __init__(self, app: Any, attack: str, attackers: int) -> None:
        super().__init__(app, CLIENTS)
        self.attack, self.attackers = attack, attackers

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return all replies; the attack changes the attackers' training replies."""
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        trained = [
            reply
            for message, reply in zip(messages, replies, strict=True)
            if message.metadata.message_type == MessageType.TRAIN
            and reply.has_content()
        ]
        honest = [reply for reply in trained if not self.is_attacker(reply)]
        if self.attackers and honest:
            # All clients are sent the same arrays.
            sent = messages[0].content.array_records["arrays"]
            for reply in filter(self.is_attacker, trained):
                reply.content["arrays"] = self._attacked(sent, reply, honest)
        return replies

    def is_attacker(self, reply: Message) -> bool:
        """Return whether a reply comes from one of the first clients."""
        return reply.metadata.src_node_id <= self.attackers

    def _attacked(
        self, sent: ArrayRecord, reply: Message, honest: Sequence[Message]
    ) -> ArrayRecord:
        records = [other.content.array_records["arrays"] for other in honest]
        attacked = {}
        for name, own in reply.content.array_records["arrays"].items():
            theirs = np.stack([record[name].numpy() for record in records])
            knowledge = Known(sent[name].numpy(), own.numpy(), theirs, self.attackers)
            with np.errstate(over="ignore", invalid="ignore"):
                values = ATTACKS[self.attack](knowledge)
                attacked[name] = Array(np.asarray(values, own.numpy().dtype))
        return ArrayRecord(attacked)
