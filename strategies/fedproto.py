"""FedProto (Tan et al., AAAI 2022)."""

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Message

from strategies.base import BaseStrategy
from strategies.server.checks import InvalidReplyError
from strategies.server.replies import to_record
from task.messages import PROTOTYPE_COUNTS, PROTOTYPES


class FedProto(BaseStrategy):
    """Algorithm 1: average the prototypes of each class; models stay with the clients.

    C̄_j is the mean of the C_ij of the clients that have class j. With
    ``weighting="examples"`` they are weighted by |D_ij| (equation 6); the authors' code
    weights all equally. The prototype of a class that nobody of a round has stays.
    """

    client = "clients.fedproto:FedProtoClient"
    averages = False

    def check_train_reply(self, reply: Message) -> None:
        """Refuse numbers of examples below 0 as well."""
        super().check_train_reply(reply)
        if (self.counts(reply) < 0).any():
            raise InvalidReplyError(f"has {PROTOTYPE_COUNTS!r} below 0")

    def counts(self, reply: Message) -> npt.NDArray[np.float64]:
        """Return how many examples of each class a client says that it has."""
        return self.arrays(reply)[PROTOTYPE_COUNTS].astype(np.float64)

    def aggregate(self, server_round: int, replies: list[Message]) -> ArrayRecord:
        """Return the prototypes, and of how many clients each is the mean."""
        before = self.centre()
        sums = np.zeros(before[PROTOTYPES].shape)
        weights = np.zeros(len(sums))
        clients = np.zeros(len(sums), np.int64)
        for weight, reply in zip(self.weights(replies), replies, strict=True):
            counts = self.counts(reply)
            shares = (counts > 0) * 1.0
            if self.weighting == "examples":
                # Its examples are at most those that it has told of.
                shares = counts / max(counts.sum(), 1.0)
            means = self.arrays(reply)[PROTOTYPES].astype(np.float64)
            sums += weight * shares[:, None] * means
            weights += weight * shares
            clients += counts > 0
        new = weights > 0
        known = before[PROTOTYPES].copy()
        known[new] = sums[new] / weights[new, None]
        counts = np.where(new, clients, before[PROTOTYPE_COUNTS])
        return to_record({PROTOTYPES: known, PROTOTYPE_COUNTS: counts})
