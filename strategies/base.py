"""The base class of all strategies."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import INFO, WARNING
from typing import Any, cast

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from flwr_frl.common.flower_messages import fill, message_like
from flwr_frl.common.memory_array import memory_record, values_of
from flwr_frl.common.messages import (
    ARRAYS,
    CONFIG,
    EXAMPLES,
    HEAD,
    IS_CHANGE,
    NUM_EXAMPLES,
    SERVER_ROUND,
    SHARED_BYTES,
)
from flwr_frl.common.settings import SettingsError, require
from flwr_frl.common.text import one_line
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.server.aggregation import (
    CENTERED_CLIP,
    CENTRED,
    Decode,
    Sent,
    about_last_change,
    bucketed,
    capped,
    make_rule,
)
from flwr_frl.strategies.server.checkpoint import State, restore_tree, snapshot_of
from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.clients import Clients
from flwr_frl.strategies.server.evaluation import Evaluation, mean_loss
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.privacy import (
    check_compatible,
    check_no_counters,
    client_privacy,
)
from flwr_frl.strategies.server.queries import common_initial_arrays
from flwr_frl.strategies.server.replies import (
    Arrays,
    RunningMean,
    as_float16,
    as_float32,
    is_finite,
    largest_reply,
    single_metrics,
    to_record,
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


class Strategy(Algorithm, FlowerFedAvg, uses_mean="only"):
    """Sample clients and average the arrays that they share.

    Clients are known by name rather than by node id, sampling is seeded, replies are
    checked, means have a fixed order, bytes are counted, and the state is saved in
    checkpoints. The class keywords are those of `Traits`.

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

    Attributes
    ----------
    settings : StrategySettings
        The arguments.
    state : dict
        State that a checkpoint saves and a resumed run restores: a tree of dicts with
        strings as keys, and with arrays and JSON values as leaves. Arrays under
        ``heads/CLIENT`` are loaded by `flwr_frl.predict`. Arrays must be
        replaced rather than changed in place.
    clients : Clients
        The clients of the run, by node.
    ledger : RoundLedger
        The last round in which each client's reply counted.
    round : Round
        The last messages to clients that train, with their replies.
    evaluation : Evaluation
        Each client's test metrics, and the last round of evaluation.
    participation : Participation
        Samples clients, and decides how many replies close a round.
    privacy : ClientPrivacy or None
        The mechanism of client-level differential privacy, with ``server-dp-noise``.
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
        self._train_metrics = train_metrics_aggr_fn
        self._evaluate_metrics = evaluate_metrics_aggr_fn
        noise, clip = settings.server_dp_noise, settings.server_dp_clip
        # The private mean has equal weights.
        valid = not noise or type(self).weights is Strategy.weights
        require(valid, "server-dp-noise", noise, "0: the algorithm weights clients")
        settings.check(self.traits)
        # `centered-clip` saves its last change here.
        clips = settings.aggregation == CENTERED_CLIP
        self.state: dict[str, Any] = {LAST_CHANGE: {}} if clips else {}
        self.privacy = client_privacy(noise, clip, settings.server_dp_delta)
        self.clients = Clients(settings.min_available_nodes)
        sampling = settings.fraction_train, settings.min_train_nodes, settings.seed
        self.participation = Participation(*sampling)
        self.ledger = RoundLedger(self.clients.label)
        self.round = Round()
        evaluated = settings.fraction_evaluate, min_evaluate_nodes, settings.seed
        self.evaluation = Evaluation(*evaluated, weighted_by_key)

    # Hooks: what an algorithm overrides.

    def begin(self, round: Round) -> None:
        """Prepare a training round before its messages are made.

        An override may add to ``round.config`` and set ``round.expected``.
        """

    def per_client(self, client: str) -> Arrays:
        """Return the arrays that only this client receives, to train or to join late.

        An array with the name of a shared array replaces it. The client returns all
        other arrays as well. By default there are none.
        """
        return {}

    def for_evaluation(self, client: str) -> Arrays:
        """Return the same for an evaluation, by default as `per_client`."""
        return self.per_client(client)

    def check(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` for a reply that this algorithm cannot use."""

    def aggregate(self, round: Round) -> Arrays | None:
        """Return the new shared arrays, by default the mean; None keeps the old ones.

        Parameters
        ----------
        round : Round
            The round, with at least one valid reply.
        """
        return round.mean()

    def weights(self, replies: list[Reply]) -> list[float]:
        """Return the weights of checked replies: 1, or numbers of examples.

        A number of examples is limited to the one declared first, and by
        ``largest-share``. With ``weighted_by_key``, the weights are that metric. They
        are 1 unless `StrategySettings.uses_claims`.
        """
        if self.settings.weighting == "uniform" or not self.settings.uses_claims:
            return [1.0] * len(replies)
        key = self.weighted_by_key
        weights = [reply.metrics[key] for reply in replies]
        if key == NUM_EXAMPLES:
            declared = [self.clients.declared(r.node, key) for r in replies]
            weights = list(map(min, weights, declared))
        return capped(weights, self.settings.largest_share)

    def metrics(self, round: Round) -> dict[str, float]:
        """Return metrics of a round with at least one valid reply: ``train-loss``."""
        metrics = (reply.metrics for reply in round.replies)
        return mean_loss(metrics, self.weighted_by_key)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the shared arrays of the initial model on which most clients agree.

        Raises
        ------
        SettingsError
            If no client sends any.
        """
        nodes = self.identify(grid)
        arrays = common_initial_arrays(self.clients, grid, nodes)
        if self.privacy:
            check_no_counters(arrays, self.settings.server_dp_noise)
        return arrays

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless a run can begin with this number of clients."""
        sample = partial(self.sample, 1, list(range(num_clients)))
        self.participation.check(num_clients, sample)

    def adapt_grid(self, grid: Grid) -> Grid:
        """Return the grid for the run; a subclass may return a decorated one.

        If the given grid has ``wait_for``, the returned one must have it as well.
        """
        return grid

    def roll_back(self, name: str) -> None:
        """Let a client continue that has seen a later checkpoint than the server has.

        This happens after the server was restored from a backup. By default the client
        continues from the newest round that both have, or else from its own newest.
        """
        self.ledger.continue_from(name)

    @property
    def unused_settings(self) -> dict[str, str]:
        """Settings without effect here, by name, with the reason."""
        unused, used = self.settings.unused, self.participation.uses
        if self.traits.uses_mean == "never":
            names = "weighting", "largest-share"
            unused |= dict.fromkeys(names, "this algorithm averages no models")
        return {name: why for name, why in unused.items() if name not in used}

    # A run.

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run as Flower's ``Strategy.start``.

        Raises
        ------
        SettingsError
            If no client's reply counted in any round or, with noise, the initial
            arrays have integers.
        """
        given = args[0] if args else ArrayRecord()
        if self.privacy:
            arrays = kwargs.get("initial_arrays", given)
            check_no_counters(arrays, self.settings.server_dp_noise)
        longest = float(kwargs.get("timeout", math.inf))
        self.clients.answers_queries = None
        grid = self.adapt_grid(reliable_grid(self, grid, longest))
        before = self.ledger.counted
        result = super().start(grid, *args, **kwargs)
        if self.ledger.counted == before and result.train_metrics_clientapp:
            why = self.round.failure or self.clients.failure or "there are none"
            raise SettingsError(f"in no round did a client's reply count: {why}")
        return result

    # Participants.

    def identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part, in the order of their clients' names."""
        nodes = self.clients.identify(grid, self.ledger.run_token)
        if self.privacy and nodes:
            # All clients have the same structure.
            about = self.clients.known[nodes[0]].properties
            check_compatible(about, self.settings.server_dp_noise)
        # Only a resumed server can be behind its clients.
        for node in nodes if self.ledger.resumed is not None else ():
            client = self.clients.known[node]
            if self.ledger.is_rolled_back(client.name, client.properties):
                self.roll_back(client.name)
        return nodes

    def _connected_nodes(self, grid: Grid, trains: bool = False) -> list[int]:
        """Return the nodes that can take part; wait for one up to ``round-timeout``.

        If ``trains`` is True, they are those that can be sampled to train.

        The wait ends as soon as no earlier participant is missing, since only missing
        ones may return. With in-process grids there is no wait.
        """
        until = time.monotonic() + self.clients.round_timeout
        while not (nodes := self._usable(self.identify(grid), trains)):
            away = self._expected_clients() - self.clients.connected_names()
            over = time.monotonic() >= until
            if over or not away or getattr(grid, "in_process", False):
                break
            self.clients.wait_for_others(grid, until)
        return nodes

    def _expected_clients(self) -> set[str]:
        """Return the names of earlier participants that may return."""
        return set(self.ledger.acknowledged)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return those of the nodes that train in a round, in the same order."""
        others = len(self.clients.busy_nodes())
        return self.participation.sample(server_round, nodes, others)

    def _usable(self, nodes: list[int], trains: bool) -> list[int]:
        """Return the nodes, without those that have nothing to train on."""
        untrained = self.clients.untrained if trains else ()
        return [n for n in nodes if n not in untrained] if untrained else nodes

    # Messages.

    def open_round(
        self,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        kind: str,
    ) -> list[Message]:
        """Return a message of this kind for each node, and expect replies to them."""
        config[SERVER_ROUND] = server_round
        trains, evaluates = kind == MessageType.TRAIN, kind == MessageType.EVALUATE
        if not trains:
            nodes = self.clients.answering(nodes)
        check = self._check_train_reply if trains else self.evaluation.check
        about = server_round, arrays, config, self.clients, nodes, trains, check
        round = Round(*about, self._all_arrays, self._mean)
        if evaluates:
            self.evaluation.round = round
        else:
            self.round = round
        sent = self._as_transported(arrays)
        if trains:
            round.like = {self.arrayrecord_key: sent}
            self.begin(round)
            if round.expected is not None:
                like = to_record(round.expected)
                # Arrays that are also sent return in the precision of ``transport``.
                both = {name: sent.get(name, like[name]) for name in like}
                round.like = {self.arrayrecord_key: ArrayRecord(both)}
        messages: list[Message] = []
        for node in nodes:
            first = messages[0] if messages else None
            messages.append(self._message(node, sent, config, kind, first))
        return round.ask(messages)

    def _message(
        self,
        node: int,
        sent: ArrayRecord,
        config: ConfigRecord,
        kind: str,
        like: Message | None = None,
    ) -> Message:
        """Return a node's message; ``like`` is a message of the same round and kind."""
        content = self.content(node, sent, config)
        evaluates, name = kind == MessageType.EVALUATE, self.clients.name_of(node)
        own = self.for_evaluation(name) if evaluates else self.per_client(name)
        if same := {n: own[n] for n in own if n in sent}:
            replaced = self._as_transported(to_record(same))
            whole = ArrayRecord({**sent, **replaced})
            fill(content, {self.arrayrecord_key: whole})
        if more := {n: own[n] for n in own if n not in sent}:
            record = to_record(more)
            fill(content, {HEAD: record})
            if kind == MessageType.TRAIN and self.round.returns_own:
                self.round.like[HEAD] = record
        if like is not None:
            return message_like(like, content, dst_node_id=node)
        return Message(content, node, kind, group_id=str(config[SERVER_ROUND]))

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return a client's message without `per_client`; subclasses add to it.

        Parameters
        ----------
        node : int
            The client's node.
        arrays : ArrayRecord
            The shared arrays.
        config : ConfigRecord
            The config, with ``server-round``; must not be changed.
        """
        server_round = int(cast(int, config[SERVER_ROUND]))
        saves = self.settings.checkpoint_every > 0
        name, client = self.clients.name_of(node), self.clients.known.get(node)
        examples = client.properties.get(EXAMPLES) if client else None
        run = self.ledger.config(name, server_round, saves, examples)
        registered = self.clients.registered.config(node)
        record = fill(ConfigRecord(), {**registered, **run, **config})
        records = {self.arrayrecord_key: arrays, self.configrecord_key: record}
        return fill(RecordDict(), records)

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and send them the shared arrays, in the order of names."""
        sampled = self.sample(server_round, self._connected_nodes(grid, trains=True))
        # A subclass may return NumPy's integers, which messages do not take.
        nodes, kind = [int(node) for node in sampled], MessageType.TRAIN
        messages = self.open_round(nodes, arrays, config, server_round, kind)
        self.participation.open(self.round, messages, grid)
        return messages

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
            with a result those of `metrics` and ``train_metrics_aggr_fn``; those of the
            participation; ``epsilon`` and ``delta`` with noise.
        """
        round = self.round
        self._receive(replies)
        metrics: dict[str, Any] = {"clients": len(round.replies), **round.counts()}
        arrays = self._aggregate_checked(round) if round.replies else None
        if arrays is not None:
            metrics |= self.metrics(round)
            metrics |= self._by_function(self._train_metrics, round.replies)
            self._count(round, arrays)
        round.forget_replies()
        metrics |= self.participation.close()
        if self.privacy:
            metrics |= self.privacy.spent()
        return arrays, single_metrics(metrics)

    def _receive(self, replies: Iterable[Message]) -> None:
        """Check the replies of the round, and average them as they arrive if possible.

        A list already holds all replies in memory.
        """
        round, use = self.round, None
        if not isinstance(replies, Sequence) and averages_on_arrival(self):
            round.running, use = RunningMean(), self._average
        round.close(replies, use)
        self.ledger.note_unused(round.unused)

    def _average(self, reply: Reply) -> None:
        """Add a valid reply to the running mean, and free its arrays."""
        with np.errstate(over="ignore", invalid="ignore"):
            weight = self.weights([reply])[0]
            cast(RunningMean, self.round.running).add(weight, self._arrays(reply))
        reply.free(self.arrayrecord_key)

    def _count(self, round: Round, arrays: ArrayRecord) -> None:
        """Record that the replies are part of the new arrays."""
        number, names = round.number, [reply.client for reply in round.replies]
        rounds = {r.client: round.asked_in.get(r.node, number) for r in round.replies}
        self.ledger.acknowledge(rounds, number)
        self.clients.settle()
        self.participation.note(names, round.record, arrays)

    def _check_train_reply(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` unless a reply to training can count."""
        if self.traits.replies_are_changes and reply.metrics.get(IS_CHANGE) != 1:
            raise InvalidReplyError(
                f"does not say that it is a change, which {type(self).__name__} adds "
                "to what it sent; a client must send the difference of its arrays from "
                f"the received ones, and {IS_CHANGE!r}: 1 in its metrics"
            )
        if self.settings.weighting == "examples":
            reply.weight(self.weighted_by_key)
        self.check(reply)

    def _aggregate_checked(self, round: Round) -> ArrayRecord | None:
        """Return the result of `aggregate`; None if it cannot be used."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                arrays = self.aggregate(round)
        except np.linalg.LinAlgError as error:
            log(WARNING, "round %d: %s; the old arrays stay", round.number, error)
            return None
        if arrays is None:
            text = "round %d: %s.aggregate returned None for %d valid replies; the old "
            name, count = type(self).__name__, len(round.replies)
            log(WARNING, text + "arrays stay", round.number, name, count)
            return None
        sent = None if self.traits.uses_mean == "never" else round.sent
        check_like_sent(arrays, sent, f"{type(self).__name__}.aggregate")
        if not is_finite(arrays):
            log(WARNING, "round %d is not finite; the old arrays stay", round.number)
            return None
        if arrays is round.sent:
            return round.record
        for array in arrays.values():
            # The messages and the checkpoint hold them without copies.
            array.flags.writeable = False
        return memory_record({n: np.asarray(a, order="C") for n, a in arrays.items()})

    def _mean(self, replies: list[Reply]) -> Arrays | None:
        """Return the aggregate of replies by ``aggregation``; None if weights are 0.

        It is their mean by default, weighted by ``weighting``; a private one with
        ``server-dp-noise``.
        """
        if self.round.running is not None:
            return self.round.running.result()
        decoded = [partial(self._arrays, reply) for reply in replies]
        if self.privacy:
            return self.privacy.mean(self.round.clients, decoded, self._centre())
        rule = self.settings.aggregation
        combine = partial(self.apply_rule, self.weights(replies), decoded)
        if rule != CENTERED_CLIP:
            return combine(self._centre() if rule in CENTRED else {})
        last = self.state.get(LAST_CHANGE, {})
        moved, change = about_last_change(combine, self._centre(), last)
        if moved is not None:
            self.state[LAST_CHANGE] = change
        return moved

    def apply_rule(
        self, weights: Sequence[float], replies: Sequence[Decode], centre: Sent
    ) -> Arrays | None:
        """Combine arrays by the rule of ``aggregation``, over buckets of replies.

        The weights are equal unless `StrategySettings.uses_claims`. The seed and the
        round determine the buckets.
        """
        settings, count = self.settings, len(replies)
        byzantine = settings.byzantine_fraction
        share = self.participation.byzantine_share(byzantine, count)
        share *= max(1, settings.bucket_size)
        rule = make_rule(settings.aggregation, share, settings.clip_norm)
        if not settings.uses_claims:
            weights = [float(weight > 0) for weight in weights]
        if settings.bucket_size > 1 and settings.aggregation != "mean":
            entropy = [settings.seed, BUCKETS, self.round.number]
            rule = bucketed(rule, settings.bucket_size, np.random.default_rng(entropy))
        return rule(weights, replies, centre)

    def _arrays(self, reply: Reply) -> Arrays:
        """Return a reply's shared arrays; float16 ones of ``transport`` as float32.

        With asynchronous rounds they are moved to the current version.
        """
        arrays = self._as_kept(reply.decoded[self.arrayrecord_key])
        return self.participation.rebased(reply.node, arrays)

    def _all_arrays(self, reply: Reply) -> Arrays:
        """Return a reply's arrays, those that its client alone received among them."""
        return {**self._arrays(reply), **reply.decoded.get(HEAD, {})}

    def _centre(self) -> Arrays:
        """Return the arrays from which replies differ by the clients' changes."""
        sent = self.round.like[self.arrayrecord_key]
        arrays = self._as_kept({name: values_of(array) for name, array in sent.items()})
        if self.traits.replies_are_changes:
            return {name: np.zeros_like(array) for name, array in arrays.items()}
        return arrays

    def _as_transported(self, arrays: ArrayRecord) -> ArrayRecord:
        return as_float16(arrays) if self.settings.transport == "float16" else arrays

    def _as_kept(self, arrays: Arrays) -> Arrays:
        short = self.settings.transport != "float32"
        return as_float32(arrays, self.round.record) if short else arrays

    # Evaluation.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the shared arrays to all clients, or ``fraction-evaluate`` of them."""
        nodes = self._connected_nodes(grid)
        if self.evaluation.fraction < 1 and (busy := self.clients.busy_nodes()):
            # The earlier metrics of busy clients count, if they are sampled.
            nodes = sorted({*nodes, *busy}, key=lambda n: (self.clients.name_of(n), n))
        nodes = self.evaluation.sample(server_round, nodes)
        kind = MessageType.EVALUATE
        return self.open_round(nodes, arrays, config, server_round, kind)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Return the mean of every metric, as `Evaluation.aggregate`.

        The metrics of ``evaluate_metrics_aggr_fn`` are added.
        """
        metrics = self.evaluation.aggregate(replies, self.clients)
        self.ledger.note_unused(self.evaluation.round.unused)
        tested = self.evaluation.replies
        metrics.update(self._by_function(self._evaluate_metrics, tested))
        return metrics

    def _by_function(
        self, function: MetricsFunction | None, replies: list[Reply]
    ) -> dict[str, Any]:
        """Return the metrics of a user's function, if there is one."""
        if function is None or not replies:
            return {}
        contents = [reply.message.content for reply in replies]
        return dict(function(contents, self.weighted_by_key))

    # State.

    def snapshot(self) -> Callable[[], State]:
        """Return a function that returns, at any later time, the state as it is now."""
        values = {**self.ledger.state_dict(), **self.clients.state_dict()}
        if self.evaluation.fraction < 1 or self.clients.busy:
            # Else all clients are in every evaluation.
            values |= self.evaluation.state_dict()
        return snapshot_of(self.state, values)

    def restore(self, state: State) -> None:
        """Return to a saved state, as `snapshot` gives it."""
        self.ledger.load_state_dict(state.values)
        self.clients.load_state_dict(state.values)
        self.evaluation.load_state_dict(state.values)
        restore_tree(self.state, state)

    def summary(self) -> None:
        """Log the configuration."""
        settings = self.settings
        sampled = settings.fraction_train, settings.min_train_nodes, settings.seed
        log(INFO, "\t├──> %s", type(self).__name__)
        log(INFO, "\t├──> Sampling: %.3g, at least %d nodes, seed %d", *sampled)
        log(INFO, "\t└──> Mean: %s", settings.weighting)


def averages_on_arrival(strategy: FlowerStrategy) -> bool:
    """Return whether a strategy needs the replies' arrays for the plain mean only."""
    kind = type(strategy)
    return (
        isinstance(strategy, Strategy)
        and strategy.traits.uses_mean == "only"
        # Arrays that a client alone receives are read from its reply.
        and HEAD not in strategy.round.like
        # Overrides receive the replies.
        and all(
            getattr(kind, name) is getattr(Strategy, name)
            for name in ("aggregate_train", "metrics", "weights")
        )
        and (settings := strategy.settings).aggregation == "mean"
        and (settings.weighting == "uniform" or settings.largest_share == 1)
        and not (strategy.privacy or strategy._train_metrics)
        # Other participations may combine replies of several rounds.
        and type(strategy.participation) is Participation
    )


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


def reliable_grid(strategy: Strategy, grid: Grid, longest: float) -> Grid:
    """Return a grid that survives outages and limits the size of replies.

    No wait takes longer than ``longest`` seconds. The limit follows from the arrays
    that a reply should have: those of the round, those that most clients share
    if a query asks for arrays, and none for other queries.
    """

    def largest(kind: str) -> float:
        category, _, action = kind.partition(".")
        if category != MessageType.QUERY:
            evaluates = kind == MessageType.EVALUATE
            round = strategy.evaluation.round if evaluates else strategy.round
            return round.largest_reply
        most = strategy.clients.usual_bytes(SHARED_BYTES, math.inf) if action else 0
        return largest_reply(most)

    if hasattr(grid, "wait_for") or getattr(grid, "in_process", False):
        return grid
    return Inbox(grid, strategy.clients.label_of, longest, largest)
