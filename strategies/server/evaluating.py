"""The test of the shared arrays: who is asked, and what the replies say together."""

import math
from collections.abc import Iterable
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.hooks import RunHooks
from flwr_frl.strategies.server.averaging import Averaging
from flwr_frl.strategies.server.checks import several
from flwr_frl.strategies.server.pending_round import mean_metrics, weighted_means
from flwr_frl.strategies.server.replies import check_evaluation, single_metrics
from flwr_frl.task.messages import NUM_TEST_EXAMPLES


class Evaluating(Averaging, RunHooks):
    """The part of a strategy that has all clients test the shared arrays."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the shared arrays to all clients, sampled or not."""
        nodes = self.connected_nodes(grid)
        kind = MessageType.EVALUATE
        return self.open_round(nodes, arrays, config, server_round, kind)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Return the plain mean of every metric over the clients with test examples.

        A client that is busy with an earlier round counts as it was last evaluated.

        Returns
        -------
        MetricRecord
            The means, accuracy and loss also over all examples (``accuracy-weighted``
            and ``loss-weighted``), ``evaluated`` (how many clients), where any is busy
            ``evaluated-before`` (how many of these count as of an earlier round),
            ``evaluation-rejected``, ``evaluation-unanswered``, ``bytes-down`` and
            ``bytes-up``; without any mean if no reply is valid. ``client_metrics``
            keeps each client's own.
        """
        exchange = self.pending
        valid = exchange.close(replies, check_evaluation)
        self.ledger.note_unused(exchange.unused)
        if exchange.silent:
            names = several(exchange.silent)
            log(WARNING, "not evaluated, no reply of clients %s", names)
        tested = [
            (name, reply, metrics)
            for name, reply in zip(exchange.names(valid), valid, strict=True)
            if (metrics := check_evaluation(reply))
        ]
        self.evaluated = [reply for _, reply, _ in tested]
        self.client_metrics |= {name: metrics for name, _, metrics in tested}
        self.evaluated_in |= dict.fromkeys((name for name, *_ in tested), server_round)
        every = [metrics for *_, metrics in tested]
        most = [self.declared(reply, NUM_TEST_EXAMPLES) for _, reply, _ in tested]
        busy = self.clients.busy_clients()
        before = [client for client in busy if client.name in self.client_metrics]
        # A row that nobody has been tested for is no row of a test.
        before = before if tested else []
        every += [self.client_metrics[client.name] for client in before]
        most += [c.properties.get(NUM_TEST_EXAMPLES, math.inf) for c in before]
        means = mean_metrics(every) | weighted_means(every, most)
        counts = {"evaluated": len(every), **exchange.counts("evaluation-")}
        if before:
            counts["evaluated-before"] = len(before)
        return single_metrics({**means, **counts, **exchange.sizes()})
