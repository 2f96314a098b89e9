"""Communication graphs: connected, undirected and without loops."""

import math
import os.path
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_frl.common.settings import SettingsError, require, unknown

# Number of attempts at drawing a connected graph.
_DRAWS = 1000


def _networkx() -> Any:
    """Import networkx, which takes 0.3 s and only gossip servers need."""
    import networkx

    return networkx


@dataclass(frozen=True)
class Graph:
    """A connected undirected graph without loops.

    Parameters
    ----------
    n : int
        Number of nodes, at least 2. The nodes are 0, ..., n − 1.
    edges : tuple of (int, int)
        The edges, in any order and direction. They are stored as sorted pairs (i, j)
        with i < j, without repetitions.

    Attributes
    ----------
    neighbours : tuple of tuple of int
        Each node's neighbours, in increasing order.

    Raises
    ------
    SettingsError
        If there are fewer than 2 nodes, an edge is invalid, or the graph is
        disconnected.
    """

    n: int
    edges: tuple[tuple[int, int], ...]
    neighbours: tuple[tuple[int, ...], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Normalise and check the edges."""
        require(self.n >= 2, "the number of nodes", self.n, "at least 2")
        edges = tuple(sorted({(min(edge), max(edge)) for edge in self.edges}))
        for i, j in edges:
            allowed = f"between two different nodes of 0 to {self.n - 1}"
            require(0 <= i < j < self.n, "an edge", (i, j), allowed)
        networkx = _networkx()
        graph = networkx.Graph(edges)
        graph.add_node(0)
        # Checked before anything of size n is built: n may come from a file.
        component = networkx.node_connected_component(graph, 0)
        if len(component) < self.n:
            unreached = next(i for i in range(self.n) if i not in component)
            raise SettingsError(
                f"the graph is disconnected: there is no path from its component "
                f"{_listed(component)} to node {unreached}"
            )
        neighbours = tuple(tuple(sorted(graph[i])) for i in range(self.n))
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "neighbours", neighbours)

    def degrees(self) -> NDArray[np.int64]:
        """Return the number of neighbours of each node, shape (n,)."""
        return np.array([len(near) for near in self.neighbours], np.int64)


def ring(n: int) -> Graph:
    """Connect each node to the next, and the last to the first."""
    return Graph(n, tuple(_networkx().cycle_graph(n).edges))


def torus(n: int) -> Graph:
    """Connect the nodes of a grid to the next in their row and column, wrapping around.

    The grid is the most nearly square one of n nodes; node i is in row i // columns.
    Raises `SettingsError` if n is not a product of two integers above 1.
    """
    rows = next((r for r in range(math.isqrt(n), 1, -1) if n % r == 0), 0)
    require(rows > 0, "the number of nodes of a torus", n, "a product of two above 1")
    grid = _networkx().grid_2d_graph(rows, n // rows, periodic=True)
    return Graph(n, tuple(_networkx().convert_node_labels_to_integers(grid).edges))


def complete(n: int) -> Graph:
    """Connect every node to every other."""
    return Graph(n, tuple(_networkx().complete_graph(n).edges))


def star(n: int) -> Graph:
    """Connect node 0 to every other."""
    return Graph(n, tuple(_networkx().star_graph(n - 1).edges))


def k_regular(n: int, degree: int, seed: int) -> Graph:
    """Draw a graph whose nodes all have the same degree, until it is connected.

    The distribution is asymptotically uniform (Steger and Wormald 1999). Raises
    `SettingsError` unless 2 ≤ degree < n, and n or the degree is even.
    """
    _check_degree(n, degree)
    require(n * degree % 2 == 0, "graph-degree", degree, f"even, for {n} nodes")
    draw, rng = _networkx().random_regular_graph, Random(seed)
    return _connected(n, lambda _: draw(degree, n, rng).edges, "a larger graph-degree")


def small_world(n: int, degree: int, rewiring: float, seed: int) -> Graph:
    """Randomly rewire the edges of a ring lattice, until the graph is connected.

    Each node is connected to its ``degree`` nearest nodes, and each edge gets a new end
    with probability ``rewiring`` (Watts and Strogatz 1998). Raises `SettingsError`
    unless the degree is even and 2 ≤ degree < n.
    """
    _check_degree(n, degree)
    require(degree % 2 == 0, "graph-degree", degree, "even, for a small world")
    draw, rng = _networkx().watts_strogatz_graph, Random(seed)
    advice = "a smaller rewiring-probability"
    return _connected(n, lambda _: draw(n, degree, rewiring, rng).edges, advice)


def erdos_renyi(n: int, probability: float, seed: int) -> Graph:
    """Connect each pair of nodes with a given probability, until connected.

    Attempt a = 0, 1, ... takes one word of ``PCG64([seed, a])`` for each pair (i, j),
    i < j, in lexicographic order. The pair is an edge if the word's upper 53 bits, as
    a fraction in [0, 1), are below the probability. NumPy guarantees these words
    across versions.
    """
    i, j = np.triu_indices(n, 1)

    def draw(attempt: int) -> Iterable[tuple[int, int]]:
        words = np.random.PCG64([seed, attempt]).random_raw(len(i))
        drawn = (words >> np.uint64(11)) * 2.0**-53 < probability
        return zip(i[drawn].tolist(), j[drawn].tolist(), strict=True)

    return _connected(n, draw, "a larger edge-probability (about ln(n)/n is enough)")


def _check_degree(n: int, degree: int) -> None:
    require(n >= 3, "the number of nodes", n, "at least 3, for a given graph-degree")
    allowed = f"from 2 to {n - 1}, for {n} nodes"
    require(2 <= degree < n, "graph-degree", degree, allowed)


def _connected(
    n: int, draw: Callable[[int], Iterable[tuple[int, int]]], advice: str
) -> Graph:
    """Return the first connected graph; ``draw`` returns the edges of an attempt."""
    for attempt in range(_DRAWS):
        edges = tuple(draw(attempt))
        with suppress(SettingsError):  # Random edges can only be disconnected.
            return Graph(n, edges)
    raise SettingsError(
        f"none of {_DRAWS} random graphs of {n} nodes is connected; choose {advice}"
    )


def from_file(path: str | Path, n: int) -> Graph:
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
            valid = len(words) == 2 and all(word.isdecimal() for word in words)
            require(valid, f"line {number} of {path}", line, "two node numbers")
            edges.append((int(words[0]), int(words[1])))
    return Graph(n, tuple(edges))


GRAPHS: dict[str, Callable[[int], Graph]] = {
    "ring": ring,
    "torus": torus,
    "complete": complete,
    "star": star,
}
RANDOM_GRAPHS = ("erdos-renyi", "k-regular", "small-world")


def build_graph(
    name: str,
    n: int,
    probability: float = 0.5,
    seed: int = 0,
    degree: int = 4,
    rewiring: float = 0.1,
) -> Graph:
    """Return the connected graph selected by the setting ``graph``.

    Parameters
    ----------
    name : str
        A key of ``GRAPHS``, one of ``RANDOM_GRAPHS``, or the path of a file of edges.
    n : int
        Number of nodes.
    probability : float, default 0.5
        Probability of an edge of ``erdos-renyi``, in (0, 1].
    seed : int, default 0
        Seed of random graphs, at least 0.
    degree : int, default 4
        Degree of the nodes of ``k-regular``; mean degree of ``small-world``.
    rewiring : float, default 0.1
        Probability that an edge of ``small-world`` gets a new end, in [0, 1].

    Raises
    ------
    SettingsError
        If the name is unknown or there is no such graph of n nodes.
    """
    require(n >= 2, "the number of nodes", n, "at least 2")
    if name in GRAPHS:
        return GRAPHS[name](n)
    if name == "erdos-renyi":
        return erdos_renyi(n, probability, seed)
    if name == "k-regular":
        return k_regular(n, degree, seed)
    if name == "small-world":
        return small_world(n, degree, rewiring, seed)
    if os.path.isfile(name):  # Unlike Path.is_file, False for names that are too long.
        return from_file(name, n)
    error = unknown("graph", name, [*GRAPHS, *RANDOM_GRAPHS])
    raise SettingsError(f"{error}, or a file of edges", error.code)


def _listed(nodes: set[int]) -> str:
    """Return the nodes of a component as text, at most ten of them."""
    names = ", ".join(map(str, sorted(nodes)[:10]))
    return f"{{{names}, ...}}" if len(nodes) > 10 else f"{{{names}}}"
