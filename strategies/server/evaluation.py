"""Evaluation of the shared arrays: each client's metrics and their means."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord
from flwr.common import log

from flwr_frl.common.messages import (
    EXAMPLE_EPSILON,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    OF_CLIENTS,
)
from flwr_frl.common.text import several
from flwr_frl.strategies.server.clients import Clients
from flwr_frl.strategies.server.replies import single_metrics
from flwr_frl.strategies.server.round import Reply, Round

# Distinguishes the draws of evaluated clients from others of the same seed.
EVALUATED = 0xE7A1
# Names in checkpoints of the clients' latest metrics, and of the rounds of these.
TESTED, TESTED_IN = "tested", "tested-in"
# Metrics under which a client may report its training loss: flwr-frl's, that of
# Flower's templates, and the plain name.
LOSSES = ("train-loss", "train_loss", "loss")


@dataclass
class Evaluation:
    """Sampling of the clients to evaluate, and each client's test metrics.

    Parameters
    ----------
    fraction : float, default 1
        Fraction of the clients in an evaluation, rounded down; 0 evaluates none.
    least : int, default 1
        Minimum number of clients in an evaluation.
    seed : int, default 0
        Seed of the sampling.
    weighted_by : str, default ""
        Metric that weights the means; empty for plain means.
    metrics : dict of str to dict
        Each client's latest metrics, by the client's name.
    rounds : dict of str to int
        Round in which each client was last evaluated.
    round : Round
        The last evaluation's messages and valid replies.
    """

    fraction: float = 1.0
    least: int = 1
    seed: int = 0
    weighted_by: str = ""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    round: Round = field(default_factory=partial(Round, trains=False))
    # The nodes that were drawn for this evaluation; None if all are evaluated.
    _sampled: frozenset[int] | None = field(default=None, init=False)
    # Clients without test examples, which have been logged.
    _untested: set[str] = field(default_factory=set, init=False)

    @property
    def replies(self) -> list[Reply]:
        """Valid replies of the last evaluation, from clients with test examples."""
        return [reply for reply in self.round.replies if reply.metrics]

    def check(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` for a reply without the metric of the weights."""
        if self.weighted_by and reply.metrics:
            reply.weight(self.weighted_by)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return the nodes to evaluate in a round, in the same order."""
        self._sampled = None
        if self.fraction in (0, 1):
            return nodes if self.fraction else []
        count = max(int(self.fraction * len(nodes) + 1e-9), self.least)
        rng = np.random.default_rng([self.seed, EVALUATED, server_round])
        chosen = rng.choice(len(nodes), min(count, len(nodes)), replace=False)
        sampled = [nodes[i] for i in sorted(chosen)]
        self._sampled = frozenset(sampled)
        return sampled

    def aggregate(self, messages: Iterable[Message], clients: Clients) -> MetricRecord:
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
        self.round.close(messages)
        if self.round.silent:
            names = several([clients.label(name) for name in self.round.silent])
            log(WARNING, "not evaluated, no reply of clients %s", names)
        self._log_untested(clients)
        tested = self.replies
        self.metrics |= {reply.client: reply.metrics for reply in tested}
        self.rounds |= {reply.client: self.round.number for reply in tested}
        every = [reply.metrics for reply in tested]
        most = [clients.declared(reply.node, NUM_TEST_EXAMPLES) for reply in tested]
        # Earlier metrics alone would not be an evaluation of this round.
        busy = [
            clients.known[node]
            for node in (clients.busy_nodes() if tested else ())
            if self._sampled is None or node in self._sampled
        ]
        before = [client for client in busy if client.name in self.metrics]
        every += [self.metrics[client.name] for client in before]
        most += [c.properties.get(NUM_TEST_EXAMPLES, math.inf) for c in before]
        means = mean_metrics(every, self.weighted_by) | weighted_means(every, most)
        counts = {"evaluated": len(every), **self.round.counts("evaluation-")}
        if before:
            counts["evaluated-before"] = len(before)
        for name in means:
            reporting = sum(name in metrics for metrics in every)
            if 0 < reporting < len(every):
                counts[name + OF_CLIENTS] = reporting
        return single_metrics({**means, **counts})

    def _log_untested(self, clients: Clients) -> None:
        """Log once which clients have no test examples."""
        without = {
            reply.client
            for reply in self.round.replies
            if not clients.declared(reply.node, NUM_TEST_EXAMPLES)
        }
        if new := sorted(without - self._untested):
            text = "without test examples: %s; the means are over the other clients"
            log(WARNING, text, several([clients.label(name) for name in new]))
            self._untested |= without

    def state_dict(self) -> dict[str, Any]:
        """Return the clients' latest metrics, for a checkpoint."""
        return {TESTED: dict(self.metrics), TESTED_IN: dict(self.rounds)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Return to a state of `state_dict`; without one, there are no metrics."""
        self.metrics = dict(values.get(TESTED, {}))
        self.rounds = dict(values.get(TESTED_IN, {}))


def mean_loss(
    metrics: Iterable[Mapping[str, float]], weighted_by: str
) -> dict[str, float]:
    """Return ``train-loss``, the mean over examples; nothing if no client reports it.

    ``metrics`` has one mapping a client, with the loss under a name of `LOSSES`, and
    the weight under ``weighted_by``.
    """
    reported = [
        (m.get(weighted_by, 1.0), m[name])
        for m in metrics
        for name in [next((n for n in LOSSES if n in m), "")]
        if name
    ]
    if not reported:
        return {}
    weights = np.array([weight for weight, _ in reported])
    losses = np.array([loss for _, loss in reported])
    total = weights.sum()
    return {"train-loss": float(losses @ weights / total) if total else 0.0}


def mean_metrics(
    metrics: Iterable[Mapping[str, float]], weighted_by: str = ""
) -> dict[str, float]:
    """Return the mean of every metric over the clients that report it.

    ``num-examples`` and the clients' ε are left out, and so is a metric that fewer than
    half of the clients report: no single client can add one. ``weighted_by`` is the
    metric of the weights; empty for plain means.
    """
    metrics = list(metrics)
    collected: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for reported in metrics:
        for name, value in reported.items():
            collected.setdefault(name, []).append(value)
            weights.setdefault(name, []).append(reported.get(weighted_by, 1.0))
    for name in (NUM_EXAMPLES, EXAMPLE_EPSILON, weighted_by):
        collected.pop(name, None)
    return {
        name: float(np.average(values, weights=weights[name] if weighted_by else None))
        for name, values in collected.items()
        if 2 * len(values) >= len(metrics) and sum(weights[name]) > 0
    }


def weighted_means(
    metrics: Iterable[Mapping[str, float]], declared: Iterable[float]
) -> dict[str, float]:
    """Return ``accuracy-weighted`` and ``loss-weighted``: means over all examples.

    Clients that report ``num-examples`` count, each up to the number of examples that
    it declared at first.
    """
    means = {}
    pairs = list(zip(metrics, declared, strict=True))
    for name in ("accuracy", "loss"):
        reported = [
            (min(m[NUM_EXAMPLES], most), m[name])
            for m, most in pairs
            if name in m and NUM_EXAMPLES in m
        ]
        total = sum(weight for weight, _ in reported)
        if total:
            means[f"{name}-weighted"] = sum(w * value for w, value in reported) / total
    return means
