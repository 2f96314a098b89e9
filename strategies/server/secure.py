"""Secure aggregation on the server: each training message becomes four.

The strategy sends its messages and receives replies as usual, but the arrays of all
replies are their mean, which is all that the server learns of them.
"""

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal, cast

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from safetensors import SafetensorError

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import (
    entries_of,
    error_reply,
    memory_record,
    message_like,
    reply_with,
    size_of,
)
from flwr_frl.common.errors import require
from flwr_frl.common.files import PRIVATE, write_atomically
from flwr_frl.common.sealed import Arrays, seal, unseal
from flwr_frl.common.secure import messages as steps
from flwr_frl.common.secure.fixed_point import Plan
from flwr_frl.common.secure.messages import SECURE
from flwr_frl.common.secure.protocol import FEWEST, Coordinator, RefusedError, demand
from flwr_frl.common.settings import Checked, Settings, build, setting
from flwr_frl.strategies.base import Strategy, inherits
from flwr_frl.strategies.grids.inbox import Closing, GridDecorator
from flwr_frl.strategies.server.replies import (
    InvalidReplyError,
    checked_arrays,
    reply_properties,
    rounded_to,
)

# Texts that are sent to nodes, or by them, about other nodes.
ByNode = dict[int, dict[int, bytes]]
# When the steps must have ended, as fractions of the timeout of a round.
ENDS = {steps.KEYS: 0.15, steps.SHARES: 0.3, steps.MASKED: 0.85, steps.UNMASK: 1.0}
# File with the last mean, for runs that are killed before they have used it.
FILE = "secure-mean.safetensors"
UNUSED = {"secure-aggregation": (False,)}
# Other settings, and their only values with secure aggregation.
ONLY = {"aggregation": "mean", "initialization": "random"}


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
    secure_bits: Literal[16, 32, 64] = setting(32, unused_if=UNUSED)
    secure_range: float = setting(8.0, gt=0, unused_if=UNUSED)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        neighbours = self.secure_neighbours
        valid = neighbours == 0 or (neighbours >= 4 and neighbours % 2 == 0)
        require(valid, "secure-neighbours", neighbours, "0 or an even number from 4")


def needs_only_mean(kind: type[Strategy]) -> bool:
    """Return whether a strategy's server uses nothing but the mean of the replies."""
    plain = inherits(kind, "aggregate_train", "per_client", "weights")
    return plain and kind._traits.uses_mean == "only"


def check_secure(strategy: Strategy, settings: Settings, num_clients: int) -> None:
    """Raise `SettingsError` if the strategy cannot use secure aggregation.

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
        return
    allowed = "False: this algorithm needs more than the mean of replies"
    valid = needs_only_mean(type(strategy))
    require(valid, "secure-aggregation", True, allowed)
    for name, only in ONLY.items():
        value = getattr(of_strategy, name.replace("-", "_"), only)
        allowed = f"{only}: with secure-aggregation the server sees no client's arrays"
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
    replies = strategy._run.participation.fewest_replies(sampled)
    least = max(FEWEST, sampled if secure.secure_neighbours else sampled // 2 + 1)
    allowed = f"False: a round may close with {replies} of {sampled} clients, and a sum"
    require(replies >= least, "secure-aggregation", True, f"{allowed} needs {least}")


@dataclass(eq=False, repr=False)
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

    strategy: Strategy
    settings: SecureSettings
    folder: Path
    resumed: Path | None = None

    def __post_init__(self) -> None:
        """Read the mean of a resumed run; warn if another run was in the folder."""
        folder, resumed = self.folder, self.resumed
        if self.strategy._run.privacy:
            self.strategy._run.privacy.by_clients = True
        # The closing is that of the step in which clients train.
        self.left_out, self.closing = set[int](), Closing()
        self.stored: tuple[dict[str, str], Arrays] = {}, {}
        if hasattr(self.grid, "wait_for"):
            self.wait_for = partial(setattr, self, "closing")
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

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return replies to training messages whose arrays are the mean of all."""
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != MessageType.TRAIN:
            return self.grid.send_and_receive(messages, timeout=timeout)
        round = SecureRound(self, messages, timeout)
        self.closing = Closing()
        if self.stored[0].get("about") == round.about:
            log(INFO, "the mean of this round was computed before the run was resumed")
            return self.replies(messages, *self.stored)
        try:
            arrays = round.run()
            values = json.dumps(round.values, default=str)
            trained = {"about": round.about, "values": values}
            write_atomically(self.folder / FILE, seal(arrays, trained), mode=PRIVATE)
        except (RefusedError, OSError) as error:
            log(WARNING, "the round has no secure mean: %s", error)
            self.left_out |= round.sums.blamed
            reason = f"there is no secure mean: {error}"
            others = {m.metadata.dst_node_id: error_reply(reason, m) for m in messages}
            return [*(others | round.failures).values()]
        replies = self.replies(messages, trained, arrays)
        self.strategy._run.round.bytes_up -= sum(size_of(r.content) for r in replies)
        return [*replies, *round.failures.values()]

    def replies(
        self, messages: list[Message], about: dict[str, str], arrays: Arrays
    ) -> list[Message]:
        """Return a reply with the mean for each client whose arrays are in it."""
        values, replies = json.loads(about["values"]), []
        sent = steps.arrays_in(messages[0].content)
        mean = memory_record({name: arrays[name] for name in sent})
        for message in messages:
            name = self.strategy._run.clients.name_of(message.metadata.dst_node_id)
            if name in values:
                metrics, properties = values[name]
                content = RecordDict({keys.METRICS: MetricRecord(metrics)})
                content[keys.PROPERTIES] = ConfigRecord(properties)
                content[keys.ARRAYS] = mean
                replies.append(reply_with(content, message))
        return replies


class SecureRound:
    """The four steps of one round.

    Attributes
    ----------
    about : str
        Identifies what all clients receive.
    failures : dict of int to Message
        Error replies by node.
    values : dict of str to tuple of dict
        Metrics and properties of the clients whose words have arrived, by name.
    """

    def __init__(
        self, secure: SecureGrid, messages: list[Message], timeout: float | None
    ) -> None:
        self.grid, self.closing = cast(Any, secure.grid), secure.closing
        self.strategy, self.about = secure.strategy, steps.digest(messages[0].content)
        self.began, self.timeout = time.monotonic(), timeout or math.inf
        self.messages = {m.metadata.dst_node_id: m for m in messages}
        left_out = secure.left_out & self.messages.keys()
        reason = "is left out: it has sent wrong shares"
        self.failures = {n: error_reply(reason, self.messages[n]) for n in left_out}
        self.nodes = [node for node in self.messages if node not in self.failures]
        self.before: steps.Arrays = self.strategy._run.round.centre()
        self.values: dict[str, tuple[Any, Any]] = {}
        options, settings = secure.settings, secure.strategy.settings
        group = options.secure_threshold, options.secure_neighbours
        self.sums = Coordinator(len(self.nodes), *group, self.closing.missing)
        threshold, most = self.sums.threshold, 0
        if settings.weighting == "examples":
            declared = self.strategy._run.clients.declared
            numbers = (declared(node, keys.NUM_EXAMPLES) for node in self.nodes)
            most = int(max(filter(math.isfinite, numbers), default=0)) or 1
        noise = settings.server_dp_noise / math.sqrt(threshold)
        about_words = options.secure_bits, options.secure_range, len(self.messages)
        about_changes = most, settings.server_dp_clip, noise
        self.plan = Plan(threshold, *about_words, *about_changes)
        self.like = memory_record({"words": self.plan.zeros(self.before)})

    def run(self) -> Arrays:
        """Return the mean; raise `RefusedError` if there is none."""
        sums, plan = self.sums, self.plan.text.encode()
        texts = self.exchange(steps.KEYS, {node: {node: plan} for node in self.nodes})
        own = {node: keys[node] for node, keys in texts.items() if node in keys}
        texts = self.exchange(steps.SHARES, sums.take_keys(own))
        self.exchange(steps.MASKED, sums.take_shares(texts))
        texts = self.exchange(steps.UNMASK, sums.ask_unmask())
        total = sums.take_unmask(texts, self.about.encode() + plan)
        changes = self.plan.decode(total, self.before, len(sums.survived))
        return {n: rounded_to(b.dtype, b + changes[n]) for n, b in self.before.items()}

    def exchange(self, step: str, requests: ByNode) -> ByNode:
        """Send a step to nodes, and return what their replies have.

        Clients train in the step *masked*; the other ones are short.
        """
        asked, texts, trains = [], ByNode(), step == steps.MASKED
        for node, of_others in requests.items():
            message = self.messages[node]
            record = steps.record_of(step, self.sums.session, of_others)
            # The strategy has counted the rest of the message.
            self.strategy._run.round.bytes_down += len(SECURE) + size_of(record)
            usual = entries_of(message.content) if trains else {}
            content = RecordDict({**usual, SECURE: record})
            kind = MessageType.TRAIN if trains else steps.SHORT
            asked.append(message_like(message, content, message_type=kind))
        take = partial(self.take, step, texts)
        on_arrival = trains and hasattr(self.grid, "wait_for")
        if on_arrival:
            self.closing.is_valid = take
            self.grid.wait_for(self.closing)
        # In one process, clients train while their words are added.
        self.grid.on_demand = trains
        left = max(0.0, self.began + self.timeout * ENDS[step] - time.monotonic())
        for reply in self.grid.send_and_receive(asked, timeout=left) if asked else ():
            if reply.has_error() or not on_arrival:
                take(reply)
        self.grid.on_demand = False
        return texts

    def take(self, step: str, texts: ByNode, reply: Message) -> bool:
        """Check a reply, and add its words or its texts; return whether it counts."""
        node = reply.metadata.src_node_id
        if reply.has_error() or node not in self.messages:
            self.failures[node] = reply
            return False
        self.strategy._run.round.bytes_up += size_of(reply.content)
        try:
            record = entries_of(reply.content).get(SECURE)
            texts[node] = steps.texts_in(record, step, self.sums.session)
            return step != steps.MASKED or self.add(node, reply)
        except (InvalidReplyError, RefusedError) as error:
            self.failures[node] = error_reply(str(error), self.messages[node])
            return False

    def add(self, node: int, reply: Message) -> bool:
        """Add the words of a reply and drop them; return whether they count."""
        content = entries_of(reply.content)
        words = checked_arrays(reply, steps.WORDS, self.like)["words"]
        metrics: Any = content.get(keys.METRICS)
        demand(isinstance(metrics, MetricRecord), "has no metrics")
        del content[steps.WORDS]
        if counts := self.sums.take_masked(node, words):
            name = self.strategy._run.clients.name_of(node)
            self.values[name] = dict(metrics), dict(reply_properties(reply))
        return counts
