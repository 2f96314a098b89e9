"""FedPAC (Xu et al., ICLR 2023): feature alignment and classifier collaboration."""

import math

import numpy as np
from scipy.optimize import nnls

from flwr_frl.common.messages import PROTOTYPES
from flwr_frl.strategies.base import Arrays, Reply, Round
from flwr_frl.strategies.fedproto import LARGEST_ENTRY, FedProto, check_range
from flwr_frl.strategies.flute import TrainedHeads
from flwr_frl.strategies.server.replies import Floats

# Arrays that clients send besides the model and the prototypes.
CLASS_FEATURES, VARIANCE = "statistics.features", "statistics.variance"


class FedPAC(TrainedHeads, FedProto, client="flwr_frl.clients.fedpac:FedPACClient"):
    """Algorithm 1: average representations and centroids, and combine the heads.

    The new head of client i is Σ_j α_ij φ_j over the heads φ_j of the round's clients.
    The weights α_i minimise the estimated test loss, Σ_j α_ij² V_j plus the squared
    distance of Σ_j α_ij h_j from h_i, over the simplex. Here h_i are the
    class means of the features, each times the class's share of the examples, and V_i
    is the variance of their estimate. Both are computed with the representation that
    the client received.

    The centroids of the classes are FedProto's: with ``weighting="examples"`` they are
    weighted by the number of examples of the class, as in the paper. A class that no
    client of a round has keeps its centroid.

    A client that is not sampled keeps its last head; one that has not trained has the
    initial head. A checkpoint contains the heads of all clients that have trained. The
    authors' code sets α below 0.001 to 0 and changes the quadratic program if its
    matrix has an eigenvalue below 0; here the program is solved unchanged.
    """

    def begin(self, round: Round) -> None:
        """Expect the statistics as well."""
        super().begin(round)
        like = round.arrays[PROTOTYPES]
        statistics = {CLASS_FEATURES: like, VARIANCE: np.zeros((), like.dtype)}
        round.expected = {**round.arrays, **statistics}

    def check_reply(self, reply: Reply) -> None:
        """Reject negative variances and huge features as well."""
        super().check_reply(reply)
        check_range(reply, CLASS_FEATURES, -LARGEST_ENTRY, LARGEST_ENTRY)
        check_range(reply, VARIANCE, 0, math.inf)

    def aggregate(self, round: Round) -> Arrays:
        """Return the mean representation and the centroids; combine the heads."""
        centroids, sent = super().aggregate(round), round.centre().items()
        before = {n: a for n, a in sent if n.startswith("representation.")}
        statistics = round.stack(CLASS_FEATURES), round.stack(VARIANCE)
        weights = combination_weights(*(s.astype(np.float64) for s in statistics))
        heads = {}
        for name in self.initial_head:
            former = round.stack(name)
            combined = [np.tensordot(row, former, 1) for row in weights]
            heads[name] = np.stack(combined).astype(former.dtype)
        self.save_heads(round, heads)
        return {**self._mean_of(round.replies, before), **centroids}


def combination_weights(features: Floats, variances: Floats) -> Floats:
    """Return the weights α of all clients' heads for each client.

    Parameters
    ----------
    features : ndarray, shape (n, classes, width)
        h_i of each client.
    variances : ndarray, shape (n,)
        V_i of each client.

    Returns
    -------
    ndarray, shape (n, n)
        Row i has the weights α_i.

    Notes
    -----
    Over the simplex, the estimated loss of client i is ‖A α‖², where column j of A has
    h_j − h_i, and √V_j as a further entry of its own. Its minimum is proportional to
    the β ≥ 0 with the least ‖A β‖² + (Σ_j β_j − 1)², since the conditions for both are
    the same up to a factor.
    """
    # The triangular factor has the same distances in fewer dimensions.
    points = np.linalg.qr(features.reshape(len(features), -1).T).R
    rows = []
    for i in range(len(features)):
        a = np.vstack([np.diag(np.sqrt(variances)), points - points[:, [i]]])
        a /= np.linalg.norm(a, axis=0).max() or 1.0
        # The own head comes first, because among equal ones the first is chosen.
        system = np.roll(np.vstack([np.ones(a.shape[1]), a]), -i, axis=1)
        beta = np.roll(nnls(system, np.eye(len(system))[0])[0], i)
        rows.append(beta / beta.sum())
    return np.stack(rows)
