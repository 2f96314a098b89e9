"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""

from collections.abc import Iterable
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord

from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies.gossip.base import Gossip, message_of
from flwr_frl.strategies.gossip.graphs import Edges
from flwr_frl.strategies.server.replies import Arrays, InvalidReplyError
from flwr_frl.strategies.server.round import Reply, Round


class MultiTask(Gossip, client="flwr_frl.clients.multi_task:MultiTaskClient"):
    """Relay compressed copies between neighbours; every node has a separate model.

    Neighbours iterate in lockstep: a node is asked once all of its neighbours have sent
    their message of the same number, and receives these. The others therefore wait for
    a node that is offline. The values of the mixing weights are not used.

    Parameters
    ----------
    **base
        Arguments of `Gossip`.

    Attributes
    ----------
    sent : dict
        By sender, the last two messages by their number, from 1. No neighbour is more
        than one behind.
    """

    uses_consensus_step = False

    def set_graph(self, names: list[str], edges: Edges) -> None:
        """Set the graph; no node has sent a message."""
        super().set_graph(names, edges)
        self.sent: dict[str, dict[int, bytes]] = {name: {} for name in names}

    def _usable(self, nodes: list[int]) -> list[int]:
        """Return the nodes that have not begun or have a message of each neighbour."""
        ready = []
        for node in nodes:
            i = self.number[name := self._run.clients.name_of(node)]
            if not self.last(name) or len(self.pending[i]) == len(self.neighbours[i]):
                ready.append(node)
        return ready

    def last(self, name: str) -> int:
        """Return the number of the last message that a node has sent, 0 for none."""
        return max(self.sent[name], default=0)

    def _config(self, node: int, config: ConfigRecord) -> dict[str, Any]:
        """Add ``node``, ``neighbour-nodes`` (numbers), and ``dual-variables``."""
        i = self.number[self._run.clients.name_of(node)]
        return {
            **super()._config(node, config),
            "node": i,
            "neighbour-nodes": self.neighbours[i],
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
            sent = self.sent[reply.client]
            sent[self.last(reply.client) + 1] = message_of(reply)
            self.sent[reply.client] = dict(sorted(sent.items())[-2:])
        self._relay_again(self.sent)
        return {}

    def _sent_messages(self) -> dict[str, dict[int, bytes]]:
        return self.sent

    def _relay_again(self, sent: dict[str, dict[int, bytes]]) -> None:
        """Relay to every node the messages with the number of its own last one."""
        self.sent = sent
        for i, name in enumerate(self.names):
            number = self.last(name)
            of_neighbours = [(j, sent[self.names[j]]) for j in self.neighbours[i]]
            self.pending[i] = [
                (number, j, of[number]) for j, of in of_neighbours if number in of
            ]

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
