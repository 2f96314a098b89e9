"""The base class of all strategies."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from flwr_frl.common import messages as keys
from flwr_frl.common.flower_messages import fill, message_like
from flwr_frl.common.memory_array import memory_record, values_of
from flwr_frl.common.settings import (
    Settings,
    SettingsError,
    require,
    require_all_of_noise,
)
from flwr_frl.common.text import one_line
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.server import aggregation as rules
from flwr_frl.strategies.server.checkpoint import State, restore_tree, snapshot_of
from flwr_frl.strategies.server.checks import InvalidReplyError, largest_reply
from flwr_frl.strategies.server.clients import Clients
from flwr_frl.strategies.server.evaluation import Evaluation, mean_loss
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.privacy import ClientPrivacy, check_no_counters
from flwr_frl.strategies.server.replies import (
    Arrays,
    RunningMean,
    as_float16,
    as_float32,
    is_finite,
    rounded_to,
    single_metrics,
    to_record,
)
from flwr_frl.strategies.server.round import Reply, Round
from flwr_frl.strategies.server.traits import (
    Algorithm,
    StrategySettings,
    check_settings,
    unused_settings,
)

# Key of the last round's change, for `centered-clip`, in the strategy's state.
LAST_CHANGE = "last-change"


@dataclass
class Parts:
    """The parts of a running strategy, which algorithms rarely need.

    Parameters
    ----------
    clients : Clients
        The clients of the run, with the last round in which each one's reply counted.
    participation : Participation
        Samples clients, and decides how many replies close a round.
    round : Round
        The last messages to clients that train, with their replies.
    evaluation : Evaluation
        Each client's test metrics, and the last round of evaluation.
    privacy : ClientPrivacy or None
        The mechanism of client-level differential privacy, with ``server-dp-noise``.
    """

    clients: Clients
    participation: Participation
    round: Round
    evaluation: Evaluation
    privacy: ClientPrivacy | None


class Strategy(Algorithm, uses_mean="only"):
    """Sample clients and average the arrays that they share.

    Clients are known by name rather than by node id, sampling is seeded, replies are
    checked, means have a fixed order, bytes are counted, and the state is saved in
    checkpoints. The class keywords are those of `Traits`.

    Parameters
    ----------
    min_evaluate_nodes : int, default 1
        Minimum number of clients in an evaluation.
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
    """

    _settings_type = StrategySettings
    settings: StrategySettings

    def __init__(self, *, min_evaluate_nodes: int = 1, **arguments: Any) -> None:
        self._set_settings(arguments)
        settings = self.settings
        noise, clip = settings.server_dp_noise, settings.server_dp_clip
        # The private mean has equal weights.
        valid = not noise or type(self).weights is Strategy.weights
        require(valid, "server-dp-noise", noise, "0: the algorithm weights clients")
        check_settings(settings, self._traits)
        require_all_of_noise("server-dp", noise, clip, settings.server_dp_delta)
        # `centered-clip` saves its last change here.
        clips = settings.aggregation == rules.CENTERED_CLIP
        self.state: dict[str, Any] = {LAST_CHANGE: {}} if clips else {}
        sampling = settings.fraction_train, settings.min_train_nodes, settings.seed
        evaluated = settings.fraction_evaluate, min_evaluate_nodes, settings.seed
        self._run = Parts(
            Clients(settings.min_available_nodes),
            Participation(*sampling),
            Round(self),
            Evaluation(Round(self, trains=False), *evaluated),
            ClientPrivacy(noise, clip, settings.server_dp_delta) if noise else None,
        )

    @classmethod
    def from_settings(cls, settings: Settings) -> Any:
        """Return the strategy with its settings; see `Algorithm._from`."""
        return cls._from(settings)

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
        ``largest-share``. They are 1 unless `StrategySettings.uses_claims`.
        """
        if self.settings.weighting == "uniform" or not self.settings.uses_claims:
            return [1.0] * len(replies)
        name, declared = keys.NUM_EXAMPLES, self._run.clients.declared
        weights = [min(r.metrics[name], declared(r.node, name)) for r in replies]
        return rules.capped(weights, self.settings.largest_share)

    def metrics(self, round: Round) -> dict[str, float]:
        """Return metrics of a round with at least one valid reply: ``train-loss``."""
        return mean_loss(reply.metrics for reply in round.replies)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the shared arrays of the initial model on which most clients agree.

        Raises
        ------
        SettingsError
            If no client sends any.
        """
        nodes = self._identify(grid)
        arrays = self._run.clients.initial_arrays(grid, nodes)
        if self._run.privacy:
            check_no_counters(arrays, self.settings.server_dp_noise)
        return arrays

    # Hooks of algorithms with a special server.

    def _check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless a run can begin with this number of clients."""
        sample = partial(self.sample, 1, list(range(num_clients)))
        self._run.participation.check(num_clients, sample)

    def _adapt_grid(self, grid: Grid) -> Grid:
        """Return the grid for the run; a subclass may return a decorated one.

        If the given grid has ``wait_for``, the returned one must have it as well.
        """
        return grid

    def _roll_back(self, name: str) -> None:
        """Let a client continue that has seen a later checkpoint than the server has.

        This happens after the server was restored from a backup. By default the client
        continues from the newest round that both have, or else from its own newest.
        """
        self._run.clients.continue_from(name)

    @property
    def _unused_settings(self) -> dict[str, str]:
        """Settings without effect here, by name, with the reason."""
        unused = unused_settings(self.settings, self._traits)
        used = self._run.participation.uses
        return {name: why for name, why in unused.items() if name not in used}

    def _expected_clients(self) -> set[str]:
        """Return the names of earlier participants that may return."""
        return set(self._run.clients.acknowledged)

    def _usable(self, nodes: list[int]) -> list[int]:
        """Return the nodes that can be sampled, which have something to train on."""
        untrained = self._run.clients.untrained
        return [n for n in nodes if n not in untrained] if untrained else nodes

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return those of the nodes that train in a round, in the same order."""
        others = len(self._run.clients.busy_nodes())
        return self._run.participation.sample(server_round, nodes, others)

    # A run.

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run as Flower's ``Strategy.start``.

        Raises
        ------
        SettingsError
            If no client's reply counted in any round or, with noise, the initial
            arrays have integers.
        """
        clients = self._run.clients
        if self._run.privacy:
            given = args[0] if args else ArrayRecord()
            arrays = kwargs.get("initial_arrays", given)
            check_no_counters(arrays, self.settings.server_dp_noise)
        longest = float(kwargs.get("timeout", math.inf))
        grid = self._adapt_grid(reliable_grid(self, grid, longest))
        before = clients.counted
        result = super().start(grid, *args, **kwargs)
        if clients.counted == before and result.train_metrics_clientapp:
            why = self._run.round.failure or clients.failure or "there are none"
            raise SettingsError(f"in no round did a client's reply count: {why}")
        return result

    def _identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part, in the order of their clients' names."""
        clients, privacy = self._run.clients, self._run.privacy
        nodes = clients.identify(grid)
        if privacy and nodes:
            # All clients have the same structure.
            privacy.check_compatible(clients.known[nodes[0]].properties)
        # Only a resumed server can be behind its clients.
        if clients.resumed is not None:
            for name in clients.rolled_back(nodes):
                self._roll_back(name)
        return nodes

    def _connected_nodes(
        self, grid: Grid, usable: Callable[[list[int]], list[int]] = list
    ) -> list[int]:
        """Return the nodes that can take part; wait for one up to ``round-timeout``.

        The wait ends as soon as no earlier participant is missing, since only missing
        ones may return. With in-process grids there is no wait.
        """
        clients = self._run.clients
        until = time.monotonic() + clients.round_timeout
        while not (nodes := usable(self._identify(grid))):
            away = self._expected_clients().difference(
                map(clients.name_of, clients.here)
            )
            over = time.monotonic() >= until
            if over or not away or getattr(grid, "in_process", False):
                break
            clients.wait_for_others(grid, until)
        return nodes

    # Messages.

    def _open_round(self, round: Round, kind: str) -> list[Message]:
        """Return a message of this kind for each node, and expect replies to them."""
        round.config[keys.SERVER_ROUND] = round.number
        if kind == MessageType.EVALUATE:
            self._run.evaluation.round = round
        else:
            self._run.round = round
        sent = self._as_transported(round.record)
        if round.trains:
            round.like = {keys.ARRAYS: sent}
            self.begin(round)
            if round.expected is not None:
                like = to_record(round.expected)
                # Arrays that are also sent return in the precision of ``transport``.
                both = {name: sent.get(name, like[name]) for name in like}
                round.like = {keys.ARRAYS: ArrayRecord(both)}
        messages: list[Message] = []
        for node in round.nodes:
            first = messages[0] if messages else None
            messages.append(self._message(node, sent, round.config, kind, first))
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
        content = self._content(node, sent, config)
        name = self._run.clients.name_of(node)
        evaluates = kind == MessageType.EVALUATE
        own = self.for_evaluation(name) if evaluates else self.per_client(name)
        if same := {n: own[n] for n in own if n in sent}:
            replaced = self._as_transported(to_record(same))
            fill(content, {keys.ARRAYS: ArrayRecord({**sent, **replaced})})
        if more := {n: own[n] for n in own if n not in sent}:
            record = to_record(more)
            fill(content, {keys.HEAD: record})
            if kind == MessageType.TRAIN and self._run.round.returns_own:
                self._run.round.like[keys.HEAD] = record
        if like is not None:
            return message_like(like, content, dst_node_id=node)
        server_round = str(config[keys.SERVER_ROUND])
        return Message(content, node, kind, group_id=server_round)

    def _content(
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
        server_round = int(cast(int, config[keys.SERVER_ROUND]))
        saves = self.settings.checkpoint_every > 0
        about = self._run.clients.config(node, server_round, saves)
        record = fill(ConfigRecord(), {**about, **config})
        return fill(RecordDict(), {keys.ARRAYS: arrays, keys.CONFIG: record})

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and send them the shared arrays, in the order of names."""
        sampled = self.sample(server_round, self._connected_nodes(grid, self._usable))
        # A subclass may return NumPy's integers, which messages do not take.
        nodes = [int(node) for node in sampled]
        round = Round(self, server_round, arrays, config, nodes)
        messages = self._open_round(round, MessageType.TRAIN)
        self._run.participation.open(round, messages, grid)
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
            with a result those of `metrics`; those of the participation; ``epsilon``
            and ``delta`` with noise.
        """
        run, round = self._run, self._run.round

        def average(reply: Reply) -> None:
            """Add a valid reply to the running mean, and free its arrays."""
            with np.errstate(over="ignore", invalid="ignore"):
                weight = self.weights([reply])[0]
                cast(RunningMean, round.running).add(weight, self._shared_arrays(reply))
            del reply.message.content[keys.ARRAYS], reply.decoded[keys.ARRAYS]

        # A list already holds all replies in memory.
        if not isinstance(replies, Sequence) and averages_on_arrival(self):
            round.running = RunningMean()
        round.close(replies, average if round.running else None)
        metrics: dict[str, Any] = {"clients": len(round.replies), **round.counts()}
        arrays = self._aggregated(round) if round.replies else None
        if arrays is not None:
            metrics |= self.metrics(round)
            number = round.number
            asked_in = {
                r.client: round.asked_in.get(r.node, number) for r in round.replies
            }
            run.clients.acknowledge(asked_in, number)
            run.participation.note(list(asked_in), round.record, arrays)
        # Replies hold whole messages.
        round.replies, round.running = [], None
        metrics |= run.participation.close()
        if run.privacy:
            metrics |= run.privacy.spent()
        return arrays, single_metrics(metrics)

    def _check_reply(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` unless a reply to training can count."""
        changes, name = self._traits.replies_are_changes, keys.IS_CHANGE
        if changes and reply.metrics.get(name) != 1:
            raise InvalidReplyError(
                f"does not say that it is a change, which {type(self).__name__} adds "
                "to what it sent; a client must send the difference of its arrays from "
                f"the received ones, and {name!r}: 1 in its metrics"
            )
        if self.settings.weighting == "examples":
            reply.metric(keys.NUM_EXAMPLES)
        self.check(reply)

    def _aggregated(self, round: Round) -> ArrayRecord | None:
        """Return the result of `aggregate`; None if it cannot be used."""
        arrays, why = None, "aggregate returned None"
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                arrays = self.aggregate(round)
        except np.linalg.LinAlgError as error:
            why = str(error)
        if arrays is not None:
            sent = None if self._traits.uses_mean == "never" else round.sent
            arrays = in_sent_dtypes(arrays, sent or {})
            check_result(arrays, sent, f"{type(self).__name__}.aggregate")
            if not is_finite(arrays):
                arrays, why = None, "the result is not finite"
        if arrays is None:
            log(WARNING, "round %d: %s; the old arrays stay", round.number, why)
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
        round, rule = self._run.round, self.settings.aggregation
        if round.running is not None:
            return round.running.result()
        decoded = [partial(self._shared_arrays, reply) for reply in replies]
        if self._run.privacy:
            return self._run.privacy.mean(round.clients, decoded, self._centre())
        combine = partial(self._apply_rule, self.weights(replies), decoded)
        if rule != rules.CENTERED_CLIP:
            return combine(self._centre() if rule in rules.CENTRED else {})
        last = self.state.get(LAST_CHANGE, {})
        moved, change = rules.about_last_change(combine, self._centre(), last)
        if moved is not None:
            self.state[LAST_CHANGE] = change
        return moved

    def _apply_rule(
        self,
        weights: Sequence[float],
        replies: Sequence[rules.Decode],
        centre: rules.Sent,
    ) -> Arrays | None:
        """Combine arrays by the rule of ``aggregation``, over buckets of replies.

        The weights are equal unless `StrategySettings.uses_claims`. The seed and the
        round determine the buckets.
        """
        settings, count = self.settings, len(replies)
        byzantine = settings.byzantine_fraction
        share = self._run.participation.byzantine_share(byzantine, count)
        share *= max(1, settings.bucket_size)
        rule = rules.make_rule(settings.aggregation, share, settings.clip_norm)
        if not settings.uses_claims:
            weights = [float(weight > 0) for weight in weights]
        if settings.bucket_size > 1 and settings.aggregation != "mean":
            entropy = [settings.seed, rules.BUCKETS, self._run.round.number]
            rule = rules.bucketed(
                rule, settings.bucket_size, np.random.default_rng(entropy)
            )
        return rule(weights, replies, centre)

    def _shared_arrays(self, reply: Reply) -> Arrays:
        """Return a reply's shared arrays; float16 ones of ``transport`` as float32.

        With asynchronous rounds they are moved to the current version.
        """
        arrays = self._as_kept(reply.decoded[keys.ARRAYS])
        return self._run.participation.rebased(reply.node, arrays)

    def _arrays(self, reply: Reply) -> Arrays:
        """Return a reply's arrays, those that its client alone received among them."""
        return {**self._shared_arrays(reply), **reply.decoded.get(keys.HEAD, {})}

    def _centre(self) -> Arrays:
        """Return the arrays from which replies differ by the clients' changes."""
        sent = self._run.round.like[keys.ARRAYS]
        arrays = self._as_kept({name: values_of(array) for name, array in sent.items()})
        if self._traits.replies_are_changes:
            return {name: np.zeros_like(array) for name, array in arrays.items()}
        return arrays

    def _as_transported(self, arrays: ArrayRecord) -> ArrayRecord:
        return as_float16(arrays) if self.settings.transport == "float16" else arrays

    def _as_kept(self, arrays: Arrays) -> Arrays:
        short = self.settings.transport != "float32"
        return as_float32(arrays, self._run.round.record) if short else arrays

    # Evaluation.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the shared arrays to all clients, or ``fraction-evaluate`` of them."""
        nodes, clients = self._connected_nodes(grid), self._run.clients
        evaluation = self._run.evaluation
        if evaluation.fraction < 1 and (busy := clients.busy_nodes()):
            # The earlier metrics of busy clients count, if they are sampled.
            nodes = sorted({*nodes, *busy}, key=lambda n: (clients.name_of(n), n))
        nodes = evaluation.sample(server_round, nodes)
        round = Round(self, server_round, arrays, config, nodes, trains=False)
        return self._open_round(round, MessageType.EVALUATE)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Return the mean of every metric, as `Evaluation.aggregate`."""
        evaluation = self._run.evaluation
        evaluation.round.close(replies)
        return evaluation.aggregate(self._run.clients)

    # State.

    def _snapshot(self) -> Callable[[], State]:
        """Return a function that returns, at any later time, the state as it is now."""
        clients, evaluation = self._run.clients, self._run.evaluation
        values = clients.state_dict()
        if evaluation.fraction < 1 or clients.busy:
            # Else all clients are in every evaluation.
            values |= evaluation.state_dict()
        return snapshot_of(self.state, values)

    def _restore(self, state: State) -> None:
        """Return to a saved state, as `_snapshot` gives it."""
        self._run.clients.load_state_dict(state.values)
        self._run.evaluation.load_state_dict(state.values)
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
        and strategy._traits.uses_mean == "only"
        # Arrays that a client alone receives are read from its reply.
        and keys.HEAD not in strategy._run.round.like
        # Overrides receive the replies.
        and all(
            getattr(kind, name) is getattr(Strategy, name)
            for name in ("aggregate_train", "metrics", "weights")
        )
        and (settings := strategy.settings).aggregation == "mean"
        and (settings.weighting == "uniform" or settings.largest_share == 1)
        and not strategy._run.privacy
        # Other participations may combine replies of several rounds.
        and type(strategy._run.participation) is Participation
    )


def in_sent_dtypes(arrays: Any, sent: Arrays) -> Any:
    """Return the result of ``aggregate`` in the dtypes that were sent.

    Arithmetic turns arrays without dimensions, such as the counter of a batch norm,
    into scalars, and integers into floats.
    """
    if not isinstance(arrays, dict):
        return arrays
    converted = {}
    for name in arrays.keys() & sent.keys():
        value, dtype = arrays[name], sent[name].dtype
        is_array = isinstance(value, np.ndarray)
        if isinstance(value, np.number) or (is_array and value.dtype != dtype):
            converted[name] = rounded_to(dtype, np.asarray(value))
    return {**arrays, **converted} if converted else arrays


def check_result(arrays: Any, sent: Arrays | None, name: str) -> None:
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
    others = [repr(arrays)]
    if isinstance(arrays, dict):
        pairs = arrays.items()
        others = [f"{n!r}: {a!r}" for n, a in pairs if not isinstance(a, np.ndarray)]
    if others:
        text = f"{name} returns {one_line(others[0], 60)}; expected a dict of NumPy "
        raise SettingsError(text + "arrays, by name, or None")
    if sent is None:
        return
    has, needs = (
        {key: f"{array.dtype}{list(array.shape)}" for key, array in each.items()}
        for each in (arrays, sent)
    )
    for key in {**needs, **has}:
        if has.get(key) != needs.get(key):
            raise SettingsError(
                f"{name} returns {key!r} as {has.get(key, 'no array')}; expected "
                f"{needs.get(key, 'no array')}, as it was sent"
            )


def reliable_grid(strategy: Strategy, grid: Grid, longest: float) -> Grid:
    """Return a grid that survives outages and limits the size of replies.

    No wait takes longer than ``longest`` seconds. The limit follows from the arrays
    that a reply should have: those of the round, those that most clients share
    if a query asks for arrays, and none for other queries.
    """
    run = strategy._run

    def largest(kind: str) -> float:
        category, _, action = kind.partition(".")
        if category != MessageType.QUERY:
            evaluates = kind == MessageType.EVALUATE
            return (run.evaluation.round if evaluates else run.round).largest_reply
        size = run.clients.usual_bytes(keys.SHARED_BYTES, math.inf) if action else 0
        return largest_reply(size)

    if hasattr(grid, "wait_for") or getattr(grid, "in_process", False):
        return grid
    return Inbox(grid, run.clients.label_of, longest, largest)
