"""Mixing matrices, their spectrum and the theoretical consensus step.

Nodes 0, ..., n − 1 exchange messages along the edges of a connected undirected graph
and average with a mixing matrix W: symmetric, doubly stochastic, and w_ij = 0 unless i
and j are equal or neighbours. With its eigenvalues ordered by magnitude,
1 = |λ_1| > |λ_2| ≥ ... ≥ |λ_n|, the spectral gap is δ = 1 − |λ_2| (Singh, UCLA 2024,
section 3.2).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_frl.strategies.gossip.graphs import Graph

Weights = NDArray[np.float64]


def metropolis_weights(graph: Graph) -> Weights:
    """Return the mixing matrix W, shape (n, n), with Metropolis-Hastings weights.

    w_ij = 1 / (1 + max(deg_i, deg_j)) for neighbours, and w_ii = 1 − Σ_j w_ij. Every
    w_ii is positive, so δ > 0.
    """
    degrees = graph.degrees()
    i, j = np.array(graph.edges).T
    return _matrix(graph, 1 / (1 + np.maximum(degrees[i], degrees[j])))


def uniform_weights(graph: Graph) -> Weights:
    """Return the mixing matrix W, shape (n, n), with equal weights for all edges.

    w_ij = 1 / (1 + max_k deg_k) for neighbours, and w_ii = 1 − Σ_j w_ij, that is
    W = I − L / (1 + max_k deg_k) with the graph's Laplacian L. The added 1 keeps every
    w_ii positive, and so δ > 0 even for bipartite graphs such as even rings.
    """
    return _matrix(graph, 1 / (1 + graph.degrees().max()))


class Spectrum(NamedTuple):
    """Spectral properties of a mixing matrix.

    Parameters
    ----------
    delta : float
        Spectral gap δ = 1 − |λ_2(W)|, in (0, 1].
    lambda_max : float
        λ = max_i (1 − λ_i(W)) of Theorem 2, in [δ, 2).
    """

    delta: float
    lambda_max: float


def spectrum(weights: Weights) -> Spectrum:
    """Return δ and λ of a mixing matrix W (Singh 2024, sections 3.2 and 3.3).

    Computes all eigenvalues, in O(n³): less than a second for n = 1,000.
    """
    eigenvalues = np.linalg.eigvalsh(weights)  # Increasing; the last one is 1.
    delta = 1 - float(np.abs(eigenvalues[:-1]).max())
    return Spectrum(delta, 1 - float(eigenvalues[0]))


def consensus_step(weights: Weights, omega: float) -> float:
    """Return the consensus step γ for which SQuARM-SGD provably converges.

    γ = 2 δ ω / (64 δ + δ² + 16 λ² + 8 δ λ² − 16 δ ω)

    with δ and λ of `Spectrum` and the compression operator's ω in (0, 1] (Singh 2024,
    section 3.3.2, Theorem 2; section 3.2.1 refers to it for γ). It is a worst-case
    value, far below the best step in practice. Theorem 1 gives a smaller one, under
    weaker assumptions and without event triggering.
    """
    delta, lambda_max = spectrum(weights)
    return (2 * delta * omega) / (
        64 * delta
        + delta**2
        + 16 * lambda_max**2
        + 8 * delta * lambda_max**2
        - 16 * delta * omega
    )


def _matrix(graph: Graph, edge_weights: Weights | np.float64) -> Weights:
    weights = np.zeros((graph.n, graph.n))
    i, j = np.array(graph.edges).T
    weights[i, j] = weights[j, i] = edge_weights
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights
