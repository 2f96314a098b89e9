"""Communication graphs, their mixing matrices, and the consensus step γ.

A graph of the nodes 0, ..., n − 1 is connected, undirected and without loops: the array
of its edges (i, j) with i < j, in lexicographic order, shape (E, 2).

Nodes average with a mixing matrix W: symmetric, doubly stochastic, and w_ij = 0 unless
i and j are equal or neighbours. With its eigenvalues ordered by magnitude,
1 = |λ_1| > |λ_2| ≥ ... ≥ |λ_n|, the spectral gap is δ = 1 − |λ_2| (Singh, UCLA 2024,
section 3.2).
"""

import math
import os.path
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from flwr_frl.common.errors import SettingsError, reading, require, unknown

Edges = NDArray[np.int64]
Weights = NDArray[np.float64]
GRAPHS = ("ring", "torus", "complete", "star", "erdos-renyi")
# Number of attempts at drawing a connected graph.
DRAWS = 1000
# Rules that derive γ.
RULES = ("auto", "theory")
ALLOWED = "auto, theory or a number in (0, 1]"


def build_graph(name: str, n: int, probability: float = 0.5, seed: int = 0) -> Edges:
    """Return the connected graph selected by the setting ``graph``.

    Parameters
    ----------
    name : str
        One of ``GRAPHS``: ``ring``, ``complete``, ``star`` around node 0, or ``torus``,
        the most nearly square grid of n nodes, with node i in row i // columns;
        ``erdos-renyi``, drawn until it is connected. Or the path of a file of edges.
    n : int
        Number of nodes.
    probability : float, default 0.5
        Probability of an edge of ``erdos-renyi``, in (0, 1].
    seed : int, default 0
        Seed of ``erdos-renyi``, at least 0.

    Raises
    ------
    SettingsError
        If the name is unknown or there is no such graph of n nodes.
    """
    # It takes 0.3 s and only gossip servers need it.
    import networkx

    require(n >= 2, "the number of nodes", n, "at least 2")
    named = {
        "ring": networkx.cycle_graph,
        "complete": networkx.complete_graph,
        "star": networkx.star_graph,
    }
    if name in named:
        return connected(named[name](range(n)).edges, n)
    if name == "torus":
        rows = next((r for r in range(math.isqrt(n), 1, -1) if n % r == 0), 0)
        allowed = "a product of two above 1"
        require(rows > 0, "the number of nodes of a torus", n, allowed)
        grid = networkx.grid_2d_graph(rows, n // rows, periodic=True)
        return connected(networkx.convert_node_labels_to_integers(grid).edges, n)
    # Unlike Path.is_file, it is False for names that are too long.
    if os.path.isfile(name):
        return from_file(name, n)
    if name != "erdos-renyi":
        raise unknown("graph", name, GRAPHS, others="a file of edges")
    for attempt in range(DRAWS):
        with suppress(SettingsError):
            return connected(_erdos_renyi(n, probability, seed, attempt).tolist(), n)
    raise SettingsError(
        f"graph is {name!r}; none of {DRAWS} drawn graphs of {n} nodes is connected; "
        "choose a larger edge-probability"
    )


def _erdos_renyi(n: int, probability: float, seed: int, attempt: int) -> Edges:
    """Connect each pair of nodes with a given probability.

    Attempt a = 0, 1, ... takes one word of ``PCG64([seed, a])`` for each pair (i, j),
    i < j, in lexicographic order. The pair is an edge if the word's upper 53 bits, as
    a fraction in [0, 1), are below the probability. NumPy guarantees these words
    across versions.
    """
    pairs = np.stack(np.triu_indices(n, 1), axis=1)
    words = np.random.PCG64([seed, attempt]).random_raw(len(pairs))
    return pairs[(words >> np.uint64(11)) * 2.0**-53 < probability]


def from_file(path: str, n: int) -> Edges:
    """Read a graph of n nodes from a text file with one edge per line.

    An edge is two node numbers, from 0. Empty lines and text after ``#`` are skipped.
    Raises `SettingsError` if the file cannot be read or a line is not an edge.
    """
    with reading(path, "graph", "two node numbers in each line"):
        edges = np.loadtxt(path, np.int64, ndmin=2, encoding="utf-8").tolist()
    nodes = range(n)
    for edge in edges:
        valid = len(edge) == len({*edge}.intersection(nodes)) == 2
        allowed = f"two different numbers from 0 to {n - 1}"
        require(valid, f"an edge in the graph file {path!r}", edge, allowed)
    return connected(edges, n)


def connected(edges: Iterable[tuple[int, int]], n: int) -> Edges:
    """Return edges in order, without repetitions; `SettingsError` if disconnected."""
    import networkx

    graph = networkx.Graph(edges)
    graph.add_nodes_from(range(n))
    missing = sorted(set(range(n)) - networkx.node_connected_component(graph, 0))
    require(not missing, "the graph's part without a path to node 0", missing, "none")
    return np.array(sorted(map(sorted, graph.edges)), np.int64)


def mixing_matrix(edges: Edges) -> Weights:
    """Return the mixing matrix W of Metropolis weights, shape (n, n).

    w_ij = 1 / (1 + max(deg_i, deg_j)) for neighbours, and w_ii = 1 − Σ_j w_ij. The
    added 1 keeps every w_ii positive, and so δ > 0 even for bipartite graphs such as
    even rings.
    """
    degrees = np.bincount(edges.ravel())
    i, j = edges.T
    weights = np.zeros((len(degrees), len(degrees)))
    weights[i, j] = weights[j, i] = 1 / (1 + np.maximum(degrees[i], degrees[j]))
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights


def spectrum(weights: Weights) -> tuple[float, float]:
    """Return δ and λ of a mixing matrix W (Singh 2024, sections 3.2 and 3.3).

    δ = 1 − |λ_2(W)| is the spectral gap, in (0, 1], and λ = max_i (1 − λ_i(W)) that of
    Theorem 2, in [δ, 2). Computes all eigenvalues, in O(n³): less than a second for
    n = 1,000.
    """
    eigenvalues = np.linalg.eigvalsh(weights)  # Increasing; the last one is 1.
    return 1 - float(np.abs(eigenvalues[:-1]).max()), 1 - float(eigenvalues[0])


def consensus_step(weights: Weights, omega: float) -> float:
    """Return the consensus step γ for which SQuARM-SGD provably converges.

    γ = 2 δ ω / (64 δ + δ² + 16 λ² + 8 δ λ² − 16 δ ω)

    with δ and λ of `spectrum` and the compression operator's ω in (0, 1] (Singh 2024,
    section 3.3.2, Theorem 2; section 3.2.1 refers to it for γ). It is a worst-case
    value, far below the best step in practice.
    """
    delta, top = spectrum(weights)
    divisor = 64 * delta + delta**2 + 16 * top**2 + 8 * delta * top**2
    return (2 * delta * omega) / (divisor - 16 * delta * omega)


def practical_step(omega: float) -> float:
    """Return ω / (2 − ω): 1 for exact messages, and about ω / 2 for small ω.

    Twice this step is too large for some operators
    (``benchmarks/results/consensus_step.md``).
    """
    return omega / (2 - omega)


def derived_step(
    rule: str, weights: Weights, omega: float, typical_omega: float
) -> float:
    """Return the consensus step γ that a rule selects.

    Parameters
    ----------
    rule : str
        ``auto`` for `practical_step` with ω at a Gaussian vector; ``theory`` for
        `consensus_step` with the worst-case ω; or a number.
    weights : ndarray, shape (n, n)
        The mixing matrix W.
    omega, typical_omega : float
        ω in the worst case and at a Gaussian vector, in (0, 1].
    """
    if rule == "auto":
        return practical_step(typical_omega)
    return consensus_step(weights, omega) if rule == "theory" else float(rule)
