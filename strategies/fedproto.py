"""FedProto (Tan et al., AAAI 2022)."""

from functools import partial

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Message

from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.server.aggregation import Reply
from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.task.messages import PROTOTYPE_COUNTS, PROTOTYPES

# Upper bound of features; the square of 1e30 is infinite in float32.
LARGEST_ENTRY = 1e6


class FedProto(
    BaseStrategy,
    client="flwr_frl.clients.fedproto:FedProtoClient",
    needs_arrays=(PROTOTYPES, PROTOTYPE_COUNTS),
):
    """Algorithm 1: average the prototypes of each class; models stay with the clients.

    C̄_j is the mean of the C_ij of the clients that have class j. With
    ``weighting="examples"`` they are weighted by |D_ij| (equation 6); the authors' code
    weights all equally. A class that no client of a round has keeps its prototype.
    """

    def check_train_reply(self, reply: Message) -> None:
        """Reject negative numbers of examples and huge prototypes as well."""
        super().check_train_reply(reply)
        if (self.counts(reply) < 0).any():
            raise InvalidReplyError(f"has {PROTOTYPE_COUNTS!r} below 0")
        largest = float(np.abs(self.arrays(reply)[PROTOTYPES]).max(initial=0.0))
        if largest > LARGEST_ENTRY:
            text = f"has {PROTOTYPES!r} of {largest:.3g}, above {LARGEST_ENTRY:g}"
            raise InvalidReplyError(text)

    def counts(self, reply: Message) -> npt.NDArray[np.float64]:
        """Return the number of examples of each class that a client reports."""
        return self.arrays(reply)[PROTOTYPE_COUNTS].astype(np.float64)

    def aggregate(self, server_round: int, replies: list[Message]) -> ArrayRecord:
        """Return the prototypes, and the number of clients that each averages.

        Other rules of ``aggregation`` apply to the clients that have the class;
        ``centered-clip`` equals ``clip`` here.
        """
        before = self._centre()
        means, counts = before[PROTOTYPES].copy(), before[PROTOTYPE_COUNTS].copy()
        prototypes = [self.arrays(reply)[PROTOTYPES] for reply in replies]
        reported, weights = list(map(self.counts, replies)), self.weights(replies)
        for j in range(len(means)):
            have = [i for i in range(len(replies)) if reported[i][j] > 0]
            shares = [weights[i] for i in have]
            if self.settings.weighting == "examples":
                # `weights` limits a client's examples to the declared number.
                shares = [weights[i] * reported[i][j] / reported[i].sum() for i in have]
            of_class: list[Reply]
            of_class = [partial(dict, {PROTOTYPES: prototypes[i][j]}) for i in have]
            centre = {PROTOTYPES: means[j]}
            mean = self.apply_rule(shares, of_class, centre) if have else None
            if mean is not None:
                means[j], counts[j] = mean[PROTOTYPES], len(have)
        return to_record({PROTOTYPES: means, PROTOTYPE_COUNTS: counts})
