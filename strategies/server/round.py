"""A round: who takes part, the messages to them, and their replies.

Replies are checked before they count, and combined in the order of the clients'
names.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import Layout, RowReply, entries_of, size_of, values_of
from flwr_frl.common.errors import SettingsError, require, unknown
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server import aggregation as rules
from flwr_frl.strategies.server.optimizer import optimizer_step
from flwr_frl.strategies.server.replies import (
    REPLY_ALLOWANCE,
    REPLY_FACTOR,
    Arrays,
    InvalidReplyError,
    RunningMean,
    check_values,
    checked_arrays,
    decompressed,
    error_reason,
    is_valid_row,
)

if TYPE_CHECKING:
    from flwr_frl.strategies.base import Strategy

# Distinguish the draws of clients that train, and that are evaluated, from others of
# the same seed.
SAMPLED, EVALUATED = 0x5A3B, 0xE7A1
# Key of the last round's change, for `centered-clip`, in the strategy's state.
LAST_CHANGE = "last-change"
# Key of the arrays that the server keeps for each client, in the strategy's state.
PERSONAL = "personal"


class NoMeanError(ArithmeticError):
    """All weights of a round's replies are 0; the old arrays stay."""


@dataclass
class Participation:
    """Sample clients without replacement, and wait for all of them.

    The sample follows from the seed, the round and the nodes' order alone.

    Parameters
    ----------
    fraction : float
        Fraction of the nodes, in [0, 1]; rounded down.
    least : int
        Minimum number of nodes, unless the fraction is 0.
    seed : int
        Seed of the sampling.
    label : int, default `SAMPLED`
        Distinguishes the draws from others of the same seed.

    Attributes
    ----------
    clients : int
        Number of clients that train in a round if all can be asked.
    """

    fraction: float
    least: int
    seed: int
    label: int = SAMPLED
    clients: int = field(default=0, init=False)

    # True if a round waits for the replies of all sampled clients.
    waits_for_all = True

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` if no client would be sampled.

        ``num_clients`` is the number of clients when the run begins.
        """
        nobody = int(self.fraction * num_clients + 1e-9) == 0
        if nobody and self.least <= 1 and num_clients:
            raise SettingsError(
                f"fraction-train is {self.fraction}: of {num_clients} clients it "
                f"samples nobody; expected at least {1 / num_clients:.4g}"
            )

    def set_rounds(self, num_rounds: int) -> None:
        """Set the number of rounds of the run."""

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes that train in a round (from 1), in their given order.

        ``others`` is the number of participants that cannot be asked now; they count
        towards the fraction.
        """
        every = len(nodes) + others
        share = max(int(self.fraction * every + 1e-9), self.least)
        self.clients = min(share, every) if self.fraction else 0
        count = min(self.clients, len(nodes))
        rng = np.random.default_rng([self.seed, self.label, server_round])
        return [nodes[i] for i in sorted(rng.choice(len(nodes), count, replace=False))]

    def open(self, round: "Round", messages: list[Message], grid: Grid) -> None:
        """Prepare the grid for a round whose messages are about to be sent.

        Parameters
        ----------
        round : Round
            The round.
        messages : list of Message
            The messages.
        grid : Grid
            The grid that will send them.
        """

    def fewest_replies(self, sampled: int) -> int:
        """Return how many replies of the sampled clients may close a round."""
        return sampled

    def close(
        self, round: "Round", arrays: ArrayRecord | None
    ) -> dict[str, float | list[int]]:
        """Close a round after its replies were combined, and return its metrics.

        ``arrays`` are the new shared arrays; None if no reply has counted.
        """
        return {}

    @property
    def updates(self) -> dict[str, int] | None:
        """Number of each client's replies that counted, by name, if it is recorded."""
        return None

    def byzantine_share(self, fraction: float, count: int) -> float:
        """Return the assumed Byzantine share of ``count`` replies.

        ``fraction`` is that of the clients.
        """
        return fraction

    def sent_to(self, node: int, round: "Round") -> Arrays:
        """Return the shared arrays that a node has trained for a round."""
        return round.centre()

    def rebased(self, node: int, arrays: Arrays) -> Arrays:
        """Return a reply's shared arrays relative to the current version."""
        return arrays


@dataclass(eq=False, repr=False)
class Reply:
    """A client's checked reply.

    Parameters
    ----------
    strategy : Strategy
        The strategy.
    client : str
        The client's name.
    node : int
        Its node.
    message : Message
        The reply as Flower's message.
    size : int
        Its number of bytes when it arrived.
    metrics : dict of str to float
        Its metrics, ``num-examples`` and ``train-loss`` among them; empty for an
        evaluation without test examples.
    decoded : dict of str to mapping
        The expected arrays, by key of the record. They are views of the message's
        bytes.
    unused : str
        Why the client could not use its saved state; empty if it could.
    """

    _strategy: "Strategy"
    client: str
    node: int
    message: Message
    size: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    decoded: dict[str, Any] = field(default_factory=dict)
    unused: str = ""

    def shared(self) -> Arrays:
        """Return its shared arrays, for reading only.

        They are without ``personal`` ones. In asynchronous rounds they are moved to the
        current version.
        """
        run, arrays = self._strategy._run, self.decoded[keys.ARRAYS]
        if self._strategy._personal:
            names = run.round.personal
            arrays = {n: a for n, a in arrays.items() if n not in names}
        return run.participation.rebased(self.node, arrays)

    def read(self) -> Arrays:
        """Return its arrays without copying them, for reading only."""
        return {**self.shared(), **self.decoded.get(keys.HEAD, {})}

    @cached_property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its arrays, by name, those that this client alone has received among them.

        They are writable copies, made at the first access.
        """
        return {name: array.copy() for name, array in self.read().items()}

    def metric(self, name: str, least: float = -math.inf) -> float:
        """Return a metric; raise `InvalidReplyError` if it is missing or too small."""
        if name not in self.metrics:
            raise InvalidReplyError(f"lacks the metric {name!r}")
        if self.metrics[name] < least:
            raise InvalidReplyError(f"has {name!r} below {least:g}")
        return self.metrics[name]

    def attachment(self, name: str) -> object:
        """Return the attachment of this name; None if there is none."""
        if isinstance(self.message, RowReply) and self.message.is_unread:
            return self.message.attachments.get(name)
        record = entries_of(self.message.content).get(keys.BYTES)
        return record.get(name) if isinstance(record, ConfigRecord) else None


@dataclass(eq=False, repr=False)
class Round:
    """A round of training or of evaluation.

    Parameters
    ----------
    strategy : Strategy
        The strategy.
    number : int, default 0
        The round, from 1.
    record : ArrayRecord, optional
        The shared arrays.
    config : ConfigRecord, optional
        Config that is sent to all clients; `Strategy.begin` may add to it.
    nodes : sequence of int
        Nodes to ask, in the order of their clients' names. Those that still owe a reply
        are not asked.
    kind : str, default "train"
        Type of the messages. Replies to all others contain metrics only.
    expected : dict of str to ndarray or None
        Arrays whose names, shapes and dtypes replies must have, by default those of
        ``arrays``; `Strategy.begin` may set it.
    returns_own : bool
        True if clients also return the arrays that they alone receive; `Strategy.begin`
        may set it.
    replies : list of Reply
        The valid replies, in the order of the clients' names.
    like : dict of str to ArrayRecord
        All arrays that replies must resemble, by key of the record.
    layout : Layout or None
        The layout of these arrays; None unless all are float32, or if clients send
        compressed changes.
    attached_bytes : int
        Number of expected bytes besides arrays and numbers.
    asked : dict of int to int
        Nodes that are asked, and the round of the message that each answers.
    rejections : list of (str, str)
        Clients whose replies were rejected, with the reason.
    silent : list of str
        Clients that were asked and did not reply.
    unused : dict of str to str
        Clients that could not use their saved state, with the reason.
    bytes_down, bytes_up : int
        Bytes of all messages to clients, and of the replies until the round closed.
    running : RunningMean or None
        The mean of the replies so far, if they are averaged as they arrive.
    """

    _strategy: "Strategy"
    number: int = 0
    record: ArrayRecord = field(default_factory=ArrayRecord)
    config: ConfigRecord = field(default_factory=ConfigRecord)
    nodes: Sequence[int] = ()
    kind: str = MessageType.TRAIN
    expected: Arrays | None = None
    returns_own: bool = True
    replies: list[Reply] = field(default_factory=list)
    like: dict[str, ArrayRecord] = field(default_factory=dict)
    layout: Layout | None = None
    attached_bytes: int = 0
    asked: dict[int, int] = field(default_factory=dict)
    rejections: list[tuple[str, str]] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    running: RunningMean | None = None

    @cached_property
    def personal(self) -> list[str]:
        """Names of the arrays that the server keeps for each client."""
        parts = self._strategy._personal
        return [n for n in self.record if any(f".{part}" in f".{n}" for part in parts)]

    @property
    def layers(self) -> list[str]:
        """Beginnings of the arrays' names up to the last dot, in order."""
        return [*dict.fromkeys(n[: n.rfind(".") + 1] or n for n in self.record)]

    def check_personal(self) -> None:
        """Raise `SettingsError` if a part of ``personal`` is in no array's name."""
        for part in self._strategy._personal:
            if not any(f".{part}" in f".{name}" for name in self.record):
                places = "the names in initial_arrays"
                raise unknown("array", part, self.layers, places, code="personal")

    # Interface for algorithms.

    @cached_property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The shared arrays, by name; for reading only."""
        return {name: values_of(array) for name, array in self.record.items()}

    @property
    def clients(self) -> list[str]:
        """Names of the clients that are asked, in order."""
        return sorted(map(self._strategy._run.clients.name_of, self.asked))

    def keep(self, *names: str) -> None:
        """Require shared arrays that clients receive, but do not return."""
        self.need(*names)
        self.expected = {n: a for n, a in self.arrays.items() if n not in names}

    def stack(self, name: str) -> npt.NDArray[Any]:
        """Return an array of the replies, stacked in the order of `replies`."""
        return np.stack([reply.read()[name] for reply in self.replies])

    def need(self, *names: str) -> None:
        """Raise `SettingsError` if the shared arrays lack one of these."""
        if missing := [name for name in names if name not in self.record]:
            raise SettingsError(
                f"initial_arrays lacks {', '.join(map(repr, missing))}, which the "
                "algorithm sends beside the model; pass the arrays that "
                "initialize(grid) returns, with flwr_frl.clients.client_app:app",
                "initial-arrays",
            )

    def mean(self, replies: list[Reply] | None = None) -> Arrays:
        """Return the mean of replies, or the result of the rule of ``aggregation``.

        It is weighted by ``weighting``, and private with ``server-dp-noise``. A
        ``server-optimizer`` makes a step along its change.

        Parameters
        ----------
        replies : list of Reply, optional
            Some of the replies, by default all.

        Returns
        -------
        dict of str to ndarray
            By name; the dict may be changed.

        Raises
        ------
        NoMeanError
            If all weights are 0. Without a handler, the old arrays stay.
        """
        if replies is not None:
            valid = self._strategy._traits.uses_mean != "only"
            allowed = 'all of them, as uses_mean="only" promises'
            require(valid, "the replies of round.mean", replies, allowed)
        mean = self._mean if replies is None else self._combined(replies)
        if mean is None:
            raise NoMeanError("all weights of the replies are 0")
        if self._strategy._personal:
            # Clients that have not trained yet receive the initial personal arrays.
            mean = mean | {name: self.arrays[name] for name in self.personal}
        return dict(mean)

    @cached_property
    def _mean(self) -> Arrays | None:
        """The mean of all replies, computed once, as it may change the state."""
        strategy = self._strategy
        mean = self.running.result() if self.running else self._combined(self.replies)
        if mean is not None and strategy.settings.server_optimizer != "none":
            about = strategy.settings, strategy.state, self.centre()
            mean = optimizer_step(*about, mean)
        return mean

    def _combined(self, replies: list[Reply]) -> Arrays | None:
        """Return the result of the rule of ``aggregation`` or of private averaging."""
        strategy, centre = self._strategy, self.centre()
        arrays = [reply.shared() for reply in replies]
        if strategy._run.privacy:
            return strategy._run.privacy.mean(self.clients, arrays, centre)
        combine = partial(strategy._apply_rule, strategy.weights(replies), arrays)
        if strategy.settings.aggregation != rules.CENTERED_CLIP:
            return combine(centre)
        last = strategy.state.get(LAST_CHANGE, {})
        moved, change = rules.about_last_change(combine, centre, last)
        if moved is not None:
            strategy.state[LAST_CHANGE] = change
        return moved

    def centre(self) -> Arrays:
        """Return the arrays from which replies differ by the clients' changes."""
        sent = self.like[keys.ARRAYS].items()
        arrays = {n: values_of(array) for n, array in sent if n not in self.personal}
        if self._strategy._traits.replies_are_changes:
            return {name: np.zeros_like(array) for name, array in arrays.items()}
        return arrays

    # Messages and replies.

    @property
    def largest_reply(self) -> float:
        """Limit of a reply in bytes: twice the expected size, plus 16 MiB.

        Clients of other apps may return the model that they have tested.
        """
        trains = self.kind == MessageType.TRAIN
        like = list(self.like.values()) if trains else [self.record]
        expected = sum(map(size_of, like)) + self.attached_bytes
        return REPLY_FACTOR * expected + REPLY_ALLOWANCE

    def accept(self, message: Message) -> Reply:
        """Return a message's reply; raise `InvalidReplyError` if it cannot count.

        It must have the expected arrays, finite numbers, no other records, a limited
        size, and the number of this round; and the algorithm must accept it.
        """
        strategy, name_of = self._strategy, self._strategy._run.clients.name_of
        layout = self.layout if self.like.keys() == {keys.ARRAYS} else None
        if isinstance(message, RowReply) and is_valid_row(message, layout):
            arrays, node = message.arrays, message.node
            values = arrays.rows.sizes[arrays.row], message.metrics
            about = strategy, name_of(node), node, message
            reply = Reply(*about, *values, {keys.ARRAYS: arrays})
        elif message.has_error():
            raise InvalidReplyError(f"is an error: {error_reason(message)}")
        else:
            node, size = message.metadata.src_node_id, size_of(message.content)
            reply = Reply(strategy, name_of(node), node, message, size)
            self._decode(reply)
        if self.kind != MessageType.TRAIN:
            return reply
        # Detects repeated content; a Byzantine client can report any round.
        expected = self.asked.get(reply.node, self.number)
        if (reported := reply.metrics.get(keys.SERVER_ROUND, expected)) != expected:
            raise InvalidReplyError(
                f"is of round {reported:g}, not of round {expected}"
            )
        changes = strategy._traits.replies_are_changes
        if changes and reply.metrics.get(keys.IS_CHANGE) != 1:
            raise InvalidReplyError(
                f"does not say that it is a change, which {type(strategy).__name__} "
                "adds to what it sent; a client must send the difference of its arrays "
                f"from the received ones, and {keys.IS_CHANGE!r}: 1 in its metrics"
            )
        if strategy.settings.weighting == "examples":
            reply.metric(keys.NUM_EXAMPLES)
        strategy.check_reply(reply)
        return reply

    def _decode(self, reply: Reply) -> None:
        """Check a reply's records, and read its metrics and arrays."""
        run, trains = self._strategy._run, self.kind == MessageType.TRAIN
        message, metrics = reply.message, []
        # Numbers and attachments have no expected names, so their size is limited.
        if reply.size > REPLY_ALLOWANCE and reply.size > (most := self.largest_reply):
            raise InvalidReplyError(f"has {reply.size:,} bytes, more than {most:,.0f}")
        for key, record in [*entries_of(message.content).items()]:
            is_array = isinstance(record, ArrayRecord)
            if key == keys.PROPERTIES and isinstance(record, ConfigRecord):
                unused = record.get(keys.UNUSED_STATE)
                reply.unused = one_line(unused) if isinstance(unused, str) else ""
            if isinstance(record, MetricRecord):
                metrics.append(entries_of(record))
            elif is_array and not trains:
                # Evaluations of another app may return arrays. Replies stay in memory
                # until the next evaluation.
                del message.content[key]
            elif key not in (self.like if is_array else (keys.BYTES, keys.PROPERTIES)):
                raise InvalidReplyError(
                    f"has the record {one_line(repr(key), 120)}, for which nobody asked"
                )
        for key, like in self.like.items():
            if run.uploads and key == keys.ARRAYS:
                data = reply.attachment(keys.MESSAGE)
                about = data, like, run.participation.sent_to(reply.node, self)
                reply.decoded[key] = decompressed(message, *about, run.uploads)
            else:
                reply.decoded[key] = checked_arrays(message, key, like)
        # Without test examples there are no metrics: the loss may be NaN.
        if not trains and any(m.get(keys.NUM_EXAMPLES) == 0 for m in metrics):
            return
        if len(metrics) > 1:
            raise InvalidReplyError(f"has {len(metrics)} metric records, not 1")
        for record in metrics:
            values = check_values(record).items()
            # Lists are not averaged.
            reply.metrics = {n: v for n, v in values if isinstance(v, (int, float))}

    def is_valid(self, message: Message) -> bool:
        """Return whether a reply can count."""
        try:
            self.accept(message)
        except InvalidReplyError:
            return False
        return True

    def close(self, messages: Iterable[Message]) -> None:
        """Store the valid replies, at most one a client, in the order of names.

        Messages come in any order, and each is checked as it arrives. A rejected one is
        logged with the client's name and the reason. With a running mean, messages
        must come in the order of names.
        """
        clients = self._strategy._run.clients
        order = clients.in_order(self.asked)
        valid: dict[int, Reply] = {}
        came = set[int]()
        for message in messages:
            if isinstance(message, RowReply):
                node = message.node
            else:
                node = message.metadata.src_node_id
            name = clients.name_of(node)
            came.add(node)
            if node not in self.asked and message.has_error():
                # The SuperLink reports, under its own id, that a node has left.
                log(INFO, "a client has not answered: %s", error_reason(message))
                continue
            try:
                if node not in self.asked:
                    raise InvalidReplyError("comes from a node that was not asked")
                if node in valid:
                    raise InvalidReplyError("comes twice")
                valid[node] = reply = self.accept(message)
                self.bytes_up += reply.size
                if self.running:
                    self._average(self.running, reply)
            except InvalidReplyError as error:
                if message.has_content():
                    self.bytes_up += size_of(message.content)
                self.rejections.append((name, one_line(error)))
                text = "reply of client %s %s"
                log(WARNING, text, clients.label(name), one_line(error))
                continue
            if reply.unused:
                self.unused[name] = reply.unused
                text = "client %s does not continue from its last state: %s"
                log(WARNING, text, clients.label(name), reply.unused)
        self.silent = [clients.name_of(node) for node in order if node not in came]
        self.replies = [valid[node] for node in order if node in valid]

    def _average(self, running: RunningMean, reply: Reply) -> None:
        """Add a valid reply to the running mean, and drop its arrays."""
        (weight,) = self._strategy.weights([reply])
        running.add(weight, reply.decoded.pop(keys.ARRAYS))
        message = reply.message
        if not (isinstance(message, RowReply) and message.is_unread):
            del message.content[keys.ARRAYS]
        elif len(message.arrays.rows.matrix.rows) == 1:
            # The rows of several clients are in memory until the last is averaged.
            del message.arrays.rows.matrix

    @property
    def failure(self) -> str:
        """Why the first client has no valid reply; empty if all have one."""
        failed = [*self.rejections, *((name, "no answer") for name in self.silent)]
        label = self._strategy._run.clients.label
        return f"client {label(failed[0][0])}: {failed[0][1]}" if failed else ""
