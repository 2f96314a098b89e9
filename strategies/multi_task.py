"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""

from collections.abc import Iterable
from logging import ERROR

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log

from strategies.gossip import BYTES, Gossip
from strategies.replies import check_metrics

# Of dual variables; machines may round differently.
TOLERANCE = 1e-9


class MultiTask(Gossip):
    """Relay compressed copies between neighbours; every node has its own model.

    Nodes iterate in step, so one that is away holds up the others until it is back.

    Parameters
    ----------
    **gossip
        As for `Gossip`; of its mixing weights only who is whose neighbour matters.
    """

    # The first exchange is not compressed.
    lengths = ("message-bytes", "first-message-bytes")

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what one node is sent.

        Parameters
        ----------
        node, arrays, config
            As for `Gossip`.

        Returns
        -------
        RecordDict
            As for `Gossip`; the config has ``node``, the node's number in the graph,
            and the lists ``neighbours`` (names) and ``neighbour-nodes`` (numbers).
        """
        content = super().content(node, arrays, config)
        own = content.config_records[self.configrecord_key]
        i = self.names.index(self.name_of(node))
        neighbours = [int(j) for j in np.flatnonzero(self.weights[i]) if j != i]
        own["node"] = i
        own["neighbours"] = [self.names[j] for j in neighbours]
        own["neighbour-nodes"] = neighbours
        return content

    def train_metrics(self, replies: list[Message]) -> dict[str, float]:
        """Return a round's metrics from the valid replies.

        Parameters
        ----------
        replies : list of Message
            At least one.

        Returns
        -------
        dict of str to float
            As for `Gossip`; ``train-loss`` is the mean expected cost of the points;
            and ``iterations``, the least number that a node has made.
        """
        iterations = [check_metrics(r, ("iterations",))["iterations"] for r in replies]
        return {**super().train_metrics(replies), "iterations": min(iterations)}

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the nodes' mean metrics, and compare both ends of every edge.

        Parameters
        ----------
        server_round : int
            The round.
        replies : iterable of Message
            What came back.

        Returns
        -------
        MetricRecord or None
            As for `BaseStrategy`; ``constraint`` is the largest over all edges, and
            ``dual-mismatch`` the largest difference between the dual variables of the
            two ends of an edge whose nodes have made equally many iterations. The
            algorithms need it to be 0; the log says where it is not.
        """
        replies = list(replies)
        metrics = super().aggregate_evaluate(server_round, replies)
        if metrics is None:
            return None
        rejected = {name for name, _ in self.evaluation_rejections}
        told = {
            self.name_of(r.metadata.src_node_id): r
            for r in replies
            if not r.has_error() and BYTES in r.content.config_records
        }
        told = {n: r for n, r in told.items() if n in self.names and n not in rejected}
        known = [self.client_metrics[name] for name in told]
        if all({"constraint", "iterations"} <= m.keys() for m in known):
            metrics["constraint"] = max(m["constraint"] for m in known)
            metrics["dual-mismatch"] = self._mismatch(told)
        return metrics

    def _mismatch(self, told: dict[str, Message]) -> float:
        """Return the largest difference between the two ends' dual variables."""
        largest = 0.0
        ends: dict[tuple[int, int], float] = {}
        for name, reply in told.items():
            i = self.names.index(name)
            neighbours = [int(j) for j in np.flatnonzero(self.weights[i]) if j != i]
            data = reply.content.config_records[BYTES].get("duals")
            if isinstance(data, bytes) and len(data) == 8 * len(neighbours):
                duals = np.frombuffer(data, "<f8").tolist()
                ends |= {(i, j): d for j, d in zip(neighbours, duals, strict=True)}
        for (i, j), mine in ends.items():
            a, b = (self.client_metrics[self.names[k]]["iterations"] for k in (i, j))
            difference = abs(mine - ends.get((j, i), mine))
            if i > j or a != b or difference == 0:
                continue
            if not difference <= TOLERANCE * (1 + abs(mine)):
                names = self.names[i], self.names[j]
                log(ERROR, "dual variables of edge %s differ by %g", names, difference)
            largest = max(largest, difference)
        return largest
