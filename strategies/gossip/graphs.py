"""Communication graphs: connected, undirected and without loops.

A graph of the nodes 0, ..., n − 1 is the array of its edges (i, j) with i < j, in
lexicographic order, shape (E, 2).
"""

import math
import os.path
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from flwr_frl.common.settings import SettingsError, require, unknown

Edges = NDArray[np.int64]
GRAPHS = ("ring", "torus", "complete", "star")
RANDOM_GRAPHS = ("erdos-renyi", "k-regular", "small-world")
# Number of attempts at drawing a connected graph.
DRAWS = 1000


def build_graph(
    name: str,
    n: int,
    probability: float = 0.5,
    seed: int = 0,
    degree: int = 4,
    rewiring: float = 0.1,
) -> Edges:
    """Return the connected graph selected by the setting ``graph``.

    Parameters
    ----------
    name : str
        One of ``GRAPHS``: ``ring``, ``complete``, ``star`` around node 0, or ``torus``,
        the most nearly square grid of n nodes, with node i in row i // columns. One of
        ``RANDOM_GRAPHS``, drawn until it is connected. Or the path of a file of edges.
    n : int
        Number of nodes.
    probability : float, default 0.5
        Probability of an edge of ``erdos-renyi``, in (0, 1].
    seed : int, default 0
        Seed of random graphs, at least 0.
    degree : int, default 4
        Degree of the nodes of ``k-regular`` (Steger and Wormald 1999); mean degree of
        ``small-world`` (Watts and Strogatz 1998).
    rewiring : float, default 0.1
        Probability that an edge of ``small-world`` gets a new end, in [0, 1].

    Raises
    ------
    SettingsError
        If the name is unknown or there is no such graph of n nodes.
    """
    # It takes 0.3 s and only gossip servers need it.
    import networkx

    require(n >= 2, "the number of nodes", n, "at least 2")
    named = {"ring": networkx.cycle_graph, "complete": networkx.complete_graph}
    if name in named:
        return connected(named[name](n).edges, n)
    if name == "star":
        return connected(networkx.star_graph(n - 1).edges, n)
    if name == "torus":
        rows = next((r for r in range(math.isqrt(n), 1, -1) if n % r == 0), 0)
        allowed = "a product of two above 1"
        require(rows > 0, "the number of nodes of a torus", n, allowed)
        grid = networkx.grid_2d_graph(rows, n // rows, periodic=True)
        return connected(networkx.convert_node_labels_to_integers(grid).edges, n)
    if name not in RANDOM_GRAPHS:
        # Unlike Path.is_file, it is False for names that are too long.
        if os.path.isfile(name):
            return from_file(name, n)
        error = unknown("graph", name, [*GRAPHS, *RANDOM_GRAPHS])
        raise SettingsError(f"{error}, or a file of edges", error.code)
    if name != "erdos-renyi":
        even = n * degree if name == "k-regular" else degree
        allowed = f"from 2 to {n - 1} for {n} nodes, and even for a small world or an "
        allowed += "odd number of nodes"
        valid = 2 <= degree < n and even % 2 == 0
        require(valid, "graph-degree", degree, allowed)
    rng = Random(seed)
    for attempt in range(DRAWS):
        if name == "erdos-renyi":
            edges = _erdos_renyi(n, probability, seed, attempt).tolist()
        elif name == "k-regular":
            edges = networkx.random_regular_graph(degree, n, rng).edges
        else:
            edges = networkx.watts_strogatz_graph(n, degree, rewiring, rng).edges
        with suppress(SettingsError):
            return connected(edges, n)
    raise SettingsError(
        f"graph is {name!r}; none of {DRAWS} drawn graphs of {n} nodes is connected; "
        "choose a larger edge-probability or graph-degree, or less rewiring"
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


def from_file(path: str | Path, n: int) -> Edges:
    """Read a graph of n nodes from a text file with one edge per line.

    An edge is two node numbers, from 0. Empty lines and text after ``#`` are skipped.
    Raises `SettingsError` if the file cannot be read or a line is not an edge.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the graph file {str(path)!r}: {error}"
        raise SettingsError(message) from error
    edges = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            valid = len(words) == 2 and all(w.isdecimal() and int(w) < n for w in words)
            allowed = f"an edge, two different numbers from 0 to {n - 1}"
            place = f"line {number} of the graph file {str(path)!r}"
            require(valid and int(words[0]) != int(words[1]), place, line, allowed)
            edges.append((int(words[0]), int(words[1])))
    return connected(edges, n)


def connected(edges: Iterable[tuple[int, int]], n: int) -> Edges:
    """Return edges in order, without repetitions; `SettingsError` if disconnected."""
    import networkx

    graph = networkx.Graph(edges)
    graph.add_nodes_from(range(n))
    reached = networkx.node_connected_component(graph, 0)
    missing = sorted(set(range(n)) - reached)
    require(not missing, "the graph's part without a path to node 0", missing, "none")
    return np.array(sorted(map(sorted, graph.edges)), np.int64)
