"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""

from collections.abc import Iterable
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord

from flwr_frl.common.settings import SettingsError, setting
from flwr_frl.strategies.gossip.base import Gossip
from flwr_frl.strategies.server.round import Reply, Round


class MultiTask(Gossip, client="flwr_frl.clients.multi_task:MultiTaskClient"):
    """Relay compressed copies between neighbours; every node has a separate model.

    Neighbours iterate in lockstep, so the others wait for a node that is offline. The
    values of the mixing weights are not used.

    Parameters
    ----------
    dual_regularizer : float or str, default "auto"
        δ, with δ η² ≤ 1 (appendix B). ``auto`` is 100, as in the chapter's experiments.
        ``theory`` is the δ of theorem 3, or of theorem 4 with bandit feedback. It needs
        a bounded X and a very small step size, and clients then receive the number of
        dual variables.
    **base
        Arguments of `Gossip`.
    """

    uses_consensus_step = False
    # The first exchange is not compressed.
    length_properties = ("message-bytes", "first-message-bytes")

    dual_regularizer: float | str = setting(
        "auto", form="auto, theory or a number above 0"
    )

    def _config(self, node: int, config: ConfigRecord) -> dict[str, Any]:
        """Add the node's number and neighbours to the config.

        The entries are ``node``, ``neighbours`` (names), ``neighbour-nodes`` (numbers)
        and, for ``dual-regularizer="theory"``, ``dual-variables``.
        """
        entries = super()._config(node, config)
        i = self.number[self._run.clients.name_of(node)]
        entries["node"] = i
        entries["neighbours"] = [self.names[j] for j in self.neighbours[i]]
        entries["neighbour-nodes"] = self.neighbours[i]
        if self.dual_regularizer == "theory":
            entries["dual-variables"] = 2 * len(self.edges)
        return entries

    def check_reply(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` unless message and ``iterations`` are valid."""
        super().check_reply(reply)
        reply.metric("iterations")

    def metrics(self, round: Round) -> dict[str, float]:
        """Add ``iterations``, the minimum over the nodes.

        ``train-loss`` is the mean expected cost of the points x_i.
        """
        iterations = [reply.metrics["iterations"] for reply in round.replies]
        return {**super().metrics(round), "iterations": min(iterations)}

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
