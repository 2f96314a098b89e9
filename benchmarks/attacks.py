"""Attacks of Byzantine clients, for `benchmarks.liars`.

The first clients are the attackers. They know the arrays that the server sent, the
result of their own training, and the replies of all honest clients.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from flwr_frl.strategies.grids.simulation import InlineGrid

CLIENTS, ATTACKERS = 10, 3
FLIP, BACKDOOR, HIDDEN = "label flip", "backdoor", "constrained backdoor"
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Known(NamedTuple):
    """An attacker's knowledge in a round; each model is one vector.

    Parameters
    ----------
    sent : ndarray
        Values that the server sent.
    last : ndarray
        Their change since the last round.
    own : ndarray
        Change in the attacker's own training.
    honest : ndarray
        Changes of the honest clients, shape (clients, ...).
    """

    sent: Floats
    last: Floats
    own: Floats
    honest: Floats

    @property
    def mean(self) -> Floats:
        """The honest clients' mean change."""
        return np.asarray(self.honest.mean(axis=0))

    @property
    def apart(self) -> Floats:
        """The honest clients' differences from their mean."""
        return np.asarray(self.honest - self.mean)


def within_spread(known: Known, direction: Floats, total: bool = False) -> Floats:
    """Go from the honest mean as far as the honest clients are apart.

    Shejwalkar and Houmansadr (NDSS 2021): the largest distance to an honest change is
    at most the largest one between two of them (min-max). With ``total``, the sum of
    the squared distances is at most the largest such sum of an honest client (min-sum).
    """
    norms = np.square(known.apart).sum(axis=1)
    squares = norms[:, None] + norms - 2 * known.apart @ known.apart.T
    # ‖γ d − x‖² = γ² a − 2 γ b + ‖x‖² for each difference x; they sum to 0.
    a, b, limit = direction @ direction, known.apart @ direction, squares.max()
    if total:
        b, norms, limit = 0 * b, norms.mean(), squares.mean(axis=1).max()
    gamma = ((b + np.sqrt(b * b + a * (limit - norms))) / a).min()
    return np.asarray(known.mean + gamma * direction)


def mimic(known: Known) -> Floats:
    """Copy the client farthest along the main direction of the honest differences."""
    along = np.linalg.svd(known.apart, full_matrices=False)[0][:, 0]
    return np.asarray(known.honest[np.abs(along).argmax()])


def relocated(known: Known) -> Floats:
    """Go from the last change, orthogonally to it, as far as honest clients do."""
    reference = 0.9 * known.last + 0.1 * known.mean
    along = np.ones_like(reference)
    along -= (along @ reference) / (reference @ reference) * reference
    radius = np.median(np.linalg.norm(known.honest - known.last, axis=1))
    return np.asarray(known.last + radius / np.linalg.norm(along) * along)


def ascent(known: Known) -> Floats:
    """Reverse the honest mean change, with the median norm of the honest changes."""
    radius = np.median(np.linalg.norm(known.honest, axis=1))
    return np.asarray(-radius / np.linalg.norm(known.mean) * known.mean)


# The change that an attacker sends
ATTACKS: dict[str, Callable[[Known], Floats]] = {
    "1e30": lambda known: np.full_like(known.own, 1e30),
    "sign flip": lambda known: -known.own - 2 * known.sent,
    "ALIE": lambda known: known.mean - 1.5 * known.honest.std(axis=0),
    "IPM 0.5": lambda known: -0.5 * known.mean,
    "IPM 3": lambda known: -3 * known.mean,
    "ascent": ascent,
    "min-max": lambda known: within_spread(known, -known.mean),
    "min-sum": lambda known: within_spread(known, -known.mean, True),
    "mimic": mimic,
    "ROP": relocated,
    FLIP: lambda known: known.own,
    BACKDOOR: lambda known: CLIENTS / ATTACKERS * known.own,
    HIDDEN: lambda known: within_spread(known, known.own - known.mean),
}


class AttackedGrid(InlineGrid):
    """A grid whose first clients apply an attack to the arrays that they share."""

    def __init__(self, app: Any, attack: str) -> None:
        super().__init__(app, CLIENTS)
        self.attack = attack
        self._sent: Floats | None = None

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
        if self.attack and trained:
            # All clients are sent the same arrays.
            sent = vector(messages[0])
            last = sent - (sent if self._sent is None else self._sent)
            self._sent = sent
            honest = [vector(r) - sent for r in trained if not is_attacker(r)]
            for reply in filter(is_attacker, trained):
                known = Known(sent, last, vector(reply) - sent, np.array(honest))
                with np.errstate(over="ignore", invalid="ignore"):
                    values = sent + ATTACKS[self.attack](known)
                state = reply.content.array_records["arrays"].to_torch_state_dict()
                vector_to_parameters(torch.tensor(values).float(), state.values())
                reply.content["arrays"] = ArrayRecord(state)
        return replies


def is_attacker(reply: Message) -> bool:
    """Return whether a reply comes from one of the first clients."""
    return reply.metadata.src_node_id <= ATTACKERS


def vector(message: Message) -> Floats:
    """Return the arrays of a message as one vector."""
    state = message.content.array_records["arrays"].to_torch_state_dict()
    return parameters_to_vector(state.values()).double().numpy()
