"""Evaluation of the shared arrays: each client's metrics and their means.

Clients that join after the training show how well the trained model serves them.
"""

from logging import WARNING
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common import messages as keys
from flwr_frl.common.errors import require
from flwr_frl.common.text import several
from flwr_frl.strategies.server.clients import Clients
from flwr_frl.strategies.server.replies import metric_record
from flwr_frl.strategies.server.round import Participation, Reply, Round

if TYPE_CHECKING:
    from flwr_frl.strategies.base import Strategy

# Names in checkpoints of the clients' latest metrics, and of the rounds of these.
TESTED, TESTED_IN = "tested", "tested-in"


class Evaluation:
    """Sampling of the clients to evaluate, and each client's test metrics.

    Parameters
    ----------
    round : Round
        An empty round; later the last evaluation's messages and valid replies.
    sampling : Participation
        Samples the clients; with the fraction 0, none is evaluated.

    Attributes
    ----------
    metrics : dict of str to dict
        Each client's latest metrics, by the client's name.
    rounds : dict of str to int
        Round in which each client was last evaluated.
    """

    def __init__(self, round: Round, sampling: Participation) -> None:
        self.round, self.sampling = round, sampling
        self.metrics: dict[str, dict[str, float]] = {}
        self.rounds: dict[str, int] = {}
        # Clients without test examples, which have been logged.
        self._untested: set[str] = set()

    @property
    def replies(self) -> list[Reply]:
        """Valid replies of the last evaluation, from clients with test examples."""
        return [reply for reply in self.round.replies if reply.metrics]

    def aggregate(self, clients: Clients) -> MetricRecord:
        """Store the clients' metrics and return means over clients with test examples.

        A sampled client that is still busy with an earlier round counts with its latest
        metrics.

        Returns
        -------
        MetricRecord
            The means, accuracy and loss also over all examples (``accuracy-weighted``
            and ``loss-weighted``), ``evaluated`` (number of clients),
            ``evaluated-before`` (busy clients among them), ``evaluation-rejected``,
            ``evaluation-unanswered``, ``bytes-down`` and ``bytes-up``; ``NAME-clients``
            for a mean over fewer clients; no means without valid replies.
        """
        if self.round.silent:
            names = several([clients.label(name) for name in self.round.silent])
            log(WARNING, "not evaluated, no reply of clients %s", names)
        tested, declared = self.replies, clients.declared
        without = {reply.client for reply in self.round.replies if not reply.metrics}
        if new := without - self._untested:
            text = "without test examples: %s; the means are over the other clients"
            log(WARNING, text, several(sorted(map(clients.label, new))))
            self._untested |= new
        self.metrics |= {reply.client: reply.metrics for reply in tested}
        self.rounds |= {reply.client: self.round.number for reply in tested}
        # Earlier metrics alone would not be an evaluation of this round.
        sampled = set(self.round.nodes if tested else ())
        busy = [node for node in clients.busy_nodes() if node in sampled]
        before = [node for node in busy if clients.name_of(node) in self.metrics]
        nodes = [*(reply.node for reply in tested), *before]
        every = [self.metrics[clients.name_of(node)] for node in nodes]
        most = [declared(node, keys.NUM_TEST_EXAMPLES) for node in nodes]
        means = mean_metrics(every) | weighted_means(every, most)
        counts = {
            "evaluated": len(every),
            "evaluation-rejected": len(self.round.rejections),
            "evaluation-unanswered": len(self.round.silent),
            "bytes-down": self.round.bytes_down,
            "bytes-up": self.round.bytes_up,
        }
        if before:
            counts["evaluated-before"] = len(before)
        for name in means:
            reporting = sum(name in metrics for metrics in every)
            if 0 < reporting < len(every):
                counts[name + keys.OF_CLIENTS] = reporting
        return metric_record({**means, **counts})


def mean_metrics(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every metric over the clients that report it.

    ``num-examples`` and the clients' ε are left out, and so is a metric that fewer than
    half of the clients report: no single client can add one.
    """
    collected: dict[str, list[float]] = {}
    for reported in metrics:
        for name, value in reported.items():
            collected.setdefault(name, []).append(value)
    return {
        name: float(np.average(values))
        for name, values in collected.items()
        if 2 * len(values) >= len(metrics)
        and name not in (keys.NUM_EXAMPLES, keys.EXAMPLE_EPSILON)
    }


def weighted_means(
    metrics: list[dict[str, float]], declared: list[float]
) -> dict[str, float]:
    """Return ``accuracy-weighted`` and ``loss-weighted``: means over all examples.

    Clients that report ``num-examples`` count, each up to the number of examples that
    it declared at first.
    """
    means = {}
    for name in ("accuracy", "loss"):
        reported = [
            (min(m[keys.NUM_EXAMPLES], most), m[name])
            for m, most in zip(metrics, declared, strict=True)
            if name in m and keys.NUM_EXAMPLES in m
        ]
        total = sum(weight for weight, _ in reported)
        if total:
            means[f"{name}-weighted"] = sum(w * value for w, value in reported) / total
    return means


def check_newcomers(
    strategy: "Strategy", algorithm: str, count: int, num_clients: int
) -> None:
    """Raise `SettingsError` unless this many clients can join after the training."""
    serves = count == 0 or strategy._traits.takes_newcomers
    allowed = f"0 with {algorithm}, which leaves no model for clients that join later"
    require(serves, "new-clients", count, allowed)
    allowed = f"at most {num_clients - 1}, so that one of {num_clients} clients trains"
    require(count in range(max(1, num_clients)), "new-clients", count, allowed)


def let_join(
    strategy: "Strategy",
    grid: Grid,
    arrays: ArrayRecord,
    server_round: int,
    timeout: float,
) -> dict[str, dict[str, float]]:
    """Let newcomers train their personal parts, and test their models.

    Parameters
    ----------
    strategy : Strategy
        The strategy, after its training.
    grid : Grid
        The grid.
    arrays : ArrayRecord
        The trained shared arrays.
    server_round : int
        The last round.
    timeout : float
        Seconds to wait for the replies.

    Returns
    -------
    dict
        Metrics by newcomer. Newcomers without a valid reply are left out.
    """
    nodes = strategy._run.clients.newcomers()
    if not nodes:
        log(WARNING, "no client says that it is new; only simulated ones do")
        return {}
    kind = f"{MessageType.EVALUATE}.{keys.NEWCOMER}"
    round = Round(strategy, server_round, arrays, ConfigRecord(), nodes, kind)
    asked = strategy._open_round(round, grid)
    round.close(grid.send_and_receive(asked, timeout=timeout))
    if silent := round.asked.keys() - {reply.node for reply in round.replies}:
        text = "new clients without a valid reply are left out: %s"
        log(WARNING, text, strategy._run.clients.several(silent))
    return {reply.client: reply.metrics for reply in round.replies}
