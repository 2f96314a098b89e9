"""Average replies: the configured rule, its memory, and a check of the result."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from flwr_frl.common.memory_array import memory_record, values_of
from flwr_frl.common.messages import ARRAYS, CONFIG, HEAD, IS_CHANGE, NUM_EXAMPLES
from flwr_frl.common.settings import SettingsError, require
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server.aggregation import (
    CENTERED_CLIP,
    CENTRED,
    Decode,
    Sent,
    bucketed,
    capped,
    make_rule,
)
from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.client_manager import ClientManager
from flwr_frl.strategies.server.evaluation import Evaluation, mean_loss
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.pending_round import PendingRound
from flwr_frl.strategies.server.privacy import client_privacy
from flwr_frl.strategies.server.replies import (
    Arrays,
    RunningMean,
    as_float16,
    as_float32,
    check_metrics,
    check_weight,
    is_finite,
    single_metrics,
)
from flwr_frl.strategies.server.round import Reply, Round
from flwr_frl.strategies.server.round_ledger import RoundLedger
from flwr_frl.strategies.server.traits import Algorithm, StrategySettings, takes

# Flower's functions that combine the metrics of replies, with the key of the weights.
MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]
# Distinguishes the draws of buckets from others of the same seed.
BUCKETS = 0xB0C4
# Key of the last round's change, for `centered-clip`, in the strategy's state.
LAST_CHANGE = "last-change"


class Averaging(Algorithm, FlowerFedAvg, uses_mean="only"):
    """The part of a strategy that checks replies to training and combines them.

    Parameters
    ----------
    min_evaluate_nodes : int, default 1
        Minimum number of clients in an evaluation.
    weighted_by_key : str, default ""
        Metric whose values weight the means of the evaluation's metrics and, unless
        ``weighting`` is given, the mean of the arrays. If empty, arrays are weighted by
        ``num-examples`` with ``weighting="examples"``, and metrics are not weighted.
    arrayrecord_key, configrecord_key : str
        Keys of the arrays and of the config in a message.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        Called with the replies' contents and the key of the weights, as in Flower's
        FedAvg; return additional metrics.
    **arguments
        The fields of `StrategySettings`.
    """

    @takes(StrategySettings)
    def __init__(
        self,
        *,
        min_evaluate_nodes: int = 1,
        weighted_by_key: str = "",
        arrayrecord_key: str = ARRAYS,
        configrecord_key: str = CONFIG,
        train_metrics_aggr_fn: MetricsFunction | None = None,
        evaluate_metrics_aggr_fn: MetricsFunction | None = None,
        **arguments: Any,
    ) -> None:
        if weighted_by_key:
            arguments.setdefault("weighting", "examples")
        self.settings = settings = StrategySettings.of(type(self), arguments)
        super().__init__(
            fraction_train=settings.fraction_train,
            fraction_evaluate=settings.fraction_evaluate,
            min_train_nodes=settings.min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=settings.min_available_nodes,
            weighted_by_key=weighted_by_key or NUM_EXAMPLES,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
        )
        key = self.weighted_by_key
        self._train_metrics = _metrics_by(train_metrics_aggr_fn, key)
        self._evaluate_metrics = _metrics_by(evaluate_metrics_aggr_fn, key)
        noise, clip = settings.server_dp_noise, settings.server_dp_clip
        # The private mean has equal weights.
        valid = not noise or type(self).weights is Averaging.weights
        require(valid, "server-dp-noise", noise, "0: the algorithm weights clients")
        settings.check(self.traits)
        # `centered-clip` saves its last change here.
        clips = settings.aggregation == CENTERED_CLIP
        self.state: dict[str, Any] = {LAST_CHANGE: {}} if clips else {}
        self.privacy = client_privacy(noise, clip, settings.server_dp_delta)
        self.clients = ClientManager(settings.min_available_nodes)
        sampling = settings.fraction_train, settings.min_train_nodes, settings.seed
        self.participation = Participation(*sampling)
        self.ledger = RoundLedger(label=self.clients.label)
        self.pending = PendingRound()
        self.round = Round(0, [], ArrayRecord(), ConfigRecord(), self._mean)
        evaluated = settings.fraction_evaluate, min_evaluate_nodes, settings.seed
        self.evaluation = Evaluation(*evaluated, weighted_by_key)
        # The mean of the replies so far, if they are averaged as they arrive.
        self._running: RunningMean | None = None
        self._custom_metrics = train_metrics_aggr_fn is not None
        # Settings that the last `aggregate` used, and settings named in a warning.
        self._used, self._warned = set[str](), set[str]()

    def _is_valid(self, reply: Message) -> bool:
        return self.pending.is_valid(reply, self._check_train_reply)

    def _check_train_reply(self, reply: Message) -> None:
        """Raise `InvalidReplyError` unless a reply to training can count."""
        self.pending.check(reply)
        changes = self.traits.replies_are_changes
        if changes and check_metrics(reply).get(IS_CHANGE) != 1:
            raise InvalidReplyError(
                f"does not say that it is a change, which {type(self).__name__} adds "
                "to what it sent; a client must send the difference of its arrays from "
                f"the received ones, and {IS_CHANGE!r}: 1 in its metrics"
            )
        if self.settings.weighting == "examples":
            check_weight(reply, self.weighted_by_key)
        else:
            check_metrics(reply)
        self.check(self._read(reply))

    def check(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` for a reply that this algorithm cannot use."""

    def _read(self, message: Message) -> Reply:
        """Return a reply as algorithms see it."""

        def read() -> Arrays:
            own = self.pending.expected.get(HEAD)
            alone = {} if own is None else self.pending.arrays(message, HEAD)
            return {**self._arrays(message), **alone}

        name = self.pending.name_of(message.metadata.src_node_id)
        return Reply(name, message, read)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the valid replies.

        Returns
        -------
        arrays : ArrayRecord or None
            The result of `aggregate`; None (the old arrays stay) without valid replies
            or without a usable result.
        metrics : MetricRecord
            ``clients``, ``rejected``, ``unanswered``, ``bytes-down`` and ``bytes-up``;
            with a result those of `train_metrics` and ``train_metrics_aggr_fn``; those
            of the participation; ``epsilon`` and ``delta`` with noise.
        """
        pending = self.pending
        use = None
        # A list already holds all replies in memory.
        if not isinstance(replies, Sequence) and averages_on_arrival(self):
            self._running, use = RunningMean(), self._average
        valid = pending.close(replies, self._check_train_reply, use)
        self.ledger.note_unused(pending.unused)
        metrics: dict[str, Any] = {"clients": len(valid), **pending.counts()}
        self.round.replies = list(map(self._read, valid))
        arrays = self._aggregate_checked(server_round) if valid else None
        self._running = None
        if arrays is not None:
            metrics |= self.metrics(self.round)
            metrics |= self._train_metrics(valid)
            self.ledger.acknowledge(pending.rounds(valid), server_round)
            self.clients.settle()
            self.participation.note(pending.names(valid), pending.sent, arrays)
        # Replies hold whole messages.
        self.round.replies = []
        metrics |= self.participation.close()
        if self.privacy:
            metrics |= self.privacy.spent()
        return arrays, single_metrics(metrics)

    def _average(self, reply: Message) -> None:
        """Add a valid reply to the running mean, and free its arrays."""
        if self._running is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                weight = self.weights([self._read(reply)])[0]
                self._running.add(weight, self._arrays(reply))
        self.pending.forget_arrays(reply, self.arrayrecord_key)

    def metrics(self, round: Round) -> dict[str, float]:
        """Return metrics of a round with at least one valid reply: ``train-loss``."""
        metrics = (reply.metrics for reply in round.replies)
        return mean_loss(metrics, self.weighted_by_key)

    def _aggregate_checked(self, server_round: int) -> ArrayRecord | None:
        """Return the result of `aggregate`; None if it cannot be used."""
        self._used.clear()
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                arrays = self.aggregate(self.round)
            self._warn_about_unused()
        except np.linalg.LinAlgError as error:
            log(WARNING, "round %d: %s; the old arrays stay", server_round, error)
            return None
        if arrays is None:
            text = "round %d: %s.aggregate returned None for %d valid replies; the old "
            name, count = type(self).__name__, len(self.round.replies)
            log(WARNING, text + "arrays stay", server_round, name, count)
            return None
        sent = None if self.traits.uses_mean == "never" else self.round.sent
        check_like_sent(arrays, sent, f"{type(self).__name__}.aggregate")
        if not is_finite(arrays):
            log(WARNING, "round %d is not finite; the old arrays stay", server_round)
            return None
        if arrays is self.round.sent:
            return self.round.record
        for array in arrays.values():
            # The messages and the checkpoint hold them without copies.
            array.flags.writeable = False
        return memory_record({n: np.asarray(a, order="C") for n, a in arrays.items()})

    def aggregate(self, round: Round) -> Arrays | None:
        """Return the new shared arrays, by default the mean; None keeps the old ones.

        Parameters
        ----------
        round : Round
            The round, with at least one valid reply.
        """
        return round.mean()

    def _mean(self, replies: list[Reply]) -> Arrays | None:
        """Return the aggregate of replies by ``aggregation``; None if weights are 0.

        It is their mean by default, weighted by ``weighting``; a private one with
        ``server-dp-noise``.
        """
        if self._running is not None:
            self._used |= {"aggregation", "weighting"}
            return self._running.result()
        decoded = [partial(self._arrays, reply.message) for reply in replies]
        if self.privacy:
            self._used |= {"aggregation", "weighting"}
            asked = self.pending.asked_names()
            return self.privacy.mean(asked, decoded, self._centre())
        weights, rule = self.weights(replies), self.settings.aggregation
        if rule == CENTERED_CLIP:
            return self._clip_about_last(weights, decoded)
        return self.apply_rule(
            weights, decoded, self._centre() if rule in CENTRED else {}
        )

    def _clip_about_last(
        self, weights: Sequence[float], replies: Sequence[Decode]
    ) -> Arrays | None:
        """Return x + v; v is the last round's change, updated by this round's replies.

        Centered clipping with one iteration a round (Karimireddy, He and Jaggi, ICML
        2021): v ← v + mean_i (Δ_i − v) min(1, τ / ‖Δ_i − v‖), where Δ_i are the
        clients' changes of x, which was sent. This equals `clip` about x + v, with
        v = 0 in the first round. In the paper workers send momentum; here Δ_i is a
        client's total change in this round, without momentum across rounds.
        """
        sent, last = self._centre(), self.state.get(LAST_CHANGE, {})
        centre = {n: np.add(a, last[n]) if n in last else a for n, a in sent.items()}
        moved = self.apply_rule(weights, replies, centre)
        if moved is not None:
            floats = (name for name, array in sent.items() if array.dtype.kind == "f")
            # The difference of two scalars is no array.
            change = {n: np.asarray(np.subtract(moved[n], sent[n])) for n in floats}
            # An infinite v would make the results of all later rounds unusable.
            self.state[LAST_CHANGE] = change if is_finite(change) else {}
        return moved

    def apply_rule(
        self, weights: Sequence[float], replies: Sequence[Decode], centre: Sent
    ) -> Arrays | None:
        """Combine arrays by the rule of ``aggregation``, over buckets of replies.

        The weights are equal unless `StrategySettings.uses_claims`. The seed and the
        round determine the buckets.
        """
        self._used.add("aggregation")
        settings, count = self.settings, len(replies)
        byzantine = settings.byzantine_fraction
        share = self.participation.byzantine_share(byzantine, count)
        share *= max(1, settings.bucket_size)
        rule = make_rule(settings.aggregation, share, settings.clip_norm)
        if not settings.uses_claims:
            weights = [float(weight > 0) for weight in weights]
        if settings.bucket_size > 1 and settings.aggregation != "mean":
            entropy = [settings.seed, BUCKETS, self.pending.server_round]
            rule = bucketed(rule, settings.bucket_size, np.random.default_rng(entropy))
        return rule(weights, replies, centre)

    def weights(self, replies: list[Reply]) -> list[float]:
        """Return the weights of checked replies: 1, or numbers of examples.

        A number of examples is limited to the one declared first, and by
        ``largest-share``. With ``weighted_by_key``, the weights are that metric. They
        are 1 unless `StrategySettings.uses_claims`.
        """
        self._used.add("weighting")
        if self.settings.weighting == "uniform" or not self.settings.uses_claims:
            return [1.0] * len(replies)
        key = self.weighted_by_key
        weights = [reply.metrics[key] for reply in replies]
        if key == NUM_EXAMPLES:
            declared = [self.clients.declared(r.message, key) for r in replies]
            weights = list(map(min, weights, declared))
        return capped(weights, self.settings.largest_share)

    def _arrays(self, reply: Message) -> Arrays:
        """Return a checked reply's arrays; float16 ones of ``transport`` as float32.

        With asynchronous rounds they are moved to the current version.
        """
        arrays = self._as_kept(self.pending.arrays(reply, self.arrayrecord_key))
        return self.participation.rebased(reply.metadata.src_node_id, arrays)

    def _centre(self) -> Arrays:
        """Return the arrays from which replies differ by the clients' changes."""
        sent = self.pending.expected[self.arrayrecord_key]
        arrays = self._as_kept({name: values_of(array) for name, array in sent.items()})
        if self.traits.replies_are_changes:
            return {name: np.zeros_like(array) for name, array in arrays.items()}
        return arrays

    def _as_transported(self, arrays: ArrayRecord) -> ArrayRecord:
        return as_float16(arrays) if self.settings.transport == "float16" else arrays

    def _as_kept(self, arrays: Arrays) -> Arrays:
        short = self.settings.transport != "float32"
        return as_float32(arrays, self.pending.sent) if short else arrays

    def _warn_about_unused(self) -> None:
        """Warn once of each setting that `aggregate` does not use."""
        for name, usual, calls in (
            ("aggregation", "mean", "self._mean"),
            ("weighting", "uniform", "self._mean or self.weights"),
        ):
            value = getattr(self.settings, name)
            if value != usual and name not in self._used | self._warned:
                self._warned.add(name)
                text = "%s=%s does nothing: %s.aggregate does not call %s"
                log(WARNING, text, name, value, type(self).__name__, calls)


def averages_on_arrival(strategy: FlowerStrategy) -> bool:
    """Return whether a strategy needs the replies' arrays for the plain mean only."""
    kind = type(strategy)
    return (
        isinstance(strategy, Averaging)
        and strategy.traits.uses_mean == "only"
        # Arrays that a client alone receives are read from its reply.
        and HEAD not in strategy.pending.expected
        # Overrides receive the replies.
        and all(
            getattr(kind, name) is getattr(Averaging, name)
            for name in ("aggregate_train", "metrics", "weights")
        )
        and (settings := strategy.settings).aggregation == "mean"
        and (settings.weighting == "uniform" or settings.largest_share == 1)
        and not (strategy.privacy or strategy._custom_metrics)
        # Other participations may combine replies of several rounds.
        and type(strategy.participation) is Participation
    )


def _metrics_by(
    function: MetricsFunction | None, key: str
) -> Callable[[list[Message]], dict[str, Any]]:
    """Return a function that applies a `MetricsFunction` to replies; {} if None."""

    def aggregate(replies: list[Message]) -> dict[str, Any]:
        if function is None or not replies:
            return {}
        return dict(function([reply.content for reply in replies], key))

    return aggregate


def check_like_sent(arrays: object, sent: Arrays | None, name: str) -> None:
    """Raise `SettingsError` unless clients can receive the result of ``aggregate``.

    Otherwise every later reply would be rejected, as if the clients were wrong.

    Parameters
    ----------
    arrays : object
        The result, which should be a dict of arrays.
    sent : dict of str to ndarray or None
        Arrays that the result must resemble in names, shapes and dtypes.
    name : str
        Name of the method, for the error.
    """
    if not isinstance(arrays, dict) or not all(
        isinstance(array, np.ndarray) for array in arrays.values()
    ):
        raise SettingsError(
            f"{name} returns {one_line(repr(arrays), 60)}; expected a dict of NumPy "
            "arrays, by name, or None"
        )
    if sent is None:
        return
    if arrays.keys() != sent.keys():
        missing, extra = sorted({*sent} - {*arrays}), sorted({*arrays} - {*sent})
        raise SettingsError(
            f"{name} lacks arrays {missing} and has unknown arrays {extra}; it must "
            "return those that were sent, under their names"
        )
    for key, like in sent.items():
        new = arrays[key]
        if (new.dtype, new.shape) != (like.dtype, like.shape):
            raise SettingsError(
                f"{name} returns {key!r} as {new.dtype}{list(new.shape)}; expected "
                f"{like.dtype}{list(like.shape)}, as it was sent"
            )
