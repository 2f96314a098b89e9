"""What all strategies have in common.

Clients are known by name and not by node id, sampling is seeded, replies are checked,
means have a fixed order, bytes are counted, and the state can be saved.
"""

import inspect
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Any, ClassVar, Self, cast

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

from strategies.server.participants import Participants
from strategies.server.replies import (
    Arrays,
    InvalidReplyError,
    check_arrays,
    check_metrics,
    count_bytes,
    half,
    mean,
    single_metrics,
    to_record,
)
from task.settings import Settings, SettingsError, require

WEIGHTINGS = ("uniform", "examples")
TRANSPORTS = ("float32", "float16")


class BaseStrategy(Participants, FlowerFedAvg):
    """The base of all strategies: sample clients, average what they share.

    Parameters
    ----------
    fraction_train : float, default 1.0
        Share of the known clients that train in a round, in (0, 1]; rounded down.
    min_train_nodes : int, default 1
        The least number of clients that train in a round.
    min_available_nodes : int, default 1
        Wait until so many clients are there.
    weighting : {"uniform", "examples"}, default "uniform"
        Weights of the mean: all equal, or the number of training examples.
    seed : int, default 0
        Who is sampled follows from the seed, the round and the clients' names alone.
    checkpoint_every : int, default 0
        Rounds between two checkpoints (the caller writes them); 0 means none.
    transport : {"float32", "float16"}, default "float32"
        How float32 arrays that are averaged travel, in both directions. The server
        itself keeps float32.

    Raises
    ------
    SettingsError
        If a value is out of its range.
    """

    # Whether only the last round is evaluated, whatever the settings say.
    evaluated_once: ClassVar[bool] = False

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_available_nodes: int = 1,
        weighting: str = "uniform",
        seed: int = 0,
        checkpoint_every: int = 0,
        transport: str = "float32",
    ) -> None:
        require(0 < fraction_train <= 1, "fraction-train", fraction_train, "in (0, 1]")
        require(min_train_nodes >= 1, "min-train-nodes", min_train_nodes, "at least 1")
        require(
            min_available_nodes >= 1,
            "min-available-nodes",
            min_available_nodes,
            "at least 1",
        )
        require(weighting in WEIGHTINGS, "weighting", weighting, "uniform or examples")
        require(seed >= 0, "seed", seed, "at least 0")
        allowed = " or ".join(TRANSPORTS)
        require(transport in TRANSPORTS, "transport", transport, allowed)
        super().__init__(
            fraction_train=fraction_train,
            min_train_nodes=min_train_nodes,
            min_available_nodes=min_available_nodes,
        )
        self.weighting = weighting
        self.seed = seed
        self.checkpoint_every = checkpoint_every
        self.transport = transport
        # Tells clients one run from another; set by the caller, kept by checkpoints.
        self.run_token = ""
        # Last round of a checkpoint that was really written; set by the caller.
        self.checkpointed = 0
        self.participants = {}
        self.refusals = {}
        self.client_metrics: dict[str, dict[str, float]] = {}
        self.acknowledged: dict[str, int] = {}
        # Of the last round: clients' names, and why their replies did not count.
        self.rejections: list[tuple[str, str]] = []
        self.evaluation_rejections: list[tuple[str, str]] = []
        # Names of the clients from which nothing came.
        self.silent: list[str] = []
        # Replies that counted in the last evaluation.
        self.evaluated: list[Message] = []
        self._asked: set[int] = set()
        self._server_round = 0
        self._expected: dict[str, ArrayRecord] = {}
        self._bytes_down = 0

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return the strategy with its arguments taken from settings.

        Parameters
        ----------
        settings : mapping
            All settings; an argument ``fraction_train`` is the setting
            ``fraction-train``.

        Returns
        -------
        BaseStrategy
            The strategy.
        """
        names = {
            parameter.name
            for base in cls.__mro__
            if issubclass(base, BaseStrategy)
            for parameter in inspect.signature(base.__init__).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        given = {name: name.replace("_", "-") for name in names}
        arguments: dict[str, Any] = {
            name: settings[key] for name, key in given.items() if key in settings
        }
        return cls(**arguments)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the arrays to start from: those of the first client.

        Parameters
        ----------
        grid : Grid
            The grid.

        Returns
        -------
        ArrayRecord
            The shared part of the common initial model.

        Raises
        ------
        SettingsError
            If no client answers.
        """
        for node in self.identify(grid):
            replies = self.query_arrays(grid, [node], {})
            if replies:
                return replies[0][1]
        raise SettingsError(
            "no client has told its initial arrays; the clients' logs say why"
        )

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Sample the nodes that train in a round.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        nodes : list of int
            Nodes to choose from, in a fixed order.

        Returns
        -------
        list of int
            The sampled nodes, in the same order.

        Raises
        ------
        SettingsError
            If the fraction samples nobody.
        """
        count = int(self.fraction_train * len(nodes) + 1e-9)
        # Later, when nodes have left, one goes on alone.
        if server_round == 1 and count == 0 and self.min_train_nodes <= 1 and nodes:
            raise SettingsError(
                f"fraction-train is {self.fraction_train}: of {len(nodes)} clients it "
                f"samples nobody; it must be at least {1 / len(nodes):.4g}"
            )
        count = min(max(count, self.min_train_nodes), len(nodes))
        rng = np.random.default_rng([self.seed, 0x5A3B, server_round])
        chosen = sorted(rng.choice(len(nodes), count, replace=False))
        return [nodes[i] for i in chosen]

    # Training

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what one client is sent.

        Parameters
        ----------
        node : int
            The client's node.
        arrays : ArrayRecord
            The shared arrays.
        config : ConfigRecord
            The config, with ``server-round``.

        Returns
        -------
        RecordDict
            ``arrays`` and ``config``, which tells the client its last round that
            counted and the round that a resume would go back to.
        """
        own = config.copy()
        if self.run_token:
            own["run"] = self.run_token
        server_round = int(cast(int, config["server-round"]))
        own["acknowledged-round"] = self.acknowledged.get(self.name_of(node), 0)
        own["checkpoint-round"] = (
            self.checkpointed
            if self.checkpoint_every or self.checkpointed
            else server_round - 1
        )
        return RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})

    def _messages(
        self,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        kind: str,
    ) -> list[Message]:
        config["server-round"] = server_round
        group = str(server_round)
        messages = [
            Message(self.content(n, arrays, config), n, kind, group_id=group)
            for n in nodes
        ]
        self._asked, self._server_round = set(nodes), server_round
        self._bytes_down = sum(count_bytes(message) for message in messages)
        return messages

    def _as_sent(self, arrays: ArrayRecord) -> ArrayRecord:
        return half(arrays) if self.transport == "float16" else arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and send them the shared arrays.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        arrays : ArrayRecord
            The shared arrays.
        config : ConfigRecord
            Passed on; gets ``server-round``.
        grid : Grid
            The grid.

        Returns
        -------
        list of Message
            One for each sampled client, in the order of the clients' names.
        """
        nodes = self.sample(server_round, self.identify(grid))
        arrays = self._as_sent(arrays)
        self._expected = {self.arrayrecord_key: arrays}
        return self._messages(nodes, arrays, config, server_round, MessageType.TRAIN)

    def _unanswered(self, replies: Iterable[Message]) -> list[str]:
        """Return the names of the asked clients from which nothing came."""
        came = {reply.metadata.src_node_id for reply in replies}
        return sorted(map(self.name_of, self._asked - came))

    def valid_replies(
        self, replies: Iterable[Message], check: Callable[[Message], object]
    ) -> tuple[list[Message], list[tuple[str, str]]]:
        """Return the replies that count, in the order of the clients' names.

        What fails is logged with the client's name and the reason.

        Parameters
        ----------
        replies : iterable of Message
            What came back.
        check : callable
            Raises `InvalidReplyError` for a reply that must not count.

        Returns
        -------
        valid : list of Message
            At most one a client that was asked.
        rejections : list of (str, str)
            Names of clients whose replies do not count, and why.
        """
        rejections: list[tuple[str, str]] = []
        valid: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error() and node not in self._asked:
                # The SuperLink's word, under its own id, that a node has left: that
                # client has not answered.
                log(INFO, "a client has not answered: %s", reply.error.reason)
                continue
            try:
                if node not in self._asked:
                    raise InvalidReplyError("comes from a node that was not asked")
                if node in valid:
                    raise InvalidReplyError("comes twice")
                if reply.has_error():
                    raise InvalidReplyError(f"is an error: {reply.error.reason}")
                check(reply)
                valid[node] = reply
            except InvalidReplyError as error:
                reason = " ".join(str(error).split())
                log(INFO, "reply of client %s %s", self.name_of(node), reason)
                rejections.append((self.name_of(node), reason))
        if rejections:
            name, reason = rejections[0]
            count = len(rejections)
            log(
                WARNING,
                "%d replies rejected; that of client %s %s",
                count,
                name,
                reason,
            )
        order = sorted(valid, key=lambda node: (self.name_of(node), node))
        return [valid[node] for node in order], rejections

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the shared arrays of the valid replies.

        Parameters
        ----------
        server_round : int
            The round.
        replies : iterable of Message
            What came back.

        Returns
        -------
        arrays : ArrayRecord or None
            The mean; None (the old arrays stay) if no reply is valid.
        metrics : MetricRecord
            ``train-loss`` (mean over examples), ``clients``, ``rejected``,
            ``unanswered``, ``bytes-down`` and ``bytes-up``.
        """
        replies = list(replies)
        self.silent = self._unanswered(replies)
        bytes_up = sum(count_bytes(reply) for reply in replies)
        valid, self.rejections = self.valid_replies(replies, self.check_train_reply)
        metrics: dict[str, float] = {
            "clients": len(valid),
            "rejected": len(self.rejections),
            "unanswered": len(self.silent),
            "bytes-down": self._bytes_down,
            "bytes-up": bytes_up,
        }
        arrays = self.aggregate(server_round, valid) if valid else None
        if arrays is not None:
            metrics |= self.train_metrics(valid)
            for reply in valid:
                name = self.name_of(reply.metadata.src_node_id)
                self.acknowledged[name] = server_round
        return arrays, single_metrics(metrics)

    def check_train_reply(self, reply: Message) -> None:
        """Raise `InvalidReplyError` unless a training reply can be averaged.

        One that tells its round (``server-round``) must be of this round.

        Parameters
        ----------
        reply : Message
            A reply with content.
        """
        for key, expected in self._expected.items():
            check_arrays(reply, key, expected)
        metrics = check_metrics(reply, ("num-examples", "train-loss"))
        # A liar can say what it likes; this is for content that is sent again.
        told = metrics.get("server-round", self._server_round)
        if told != self._server_round:
            raise InvalidReplyError(
                f"is of round {told:g}, not of round {self._server_round}"
            )

    def train_metrics(self, replies: list[Message]) -> dict[str, float]:
        """Return a round's metrics from the valid replies.

        Parameters
        ----------
        replies : list of Message
            At least one.

        Returns
        -------
        dict of str to float
            ``train-loss``, the mean over examples.
        """
        metrics = [check_metrics(reply, ()) for reply in replies]
        weights = np.array([m["num-examples"] for m in metrics])
        losses = np.array([m["train-loss"] for m in metrics])
        total = weights.sum()
        return {"train-loss": float(losses @ weights / total) if total else 0.0}

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Return the new shared arrays from checked replies; the mean by default.

        Parameters
        ----------
        server_round : int
            The round.
        replies : list of Message
            At least one, in the order of the clients' names.

        Returns
        -------
        ArrayRecord or None
            The new arrays; None keeps the old ones.
        """
        arrays = mean(self.weighted(replies, self.arrayrecord_key))
        return None if arrays is None else to_record(arrays)

    def weighted(
        self, replies: list[Message], key: str
    ) -> Iterable[tuple[float, Arrays]]:
        """Yield the weight and the arrays of one reply after the other.

        Parameters
        ----------
        replies : list of Message
            Checked replies.
        key : str
            Key of the ArrayRecord.

        Yields
        ------
        float, dict of str to ndarray
            1, or the number of examples; the arrays.
        """
        for reply in replies:
            metrics = check_metrics(reply, ())
            weight = 1.0 if self.weighting == "uniform" else metrics["num-examples"]
            arrays = check_arrays(reply, key, self._expected[key])
            if self.transport == "float16":
                arrays = {
                    n: a.astype(np.float32) if a.dtype == np.float16 else a
                    for n, a in arrays.items()
                }
            yield weight, arrays

    # Evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the shared arrays to all clients, sampled or not.

        Parameters
        ----------
        server_round : int
            The round.
        arrays : ArrayRecord
            The shared arrays.
        config : ConfigRecord
            Passed on; gets ``server-round``.
        grid : Grid
            The grid.

        Returns
        -------
        list of Message
            One for each client, in the order of the clients' names.
        """
        nodes = self.identify(grid)
        arrays = self._as_sent(arrays)
        return self._messages(nodes, arrays, config, server_round, MessageType.EVALUATE)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the plain mean of every metric over the clients.

        Parameters
        ----------
        server_round : int
            The round.
        replies : iterable of Message
            What came back; clients without test examples do not count.

        Returns
        -------
        MetricRecord or None
            The means, ``evaluated`` (how many clients), ``evaluation-rejected``,
            ``evaluation-unanswered``, ``bytes-down`` and ``bytes-up``; None if no reply
            is valid. ``client_metrics`` keeps each client's own.
        """
        replies = list(replies)
        bytes_up = sum(count_bytes(reply) for reply in replies)
        valid, self.evaluation_rejections = self.valid_replies(
            [r for r in replies if not _has_no_examples(r)],
            lambda reply: check_metrics(reply, ("num-examples", "loss")),
        )
        self.evaluated = valid
        unanswered = self._unanswered(replies)
        if unanswered:
            log(WARNING, "not evaluated, no reply of clients %s", ", ".join(unanswered))
        if not valid:
            return None
        collected: dict[str, list[float]] = {}
        for reply in valid:
            metrics = check_metrics(reply, ())
            name = self.name_of(reply.metadata.src_node_id)
            self.client_metrics[name] = metrics
            for metric, value in metrics.items():
                collected.setdefault(metric, []).append(value)
        del collected["num-examples"]
        means = {metric: float(np.mean(v)) for metric, v in collected.items()}
        means |= {
            "evaluated": len(valid),
            "evaluation-rejected": len(self.evaluation_rejections),
            "evaluation-unanswered": len(unanswered),
            "bytes-down": self._bytes_down,
            "bytes-up": bytes_up,
        }
        return single_metrics(means)

    # State

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return all that a resumed run needs besides the shared arrays.

        Who is sampled follows from seed and round, so there is no random state.

        Returns
        -------
        arrays : dict of str to ndarray
            None here; subclasses add theirs.
        values : dict
            What JSON can hold.
        """
        return {}, {"acknowledged": self.acknowledged, "run": self.run_token}

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state.

        Parameters
        ----------
        arrays, values
            As `state_dict` returned them.
        """
        self.acknowledged = {n: int(r) for n, r in values["acknowledged"].items()}
        self.run_token = str(values["run"])

    def summary(self) -> None:
        """Log what will run."""
        log(INFO, "\t├──> %s", type(self).__name__)
        log(
            INFO,
            "\t├──> Sampling: fraction %.3g, at least %d nodes, seed %d",
            self.fraction_train,
            self.min_train_nodes,
            self.seed,
        )
        log(INFO, "\t└──> Mean: %s", self.weighting)


def _has_no_examples(reply: Message) -> bool:
    if reply.has_error():
        return False
    records = reply.content.metric_records.values()
    return any(record.get("num-examples") == 0 for record in records)
