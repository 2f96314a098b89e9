"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""

from collections.abc import Iterable
from logging import ERROR
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log

from flwr_frl.strategies.gossip.base import Gossip
from flwr_frl.strategies.server.replies import attached, check_metrics
from flwr_frl.task.settings import SettingsError

# Of dual variables; machines may round differently.
TOLERANCE = 1e-9
# In the place of NaN.
HUGE = 1e300


class MultiTask(Gossip):
    """Relay compressed copies between neighbours; every node has its own model.

    Nodes iterate in step, so one that is away holds up the others until it is back. Of
    the mixing weights only who is whose neighbour matters.
    """

    client = "flwr_frl.clients.multi_task:MultiTaskClient"
    uses_consensus_step = False
    # The first exchange is not compressed.
    length_properties = ("message-bytes", "first-message-bytes")

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return also, in the config, this node's number and who its neighbours are.

        They are ``node``, ``neighbours`` (names) and ``neighbour-nodes`` (numbers).
        """
        content = super().content(node, arrays, config)
        own = cast(ConfigRecord, content[self.configrecord_key])
        i = self.boxes.number[self.name_of(node)]
        neighbours = list(self.boxes.neighbours[i])
        own["node"] = i
        own["neighbours"] = [self.boxes.names[j] for j in neighbours]
        own["neighbour-nodes"] = neighbours
        return content

    def check_train_reply(self, reply: Message) -> None:
        """Raise `InvalidReplyError` unless a reply has a message and ``iterations``."""
        super().check_train_reply(reply)
        check_metrics(reply, ("iterations",))

    def train_metrics(self, replies: list[Message]) -> dict[str, float]:
        """Return also ``iterations``, the least that a node has made.

        ``train-loss`` is the mean expected cost of the points.
        """
        iterations = [check_metrics(r, ("iterations",))["iterations"] for r in replies]
        return {**super().train_metrics(replies), "iterations": min(iterations)}

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Return also the largest ``constraint`` of all edges, and ``dual-mismatch``.

        That is the largest difference between the dual variables of an edge's two ends,
        of nodes with equally many iterations. The algorithms need it to be 0; the log
        says where it is not.
        """
        metrics = super().aggregate_evaluate(server_round, replies)
        if not self.evaluated:
            return metrics
        said = map(check_metrics, self.evaluated)
        constraints = [m["constraint"] for m in said if "constraint" in m]
        if constraints:
            metrics["constraint"] = max(constraints)
        metrics["dual-mismatch"] = self._mismatch()
        return metrics

    def _mismatch(self) -> float:
        """Return ``dual-mismatch``, and log each edge that has one."""
        ends: dict[tuple[int, int], tuple[float, float]] = {}
        for reply in self.evaluated:
            i = self.boxes.number[self.name_of(reply.metadata.src_node_id)]
            iterations = check_metrics(reply).get("iterations", -1.0)
            data = attached(reply, "duals")
            neighbours = self.boxes.neighbours[i]
            if isinstance(data, bytes) and len(data) == 8 * len(neighbours):
                duals = np.nan_to_num(np.frombuffer(data, "<f8"), nan=HUGE).tolist()
                for j, dual in zip(neighbours, duals, strict=True):
                    ends[i, j] = iterations, dual
        largest = 0.0
        for (i, j), (count, mine) in ends.items():
            other, theirs = ends.get((j, i), (-1.0, 0.0))
            if i > j or count != other:
                continue
            difference = min(abs(mine - theirs), HUGE)
            if difference > TOLERANCE * (1 + abs(mine)):
                names = self.boxes.names[i], self.boxes.names[j]
                log(ERROR, "dual variables of edge %s differ by %g", names, difference)
            largest = max(largest, difference)
        return largest

    def lose(self, name: str, reason: str) -> None:
        """End the run: without a node, its neighbours cannot iterate any more."""
        raise SettingsError(
            f"client {name} is lost, as {reason}; multi-task optimisation needs every "
            "node of the graph"
        )
