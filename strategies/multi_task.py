"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord
from numpy.typing import NDArray

from flwr_frl.common.errors import SettingsError, reading, require
from flwr_frl.common.settings import checked_by, is_possible, setting
from flwr_frl.strategies.gossip.base import Gossip, message_of
from flwr_frl.strategies.gossip.graphs import Edges
from flwr_frl.strategies.server.replies import Arrays, InvalidReplyError
from flwr_frl.strategies.server.round import Reply, Round


def is_bound(value: float | str) -> bool:
    """Return whether a value is a number, at least 0, or may be the path of a file."""
    try:
        return 0 <= float(value) < math.inf
    except ValueError:
        return is_possible(str(value))


# Tasks that have their own constraints.
SYNTHETIC = {"task": ("qcqp", "multi-task-logistic")}


class MultiTask(Gossip, client="flwr_frl.clients.multi_task:MultiTaskClient"):
    """Relay compressed copies between neighbours; every node has a separate model.

    Neighbours iterate in lockstep: a node is asked once all of its neighbours have sent
    their message of the same number, and receives these. The others therefore wait for
    a node that is offline. The values of the mixing weights are not used.

    Parameters
    ----------
    constraint_bound : float or str, default "1"
        b_ij ≥ 0 of the constraints between neighbours, for all edges; or a file with
        two node numbers and b_ij in each line, for every edge of the graph.
    **base
        Arguments of `Gossip`.

    Attributes
    ----------
    sent : dict of str to dict of int to bytes
        By sender, the last two messages by their number, from 1. No neighbour is more
        than one behind.
    """

    constraint_bound: Annotated[float | str, checked_by(is_bound)] = setting(
        "1", form="a number, at least 0, or a file", unused_if=SYNTHETIC
    )

    uses_consensus_step = False

    def build_graph(self, n: int) -> Edges:
        """Return the graph of n nodes, of which each edge has a bound."""
        edges = super().build_graph(n)
        read_bounds(self.constraint_bound, edges)
        return edges

    @cached_property
    def bounds(self) -> NDArray[np.float64]:
        """b_ij, shape (n, n), symmetric; NaN for nodes that are no neighbours."""
        return read_bounds(self.constraint_bound, self.edges)

    def _usable(self, nodes: list[int]) -> list[int]:
        """Return the nodes that have not begun or have a message of each neighbour."""
        names = map(self._run.clients.name_of, nodes)
        return [n for n, name in zip(nodes, names, strict=True) if self.is_ready(name)]

    def is_ready(self, name: str) -> bool:
        """Return whether a node has not begun or has a message of each neighbour."""
        i = self.number[name]
        return not self.last(name) or len(self.relayed(i)) == len(self.neighbours[i])

    def last(self, name: str) -> int:
        """Return the number of the last message that a node has sent, 0 for none."""
        return max(self.sent[name], default=0)

    def _config(self, node: int, config: ConfigRecord) -> dict[str, Any]:
        """Add ``node``, ``neighbour-nodes`` (numbers), bounds, ``dual-variables``."""
        i = self.number[self._run.clients.name_of(node)]
        near = self.neighbours[i]
        return {
            **super()._config(node, config),
            "node": i,
            "neighbour-nodes": near,
            "constraint-bounds": self.bounds[i, near].tolist(),
            "dual-variables": 2 * len(self.edges),
        }

    def check_reply(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` unless there is a message of valid length."""
        super().check_reply(reply)
        if not message_of(reply):
            raise InvalidReplyError("has an empty message")

    def aggregate(self, round: Round) -> Arrays:
        """Keep each message until the sender's neighbours have used it."""
        for reply in round.replies:
            number = self.last(reply.client) + 1
            self.sent[reply.client][number] = message_of(reply)
        return {}

    def forget(self) -> None:
        """Delete all but the last two messages of each node."""
        for name, messages in self.sent.items():
            self.sent[name] = dict(sorted(messages.items())[-2:])

    def relayed(self, i: int) -> list[tuple[int, int, bytes]]:
        """Return the neighbours' messages with the number of the node's last one."""
        number = self.last(self.names[i])
        of_neighbours = [(j, self.sent[self.names[j]]) for j in self.neighbours[i]]
        return [(number, j, of[number]) for j, of in of_neighbours if number in of]

    def metrics(self, round: Round) -> dict[str, float]:
        """Add ``iterations``, the minimum over the nodes.

        ``train-loss`` is the mean expected cost of the points x_i.
        """
        iterations = [max(0, self.last(name) - 1) for name in self.names]
        return {**super().metrics(round), "iterations": float(min(iterations))}

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Add ``constraint``, the largest g_ij of all edges."""
        metrics = super().aggregate_evaluate(server_round, replies)
        reported = [reply.metrics for reply in self._run.evaluation.replies]
        constraints = [m["constraint"] for m in reported if "constraint" in m]
        if constraints:
            metrics["constraint"] = max(constraints)
        return metrics

    def lose(self, name: str, reason: str) -> None:
        """End the run, since the neighbours of a lost node cannot iterate."""
        raise SettingsError(
            f"client {self._run.clients.label(name)} is lost: {reason}; multi-task "
            "optimisation needs every node of the graph"
        )


class SyntheticMultiTask(
    MultiTask, client="flwr_frl.clients.multi_task:SyntheticMultiTaskClient"
):
    """The chapter's problems (section 4.5), whose costs and constraints are drawn."""


def read_bounds(text: float | str, edges: Edges) -> NDArray[np.float64]:
    """Return b_ij of every edge, shape (n, n), symmetric and elsewhere NaN.

    Raises `SettingsError` if the text is neither a number, at least 0, nor a file
    that has such a number for every edge, and for no other pair of nodes.
    """
    known = set(map(tuple, edges.tolist()))
    try:
        given = dict.fromkeys(known, float(text))
    except ValueError:
        file, allowed = str(text), "two nodes and a number in each line"
        with reading(file, "constraint-bound", allowed):
            lines = np.loadtxt(file, ndmin=2, encoding="utf-8").tolist()
            given = {(min(i, j), max(i, j)): bound for i, j, bound in lines}
            if len(given) < len(lines):
                raise ValueError("an edge has several lines") from None
    differ = sorted(given.keys() ^ known)
    what = f"the list of edges that only {text!r} or only the graph has"
    require(not differ, what, differ, "none", "constraint-bound")
    bounds = np.full((int(edges.max()) + 1,) * 2, np.nan)
    for (i, j), bound in given.items():
        valid = 0 <= bound < math.inf
        require(valid, "constraint-bound", bound, "at least 0 and finite")
        bounds[int(i), int(j)] = bounds[int(j), int(i)] = bound
    return bounds
