"""Rounds that close after the first replies, on real and simulated nodes."""

import time

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict

from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies.grids import inbox
from flwr_frl.strategies.grids.inbox import Closing, Inbox
from flwr_frl.strategies.grids.speeds import SimulatedArrivals, SpeedModel


class Script:
    """A grid whose nodes reply at scripted times; each pause advances the clock by 1.

    ``looks`` has the number of messages that were checked before each pause.
    """

    running: "Script"

    def __init__(self, delays: dict[int, float], errors: frozenset[int] = frozenset()):
        self.delays, self.errors = delays, errors
        self.now, self.looks = 0, [0]
        self.pending: dict[str, tuple[float, Message]] = {}
        self.pushed: list[int] = []
        Script.running = self

    def pause(self) -> None:
        self.now += 1
        self.looks.append(0)

    def get_node_ids(self):
        return list(self.delays)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            ids.append(str(len(self.pushed)))
            message.metadata.__dict__["_message_id"] = ids[-1]
            node = message.metadata.dst_node_id
            self.pushed.append(node)
            self.pending[ids[-1]] = self.now + self.delays[node], message
        return ids

    def pull_messages(self, message_ids):
        self.looks[-1] += len(message_ids)
        ready = [i for i in message_ids if self.pending[i][0] <= self.now]
        return [self.answer(self.pending.pop(i)[1]) for i in ready]

    def answer(self, message):
        if message.metadata.dst_node_id in self.errors:
            return Message(Error(2, "broken"), reply_to=message)
        return Message(RecordDict(), reply_to=message)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox.time, "sleep", lambda seconds: Script.running.pause())


def send(
    grid: Inbox, wanted: int | None, timeout: float | None = None, ttl=None, **options
) -> list[int]:
    nodes = grid.get_node_ids()
    messages = [Message(RecordDict(), node, "train", ttl=ttl) for node in nodes]
    if wanted is not None:
        grid.wait_for(Closing(wanted, **options))
    replies = grid.send_and_receive(messages, timeout=timeout)
    return [r.metadata.src_node_id for r in replies]


def test_first_replies_close_the_round_and_late_nodes_are_not_asked() -> None:
    script = Script({1: 3, 2: 1, 3: 50, 4: 2})
    grid = Inbox(script)
    assert send(grid, 2) == [2, 4]
    # Nodes 1 and 3 still owe a reply, so they are not listed.
    assert 3 not in grid.get_node_ids()
    script.now = 10
    assert list(grid.get_node_ids()) == [1, 2, 4]
    # The late reply of node 1 was pulled and dropped.
    assert len(script.pending) == 1
    assert sorted(send(grid, 3)) == [1, 2, 4]
    assert script.pushed.count(3) == 1
    script.now = 100
    grid.drain()
    assert script.pending == {}


def test_validity_check_applies_only_to_its_own_messages(caplog) -> None:
    grid = Inbox(Script({1: 1, 2: 2, 3: 3}))
    assert send(grid, 1, is_valid=lambda reply: reply.metadata.src_node_id != 1) == [
        1,
        2,
    ]
    grid = Inbox(Script({1: 1, 2: 2, 3: 3}))
    assert send(grid, 3, is_valid=lambda reply: False) == [1, 2, 3]
    assert caplog.messages == ["the round closes although valid replies are missing: 3"]
    caplog.clear()
    # The validity check does not carry over to other messages.
    assert send(grid, None) == [1, 2, 3]
    assert send(grid, 3) == [1, 2, 3]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("delays", "errors", "wanted", "options", "expected"),
    [
        # By default, all replies are awaited.
        ({1: 9, 2: 1, 3: 5}, [], None, {}, [2, 3, 1]),
        # Errors do not count, but are returned so that the strategy can log them.
        ({1: 1, 2: 2, 3: 3}, [1], 2, {}, [1, 2, 3]),
        # Fewer nodes than wanted can reply.
        ({1: 1, 2: 2, 3: 3}, [1, 3], 3, {}, [1, 2, 3]),
        # A deadline closes the round.
        ({1: 1, 2: float("inf")}, [], 2, {"timeout": 0.05}, [1]),
    ],
)
def test_a_round_closes_at_valid_replies_or_its_deadline(
    delays, errors, wanted, options, expected
) -> None:
    script = Script(delays, errors=frozenset(errors))
    assert send(Inbox(script), wanted, **options) == expected


def test_ties_are_broken_by_node_id() -> None:
    script = Script({3: 1, 1: 1, 2: 1})
    messages = [Message(RecordDict(), node, "train") for node in (3, 1, 2)]
    created = time.time()
    grid = Inbox(script)
    answer = script.answer

    def at_once(message):
        reply = answer(message)
        reply.metadata.created_at = created
        return reply

    script.answer = at_once
    grid.wait_for(Closing(2))
    replies = grid.send_and_receive(messages)
    assert [r.metadata.src_node_id for r in replies] == [1, 2]


def test_speeds() -> None:
    fixed = SpeedModel("fixed", 2000, seed=3)
    np.testing.assert_array_equal(fixed.times(1), fixed.times(2))
    # The mean of 2,000 draws from Exp(1) is 1 ± 0.022 (false alarm rate below 1e-5).
    assert abs(fixed.times(1).mean() - 1) < 0.1
    dynamic = SpeedModel("dynamic", 50, seed=3)
    assert not np.array_equal(dynamic.times(1), dynamic.times(2))
    np.testing.assert_array_equal(dynamic.times(2), dynamic.times(2))
    groups = SpeedModel("groups", 1000, straggler_fraction=0.3)
    assert groups.times(1)[:700].mean() < 0.2
    assert groups.times(1)[700:].mean() > 5
    # Times are constant over rounds unless they are redrawn.
    np.testing.assert_array_equal(groups.times(1), groups.times(2))
    redrawn = SpeedModel("groups", 1000, straggler_fraction=0.3, redraw_speeds=True)
    # Ratio of a client's times in two rounds: for two exponentials, 2/3 are outside
    # [1/2, 2] (± 0.015); a false alarm is rarer than 1e-9.
    ratio = redrawn.times(1) / redrawn.times(2)
    assert 0.57 < np.mean(np.maximum(ratio, 1 / ratio) > 2) < 0.77
    assert redrawn.times(2)[700:].mean() > 5
    np.testing.assert_array_equal(redrawn.times(2), redrawn.times(2))
    correlated = SpeedModel("correlated", 50, seed=3)
    assert np.all(np.diff(correlated.times(1)) >= 0)


def test_expected_arrivals_of_exponential_times() -> None:
    # The first of N arrivals with mean 0.1 is expected at 0.1 / N, the last at 0.1 H_N.
    speeds = SpeedModel("groups", 10, straggler_fraction=0, redraw_speeds=True)
    expected = speeds.expected_arrivals(10)
    harmonic = sum(1 / i for i in range(1, 11))
    assert expected[0] == pytest.approx(0.01, rel=0.2)
    assert expected[-1] == pytest.approx(0.1 * harmonic, rel=0.1)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("1\n2\n", "for each of 3 clients"),
        ("1\n-2\n3\n", "at least 0"),
        ("1\nnan\n3\n", "finite number"),
        ("1\nfast\n3\n", "fast"),
    ],
)
def test_times_from_a_file(tmp_path, lines: str, words: str) -> None:
    path = tmp_path / "times"
    path.write_text("3\n1\n2\n9\n")
    np.testing.assert_array_equal(SpeedModel(str(path), 3).times(7), [3, 1, 2])
    path.write_text(lines)
    with pytest.raises(SettingsError, match=words) as caught:
        SpeedModel(str(path), 3)
    assert "\n" not in str(caught.value)
    with pytest.raises(SettingsError, match="did you mean 'fixed'"):
        SpeedModel("fixd", 3)


@pytest.mark.parametrize(
    ("spoilt", "wanted", "asked", "seconds"),
    [
        # Nodes 1 to 5 take 5, 1, 4, 2 and 3 s, plus 10 s for communication. Nodes
        # messaged together are messaged in the given order.
        ({}, 2, [2, 4], 12),
        ({2}, 2, [2, 4, 5], 13),
        ({2, 5}, 2, [2, 4, 5, 3], 14),
        ({1, 2, 3, 4, 5}, 2, [2, 4, 3, 5, 1], 15),
        ({2}, None, [1, 2, 3, 4, 5], 15),
    ],
)
def test_next_node_replaces_an_invalid_reply(spoilt, wanted, asked, seconds) -> None:
    times, sent = [5.0, 1.0, 4.0, 2.0, 3.0], []

    class Inner:
        def send_and_receive(self, messages, *, timeout):
            sent.extend(m.metadata.dst_node_id for m in messages)
            return [Message(RecordDict(), reply_to=m) for m in messages]

    class Speeds:
        communication_time = 10.0

        def times(self, server_round):
            return np.array(times)

    grid = SimulatedArrivals(Inner(), Speeds(), lambda node: node - 1)
    if wanted is not None:
        is_valid = lambda reply: reply.metadata.src_node_id not in spoilt  # noqa: E731
        grid.wait_for(Closing(wanted, is_valid))
    nodes = range(1, 6)
    messages = [Message(RecordDict(), n, "train", group_id="1") for n in nodes]
    for i, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = str(i)
    replies = grid.send_and_receive(messages)
    assert sent == asked
    assert [reply.metadata.src_node_id for reply in replies] == asked
    assert grid.seconds == seconds


@pytest.mark.parametrize(
    ("delays", "wanted", "timeout", "nodes", "looks"),
    [
        # A portion without replies ends a pull.
        ({}, None, None, range(1, 251), [100] * 5 + [250]),
        # At the deadline, all messages are checked.
        (dict.fromkeys(range(250), 0) | {250: np.inf}, None, 0, range(1, 250), [250]),
        # So they are if the order of arrival matters.
        ({201: 1, 250: 1}, 2, None, [201, 250], [250, 250]),
    ],
)
def test_messages_are_checked_in_portions(delays, wanted, timeout, nodes, looks):
    script = Script({node: delays.get(node, 5) for node in range(1, 251)})
    assert sorted(send(Inbox(script), wanted, timeout=timeout)) == list(nodes)
    assert script.looks == looks
