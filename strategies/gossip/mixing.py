"""Mixing weights, their spectrum and the consensus step.

Nodes 0, ..., n-1 exchange messages along the edges of a connected undirected graph and
average with a mixing matrix W: symmetric, doubly stochastic, w_ij = 0 where i and j are
neither equal nor neighbours. With its eigenvalues ordered by magnitude,
1 = |lambda_1| > |lambda_2| >= ... >= |lambda_n|, the spectral gap is
delta = 1 - |lambda_2| (Singh, UCLA 2024, section 3.2).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_frl.strategies.gossip.graphs import Graph, from_edges
from flwr_frl.task.settings import require

Weights = NDArray[np.float64]

# How far a matrix given by a user may be from symmetric and stochastic: weights are
# often written with few digits.
_TOLERANCE = 1e-6


def metropolis_weights(graph: Graph) -> Weights:
    """Return the mixing matrix W, of shape (n, n), of Metropolis-Hastings weights.

    w_ij = 1 / (1 + max(deg_i, deg_j)) for neighbours, and w_ii is what is left of 1. It
    is positive, so delta > 0.
    """
    degrees = graph.degrees()
    i, j = np.array(graph.edges).T
    return _weights(graph.n, i, j, 1 / (1 + np.maximum(degrees[i], degrees[j])))


def uniform_weights(graph: Graph) -> Weights:
    """Return the mixing matrix W in which all edges weigh the same (maximum degree).

    w_ij = 1 / (1 + max_k deg_k) for neighbours, and w_ii is what is left of 1: W =
    I - L / (1 + max_k deg_k) with the graph's Laplacian L. The added 1 keeps every w_ii
    positive and so delta > 0 where the graph is bipartite too, as an even ring is.
    """
    i, j = np.array(graph.edges).T
    weight = 1 / (1 + graph.degrees().max())
    return _weights(graph.n, i, j, np.full(len(i), weight))


class Spectrum(NamedTuple):
    """What theory needs of a mixing matrix.

    Parameters
    ----------
    delta : float
        Spectral gap 1 - |lambda_2(W)|, in (0, 1].
    lambda_max : float
        max_i (1 - lambda_i(W)), at least delta and below 2: the lambda of Theorem 2.
    """

    delta: float
    lambda_max: float


def spectrum(weights: Weights) -> Spectrum:
    """Return the spectral gap and lambda of W (Singh 2024, sections 3.2 and 3.3).

    All eigenvalues are computed, in O(n^3): less than a second for n = 1,000. Raises
    `SettingsError` as `check_weights` does, or if |lambda_2| = 1 so that nothing
    converges: the graph is bipartite and every w_ii is zero.
    """
    check_weights(weights)
    eigenvalues = np.linalg.eigvalsh(weights)  # Increasing; the last one is 1.
    delta = 1 - float(np.abs(eigenvalues[:-1]).max())
    require(delta > 1e-12, "the spectral gap", delta, "> 0: give each w_ii some weight")
    return Spectrum(delta, 1 - float(eigenvalues[0]))


def check_weights(weights: Weights) -> None:
    """Raise `SettingsError` unless W is a mixing matrix of a connected graph.

    It must be square, finite, nowhere negative, symmetric, with rows that sum to 1.
    """
    shape = weights.shape
    square = len(shape) == 2 and shape[0] == shape[1] >= 2
    require(square, "the mixing matrix's shape", shape, "(n, n), n >= 2")
    valid = np.isfinite(weights) & (weights >= 0)
    i, j = np.unravel_index(np.argmin(valid), shape)
    require(bool(valid[i, j]), f"w_{i},{j}", float(weights[i, j]), "a number >= 0")
    difference = np.abs(weights - weights.T)
    i, j = np.unravel_index(np.argmax(difference), shape)
    mirrored = f"w_{j},{i} = {weights[j, i]}, as it is to be symmetric"
    symmetric = bool(difference[i, j] <= _TOLERANCE)
    require(symmetric, f"w_{i},{j}", float(weights[i, j]), mirrored)
    sums = weights.sum(axis=1)
    row = int(np.argmax(np.abs(sums - 1)))
    stochastic = bool(abs(sums[row] - 1) <= _TOLERANCE)
    require(stochastic, f"the sum of row {row} of W", float(sums[row]), "1")
    from_edges(np.argwhere(np.triu(weights, 1)).tolist(), shape[0])


def consensus_step(weights: Weights, omega: float) -> float:
    """Return the consensus step gamma with which SQuARM-SGD provably converges.

    gamma = 2 delta omega
            / (64 delta + delta^2 + 16 lambda^2 + 8 delta lambda^2 - 16 delta omega)

    with lambda = max_i (1 - lambda_i(W)) and the compression operator's omega: Singh
    2024, section 3.3.2, Theorem 2, to which section 3.2.1 refers for gamma. It is a
    worst case, far below the best step found by trying. Theorem 1 has another one,
    smaller, for weaker assumptions and without event triggering. Raises `SettingsError`
    unless omega is in (0, 1], and as `spectrum` does.
    """
    require(0 < omega <= 1, "omega", omega, "in (0, 1]")
    delta, lambda_max = spectrum(weights)
    return (2 * delta * omega) / (
        64 * delta
        + delta**2
        + 16 * lambda_max**2
        + 8 * delta * lambda_max**2
        - 16 * delta * omega
    )


def _weights(
    n: int, i: NDArray[np.int64], j: NDArray[np.int64], edge_weights: Weights
) -> Weights:
    weights = np.zeros((n, n))
    weights[i, j] = weights[j, i] = edge_weights
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights
