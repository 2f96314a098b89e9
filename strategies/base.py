"""What all strategies have in common.

Clients are known by name and not by node id, sampling is seeded, replies are checked,
means have a fixed order, bytes are counted, and the state can be saved.
"""

import inspect
from collections.abc import Iterable
from logging import INFO
from typing import Annotated, Any, Self, cast

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

from flwr_frl.strategies.server.aggregation import (
    CENTERED_CLIP,
    RULES,
    WEIGHED,
    make_rule,
)
from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.client_manager import ClientManager
from flwr_frl.strategies.server.evaluating import Evaluating
from flwr_frl.strategies.server.pending_round import PendingRound, mean_loss
from flwr_frl.strategies.server.replies import (
    Arrays,
    as_float16,
    check_metrics,
    largest_reply,
    single_metrics,
)
from flwr_frl.strategies.server.round_ledger import RoundLedger
from flwr_frl.strategies.server.sampling import Sampler
from flwr_frl.task.messages import INITIAL_ARRAYS, IS_CHANGE, NUM_EXAMPLES, SERVER_ROUND
from flwr_frl.task.settings import (
    Choice,
    Range,
    Seed,
    Settings,
    SettingsError,
    require,
    validate,
)

# What `centered-clip` remembers, in a checkpoint.
LAST_CHANGE = "last-change/"


class BaseStrategy(Evaluating, FlowerFedAvg):
    """The base of all strategies: sample clients, average what they share.

    Parameters
    ----------
    fraction_train : float, default 0.5
        Share of the known clients that train in a round; rounded down.
    min_train_nodes : int, default 1
        The least number of clients that train in a round.
    min_available_nodes : int, default 1
        Wait until so many clients are there.
    weighting : {"uniform", "examples"}, default "uniform"
        Weights of the mean: all equal, or the number of training examples, but no more
        than a client said in the beginning.
    largest_share : float, default 1
        With ``weighting="examples"``, the largest share of all weights of a round that
        one of three or more clients can have; 1 sets no limit.
    aggregation : str, default "mean"
        How replies become one model (`flwr_frl.strategies.server.aggregation`); a
        single Byzantine client can ruin the ``mean``. ``median``, ``trimmed-mean`` and
        ``multi-krum`` give every client one vote; they and ``geometric-median`` hold an
        array of all clients at a time. ``centered-clip`` is ``clip`` about the last
        round's change.
    bucket_size : int, default 0
        Replies in a bucket, whose mean takes their place in every ``aggregation`` but
        the mean, for clients whose data differ much. One Byzantine client spoils a
        whole bucket, so rules multiply ``byzantine-fraction`` by it. 0 and 1 make no
        buckets.
    byzantine_fraction : float, default 0.2
        Share of a round's replies that ``trimmed-mean`` (at either end of each entry)
        and ``multi-krum`` take for lies.
    clip_norm : float, default 0
        Longest change of the model that ``clip`` lets one client make, and how far from
        the last round's change it may be with ``centered-clip``; 0: the median of the
        round's.
    server_dp_noise : float, default 0
        Noise multiplier z of differential privacy of clients
        (`flwr_frl.strategies.server.privacy`): the mean of n clients' changes gets
        noise with the standard deviation z C/n; 0 (none) or at least 0.001.
    server_dp_clip : float, default 0
        C, the longest change of what is shared that counts of one client.
    server_dp_delta : float, default 0
        δ for which ε is counted; well below one in the number of clients.
    seed : int, default 0
        Who is sampled follows from the seed, the round and the clients' names alone.
    checkpoint_every : int, default 0
        Rounds between two checkpoints (the caller writes them); 0 means none between.
    transport : {"float32", "float16"}, default "float32"
        How float32 arrays that are averaged travel, in both directions. The server
        itself keeps float32.

    Raises
    ------
    SettingsError
        If a value is out of its range.
    """

    def __init__(
        self,
        *,
        fraction_train: Annotated[float, Range("(0, 1]")] = 0.5,
        min_train_nodes: Annotated[int, Range("[1, inf)")] = 1,
        min_available_nodes: Annotated[int, Range("[1, inf)")] = 1,
        weighting: Annotated[str, Choice("uniform", "examples")] = "uniform",
        largest_share: Annotated[float, Range("(0, 1]")] = 1.0,
        aggregation: Annotated[str, Choice(*RULES)] = "mean",
        byzantine_fraction: Annotated[float, Range("[0, 0.5)")] = 0.2,
        clip_norm: Annotated[float, Range("[0, inf)")] = 0.0,
        bucket_size: Annotated[int, Range("[0, inf)")] = 0,
        server_dp_noise: Annotated[float, Range("[0, inf)")] = 0.0,
        server_dp_clip: Annotated[float, Range("[0, inf)")] = 0.0,
        server_dp_delta: Annotated[float, Range("[0, 1)")] = 0.0,
        seed: Annotated[int, Seed] = 0,
        checkpoint_every: Annotated[int, Range("[0, inf)")] = 0,
        transport: Annotated[str, Choice("float32", "float16")] = "float32",
    ) -> None:
        super().__init__(
            fraction_train=fraction_train,
            min_train_nodes=min_train_nodes,
            min_available_nodes=min_available_nodes,
        )
        self.weighting = weighting
        self.largest_share = largest_share
        self.aggregation = aggregation
        self.byzantine_fraction = byzantine_fraction
        self.clip_norm = clip_norm
        self.bucket_size = bucket_size
        self.server_dp_noise = server_dp_noise
        self.server_dp_clip = server_dp_clip
        self.server_dp_delta = server_dp_delta
        self.seed = seed
        self.checkpoint_every = checkpoint_every
        self.transport = transport
        validate(self)
        allowed = "mean: this algorithm averages no models"
        require(
            self.averages or aggregation == "mean", "aggregation", aggregation, allowed
        )
        allowed = f"uniform with aggregation={aggregation!r}, which gives each one vote"
        valid = weighting == "uniform" or aggregation in WEIGHED
        require(valid, "weighting", weighting, allowed)
        self._used, self._idle = set(), set()
        self.rule = make_rule(
            aggregation, byzantine_fraction * max(1, bucket_size), clip_norm
        )
        self._last_change = {}
        self.privacy = self.make_privacy()
        self.clients = ClientManager(min_available_nodes)
        self.sampler = Sampler(fraction_train, min_train_nodes, seed)
        self.ledger = RoundLedger()
        # That of the messages sent last, and that of the last training.
        self.pending = self.training = PendingRound()
        self.client_metrics: dict[str, dict[str, float]] = {}
        # In which round each client was last evaluated.
        self.evaluated_in: dict[str, int] = {}
        # Replies that counted in the last evaluation.
        self.evaluated: list[Message] = []

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return the strategy with its declared arguments taken from settings.

        Raises
        ------
        SettingsError
            If an ``__init__`` does not hand on the arguments of its bases: their
            settings, the seed among them, would silently keep their defaults.
        """
        for kind in cls.__mro__[: cls.__mro__.index(BaseStrategy)]:
            own = vars(kind).get("__init__")
            if own and all(
                parameter.kind is not parameter.VAR_KEYWORD
                for parameter in inspect.signature(own).parameters.values()
            ):
                raise SettingsError(
                    f"{kind.__qualname__}.__init__ takes no **base, so the settings of "
                    "its bases, such as fraction-train and seed, have no effect; add "
                    "**base to its arguments and call super().__init__(**base)"
                )
        return super().from_settings(settings)

    @property
    def unused_settings(self) -> dict[str, str]:
        """Settings that do nothing here, by name, and why."""
        rule, idle = f"aggregation {self.aggregation!r} does not use it", {}
        if self.aggregation not in ("clip", CENTERED_CLIP):
            idle["clip-norm"] = rule
        if self.aggregation not in ("trimmed-mean", "multi-krum"):
            idle["byzantine-fraction"] = rule
        if self.aggregation == "mean":
            idle["bucket-size"] = rule
        if self.weighting == "uniform":
            idle["largest-share"] = "with weighting='uniform' all have the same share"
        return idle

    # Where a run begins.

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` if of so many clients nobody is sampled."""
        self.sampler.check(num_clients)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the shared part of the initial model, on which most clients agree."""
        nodes = self.identify(grid)
        arrays = self.clients.common_initial_arrays(grid, nodes, INITIAL_ARRAYS)
        self.check_private(arrays)
        return arrays

    # Who takes part.

    def identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part, in the order of their clients' names."""
        nodes = self.clients.identify(grid, self.ledger.run_token)
        for node in nodes:
            client = self.clients.known[node]
            if self.ledger.is_rolled_back(client.name, client.properties):
                self.roll_back(client.name)
        return nodes

    def roll_back(self, name: str) -> None:
        """Go on with a client that has seen a later checkpoint than the run's.

        Here it goes on from the newest round that both know, or else from its newest.
        """
        self.ledger.continue_from(name)

    def name_of(self, node: int) -> str:
        """Return the name of a node's client."""
        return self.clients.name_of(node)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return those of some nodes that train in a round, in the same order."""
        others = len(self.clients.busy_clients())
        return self.sampler.sample(server_round, nodes, others)

    # Training.

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what one client is sent; subclasses add to it.

        Parameters
        ----------
        node : int
            The client's node.
        arrays : ArrayRecord
            The shared arrays.
        config : ConfigRecord
            The config, with ``server-round``; not to be changed.

        Returns
        -------
        RecordDict
            ``arrays``, and ``config`` with what `RoundLedger.config` says.
        """
        server_round = int(cast(int, config[SERVER_ROUND]))
        saves = self.checkpoint_every > 0
        own = self.ledger.config(self.name_of(node), server_round, saves)
        record = ConfigRecord({**own, **config})
        return RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: record})

    def open_round(
        self,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        kind: str,
    ) -> list[Message]:
        """Return a message for each of some nodes, and note what to expect."""
        config[SERVER_ROUND] = server_round
        if kind != MessageType.TRAIN:
            nodes = self.clients.answering(nodes)
        else:
            self.trained_from = arrays
        arrays = self._as_transported(arrays)
        self.pending = PendingRound(server_round, self.name_of)
        self.pending.expect(self.arrayrecord_key, arrays)
        group, messages = str(server_round), []
        for node in nodes:
            content = self.content(node, arrays, config)
            # A subclass may have put a client's own in the shared ones' place.
            own = content.get(self.arrayrecord_key)
            if isinstance(own, ArrayRecord):
                content[self.arrayrecord_key] = self._as_transported(own)
            messages.append(Message(content, node, kind, group_id=group))
        if kind != MessageType.TRAIN:
            # Those who test send numbers alone.
            self.pending.expected = {}
        return self.pending.ask(messages)

    def largest_reply(self, kind: str) -> float:
        """Return how many bytes a reply to messages of a kind may have.

        They are `PendingRound.largest_reply`. To a query it is that of the bytes that
        most clients say their shared arrays have, or of none where it asks for no
        arrays.
        """
        category, _, action = kind.partition(".")
        if category != MessageType.QUERY:
            return self.pending.largest_reply
        return largest_reply(self.clients.shared_bytes() if action else 0)

    def _as_transported(self, arrays: ArrayRecord) -> ArrayRecord:
        return as_float16(arrays) if self.transport == "float16" else arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and send them the shared arrays, in the order of names."""
        nodes = self.sample(server_round, self.connected_nodes(grid))
        kind = MessageType.TRAIN
        return self.open_round(nodes, arrays, config, server_round, kind)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the valid replies.

        Returns
        -------
        arrays : ArrayRecord or None
            What `aggregate` makes of them; None (the old arrays stay) if none is valid.
        metrics : MetricRecord
            ``train-loss`` (mean over examples), ``clients``, ``rejected``,
            ``unanswered``, ``bytes-down`` and ``bytes-up``; ``epsilon`` and ``delta``
            with noise.
        """
        exchange = self.training = self.pending
        valid = exchange.close(replies, self.check_train_reply)
        self.ledger.note_unused(exchange.unused)
        metrics = {"clients": len(valid), **exchange.counts(), **exchange.sizes()}
        arrays = self.aggregate_checked(server_round, valid) if valid else None
        if arrays is not None:
            metrics |= self.train_metrics(valid)
            self.ledger.acknowledge(exchange.rounds(valid), server_round)
            self.clients.settle()
        if self.privacy:
            metrics |= self.privacy.spent()
        return arrays, single_metrics(metrics)

    def check_train_reply(self, reply: Message) -> None:
        """Raise `InvalidReplyError` unless a training reply with content can count."""
        self.pending.check(reply)
        if self.replies_are_changes and check_metrics(reply).get(IS_CHANGE) != 1:
            raise InvalidReplyError(
                f"does not say that it is a change, which {type(self).__name__} adds "
                "to what it sent; a client must send the difference of its arrays from "
                f"the received ones, and {IS_CHANGE!r}: 1 in its metrics"
            )
        check_metrics(reply, [NUM_EXAMPLES] if self.weighting == "examples" else [])

    def train_metrics(self, replies: list[Message]) -> dict[str, float]:
        """Return a round's metrics from at least one valid reply: ``train-loss``."""
        return mean_loss(map(check_metrics, replies))

    # State.

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return how far the run has come with each client, and a rule's memory.

        Who is sampled follows from seed and round, so there is no random state.
        """
        of_clients = {
            "keys": self.clients.keys,
            "labels": self.clients.client_labels(),
            "classes": self.clients.classes,
            "model": self.clients.settled,
        }
        remembered = {LAST_CHANGE + n: a for n, a in self._last_change.items()}
        return remembered, {**self.ledger.state_dict(), **of_clients}

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state."""
        self._last_change = {
            name.removeprefix(LAST_CHANGE): array
            for name, array in arrays.items()
            if name.startswith(LAST_CHANGE)
        }
        self.ledger.load_state_dict(values)
        self.clients.keys = {n: str(k) for n, k in values.get("keys", {}).items()}
        self.clients.settled = dict(values.get("model", {}))

    def summary(self) -> None:
        """Log what will run."""
        sampled = self.fraction_train, self.min_train_nodes, self.seed
        log(INFO, "\t├──> %s", type(self).__name__)
        log(INFO, "\t├──> Sampling: %.3g, at least %d nodes, seed %d", *sampled)
        log(INFO, "\t└──> Mean: %s", self.weighting)
