"""The base class of all strategies."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from logging import INFO, WARNING
from typing import Any, ClassVar, cast

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

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import (
    Request,
    entries_of,
    is_finite,
    layout_of,
    memory_record,
    plain,
    size_of,
)
from flwr_frl.common.command_line import shorten_errors
from flwr_frl.common.compression import UploadSettings
from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.settings import require_all_of_noise
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.server import aggregation as rules
from flwr_frl.strategies.server.checkpoint import State, restore_tree, snapshot_of
from flwr_frl.strategies.server.clients import Clients
from flwr_frl.strategies.server.evaluation import TESTED, TESTED_IN, Evaluation
from flwr_frl.strategies.server.privacy import ClientPrivacy, check_no_counters
from flwr_frl.strategies.server.replies import (
    REPLY_ALLOWANCE,
    RunningMean,
    metric_record,
    rounded_to,
    to_record,
)
from flwr_frl.strategies.server.replies import Arrays as Arrays
from flwr_frl.strategies.server.round import (
    EVALUATED,
    PERSONAL,
    NoMeanError,
    Participation,
)
from flwr_frl.strategies.server.round import Reply as Reply
from flwr_frl.strategies.server.round import Round as Round
from flwr_frl.strategies.server.traits import (
    Algorithm,
    StrategySettings,
    check_settings,
)

# Seconds between two attempts to find a client that can take part.
NOBODY_INTERVAL = 30.0
# Metrics under which a client may report its training loss: flwr-frl's, that of
# Flower's templates, and the plain name.
LOSSES = ("train-loss", "train_loss", "loss")


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
    uploads : UploadSettings or None
        How clients compress their changes, with ``upload-compressor``.
    """

    clients: Clients
    participation: Participation
    round: Round
    evaluation: Evaluation
    privacy: ClientPrivacy | None
    uploads: UploadSettings | None = None


class Strategy(Algorithm, uses_mean="only"):
    """Sample clients and average the arrays that they share.

    Clients are known by name rather than by node id, sampling is seeded, replies are
    checked, means have a fixed order, bytes are counted, and the state is saved in
    checkpoints. The class keywords are those of `StrategyTraits`.

    Parameters
    ----------
    min_evaluate_nodes : int, default 1
        Minimum number of clients in an evaluation.
    personal : sequence of str, default ()
        Names of layers, such as ``"fc3."``, or parts of names, such as ``"lora_B"``,
        for a ClientApp that returns the whole model. The server keeps each client's own
        copy of these arrays, sends it back to this client only, and averages the
        others. Clients of this package keep their personal arrays themselves.
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
    # Values that settings must have, and why
    _only: ClassVar[tuple[tuple[str, object], ...]] = ()
    _because: ClassVar[str] = ""

    def __init__(
        self,
        *,
        min_evaluate_nodes: int = 1,
        personal: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        # Also in ServerApps of other apps.
        shorten_errors()
        settings = self.settings = self._settings_type(**arguments)
        common = fields(StrategySettings)
        own = [each.name for each in fields(settings) if each not in common]
        # Settings of an algorithm are attributes, too.
        vars(self).update({name: getattr(settings, name) for name in own})
        noise, clip = settings.server_dp_noise, settings.server_dp_clip
        # The private mean has equal weights.
        valid = not noise or inherits(type(self), "weights")
        require(valid, "server-dp-noise", noise, "0: the algorithm weights clients")
        check_settings(settings, self._traits, type(self).__name__)
        for name, only in self._only:
            value = getattr(settings, name)
            allowed = f"{only}: {self._because}"
            require(value == only, name.replace("_", "-"), value, allowed)
        require_all_of_noise("server-dp", noise, clip, settings.server_dp_delta)
        self.state: dict[str, Any] = {}
        self._personal = (personal,) if isinstance(personal, str) else tuple(personal)
        averages = self._traits.uses_mean == "only" and not noise
        allowed = "() with noise, or if the algorithm keeps arrays of clients itself"
        valid = averages and inherits(type(self), "per_client")
        require(valid or not self._personal, "personal", personal, allowed)
        self._has_warned = False
        trained = settings.fraction_train, settings.min_train_nodes, settings.seed
        tested = settings.fraction_evaluate, min_evaluate_nodes, settings.seed
        self._run = Parts(
            Clients(settings.min_available_nodes),
            Participation(*trained),
            Round(self),
            Evaluation(
                Round(self, kind=MessageType.EVALUATE),
                Participation(*tested, EVALUATED),
            ),
            ClientPrivacy(noise, clip, settings.server_dp_delta) if noise else None,
        )

    # Hooks: what an algorithm overrides.

    def begin(self, round: Round) -> None:
        """Prepare a training round before its messages are made.

        An override may add to ``round.config`` and set ``round.expected``.
        """

    def per_client(self, client: str) -> Arrays:
        """Return the arrays that only this client receives, to train or to join late.

        An array with the name of a shared array replaces it. Arrays of other names come
        back in the client's reply. By default, they are its ``personal`` ones.
        """
        arrays: Arrays = self.state.get(PERSONAL, {}).get(client, {})
        return arrays

    def for_evaluation(self, client: str) -> Arrays:
        """Return the same for an evaluation, by default as `per_client`."""
        return self.per_client(client)

    def check_reply(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` for a reply that this algorithm cannot use."""

    def aggregate(self, round: Round) -> Arrays | None:
        """Return the new shared arrays, by default the mean; None keeps the old ones.

        By default, arrays that clients do not return (`Round.expected`) stay the same.

        Parameters
        ----------
        round : Round
            The round, with at least one valid reply.
        """
        return {**round.arrays, **round.mean()}

    def weights(self, replies: list[Reply]) -> list[float]:
        """Return the weights of checked replies: 1, or numbers of examples.

        A number of examples is limited to the one declared first.
        """
        if self.settings.weighting == "uniform":
            return [1.0] * len(replies)
        name, declared = keys.NUM_EXAMPLES, self._run.clients.declared
        return [min(r.metrics[name], declared(r.node, name)) for r in replies]

    def metrics(self, round: Round) -> dict[str, float]:
        """Return metrics of a round with at least one valid reply.

        They are ``train-loss``, the mean over examples, if a client reports its loss
        under a name of `LOSSES`. Of clients of another app, all metrics are averaged.
        """
        reported: dict[str, list[tuple[float, float]]] = {}
        for reply in round.replies:
            values, means_of = reply.metrics, dict[str, float]()
            weight = values.get(keys.NUM_EXAMPLES, 1.0)
            if loss := next(filter(values.__contains__, LOSSES), ""):
                means_of["train-loss"] = values[loss]
            if reply.node in self._run.clients.foreign:
                others = values.keys() - {keys.NUM_EXAMPLES, loss}
                means_of |= {name: values[name] for name in sorted(others)}
            for name, value in means_of.items():
                reported.setdefault(name, []).append((weight, value))
        means = {}
        for name, pairs in reported.items():
            weights, numbers = np.array(pairs).T
            total = weights.sum()
            means[name] = float(numbers @ weights / total) if total else 0.0
        return means

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the shared arrays of the initial model on which most clients agree.

        Raises
        ------
        SettingsError
            If no client sends any.
        """
        arrays = self._run.clients.initial_arrays(grid, self._identify(grid))
        if self._run.privacy:
            check_no_counters(arrays, self.settings.server_dp_noise)
        return arrays

    # Hooks of algorithms with a special server.

    def _check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless a run can begin with this number of clients."""
        self._run.participation.check_clients(num_clients)

    def _adapt_grid(self, grid: Grid) -> Grid:
        """Return the grid for the run; a subclass may return a decorated one.

        If the given grid has ``wait_for``, the returned one must have it as well.
        """
        return grid

    def _expected_clients(self) -> set[str]:
        """Return the names of earlier participants that may return."""
        return set(self._run.clients.acknowledged)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return those of the nodes that train in a round, in the same order."""
        clients = self._run.clients
        others = len(clients.busy_nodes()) if clients.busy else 0
        return self._run.participation.sample(server_round, nodes, others)

    # A run.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run as Flower's ``Strategy.start``.

        Raises
        ------
        SettingsError
            If no client's reply counted in any round, the initial arrays lack one of
            ``personal`` or, with noise, have integers.
        """
        clients = self._run.clients
        Round(self, record=initial_arrays).check_personal()
        if self._run.privacy:
            check_no_counters(initial_arrays, self.settings.server_dp_noise)
        self._run.participation.set_rounds(num_rounds)
        longest = float(kwargs.get("timeout", math.inf))
        grid = self._adapt_grid(reliable_grid(self, grid, longest))
        before = clients.counted
        result = super().start(grid, initial_arrays, num_rounds, *args, **kwargs)
        if clients.counted == before and result.train_metrics_clientapp:
            why = self._run.round.failure or clients.failure or "there are none"
            if clients.known and clients.known.keys() <= clients.foreign:
                why += self._remedy()
            raise SettingsError(f"in no round did a client's reply count: {why}")
        return result

    def _identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part, in the order of their clients' names."""
        clients, privacy = self._run.clients, self._run.privacy
        nodes = clients.identify(grid)
        if privacy and nodes:
            # All clients have the same structure.
            privacy.check_compatible(clients.known[nodes[0]].properties)
        return nodes

    def _usable(self, nodes: list[int]) -> list[int]:
        """Return the nodes that can train: those with training examples."""
        return [node for node in nodes if node not in self._run.clients.untrained]

    def _connected_nodes(self, grid: Grid, trains: bool = False) -> list[int]:
        """Return the nodes that can take part; wait for one up to ``round-timeout``.

        For training, nodes without training examples do not count. The wait ends as
        soon as no earlier participant is missing, since only missing ones may return.
        With in-process grids there is no wait.
        """
        clients = self._run.clients
        until = time.monotonic() + clients.round_timeout
        while True:
            nodes = self._identify(grid)
            nodes = self._usable(nodes) if trains else nodes
            if nodes or getattr(grid, "in_process", False):
                return nodes
            here = set(map(clients.name_of, clients.here))
            left = until - time.monotonic()
            if self._expected_clients() <= here or left <= 0:
                return nodes
            text = "waiting for clients: of the nodes that are here none takes part: %s"
            log(INFO, text, clients.several(clients.here))
            time.sleep(min(left, NOBODY_INTERVAL))

    # Clients of other apps.

    def _remedy(self) -> str:
        """Return what to do if the clients of another app lack something."""
        client = self._traits.client.rpartition(":")[2]
        return (
            f". {type(self).__name__} needs clients that do the same as {client}; that "
            'is the clientapp "flwr_frl.clients.client_app:app" with its algorithm'
        )

    def _look_at_foreign(self, round: Round) -> None:
        """Warn once if clients of another app do less than the algorithm's own."""
        foreign = self._run.clients.foreign.intersection(r.node for r in round.replies)
        averages = self._traits.client.endswith(":FedAvgClient")
        if foreign and not (self._personal or averages or self._has_warned):
            self._has_warned = True
            text = "the clients are those of another app%s. To keep each client's last "
            text += "layer on the server, use FedPer(personal=(%r,)) with this app"
            log(WARNING, text, self._remedy(), round.layers[-1])

    # Messages.

    def _open_round(self, round: Round, grid: Grid) -> list[Message]:
        """Return a message for each node of a round, and expect replies to them.

        They are Flower's own unless a grid of this package sends them.
        """
        round.config[keys.SERVER_ROUND] = round.number
        clients, nodes = self._run.clients, round.nodes
        if clients.run_token:
            round.config[keys.RUN] = clients.run_token
        if clients.columns:
            round.config[keys.COLUMNS] = clients.columns
        if round.kind == MessageType.EVALUATE:
            self._run.evaluation.round = round
        else:
            self._run.round = round
        if busy := clients.busy.intersection(nodes):
            nodes = [node for node in nodes if node not in busy]
            text = "not asked, as answers are still to come: %s"
            log(INFO, text, clients.several(busy))
        round.asked = dict.fromkeys(nodes, round.number)
        if round.kind == MessageType.TRAIN:
            round.like = {keys.ARRAYS: round.record}
            self.begin(round)
            if round.expected is not None:
                like = to_record(round.expected)
                # Changes are measured from what was sent, whatever is expected.
                both = {name: round.record.get(name, like[name]) for name in like}
                round.like = {keys.ARRAYS: ArrayRecord(both)}
            arrays = entries_of(round.like[keys.ARRAYS])
            dtypes = {array.dtype for array in arrays.values()}
            if dtypes <= {"float32"} and not self._run.uploads:
                shapes = tuple(tuple(array.shape) for array in arrays.values())
                round.layout = layout_of((*arrays,), shapes)
        messages = self._messages(round, nodes)
        return messages if is_ours(grid) else plain(messages)

    def _messages(self, round: Round, nodes: Sequence[int]) -> list[Message]:
        """Return messages of a round to nodes, and count their bytes."""
        messages, sent = list[Message](), round.record
        template = Message(RecordDict(), 0, round.kind, group_id=str(round.number))
        shared, common = {keys.ARRAYS: sent}, dict(round.config)
        size_of_shared = size_of({**shared, keys.CONFIG: common})
        evaluates = round.kind == MessageType.EVALUATE
        for node in nodes:
            name, records = self._run.clients.name_of(node), shared
            own = self.for_evaluation(name) if evaluates else self.per_client(name)
            if same := {n: own[n] for n in own if n in sent}:
                records = {keys.ARRAYS: ArrayRecord({**sent, **to_record(same)})}
                round.bytes_down += size_of(records) - size_of(shared)
            if more := {n: own[n] for n in own if n not in sent}:
                records = {**records, keys.HEAD: to_record(more)}
                round.bytes_down += size_of({keys.HEAD: records[keys.HEAD]})
                if round.kind == MessageType.TRAIN and self._run.round.returns_own:
                    self._run.round.like[keys.HEAD] = records[keys.HEAD]
            config = self._config(node, round.config)
            messages.append(Request(template, node, records, config, common))
            round.bytes_down += size_of_shared + size_of(config)
        round.asked |= dict.fromkeys(nodes, round.number)
        return messages

    def _config(self, node: int, config: ConfigRecord) -> dict[str, Any]:
        """Return the entries of a message's config that may differ between nodes.

        ``config`` is the round's, with ``server-round``.
        """
        return self._run.clients.config(node, cast(int, config[keys.SERVER_ROUND]))

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and send them the shared arrays, in the order of names."""
        sampled = self.sample(server_round, self._connected_nodes(grid, trains=True))
        # A subclass may return NumPy's integers, which messages do not take.
        nodes = [int(node) for node in sampled]
        round = Round(self, server_round, arrays, config, nodes)
        messages = self._open_round(round, grid)
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
        # A list already holds all replies in memory.
        if not isinstance(replies, Sequence) and self._averages_on_arrival:
            round.running = RunningMean()
        round.close(replies)
        if run.clients.foreign:
            self._look_at_foreign(round)
        metrics: dict[str, Any] = {
            "clients": len(round.replies),
            "rejected": len(round.rejections),
            "unanswered": len(round.silent),
            "bytes-down": round.bytes_down,
            "bytes-up": round.bytes_up,
        }
        if run.uploads:
            sent = (r.attachment(keys.MESSAGE) or b"" for r in round.replies)
            metrics["bits"] = 8 * sum(len(cast(bytes, data)) for data in sent)
        arrays = self._aggregated(round) if round.replies else None
        if arrays is not None:
            for reply in round.replies if self._personal else ():
                own = {n: reply.decoded[keys.ARRAYS][n].copy() for n in round.personal}
                self.state.setdefault(PERSONAL, {})[reply.client] = own
            metrics |= self.metrics(round)
            made_in = {reply.client: round.asked[reply.node] for reply in round.replies}
            run.clients.acknowledge(made_in, round.number)
        metrics |= run.participation.close(round, arrays)
        # Replies hold whole messages.
        round.replies, round.running = [], None
        if run.privacy:
            metrics |= run.privacy.spent()
        return arrays, metric_record(metrics)

    @cached_property
    def _averages_on_arrival(self) -> bool:
        """True if the replies' arrays are needed for the plain mean only."""
        hooks = "aggregate_evaluate", "aggregate_train", "metrics", "per_client"
        return (
            self._traits.uses_mean == "only"
            # Overrides receive the replies, and arrays that a client alone receives are
            # read from them.
            and inherits(type(self), *hooks, "weights")
            and self.settings.aggregation == "mean"
            and not (self._run.privacy or self._personal)
            # Other participations may combine replies of several rounds.
            and type(self._run.participation) is Participation
        )

    def _aggregated(self, round: Round) -> ArrayRecord | None:
        """Return the result of `aggregate`; None if it cannot be used.

        Raises `SettingsError` for a result that clients cannot receive. Otherwise
        every later reply would be rejected, as if the clients were wrong.
        """
        result: Any = None
        why = "aggregate returned None"
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                result = self.aggregate(round)
        except (NoMeanError, np.linalg.LinAlgError) as error:
            why = str(error)
        if result is round.arrays:
            return round.record
        if result is not None:
            sent = {} if self._traits.uses_mean == "never" else round.arrays
            result = as_arrays(result, sent, f"{type(self).__name__}.aggregate")
            for array in result.values():
                # The messages and the checkpoint hold them without copies.
                array.flags.writeable = False
            if is_finite(*result.values()):
                return memory_record(result)
            why = "the result is not finite"
        log(WARNING, "round %d: %s; the old arrays stay", round.number, why)
        return None

    def _mean_of(self, replies: list[Reply], centre: Arrays) -> Arrays:
        """Return the mean of some replies by the rule of ``aggregation``.

        Parameters
        ----------
        replies : list of Reply
            Some replies of a round.
        centre : dict of str to ndarray
            The arrays with which these clients began. The mean has their names. They
            are returned if there are no replies, or if all weights are 0.
        """
        if not replies:
            return centre
        read = [reply.read() for reply in replies]
        arrays: list[Arrays] = [{name: each[name] for name in centre} for each in read]
        return self._apply_rule(self.weights(replies), arrays, centre) or centre

    def _apply_rule(
        self, weights: Sequence[float], replies: Sequence[Arrays], centre: rules.Sent
    ) -> Arrays | None:
        """Combine arrays by the rule of ``aggregation``.

        None without replies, or if the rule uses weights and all of them are 0. All
        rules but the mean give every client one vote, as a client can report any number
        of examples.
        """
        settings, participation = self.settings, self._run.participation
        if not replies:
            return None
        fraction = settings.byzantine_fraction
        share = participation.byzantine_share(fraction, len(replies))
        rule = rules.make_rule(settings.aggregation, share, settings.clip_norm)
        if settings.aggregation != "mean":
            weights = [float(weight > 0) for weight in weights]
        return rule(weights, replies, centre)

    # Evaluation.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the shared arrays to all clients, or ``fraction-evaluate`` of them."""
        nodes, clients = self._connected_nodes(grid), self._run.clients
        if busy := clients.busy_nodes():
            # The earlier metrics of busy clients count, if they are sampled.
            nodes = clients.in_order({*nodes, *busy})
        nodes = self._run.evaluation.sampling.sample(server_round, nodes)
        kind = MessageType.EVALUATE
        round = Round(self, server_round, arrays, config, nodes, kind)
        return self._open_round(round, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Return the mean of every metric, as `Evaluation.aggregate`."""
        evaluation = self._run.evaluation
        evaluation.round.close(replies)
        return evaluation.aggregate(self._run.clients)

    # State.

    def _snapshot(self) -> State:
        """Return the state as it is now, for a checkpoint that is written later."""
        clients, evaluation = self._run.clients, self._run.evaluation
        values = clients.state_dict()
        if evaluation.sampling.fraction < 1 or clients.busy:
            # Else all clients are in every evaluation.
            values |= {TESTED: evaluation.metrics, TESTED_IN: evaluation.rounds}
        return snapshot_of(self.state, values)

    def _restore(self, state: State) -> None:
        """Return to a saved state, as `_snapshot` gives it."""
        self._run.clients.load_state_dict(state.values)
        self._run.evaluation.metrics = dict(state.values.get(TESTED, {}))
        self._run.evaluation.rounds = dict(state.values.get(TESTED_IN, {}))
        restore_tree(self.state, state)

    def summary(self) -> None:
        """Log the arguments."""
        log(INFO, "\t└──> %s: %s", type(self).__name__, self.settings)
        if self._personal:
            names = ", ".join(self._personal)
            log(INFO, "\t└──> Kept on the server for each client: %s", names)


def stored(key: str, kind: type = dict) -> Any:
    """Return an attribute that is an entry of a strategy's ``state``, first empty.

    ``models: dict[str, Arrays] = stored("models")`` in the class declares it. Its first
    value is that of ``kind()``.
    """
    return property(
        lambda strategy: strategy.state.setdefault(key, kind()),
        lambda strategy, value: strategy.state.update({key: value}),
    )


def inherits(kind: type, *names: str) -> bool:
    """Return whether a class has these methods as `Strategy` defines them."""
    return all(getattr(kind, n, None) is getattr(Strategy, n) for n in names)


def as_arrays(result: Any, sent: Arrays, name: str) -> Arrays:
    """Return the result of ``aggregate`` as arrays, in the dtypes that were sent.

    Arithmetic turns arrays without dimensions, such as the counter of a batch norm,
    into scalars, and integers into floats. Raises `SettingsError`, which names the
    method, unless the result is a dict of arrays with the names and shapes that were
    sent; they are free if ``sent`` is empty.
    """
    if not isinstance(result, dict):
        allowed = "expected a dict of NumPy arrays, by name, or None"
        raise SettingsError(f"{name} returns {type(result).__name__}; {allowed}")
    arrays = {key: np.asarray(value) for key, value in result.items()}
    shapes = {key: array.shape for key, array in arrays.items()}
    expected = {key: array.shape for key, array in (sent or arrays).items()}
    if shapes != expected:
        key, _ = min(shapes.items() ^ expected.items())
        line = f"{name} returns {key!r} with the shape {shapes.get(key)}"
        raise SettingsError(f"{line}; expected {expected.get(key)}")
    for key, like in sent.items():
        if arrays[key].dtype != like.dtype:
            arrays[key] = rounded_to(like.dtype, arrays[key])
    return arrays


def is_ours(grid: Grid) -> bool:
    """Return whether a grid is one of this package, not Flower's or a user's."""
    return hasattr(grid, "wait_for") or getattr(grid, "in_process", False)


def reliable_grid(strategy: Strategy, grid: Grid, longest: float) -> Grid:
    """Return a grid that survives outages and limits the size of replies.

    No wait takes longer than ``longest`` seconds.
    """
    run = strategy._run

    def largest(kind: str) -> float:
        if kind.startswith(MessageType.QUERY):
            # The size of the arrays is not known before the first round.
            return REPLY_ALLOWANCE if kind == MessageType.QUERY else math.inf
        evaluates = kind == MessageType.EVALUATE
        return (run.evaluation.round if evaluates else run.round).largest_reply

    if is_ours(grid):
        return grid
    return Inbox(grid, run.clients.label_of, longest, largest)
