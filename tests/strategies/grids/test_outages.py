"""Invalid replies of a client and failures of the SuperLink do not end a run."""

import hashlib
from collections import defaultdict

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies.grids import inbox
from flwr_frl.strategies.grids.inbox import PULL_INTERVAL, Closing, Inbox


class Clock:
    """Replaces the module ``time``; only ``sleep`` advances it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(inbox, "time", clock)
    return clock


def response(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://superlink")
    return httpx.HTTPStatusError(
        "database is locked", request=request, response=httpx.Response(status)
    )


class Link:
    """Simulates Flower's grid and SuperLink: ids are digests, a reply is pulled once.

    ``answers`` maps each node to a function of a message. It returns a reply, a
    callable that raises what Flower raises when it inflates the reply, or None for
    silence. If a pull raises, its replies are lost.
    """

    def __init__(self, answers: dict) -> None:
        self.answers = answers
        self.stored: dict[str, Message] = {}
        self.delivered: list[int] = []
        self.pulled: list[str] = []
        self.failures: dict[str, list[Exception]] = defaultdict(list)

    def _fail(self, at: str) -> None:
        if self.failures[at]:
            raise self.failures[at].pop(0)

    def get_node_ids(self):
        self._fail("nodes")
        return list(self.answers)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            about = message.metadata
            text = f"{about.dst_node_id}/{about.message_type}/{about.created_at}"
            ids.append(hashlib.sha256(text.encode()).hexdigest())
            message.metadata.__dict__["_message_id"] = ids[-1]
            if ids[-1] not in self.stored:
                self.stored[ids[-1]] = message
                self.delivered.append(about.dst_node_id)
        # The messages are stored although the request fails.
        self._fail("push")
        return ids

    def pull_messages(self, message_ids):
        self._fail("pull")
        self.pulled += message_ids
        found = []
        for message_id in message_ids:
            message = self.stored.get(message_id)
            if message is None:
                continue
            reply = self.answers[message.metadata.dst_node_id](message)
            if reply is not None:
                del self.stored[message_id]
                found.append(reply)
        return [reply() if callable(reply) else reply for reply in found]


def honest(message: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def silent(message: Message) -> None:
    return None


def impossible_shape(message: Message):
    """Return a callable that fails as Flower does when it inflates an invalid shape."""
    array = Array(np.zeros((1, 2)))
    array.shape = (1.5, 2.5)
    reply = honest(message)
    reply.content["arrays"] = ArrayRecord({"w": array})
    contents = {i: o.deflate() for i, o in get_all_nested_objects(reply).items()}
    return lambda: inflate_object_from_contents(reply.object_id, contents)


def send(grid, timeout: float | None = None, kind: str = "train") -> list[Message]:
    messages = [Message(RecordDict(), node, kind) for node in grid.get_node_ids()]
    return list(grid.send_and_receive(messages, timeout=timeout))


def nodes(replies: list[Message]) -> list[int]:
    return sorted(reply.metadata.src_node_id for reply in replies)


def test_unreadable_reply_is_an_error_of_its_node_alone() -> None:
    def too_deep(message):
        def reply():
            raise RecursionError("deep")

        return reply

    answers = {1: honest, 2: impossible_shape, 3: honest, 4: too_deep}
    # Precondition: Flower's own pull fails for all nodes.
    link = Link(answers)
    ids = link.push_messages([Message(RecordDict(), node, "train") for node in answers])
    with pytest.raises((TypeError, RecursionError)):
        link.pull_messages(ids)
    replies = send(Inbox(Link(answers)))
    assert nodes(replies) == [1, 2, 3, 4]
    failed = [r for r in replies if r.has_error()]
    assert nodes(failed) == [2, 4]
    assert all(r.error.reason.startswith("the reply cannot be read") for r in failed)


def test_forged_metadata_is_an_error_of_the_node_that_was_asked() -> None:
    def as_node_3(message):
        reply = honest(message)
        reply.metadata.__dict__["_src_node_id"] = 3
        return reply

    def to_another(message):
        reply = honest(message)
        reply.metadata.__dict__["_reply_to_message_id"] = "0" * 64
        return reply

    def gone(message):
        # Errors of the SuperLink itself carry the SuperLink's node id.
        reply = Message(Error(5, "not available"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return reply

    answers = {7: as_node_3, 8: to_another, 3: honest, 9: gone}
    replies = send(Inbox(Link(answers)))
    assert nodes(replies) == [SUPERLINK_NODE_ID, 3, 7, 8]
    reasons = {r.metadata.src_node_id: r.error.reason for r in replies if r.has_error()}
    assert "it says that it is of node 3" in reasons[7]
    assert "it says that it answers another message" in reasons[8]
    assert reasons[SUPERLINK_NODE_ID] == "not available"


def test_outage_is_waited_out_without_duplicate_deliveries(clock: Clock) -> None:
    link = Link({1: honest, 2: honest})
    grid = Inbox(link)
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    # Three pushes fail, retried after 1, 2 and 4 s, then two pulls.
    link.failures["push"] = [response(500) for _ in range(3)]
    link.failures["pull"] = [response(500), httpx.ReadTimeout("slow")]
    replies = list(grid.send_and_receive(messages))
    assert nodes(replies) == [1, 2]
    assert sorted(link.delivered) == [1, 2]
    assert clock.now == pytest.approx(1007 + 2 * PULL_INTERVAL)


def test_replies_that_the_superlink_cannot_give_do_not_delay_others(caplog) -> None:
    def broken(message):
        raise response(500)

    link = Link({1: broken, 2: honest, 3: broken, 4: honest, 5: broken, 6: honest})
    grid = Inbox(link)
    assert nodes(send(grid, timeout=10)) == [2, 4, 6]
    assert len([m for m in caplog.messages if "no replies" in m]) == 1


def test_endless_outage_is_a_one_line_error(clock: Clock) -> None:
    link = Link({1: honest})
    link.failures["nodes"] = [response(503) for _ in range(1000)]
    with pytest.raises(SettingsError, match="could not be used for 600 s") as caught:
        send(Inbox(link))
    assert "\n" not in str(caught.value)
    # Retried after 1 + 2 + 4 + … + 32 + 60 + 60 + … seconds
    assert 1500 <= clock.now <= 1600


def test_rejected_request_is_not_an_outage() -> None:
    link = Link({1: honest})
    link.failures["nodes"] = [response(404)]
    with pytest.raises(httpx.HTTPStatusError):
        send(Inbox(link))


class Stutter(Link):
    """Returns each reply twice, and a reply to a message that was never sent."""

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        strange = [honest(Message(RecordDict(), 5, "train"))] if found else []
        return [*found, *found, *strange]


def test_unknown_and_repeated_replies_are_ignored() -> None:
    grid = Inbox(Stutter({1: honest, 2: honest, 3: honest}))
    assert nodes(send(grid)) == [1, 2, 3]
    grid.wait_for(Closing(2))
    assert len(send(grid)) == 2
    grid.drain()
    assert nodes(send(grid)) == [1, 2, 3]


def test_silent_node_is_waited_for_at_most_once_per_round(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link({1: honest, 2: silent, 3: honest})
    grid = Inbox(link, lambda node: f"pi-{node}", longest=100)
    waits, asked = [], []
    # A round consists of training and evaluation; other work takes 10 s.
    for _ in range(30):
        began = clock.now
        before = link.delivered.count(2)
        assert nodes(send(grid)) == [1, 3]
        assert nodes(send(grid, kind="evaluate")) == [1, 3]
        waits.append(clock.now - began)
        asked.append(link.delivered.count(2) - before)
        clock.now += 10
    assert max(waits) == pytest.approx(100, abs=4)
    # The pauses are 100 and 300 s, that is 10 and 30 rounds of 10 s.
    assert [r for r, times in enumerate(asked) if times] == [0, 10]
    assert max(asked) == 1
    assert "no answer in time, so not asked for a while: pi-2" in caplog.text
    assert grid.silent == ["pi-2"]
    # The node is available again as soon as its late reply arrives.
    link.answers[2] = honest
    assert nodes(send(grid)) == [1, 2, 3]
    assert grid.silent == []


def test_only_node_is_asked_again_however_often_it_was_silent(clock: Clock) -> None:
    # The pause after the 1,025th time exceeds the largest float.
    link = Link({1: silent})
    grid = Inbox(link, longest=0.1)
    for _ in range(1030):
        assert list(grid.get_node_ids()) == [1]
        assert send(grid) == []
    assert clock.now == pytest.approx(1000 + 103, abs=1)
    assert len(link.delivered) == 1030


def test_silent_node_that_left_for_good_is_forgotten(clock: Clock) -> None:
    def gone(message):
        reply = Message(Error(5, "not available"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return reply

    link, here = Link({1: honest, 2: silent}), [1, 2]
    link.get_node_ids = lambda: list(here)
    grid = Inbox(link, longest=100)
    assert nodes(send(grid)) == [1]
    # The node reconnects under another id; the old id may still receive a reply.
    here[1] = 3
    link.answers[3] = honest
    assert nodes(send(grid)) == [1, 3]
    assert grid.silent == ["2"]
    link.answers[2] = gone
    assert nodes(send(grid)) == [1, 3]
    assert grid.silent == []


def test_reply_owed_for_too_long_counts_as_silence(clock: Clock) -> None:
    link = Link({1: honest, 2: silent})
    grid = Inbox(link, longest=50)
    grid.wait_for(Closing(1))
    assert nodes(send(grid)) == [1]
    assert list(grid.get_node_ids()) == [1]
    clock.now += 51
    # The reply is owed for longer than a round may take, and the pause begins.
    assert list(grid.get_node_ids()) == [1]
    clock.now += 51
    assert list(grid.get_node_ids()) == [1, 2]
    assert grid.silent == ["2"]


def test_expired_messages_are_forgotten(clock):
    link = Link({1: silent, 2: silent})
    grid = Inbox(link, longest=10)
    message = Message(RecordDict(), 1, "train", ttl=60.0)
    assert grid.send_and_receive([message]) == []
    clock.now += 30
    assert grid.send_and_receive([Message(RecordDict(), 2, "train", ttl=600.0)]) == []
    link.pulled.clear()
    grid.drain()
    assert len(link.pulled) == 2
    clock.now += 30
    grid.drain()
    link.pulled.clear()
    grid.drain()
    assert len(link.pulled) == 1
