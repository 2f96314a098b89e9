"""FedProto (Tan et al., AAAI 2022)."""

import math

import numpy as np

from flwr_frl.common.messages import PROTOTYPE_COUNTS, PROTOTYPES
from flwr_frl.strategies.base import Arrays, Reply, Round, Strategy
from flwr_frl.strategies.server.replies import InvalidReplyError

# Upper bound of features; the square of 1e30 is infinite in float32.
LARGEST_ENTRY = 1e6


def check_range(reply: Reply, name: str, least: float, most: float) -> None:
    """Raise `InvalidReplyError` if an entry of an array is out of a range."""
    values = reply.read()[name].astype(np.float64)
    if not ((values >= least) & (values <= most)).all():
        text = f"has an entry of {name!r} that is not from {least:g} to {most:g}"
        raise InvalidReplyError(text)


class FedProto(Strategy, client="flwr_frl.clients.fedproto:FedProtoClient"):
    """Algorithm 1: average the prototypes of each class; models stay with the clients.

    C̄_j is the mean of the C_ij of the clients that have class j. With
    ``weighting="examples"`` they are weighted by |D_ij| (equation 6); the authors' code
    weights all equally. A class that no client of a round has keeps its prototype.
    """

    def begin(self, round: Round) -> None:
        """Require the prototypes and their counts among the shared arrays."""
        round.need(PROTOTYPES, PROTOTYPE_COUNTS)

    def check_reply(self, reply: Reply) -> None:
        """Reject negative numbers of examples and huge prototypes."""
        check_range(reply, PROTOTYPE_COUNTS, 0, math.inf)
        check_range(reply, PROTOTYPES, -LARGEST_ENTRY, LARGEST_ENTRY)

    def aggregate(self, round: Round) -> Arrays:
        """Return the prototypes, and the number of clients that each averages.

        Other rules of ``aggregation`` apply to the clients that have the class;
        ``centered-clip`` equals ``clip`` here.
        """
        before, replies = round.centre(), round.replies
        means, counts = before[PROTOTYPES].copy(), before[PROTOTYPE_COUNTS].copy()
        prototypes, weights = round.stack(PROTOTYPES), self.weights(replies)
        reported = round.stack(PROTOTYPE_COUNTS).astype(np.float64)
        for j in range(len(means)):
            have = [i for i in range(len(replies)) if reported[i][j] > 0]
            shares = [weights[i] for i in have]
            if self.settings.weighting == "examples":
                # `weights` limits a client's examples to the declared number.
                shares = [weights[i] * reported[i][j] / reported[i].sum() for i in have]
            of_class: list[Arrays] = [{PROTOTYPES: prototypes[i][j]} for i in have]
            centre = {PROTOTYPES: means[j]}
            mean = self._apply_rule(shares, of_class, centre) if have else None
            if mean is not None:
                means[j], counts[j] = mean[PROTOTYPES], len(have)
        return {PROTOTYPES: means, PROTOTYPE_COUNTS: counts}
