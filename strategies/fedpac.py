"""FedPAC (Xu et al., ICLR 2023): feature alignment and classifier collaboration."""

import math

import numpy as np
import numpy.typing as npt

from flwr_frl.common.messages import PROTOTYPES
from flwr_frl.strategies.fedproto import LARGEST_ENTRY, FedProto, check_range
from flwr_frl.strategies.flute import TrainedHeads
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Reply, Round

Matrix = npt.NDArray[np.float64]
# Arrays that clients send besides the model and the prototypes.
CLASS_FEATURES, VARIANCE = "statistics.features", "statistics.variance"
# Relative decrease below which a better combination is attributed to rounding.
TOLERANCE = 1e-12


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
        centroids, replies = super().aggregate(round), round.replies
        decoded = [representation_of(reply.read()) for reply in replies]
        centre = representation_of(round.centre())
        mean = self._apply_rule(self.weights(replies), decoded, centre) or centre
        weights = combination_weights(
            np.stack([r.read()[CLASS_FEATURES] for r in replies]).astype(np.float64),
            np.array([r.read()[VARIANCE] for r in replies], np.float64),
        )
        heads = self.initial_head
        stacked = {n: np.stack([r.read()[n] for r in replies]) for n in heads}
        combined: list[Arrays] = [
            {n: np.tensordot(row, a, 1).astype(a.dtype) for n, a in stacked.items()}
            for row in weights
        ]
        self.save_heads([reply.client for reply in replies], combined)
        return {**mean, **centroids}


def representation_of(arrays: Arrays) -> Arrays:
    """Return the arrays of the representation."""
    return {n: a for n, a in arrays.items() if n.startswith("representation.")}


def combination_weights(features: Matrix, variances: Matrix) -> Matrix:
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
    """
    flat = features.reshape(len(features), -1)
    # ⟨h_i − h_j, h_i − h_k⟩ follows from the inner products. Centring reduces rounding
    # errors and does not change it.
    flat = flat - flat.mean(0)
    products = flat @ flat.T
    rows = []
    for i, row in enumerate(products):
        spread = products + row[i] - row - row[:, None]
        rows.append(simplex_minimum(np.diag(variances) + spread, i))
    return np.stack(rows)


def simplex_minimum(matrix: Matrix, start: int) -> Matrix:
    """Return the α ≥ 0 with Σ α = 1 that minimises αᵀ P α.

    Wolfe's active-set method (Mathematical Programming, 1976), which is exact after
    finitely many steps. In each step the weight that lowers the value most joins the
    positive ones. Then α moves towards the minimum over the positive weights alone,
    until it is reached or one of them becomes 0 and leaves.

    Parameters
    ----------
    matrix : ndarray, shape (n, n)
        P, positive semi-definite.
    start : int
        Index of the weight that is 1 at first, and stays 1 if no other α is better.
    """
    n = len(matrix)
    alpha = np.eye(n)[start]
    for _ in range(10 * n):
        slope = matrix @ alpha
        best = int(slope.argmin())
        if slope[best] >= (1 - TOLERANCE) * (alpha @ slope):
            break
        active = alpha > 0
        active[best] = True
        while True:
            places = np.flatnonzero(active)
            target = np.zeros(n)
            target[places] = affine_minimum(matrix[np.ix_(places, places)])
            falling = active & (target <= 0)
            if not falling.any():
                break
            falls = alpha[falling] - target[falling]
            share = (alpha[falling] / np.where(falls > 0, falls, 1)).min()
            alpha = np.maximum(alpha + share * (target - alpha), 0)
            gone = places[alpha[places].argmin()]
            alpha[gone], active[gone] = 0, False
        alpha = target
    return np.asarray(alpha / alpha.sum())


def affine_minimum(matrix: Matrix) -> Matrix:
    """Return the α with Σ α = 1, of any sign, that minimises αᵀ P α."""
    # Scale P to a unit diagonal, as clients' entries may differ by orders of magnitude.
    units = 1 / np.sqrt(np.maximum(matrix.diagonal(), np.finfo(float).tiny))
    ones = (units / units.max())[:, None]
    scaled = units[:, None] * matrix * units
    system = np.block([[scaled, ones], [ones.T, np.zeros((1, 1))]])
    right = np.append(np.zeros(len(matrix)), 1.0)
    # P is singular if clients have equal features without variance.
    solution = units * np.linalg.lstsq(system, right, rcond=None)[0][:-1]
    return np.asarray(solution / solution.sum())
