"""Base of strategies whose clients are the nodes of a fixed graph."""

from logging import WARNING
from typing import Annotated, Any, Literal

import numpy as np
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.settings import SettingsError, setting, validate
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.gossip.graphs import GRAPHS, RANDOM_GRAPHS, Graph, build_graph
from flwr_frl.strategies.gossip.mailboxes import Mailboxes
from flwr_frl.strategies.gossip.mixing import metropolis_weights, uniform_weights

FORMS = f"{', '.join([*GRAPHS, *RANDOM_GRAPHS])} or a file of edges"
MIXING = {"metropolis": metropolis_weights, "uniform": uniform_weights}


class GraphStrategy(Strategy):
    """Build a graph from the initial clients, all of which take part in every round.

    Parameters
    ----------
    graph : str, default "ring"
        ``ring``, ``torus``, ``complete`` or ``star``; a random graph, ``erdos-renyi``,
        ``k-regular`` or ``small-world``; or a file with one edge (two node numbers) per
        line. Node i is the i-th of the sorted names of the initial clients.
    edge_probability : float, default 0.5
        Probability of an edge of ``erdos-renyi``.
    graph_degree : int, default 4
        Degree of the nodes of ``k-regular``; even mean degree of ``small-world`` (Watts
        and Strogatz 1998).
    rewiring_probability : float, default 0.1
        Probability that an edge of ``small-world``'s ring lattice gets a new end.
    mixing : {"metropolis", "uniform"}, default "metropolis"
        The weights w_ij.
    max_missed_rounds : int, default 1000
        Number of consecutive rounds that a node may miss; after more, it is excluded
        permanently.
    **base
        The settings of `Strategy`.

    Raises
    ------
    SettingsError
        If a value is out of range.
    """

    def __init__(
        self,
        *,
        graph: Annotated[str, setting(form=FORMS)] = "ring",
        edge_probability: Annotated[float, setting(gt=0, le=1)] = 0.5,
        graph_degree: Annotated[int, setting(ge=2)] = 4,
        rewiring_probability: Annotated[float, setting(ge=0, le=1)] = 0.1,
        mixing: Annotated[Literal["metropolis", "uniform"], setting()] = "metropolis",
        max_missed_rounds: Annotated[int, setting(ge=1)] = 1000,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.graph = graph
        self.edge_probability = edge_probability
        self.graph_degree = graph_degree
        self.rewiring_probability = rewiring_probability
        self.mixing = mixing
        self.max_missed_rounds = max_missed_rounds
        validate(self)
        # Empty until the clients are known.
        self.boxes = Mailboxes([], np.zeros((0, 0)), [])
        self._edges = np.zeros((0, 2), np.int64)
        self._latecomers: set[str] = set()
        # Clients ahead of the server's checkpoint: those found in the current call of
        # `identify`, and all so far.
        self._ahead: list[str] = []
        self._ever_ahead: set[str] = set()

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless the graph can have this many nodes."""
        self.build_graph(num_clients)

    def build_graph(self, n: int) -> Graph:
        """Return the graph of n nodes."""
        return build_graph(
            self.graph,
            n,
            self.edge_probability,
            self.settings.seed,
            self.graph_degree,
            self.rewiring_probability,
        )

    def identify(self, grid: Grid) -> list[int]:
        """Return the connected nodes of the graph.

        The first call builds the graph from the connected clients. Clients with other
        names that connect later are not part of it.
        """
        nodes = super().identify(grid)
        if not nodes:
            return []
        if not self.boxes.names:
            names = [self.clients.name_of(n) for n in nodes]
            self._set_graph(names, self.build_graph(len(nodes)))
        number = self.boxes.number
        for name in {self.clients.name_of(node) for node in nodes} - number.keys():
            if name not in self._latecomers:
                text = "client %s came late and has no place in the graph"
                log(WARNING, text, self.clients.label(name))
                self._latecomers.add(name)
        ahead, self._ahead = self._ahead, []
        self._lose_ahead([name for name in ahead if name in number])
        present = number.keys() - self.boxes.lost
        return [node for node in nodes if self.clients.name_of(node) in present]

    def _expected_clients(self) -> set[str]:
        """Exclude lost nodes."""
        return super()._expected_clients() - self.boxes.lost

    def roll_back(self, name: str) -> None:
        """Defer the decision to `identify`, which can count the clients ahead."""
        self._ahead.append(name)

    def _lose_ahead(self, ahead: list[str]) -> None:
        """Lose nodes that are ahead of the server; `SettingsError` if most nodes are.

        A node cannot return to an earlier round, as its neighbours' estimates are of
        its newest one. A minority, however, must not be able to end the run.
        """
        self._ever_ahead.update(ahead)
        majority = 2 * len(self._ever_ahead) > len(self.boxes.names)
        for name in ahead:
            reason = (
                f"has seen a checkpoint of round {self.ledger.seen[name]}, later "
                f"than this one of round {self.ledger.resumed}"
            )
            if majority:
                raise SettingsError(
                    f"resume: client {self.clients.label(name)}, like most clients, "
                    f"{reason}; gossip can only resume from its newest checkpoint"
                )
            if name not in self.boxes.lost:
                self.lose(name, f"it {reason}")

    def _set_graph(self, names: list[str], graph: Graph) -> None:
        self._edges = np.array(graph.edges, np.int64)
        self.boxes = Mailboxes(names, MIXING[self.mixing](graph), graph.neighbours)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return all nodes."""
        return nodes

    def _usable(self, nodes: list[int], trains: bool) -> list[int]:
        """Return all nodes: one without examples still mixes its neighbours' models."""
        return nodes

    def lose_absent(self, server_round: int) -> None:
        """Give up nodes that have missed more than ``max_missed_rounds`` rounds."""
        for name in self.boxes.names:
            missed = server_round - 1 - self.ledger.acknowledged.get(name, 0)
            if name not in self.boxes.lost and missed > self.max_missed_rounds:
                self.lose(name, f"it missed {missed} rounds")

    def lose(self, name: str, reason: str) -> None:
        """Permanently give up a node, and log the reason."""
        text = "client %s is lost: %s; its neighbours continue with its last message"
        log(WARNING, text, self.clients.label(name), reason)
        self.boxes.lose(name)
