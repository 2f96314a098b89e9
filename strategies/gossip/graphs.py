"""Graphs over which nodes exchange messages: connected, undirected, without loops."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_frl.task.settings import SettingsError, require, unknown

# How often a graph is drawn before giving up.
_DRAWS = 1000


@dataclass(frozen=True)
class Graph:
    """A connected undirected graph without loops.

    Fewer than 2 nodes, a loop, an edge to a node that does not exist and a disconnected
    graph are a `SettingsError`.

    Parameters
    ----------
    n : int
        Number of nodes, at least 2; they are 0, ..., n-1.
    edges : tuple of (int, int)
        The edges in any order and direction. They are stored once each, as (i, j) with
        i < j, sorted.
    """

    n: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Put the edges in order and check the graph."""
        require(self.n >= 2, "the number of nodes", self.n, "at least 2")
        edges = tuple(sorted({(min(edge), max(edge)) for edge in self.edges}))
        for i, j in edges:
            if i == j or i < 0 or j >= self.n:
                allowed = f"between two different nodes of 0 to {self.n - 1}"
                require(False, "an edge", (i, j), allowed)
        object.__setattr__(self, "edges", edges)
        reached = self._reached()
        if len(reached) < self.n:
            apart = next(i for i in range(self.n) if i not in reached)
            raise SettingsError(
                f"the graph is disconnected: from its component {_listed(reached)} "
                f"there is no path to node {apart}"
            )

    @cached_property
    def _neighbours(self) -> dict[int, list[int]]:
        # A dict, as a file may name a node of any number; nodes without an edge are
        # refused before anybody can miss them. Edges are sorted, so a node's smaller
        # neighbours come first, in order, and then its larger ones.
        neighbours: dict[int, list[int]] = {}
        for i, j in self.edges:
            neighbours.setdefault(i, []).append(j)
            neighbours.setdefault(j, []).append(i)
        return neighbours

    def _reached(self) -> set[int]:
        """Return the nodes with a path to node 0, itself included."""
        reached, waiting = {0}, [0]
        while waiting:
            for node in self._neighbours.get(waiting.pop(), []):
                if node not in reached:
                    reached.add(node)
                    waiting.append(node)
        return reached

    def neighbours(self, i: int) -> tuple[int, ...]:
        """Return the neighbours of a node, in increasing order."""
        return tuple(self._neighbours[i])

    def degrees(self) -> NDArray[np.int64]:
        """Return the number of neighbours of each node, of shape (n,)."""
        return np.array([len(self._neighbours[i]) for i in range(self.n)], np.int64)


def ring(n: int) -> Graph:
    """Connect each node with the next, and the last with the first; 2 make one edge."""
    return _made(n, lambda nx: nx.cycle_graph(n))


def torus(n: int) -> Graph:
    """Connect a grid's nodes with the next in their row and column, wrapping around.

    The grid is the one of n nodes nearest to a square; node i is in row i // columns.
    With 2 rows the two edges between the nodes of a column are one. Raises
    `SettingsError` if n is no product of two numbers of at least 2.
    """
    rows = next((r for r in range(math.isqrt(max(n, 0)), 1, -1) if n % r == 0), 0)
    require(rows > 0, "the number of nodes of a torus", n, "a product of two above 1")
    columns = n // rows

    def grid(nx: Any) -> Any:
        return nx.convert_node_labels_to_integers(
            nx.grid_2d_graph(rows, columns, periodic=True)
        )

    return _made(n, grid)


def complete(n: int) -> Graph:
    """Connect every node with every other."""
    return _made(n, lambda nx: nx.complete_graph(n))


def star(n: int) -> Graph:
    """Connect node 0 with every other."""
    return _made(n, lambda nx: nx.star_graph(n - 1))


def _made(n: int, make: Callable[[Any], Any]) -> Graph:
    """Return what networkx makes of at least 2 nodes."""
    require(n >= 2, "the number of nodes", n, "at least 2")
    # Most servers need no graph.
    import networkx

    return Graph(n, tuple(make(networkx).edges))


def k_regular(n: int, degree: int, seed: int) -> Graph:
    """Draw among all graphs whose nodes have the same degree, until connected.

    Uniformly for large n (Steger and Wormald 1999). Raises `SettingsError` unless
    2 <= degree < n, and n or the degree is even.
    """
    require(n >= 3, "the number of nodes of a k-regular graph", n, "at least 3")
    require(
        2 <= degree < n, "graph-degree", degree, f"from 2 to {n - 1}, for {n} nodes"
    )
    require(n * degree % 2 == 0, "graph-degree", degree, f"even, for {n} nodes")
    rng = Random(seed)
    for _ in range(_DRAWS):
        with suppress(SettingsError):  # Disconnected, as with a degree of 2 most are.
            return _made(n, lambda nx: nx.random_regular_graph(degree, n, seed=rng))
    raise SettingsError(
        f"graph-degree is {degree}; none of {_DRAWS} graphs drawn with {n} nodes is "
        "connected, it must be larger"
    )


def small_world(n: int, degree: int, rewiring: float, seed: int) -> Graph:
    """Rewire a ring on which each node knows its nearest ones, until connected.

    Watts and Strogatz 1998: each edge gets another end with a given probability.
    Raises `SettingsError` unless the degree is even and 2 <= degree < n, or if the
    probability is not in [0, 1].
    """
    require(n >= 3, "the number of nodes of a small world", n, "at least 3")
    require(
        2 <= degree < n, "graph-degree", degree, f"from 2 to {n - 1}, for {n} nodes"
    )
    require(degree % 2 == 0, "graph-degree", degree, "even, for a small world")
    require(0 <= rewiring <= 1, "rewiring-probability", rewiring, "in [0, 1]")

    def connected(nx: Any) -> Any:
        try:
            return nx.connected_watts_strogatz_graph(n, degree, rewiring, _DRAWS, seed)
        except nx.NetworkXError:
            raise SettingsError(
                f"rewiring-probability is {rewiring!r}; none of {_DRAWS} graphs drawn "
                f"with {n} nodes of degree {degree} is connected, it must be smaller"
            ) from None

    return _made(n, connected)


def erdos_renyi(n: int, probability: float, seed: int) -> Graph:
    """Connect each pair of nodes with a given probability, drawing until connected.

    Attempt a = 0, 1, ... takes one word of ``PCG64([seed, a])`` for each pair (i, j),
    i < j, in lexicographic order; the pair is an edge if the word's upper 53 bits, as
    a fraction in [0, 1), are below the probability. The first connected graph is the
    result. NumPy promises these words to be the same in every version.

    Raises `SettingsError` if the probability is not in (0, 1], the seed is negative, or
    none of 1,000 draws is connected.
    """
    require(n >= 2, "the number of nodes", n, "at least 2")
    require(0 < probability <= 1, "the edge probability", probability, "in (0, 1]")
    require(seed >= 0, "the graph's seed", seed, "at least 0")
    i, j = np.triu_indices(n, 1)
    for attempt in range(_DRAWS):
        words = np.random.PCG64([seed, attempt]).random_raw(len(i))
        drawn = (words >> np.uint64(11)) * 2.0**-53 < probability
        edges = tuple(zip(i[drawn].tolist(), j[drawn].tolist(), strict=True))
        try:
            return Graph(n, edges)
        except SettingsError:  # Disconnected: nothing else can be wrong here.
            continue
    raise SettingsError(
        f"the edge probability is {probability!r}; none of {_DRAWS} graphs drawn with "
        f"{n} nodes is connected, it must be larger (about ln(n)/n is enough)"
    )


def from_edges(edges: Iterable[Sequence[int]], n: int | None = None) -> Graph:
    """Return the graph of these edges; n is the largest node plus 1 by default."""
    pairs = tuple((int(i), int(j)) for i, j in edges)
    return Graph(max(map(max, pairs), default=-1) + 1 if n is None else n, pairs)


def from_file(path: str | Path, n: int | None = None) -> Graph:
    """Read a graph from a text file with one edge a line: two node numbers, from 0.

    Text after ``#`` and empty lines are skipped; n is the largest node plus 1 by
    default. Raises `SettingsError` if the file cannot be read or a line is not an edge.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"the graph file {str(path)!r} can not be read: {error}"
        raise SettingsError(message) from error
    edges = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            valid = len(words) == 2 and all(word.isdecimal() for word in words)
            require(valid, f"line {number} of {path}", line, "two node numbers")
            edges.append((int(words[0]), int(words[1])))
    return from_edges(edges, n)


GRAPHS: dict[str, Callable[[int], Graph]] = {
    "ring": ring,
    "torus": torus,
    "complete": complete,
    "star": star,
}


DRAWN = ("erdos-renyi", "k-regular", "small-world")


def build_graph(
    name: str,
    n: int,
    probability: float = 0.5,
    seed: int = 0,
    degree: int = 4,
    rewiring: float = 0.1,
) -> Graph:
    """Return the connected graph that the setting ``graph`` names.

    Parameters
    ----------
    name : str
        A key of ``GRAPHS``, one of ``DRAWN``, or the path of a file of edges; anything
        else is a `SettingsError`.
    n : int
        Number of nodes.
    probability : float, default 0.5
        Of an edge of ``erdos-renyi``.
    seed : int, default 0
        Of what is drawn.
    degree : int, default 4
        Of a node of ``k-regular``, and of ``small-world`` on average.
    rewiring : float, default 0.1
        Probability with which an edge of ``small-world`` gets another end.
    """
    if name in GRAPHS:
        return GRAPHS[name](n)
    if name == "erdos-renyi":
        return erdos_renyi(n, probability, seed)
    if name == "k-regular":
        return k_regular(n, degree, seed)
    if name == "small-world":
        return small_world(n, degree, rewiring, seed)
    if not _is_file(name):
        error = unknown("graph", name, [*GRAPHS, *DRAWN])
        raise SettingsError(f"{error}, or a file of edges")
    return from_file(name, n)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # Too long, or with a zero byte.
        return False


def _listed(nodes: set[int]) -> str:
    """Return the nodes of a component as text, the first ten if there are more."""
    names = ", ".join(map(str, sorted(nodes)[:10]))
    return f"{{{names}, ...}}" if len(nodes) > 10 else f"{{{names}}}"
