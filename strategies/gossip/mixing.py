"""Mixing matrices, their spectrum, the consensus step γ and the consensus distance.

Nodes 0, ..., n − 1 exchange messages along the edges of a connected undirected graph
and average with a mixing matrix W: symmetric, doubly stochastic, and w_ij = 0 unless i
and j are equal or neighbours. With its eigenvalues ordered by magnitude,
1 = |λ_1| > |λ_2| ≥ ... ≥ |λ_n|, the spectral gap is δ = 1 − |λ_2| (Singh, UCLA 2024,
section 3.2).
"""

from collections import Counter
from collections.abc import Sequence
from logging import INFO, WARNING
from typing import NamedTuple

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from flwr_frl.strategies.gossip.graphs import Edges

Weights = NDArray[np.float64]
# Rules that derive γ.
RULES = ("auto", "theory", "theorem-1")
ALLOWED = "auto, theory, theorem-1 or a number in (0, 1]"
# A smaller step needs thousands of rounds to bring the nodes together.
SMALL = 1e-3


def mixing_matrix(edges: Edges, rule: str) -> Weights:
    """Return the mixing matrix W, shape (n, n).

    For neighbours, ``metropolis`` has w_ij = 1 / (1 + max(deg_i, deg_j)), and
    ``uniform`` w_ij = 1 / (1 + max_k deg_k), that is W = I − L / (1 + max_k deg_k) with
    the graph's Laplacian L. In both, w_ii = 1 − Σ_j w_ij. The added 1 keeps every w_ii
    positive, and so δ > 0 even for bipartite graphs such as even rings.
    """
    degrees = np.bincount(edges.ravel())
    i, j = edges.T
    most = np.maximum(degrees[i], degrees[j])
    if rule == "uniform":
        most = degrees.max()
    weights = np.zeros((len(degrees), len(degrees)))
    weights[i, j] = weights[j, i] = 1 / (1 + most)
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights


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
    value, far below the best step in practice.
    """
    delta, lambda_max = spectrum(weights)
    return (2 * delta * omega) / (
        64 * delta
        + delta**2
        + 16 * lambda_max**2
        + 8 * delta * lambda_max**2
        - 16 * delta * omega
    )


def relaxed_consensus_step(weights: Weights, omega: float) -> float:
    """Return the γ of Theorem 1, under weaker assumptions and without a trigger.

    γ = 2 δ ω³ / (4 δ² ω² + δ² + 128 λ² + 24 ω² λ²) (section 3.3.1), smaller than that
    of `consensus_step`.
    """
    delta, lambda_max = spectrum(weights)
    return (2 * delta * omega**3) / (
        4 * delta**2 * omega**2
        + delta**2
        + 128 * lambda_max**2
        + 24 * omega**2 * lambda_max**2
    )


def practical_step(omega: float) -> float:
    """Return ω / (2 − ω): 1 for exact messages, and about ω / 2 for small ω.

    Twice this step is too large for some operators
    (``benchmarks/results/consensus_step.md``).
    """
    return omega / (2 - omega)


def derived_step(
    rule: str, weights: Weights, omega: float, typical_omega: float
) -> float:
    """Return the consensus step γ that a rule selects, and warn if it is very small.

    Parameters
    ----------
    rule : str
        ``auto`` for `practical_step` with ω at a Gaussian vector; ``theory`` for
        `consensus_step` and ``theorem-1`` for `relaxed_consensus_step`, both with the
        worst-case ω; or a number.
    weights : ndarray, shape (n, n)
        The mixing matrix W.
    omega, typical_omega : float
        ω in the worst case and at a Gaussian vector, in (0, 1].
    """
    practical = practical_step(typical_omega)
    if rule == "auto":
        step = practical
    elif rule == "theory":
        step = consensus_step(weights, omega)
    elif rule == "theorem-1":
        step = relaxed_consensus_step(weights, omega)
    else:
        step = float(rule)
    log(INFO, "consensus step: %.3g (%s)", step, rule)
    if step < SMALL:
        text = "consensus step %.3g is so small that messages have almost no "
        text += "effect; consensus-step='auto' would be %.3g"
        log(WARNING, text, step, practical)
    return step


def consensus_distance(sketches: Sequence[NDArray[np.float32]]) -> float:
    """Estimate (1/n) Σ_i ‖x_i − x̄‖² from sketches of the models x_i.

    Sketches whose length differs from the most common one are ignored.
    """
    length = Counter(map(len, sketches)).most_common(1)[0][0]
    stacked = np.stack([s for s in sketches if len(s) == length])
    deviations = stacked - stacked.mean(axis=0, dtype=np.float64)
    return float(np.square(deviations).sum(1).mean())
