"""One exchange of a round: who was asked, what is expected, and which replies count."""

from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.common import log

from flwr_frl.strategies.server.checks import InvalidReplyError, one_line
from flwr_frl.strategies.server.replies import (
    Arrays,
    check_arrays,
    check_metrics,
    count_bytes,
    largest_reply,
    record_bytes,
    unused_state,
)
from flwr_frl.task.messages import (
    BYTES,
    EXAMPLE_EPSILON,
    NUM_EXAMPLES,
    PROPERTIES,
    SERVER_ROUND,
)


class _Decoded(NamedTuple):
    """The arrays of a record as NumPy's, and the record's own of which they are."""

    held: tuple[Array, ...]
    arrays: Arrays


class PendingRound:
    """Messages of one kind in one round, and their replies.

    Parameters
    ----------
    server_round : int, default 0
        The round.
    name_of : callable, default str
        A node's name.

    Attributes
    ----------
    expected : dict of str to ArrayRecord
        What the replies' records must be like, by key.
    attached_bytes : int
        How many bytes are expected besides arrays and numbers.
    rejections : list of (str, str)
        Clients whose replies do not count, and why.
    silent : list of str
        Clients that were asked and from which nothing came.
    unused : dict of str to str
        Clients that could not use what they had kept, and why.
    bytes_down, bytes_up : int
        Bytes of all messages to the clients, and of the replies that came before the
        round closed.
    """

    def __init__(
        self, server_round: int = 0, name_of: Callable[[int], str] = str
    ) -> None:
        self.server_round = server_round
        self.name_of = name_of
        self.asked: set[int] = set()
        self.expected: dict[str, ArrayRecord] = {}
        self.attached_bytes = 0
        self.rejections: list[tuple[str, str]] = []
        self.silent: list[str] = []
        self.unused: dict[str, str] = {}
        self.bytes_down = self.bytes_up = 0
        # Views of what the replies themselves hold, and whose they are.
        self._arrays: WeakKeyDictionary[Message, dict[str, _Decoded]]
        self._arrays = WeakKeyDictionary()

    def expect(self, key: str, like: ArrayRecord) -> None:
        """Expect arrays of these names, shapes and dtypes under a key."""
        self.expected[key] = like
        self._arrays.clear()

    def ask(self, messages: list[Message]) -> list[Message]:
        """Note who is asked, count the bytes, and return the same messages."""
        self.asked = {message.metadata.dst_node_id for message in messages}
        self.bytes_down = sum(count_bytes(message) for message in messages)
        return messages

    @property
    def largest_reply(self) -> float:
        """How many bytes a reply may have: twice what is expected, and 16 MiB."""
        arrays = sum(map(record_bytes, self.expected.values()))
        return largest_reply(arrays + self.attached_bytes)

    def check_content(self, reply: Message) -> None:
        """Raise `InvalidReplyError` if a reply has records that nobody asked for.

        Or if it is too large: its numbers and attachments have no names to go by.
        """
        for key, record in reply.content.items():
            arrays = isinstance(record, ArrayRecord) and key not in self.expected
            own = isinstance(record, ConfigRecord) and key not in (BYTES, PROPERTIES)
            if arrays or own:
                raise InvalidReplyError(
                    f"has the record {one_line(repr(key), 120)}, for which nobody asked"
                )
        size = count_bytes(reply)
        if size > (most := self.largest_reply):
            raise InvalidReplyError(f"has {size:,} bytes, more than {most:,.0f}")

    def check(self, reply: Message) -> None:
        """Raise `InvalidReplyError` unless a reply is of this round and as expected."""
        for key in self.expected:
            self.arrays(reply, key)
        # A liar can say what it likes; this is for content that is sent again.
        said = self._round_of(reply)
        if said != self.server_round:
            raise InvalidReplyError(
                f"is of round {said:g}, not of round {self.server_round}"
            )

    def _round_of(self, reply: Message) -> float:
        """Return the round in which a reply was made, by its client's word."""
        return check_metrics(reply).get(SERVER_ROUND, self.server_round)

    def arrays(self, reply: Message, key: str) -> Arrays:
        """Return a reply's arrays under a key, in the expected order.

        They are checked once, and again where others have taken their place: wrappers
        such as Flower's of differential privacy clip what a reply holds.
        """
        known = self._arrays.setdefault(reply, {})
        record = reply.content.get(key)
        held = tuple(record.values()) if isinstance(record, ArrayRecord) else ()
        if key not in known or known[key].held != held:
            arrays = check_arrays(reply, key, self.expected[key])
            known[key] = _Decoded(held, arrays)
        return dict(known[key].arrays)

    def close(
        self, replies: Iterable[Message], check: Callable[[Message], object]
    ) -> list[Message]:
        """Return the replies that count, at most one a client, in the order of names.

        ``check`` raises `InvalidReplyError` for a reply that must not count. What fails
        is logged with the client's name and the reason.
        """
        replies = list(replies)
        came = {reply.metadata.src_node_id for reply in replies}
        self.silent = sorted(map(self.name_of, self.asked - came))
        self.bytes_up = sum(count_bytes(reply) for reply in replies)
        valid: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error() and node not in self.asked:
                # The SuperLink's word, under its own id, that a node has left: that
                # client has not answered.
                reason = one_line(reply.error.reason)
                log(INFO, "a client has not answered: %s", reason)
                continue
            try:
                if node not in self.asked:
                    raise InvalidReplyError("comes from a node that was not asked")
                if node in valid:
                    raise InvalidReplyError("comes twice")
                if reply.has_error():
                    raise InvalidReplyError(f"is an error: {reply.error.reason}")
                self.check_content(reply)
                check(reply)
                valid[node] = reply
                if reason := unused_state(reply):
                    self.unused[self.name_of(node)] = reason
            except InvalidReplyError as error:
                reason = one_line(error)
                log(INFO, "reply of client %s %s", self.name_of(node), reason)
                self.rejections.append((self.name_of(node), reason))
        if self.rejections:
            log(
                WARNING,
                "%d replies rejected; that of client %s %s",
                len(self.rejections),
                *self.rejections[0],
            )
        order = sorted(valid, key=lambda node: (self.name_of(node), node))
        return [valid[node] for node in order]

    @property
    def failure(self) -> str:
        """Why a reply does not count, of the first client; empty where all do."""
        silent = [(name, "no answer") for name in self.silent]
        return next((f"client {n}: {r}" for n, r in [*self.rejections, *silent]), "")

    def counts(self, prefix: str = "") -> dict[str, float]:
        """Return ``rejected`` and ``unanswered``, with a prefix before the names."""
        rejected, unanswered = len(self.rejections), len(self.silent)
        return {f"{prefix}rejected": rejected, f"{prefix}unanswered": unanswered}

    def sizes(self) -> dict[str, float]:
        """Return ``bytes-down`` and ``bytes-up``."""
        return {"bytes-down": self.bytes_down, "bytes-up": self.bytes_up}

    def names(self, replies: Iterable[Message]) -> list[str]:
        """Return the names of the clients that have sent replies, in their order."""
        return [self.name_of(reply.metadata.src_node_id) for reply in replies]

    def rounds(self, replies: Iterable[Message]) -> dict[str, int]:
        """Return the rounds in which replies were made, by their clients' names.

        A reply that a grid has held back, and that `check_train_reply` of a subclass
        accepts, is of an earlier round than this one.
        """
        return {
            self.name_of(reply.metadata.src_node_id): int(
                min(max(self._round_of(reply), 0), self.server_round)
            )
            for reply in replies
        }


def mean_loss(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return ``train-loss``, the mean over examples; nothing where nobody reports one.

    ``metrics`` are of one client each. A loss may be called ``train-loss``,
    ``train_loss`` or ``loss``.
    """
    said = [
        (m.get(NUM_EXAMPLES, 1.0), m[name])
        for m in metrics
        for name in [next((n for n in LOSSES if n in m), "")]
        if name
    ]
    if not said:
        return {}
    weights = np.array([weight for weight, _ in said])
    losses = np.array([loss for _, loss in said])
    total = weights.sum()
    return {"train-loss": float(losses @ weights / total) if total else 0.0}


# Ours, that of Flower's templates, and the plain one.
LOSSES = ("train-loss", "train_loss", "loss")


def mean_metrics(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the plain mean of every metric over the clients that report it.

    ``num-examples`` and each one's ε are left out, and what fewer than half of them
    report: nobody's invention gets into the rows.
    """
    metrics = list(metrics)
    collected: dict[str, list[float]] = {}
    for said in metrics:
        for name, value in said.items():
            collected.setdefault(name, []).append(value)
    for own in (NUM_EXAMPLES, EXAMPLE_EPSILON):
        collected.pop(own, None)
    return {
        name: float(np.mean(values))
        for name, values in collected.items()
        if 2 * len(values) >= len(metrics)
    }


def weighted_means(
    metrics: Iterable[Mapping[str, float]], declared: Iterable[float]
) -> dict[str, float]:
    """Return ``accuracy-weighted`` and ``loss-weighted``: means over all examples.

    They are of the clients that say them with their ``num-examples``, which count up to
    what a client has declared in the beginning.
    """
    found = {}
    pairs = list(zip(metrics, declared, strict=True))
    for name in ("accuracy", "loss"):
        said = [
            (min(m[NUM_EXAMPLES], most), m[name])
            for m, most in pairs
            if name in m and NUM_EXAMPLES in m
        ]
        total = sum(weight for weight, _ in said)
        if total:
            found[f"{name}-weighted"] = sum(w * value for w, value in said) / total
    return found
