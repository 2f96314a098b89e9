"""Secure aggregation on the server: each training message becomes four.

The strategy sends its messages and receives replies as usual, but the arrays of all
replies are their mean, which is all that the server learns of them.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid
from safetensors import SafetensorError

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import (
    MemoryArray,
    entries_of,
    fill,
    memory_record,
    message_like,
    reply_with,
)
from flwr_frl.common.files import PRIVATE, write_atomically
from flwr_frl.common.sealed import Arrays, seal, unseal
from flwr_frl.common.secure import messages as steps
from flwr_frl.common.secure.fixed_point import WORDS, Plan
from flwr_frl.common.secure.messages import SECURE, record_of
from flwr_frl.common.secure.primitives import Words
from flwr_frl.common.secure.protocol import FEWEST, Coordinator, RefusedError, demand
from flwr_frl.common.settings import (
    Checked,
    Settings,
    SettingsError,
    build,
    require,
    setting,
)
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.inbox import Closing, GridDecorator
from flwr_frl.strategies.server.replies import (
    InvalidReplyError,
    checked_arrays,
    reply_properties,
    rounded_to,
    size_of,
)

# Code of an error reply, as of Flower's for an app that has failed.
FAILED = 2
# When the steps must have ended, as fractions of the timeout of a round.
ENDS = {steps.KEYS: 0.15, steps.SHARES: 0.3, steps.MASKED: 0.85, steps.UNMASK: 1.0}
# File with the last mean, for runs that are killed before they have used it.
FILE = "secure-mean.safetensors"
UNUSED = {"secure-aggregation": (False,)}
# Other settings, and their only values with secure aggregation.
ONLY = {"aggregation": "mean", "transport": "float32", "initialization": "random"}


@dataclass(frozen=True)
class SecureSettings(Checked):
    """Settings of secure aggregation.

    Parameters
    ----------
    secure_aggregation : bool, default False
        Whether the server learns only the mean of the arrays that clients train
        (SecAgg; docs/secure-aggregation.md). Algorithms that need more than the mean
        refuse it.
    secure_threshold : float, default 0.67
        Fraction of the clients of a round, above one half, of which more must stay
        until its end; fewer give no mean. So many clients could also reveal another
        one's change together with the server.
    secure_neighbours : int, default 0
        Number of clients with which each client exchanges masks, even and at least 4;
        0 is all of them. With more than 50 clients, 20 save most of the server's time.
    secure_bits : int, default 32
        Size of a masked value: 16, 32 or 64 bits. With n clients, values are rounded
        to multiples of n ``secure-range`` / 2^(bits - 1).
    secure_range : float, default 8
        Largest absolute change of a value in a round. Clients refuse larger ones.
    """

    secure_aggregation: bool = setting(False)
    secure_threshold: float = setting(0.67, gt=0.5, le=1, unused_if=UNUSED)
    secure_neighbours: int = setting(0, ge=0, unused_if=UNUSED)
    secure_bits: int = setting(32, form="16, 32 or 64", unused_if=UNUSED)
    secure_range: float = setting(8.0, gt=0, unused_if=UNUSED)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        neighbours, bits = self.secure_neighbours, self.secure_bits
        valid = neighbours == 0 or (neighbours >= 4 and neighbours % 2 == 0)
        require(valid, "secure-neighbours", neighbours, "0 or an even number from 4")
        require(bits in WORDS, "secure-bits", bits, "16, 32 or 64")


def check_secure(
    strategy: Strategy, settings: Settings, num_clients: int
) -> SecureSettings:
    """Return the settings; raise `SettingsError` if the strategy cannot use them.

    Parameters
    ----------
    strategy : Strategy
        The strategy.
    settings : mapping
        All settings.
    num_clients : int
        Number of clients when the run begins.
    """
    secure, of_strategy = build(SecureSettings, settings), strategy.settings
    if not secure.secure_aggregation:
        return secure
    hooks = "aggregate_train", "per_client", "weights"
    plain = all(getattr(type(strategy), n) is getattr(Strategy, n) for n in hooks)
    allowed = "False: this algorithm needs more than the mean of replies"
    valid = plain and strategy._traits.uses_mean == "only"
    require(valid, "secure-aggregation", True, allowed)
    for name, only in ONLY.items():
        value = getattr(of_strategy, name.replace("-", "_"), only)
        allowed = f"{only} with secure-aggregation: the server sees no client's arrays"
        require(value == only, name, value, allowed)
    every = settings["checkpoint-every"]
    allowed = "0 or 1 with secure-aggregation: repeated rounds could reveal clients"
    require(int(every) <= 1, "checkpoint-every", every, allowed)
    if noise := of_strategy.server_dp_noise:
        # The sum of the noise must not exceed what a word can hold.
        least = of_strategy.server_dp_clip * (1 + 5 * noise)
        allowed = f"at least {least:g} with these server-dp-noise and server-dp-clip"
        valid = secure.secure_range >= least
        require(valid, "secure-range", secure.secure_range, allowed)
    sampled = len(strategy.sample(1, list(range(num_clients))))
    allowed = f"one that samples at least {FEWEST} clients for secure-aggregation, not "
    fraction, valid = of_strategy.fraction_train, sampled >= FEWEST
    require(valid, "fraction-train", fraction, f"{allowed}{sampled}")
    neighbours = secure.secure_neighbours
    allowed = f"at most {sampled - 1}, the number of others in a round"
    require(neighbours < sampled, "secure-neighbours", neighbours, allowed)
    replies = strategy._run.participation.fewest_replies(sampled)
    least = sampled if neighbours else max(FEWEST, sampled // 2 + 1)
    allowed = (
        f"False: a round may close with {replies} of {sampled} clients, and a sum "
    )
    require(replies >= least, "secure-aggregation", True, f"{allowed}needs {least}")
    return secure


class SecureGrid(GridDecorator):
    """Turn each training message into the four steps of secure aggregation.

    Parameters
    ----------
    grid : Grid
        The grid that sends the messages of the steps.
    strategy : Strategy
        The strategy.
    settings : SecureSettings
        The settings.
    folder : Path
        The run's folder, for the last mean.
    resumed : Path, optional
        Folder of the run that is resumed.

    Attributes
    ----------
    left_out : set of int
        Nodes that have sent wrong shares. They are not asked any more.
    """

    def __init__(
        self,
        grid: Grid,
        strategy: Strategy,
        settings: SecureSettings,
        folder: Path,
        resumed: Path | None = None,
    ) -> None:
        super().__init__(grid)
        self.strategy, self.settings, self.folder = strategy, settings, folder
        if strategy._run.privacy:
            strategy._run.privacy.by_clients = True
        self.left_out: set[int] = set()
        self.closing: Closing | None = None
        self.stored: tuple[dict[str, str], Arrays] | None = None
        if hasattr(grid, "wait_for"):
            self.wait_for = self._wait_for
        if resumed and (path := resumed / FILE).is_file():
            try:
                self.stored = unseal(path)
            except (OSError, ValueError, SafetensorError) as error:
                log(WARNING, "%s is not used: %s", path, error)
        elif not resumed:
            earlier = folder.parent.glob(f"earlier-*/{folder.name}/{FILE}")
            if any((*earlier, (folder / FILE).is_file())):
                text = "there was a run in %s; if it had the same seed and other "
                text += "clients, the difference of two means may reveal a client"
                log(WARNING, text, folder.parent)

    def _wait_for(self, closing: Closing) -> None:
        """Close the step in which clients train by a policy."""
        self.closing = closing

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return replies to training messages whose arrays are the mean of all."""
        messages, closing, self.closing = list(messages), self.closing, None
        if not messages or messages[0].metadata.message_type != MessageType.TRAIN:
            return self.grid.send_and_receive(messages, timeout=timeout)
        about = steps.digest(messages[0].content)
        if self.stored and self.stored[0]["about"] == about.hex():
            log(INFO, "the mean of this round was computed before the run was resumed")
            return self.replies(messages, *self.stored)
        round = SecureRound(self, messages, closing, about, timeout)
        try:
            arrays = round.run()
            trained = {"about": about.hex(), "metrics": json.dumps(round.trained)}
            data = seal(arrays, trained)
            write_atomically(self.folder / FILE, data, mode=PRIVATE)
        except (RefusedError, OSError) as error:
            log(WARNING, "the round has no secure mean: %s", error)
            self.left_out |= round.sums.blamed
            return [failed(m, f"there is no secure mean: {error}") for m in messages]
        replies = self.replies(messages, trained, arrays)
        self.strategy._run.round.bytes_up -= sum(size_of(r.content) for r in replies)
        return [*replies, *round.failures.values()]

    def replies(
        self, messages: list[Message], about: dict[str, str], arrays: Arrays
    ) -> list[Message]:
        """Return a reply with the mean for each client whose arrays are in it."""
        record, replies = memory_record(arrays), []
        metrics, names = (
            json.loads(about["metrics"]),
            steps.arrays_in(messages[0].content),
        )
        shared = {name: record[name] for name in names}
        for message in messages:
            name = self.strategy._run.clients.name_of(message.metadata.dst_node_id)
            if name in metrics:
                values = metrics[name]
                content = {
                    keys.ARRAYS: fill(ArrayRecord(), shared),
                    keys.METRICS: MetricRecord(values[keys.METRICS]),
                }
                if reason := values[keys.UNUSED_STATE]:
                    unused = ConfigRecord({keys.UNUSED_STATE: reason})
                    content[keys.PROPERTIES] = unused
                replies.append(reply_with(fill(RecordDict(), content), message))
        return replies


class SecureRound:
    """The four steps of one round.

    Attributes
    ----------
    failures : dict of int to Message
        Error replies by node.
    trained : dict of str to dict
        Metrics of the clients whose words have arrived, by name.
    """

    def __init__(
        self,
        grid: SecureGrid,
        messages: list[Message],
        closing: Closing | None,
        about: bytes,
        timeout: float | None,
    ) -> None:
        self.grid, self.round = grid.grid, grid.strategy._run.round
        self.clients, self.traits = grid.strategy._run.clients, grid.strategy._traits
        self.closing, self.about = closing or Closing(), about
        self.began, self.timeout = time.monotonic(), timeout
        self.messages = {m.metadata.dst_node_id: m for m in messages}
        self.failures = {
            node: failed(self.messages[node], "is left out: it has sent wrong shares")
            for node in grid.left_out & self.messages.keys()
        }
        self.nodes = [node for node in self.messages if node not in self.failures]
        self.sent = steps.arrays_in(messages[0].content)
        self.trained: dict[str, Mapping[str, Any]] = {}
        settings, asked = grid.strategy.settings, len(self.nodes)
        secure = grid.settings
        fraction, ring = secure.secure_threshold, secure.secure_neighbours
        missing = self.closing.missing
        expected = int(missing) if missing < asked else None
        self.sums = Coordinator(asked, fraction, ring, expected)
        most = 0
        if settings.weighting == "examples":
            declared = (self.clients.declared(n, keys.NUM_EXAMPLES) for n in self.nodes)
            most = int(max(filter(math.isfinite, declared), default=0)) or 1
        self.plan = Plan(
            self.sums.threshold,
            cast(Any, secure.secure_bits),
            secure.secure_range,
            max(1, asked),
            most,
            settings.server_dp_clip,
            settings.server_dp_noise / math.sqrt(self.sums.threshold),
        )
        size = (self.plan.size(self.sent),)
        words = np.zeros(size, WORDS[self.plan.bits])
        self.like = ArrayRecord({"words": MemoryArray(words)})

    def run(self) -> Arrays:
        """Return the mean; raise `RefusedError` if there is none."""
        requests: dict[int, dict[int, bytes]] = {node: {} for node in self.nodes}
        sums, texts = self.sums, self.exchange(steps.KEYS, requests)
        keys_of = {node: keys[node] for node, keys in texts.items() if node in keys}
        texts = self.exchange(steps.SHARES, sums.take_keys(keys_of))
        self.train(sums.take_shares(texts))
        texts = self.exchange(steps.UNMASK, sums.ask_unmask())
        total = sums.take_unmask(texts, self.about + self.plan.text.encode())
        before = steps.changes_from(self.sent, self.traits.replies_are_changes)
        changes = self.plan.decode(total, before, len(sums.survived))
        return {n: rounded_to(b.dtype, b + changes[n]) for n, b in before.items()}

    def left(self, step: str) -> float | None:
        """Return how many seconds a step may take."""
        if self.timeout is None:
            return None
        return max(0.0, self.began + self.timeout * ENDS[step] - time.monotonic())

    def exchange(
        self, step: str, requests: dict[int, dict[int, bytes]]
    ) -> dict[int, dict[int, bytes]]:
        """Send a short step to nodes, and return what their replies have."""
        asked, texts = [], {}
        plan = self.plan.text if step == steps.KEYS else ""
        for node, of in requests.items():
            record = {SECURE: record_of(step, self.sums.session, of, plan)}
            content, group = fill(RecordDict(), record), self.messages[node]
            about = group.metadata.group_id
            asked.append(Message(content, node, steps.SHORT, group_id=about))
            self.round.bytes_down += size_of(content)
        replies = self.grid.send_and_receive(asked, timeout=self.left(step))
        for reply in replies if asked else ():
            node = reply.metadata.src_node_id
            if (found := self.texts(step, reply)) is not None and node in requests:
                texts[node] = found
        return texts

    def texts(self, step: str, reply: Message) -> dict[int, bytes] | None:
        """Return what a reply has for each node; None if it is invalid."""
        node = reply.metadata.src_node_id
        if reply.has_error():
            self.failures[node] = reply
            return None
        self.round.bytes_up += size_of(reply.content, {})
        try:
            record = entries_of(reply.content).get(SECURE)
            return steps.texts_in(record, step, self.sums.session)
        except RefusedError as error:
            self.fail(node, str(error))
            return None

    def fail(self, node: int, reason: str) -> None:
        """Replace a node's reply by an error, if the node was asked."""
        if node in self.messages:
            self.failures[node] = failed(self.messages[node], reason)

    def train(self, boxes: dict[int, dict[int, bytes]]) -> None:
        """Let clients train; their words are added as they arrive."""
        grid: Any = self.grid
        asked = []
        for node, of_others in boxes.items():
            message = self.messages[node]
            record = record_of(steps.MASKED, self.sums.session, of_others)
            # The strategy has counted the rest of the message.
            self.round.bytes_down += len(SECURE) + size_of(record)
            content = {**entries_of(message.content), SECURE: record}
            asked.append(message_like(message, fill(RecordDict(), content)))
        waits = hasattr(grid, "wait_for")
        if waits:
            self.closing.is_valid = self.take
            grid.wait_for(self.closing)
        elif hasattr(grid, "on_demand"):
            grid.on_demand = True
        try:
            for reply in grid.send_and_receive(asked, timeout=self.left(steps.MASKED)):
                if reply.has_error() or not waits:
                    self.take(reply)
        finally:
            if not waits and hasattr(grid, "on_demand"):
                grid.on_demand = False

    def take(self, reply: Message) -> bool:
        """Add the words of a reply and drop them; return whether they count."""
        node = reply.metadata.src_node_id
        if self.texts(steps.MASKED, reply) is None:
            return False
        content = entries_of(reply.content)
        metrics = content.get(keys.METRICS)
        try:
            words = checked_arrays(reply, steps.WORDS, self.like)["words"]
            only = {keys.METRICS, keys.PROPERTIES, steps.WORDS, SECURE}
            known = content.keys() <= only and isinstance(metrics, MetricRecord)
            demand(known, "has other records than metrics and words")
        except (InvalidReplyError, SettingsError) as error:
            self.fail(node, str(error))
            return False
        del content[steps.WORDS]
        if counts := self.sums.take_masked(node, cast(Words, words)):
            unused = reply_properties(reply).get(keys.UNUSED_STATE)
            about = {
                keys.METRICS: dict(metrics or {}),
                keys.UNUSED_STATE: str(unused or ""),
            }
            self.trained[self.clients.name_of(node)] = about
        return counts


def failed(message: Message, reason: str) -> Message:
    """Return an error reply to a message."""
    reply = reply_with(RecordDict(), message)
    vars(reply).update(_content=None, _error=Error(FAILED, reason))
    return reply
