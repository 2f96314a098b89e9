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

# No feature of a training that goes well is larger; the square of 1e30 is infinite.
LARGEST_ENTRY = 1e6


class FedProto(BaseStrategy):
    """Algorithm 1: average the prototypes of each class; models stay with the clients.

    C̄_j is the mean of the C_ij of the clients that have class j. With
    ``weighting="examples"`` they are weighted by |D_ij| (equation 6); the authors' code
    weights all equally. The prototype of a class that nobody of a round has stays.
    """

    client = "flwr_frl.clients.fedproto:FedProtoClient"

    def check_train_reply(self, reply: Message) -> None:
        """Refuse numbers of examples below 0, and huge prototypes, as well."""
        super().check_train_reply(reply)
        if (self.counts(reply) < 0).any():
            raise InvalidReplyError(f"has {PROTOTYPE_COUNTS!r} below 0")
        largest = float(np.abs(self.arrays(reply)[PROTOTYPES]).max(initial=0.0))
        if largest > LARGEST_ENTRY:
            text = f"has {PROTOTYPES!r} of {largest:.3g}, above {LARGEST_ENTRY:g}"
            raise InvalidReplyError(text)

    def counts(self, reply: Message) -> npt.NDArray[np.float64]:
        """Return how many examples of each class a client says that it has."""
        return self.arrays(reply)[PROTOTYPE_COUNTS].astype(np.float64)

    def aggregate(self, server_round: int, replies: list[Message]) -> ArrayRecord:
        """Return the prototypes, and of how many clients each is the mean.

        Another ``aggregation`` is a rule over the clients that have the class;
        ``centered-clip`` remembers no change of prototypes, and is ``clip`` here.
        """
        before = self.centre()
        means, counts = before[PROTOTYPES].copy(), before[PROTOTYPE_COUNTS].copy()
        own = [self.arrays(reply)[PROTOTYPES] for reply in replies]
        said, weights = list(map(self.counts, replies)), self.weights(replies)
        for j in range(len(means)):
            have = [i for i in range(len(replies)) if said[i][j] > 0]
            shares = [weights[i] for i in have]
            if self.weighting == "examples":
                # Its examples are at most those that it has told of.
                shares = [weights[i] * said[i][j] / said[i].sum() for i in have]
            of_class: list[Reply]
            of_class = [partial(dict, {PROTOTYPES: own[i][j]}) for i in have]
            found = (
                self.rule(shares, of_class, {PROTOTYPES: means[j]}) if have else None
            )
            if found is not None:
                means[j], counts[j] = found[PROTOTYPES], len(have)
        return to_record({PROTOTYPES: means, PROTOTYPE_COUNTS: counts})
