"""Attacks of Byzantine clients, for `benchmarks.liars`.

Attackers are the first clients. They know what was sent, what they have trained
themselves, and what all honest clients send back.
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
    """The values of one array that attackers know in a round.

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
    """Return the honest mean less z standard deviations of each entry."""
    return np.asarray(known.honest.mean(axis=0) - z * known.honest.std(axis=0))


def inner_product(known: Known, epsilon: float) -> Floats:
    """Return what was sent less ε times the mean honest change."""
    return np.asarray(known.sent - epsilon * (known.honest.mean(axis=0) - known.sent))


def model_replacement(known: Known) -> Floats:
    """Return what was sent and n/f times the change, with which f of n replace it."""
    scale = CLIENTS / known.attackers
    return np.asarray(known.sent + scale * (known.own - known.sent))


def least_suspicious(n: int, f: int) -> float:
    """Return z of f attackers of n (Baruch, Baruch and Goldberg, NeurIPS 2019).

    With s = ⌊n/2 + 1⌋ − f honest clients that are farther from the mean than they are,
    attackers are among a majority: Φ(z) = (n − f − s) / (n − f).
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
    """A grid whose first clients send what an attack makes of their shared arrays."""

    def __init__(self, app: Any, attack: str, attackers: int) -> None:
        super().__init__(app, CLIENTS)
        self.attack, self.attackers = attack, attackers

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Answer all messages, the attackers' training ones as the attack has it."""
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
            # Every client is sent the same.
            sent = messages[0].content.array_records["arrays"]
            for reply in filter(self.is_attacker, trained):
                reply.content["arrays"] = self._attacked(sent, reply, honest)
        return replies

    def is_attacker(self, reply: Message) -> bool:
        """Return whether a reply is of one of the first clients."""
        return reply.metadata.src_node_id <= self.attackers

    def _attacked(
        self, sent: ArrayRecord, reply: Message, honest: Sequence[Message]
    ) -> ArrayRecord:
        records = [other.content.array_records["arrays"] for other in honest]
        found = {}
        for name, own in reply.content.array_records["arrays"].items():
            theirs = np.stack([record[name].numpy() for record in records])
            known = Known(sent[name].numpy(), own.numpy(), theirs, self.attackers)
            with np.errstate(over="ignore", invalid="ignore"):
                values = ATTACKS[self.attack](known)
                found[name] = Array(np.asarray(values, own.numpy().dtype))
        return ArrayRecord(found)
