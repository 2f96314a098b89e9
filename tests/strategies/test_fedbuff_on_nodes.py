"""FedBuff on nodes that reply late or never."""

import math

import numpy as np
import pytest
from flwr.app import Message, MessageType
from flwr.common.constant import SUPERLINK_NODE_ID
from quadratic_clients import quadratic

from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies import FedAsync, FedAvg, FedBuff
from flwr_frl.strategies.grids import inbox
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server.replies import to_record


class Late(InlineGrid):
    """Nodes whose replies arrive after a number of pauses, or never."""

    in_process = False
    running: "Late"

    def __init__(self, delays: dict[int, float], failing: tuple[int, ...] = ()) -> None:
        def app(message: Message, context) -> Message:
            trains = message.metadata.message_type == MessageType.TRAIN
            if trains and context.node_id in failing:
                raise SettingsError("the node fails")
            return quadratic(message, context)

        super().__init__(app, len(delays))
        self.delays, self.now = delays, 0
        self.arrives: dict[str, float] = {}
        Late.running = self
        self.log: list[int] = []

    def push_messages(self, messages):
        messages = list(messages)
        # A SuperLink refuses subclasses.
        assert all(type(message) is Message for message in messages)
        ids = list(super().push_messages(messages))
        for i, message in zip(ids, messages, strict=True):
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            trains = kind == MessageType.TRAIN
            self.arrives[i] = self.now + (self.delays[node] if trains else 0)
            self.log += [node] * trains
        assert len(self.log) < 200, "nodes are asked again and again"
        return ids

    def pull_messages(self, message_ids):
        ready = [i for i in message_ids if self.arrives[i] <= self.now]
        replies = []
        for reply in super().pull_messages(ready):
            # Each reply is delivered twice.
            replies += [reply, reply]
        return replies


@pytest.fixture
def no_pauses(monkeypatch) -> None:
    def pause(seconds: float) -> None:
        Late.running.now += 1

    monkeypatch.setattr(inbox.time, "sleep", pause)


def run_on(
    grid: Late, wrapper: FedBuff, versions: int, timeout: float = 60.0, every: int = 99
):
    strategy, rows = wrapper, []
    wrapper._run.participation.last_version = versions
    run_rounds(
        strategy,
        Inbox(grid, strategy._run.clients.name_of, timeout),
        to_record({"w": np.zeros(4)}),
        range(1, versions + 1),
        evaluated=lambda version: version == versions or version % every == 0,
        after_round=lambda version, arrays, metrics: rows.append(metrics),
    )
    return rows


def test_slow_nodes_do_not_delay_versions(no_pauses):
    # Node 3 replies after 40 pulls, the others after 2.
    grid = Late({1: 1, 2: 1, 3: 40})
    wrapper = FedBuff(FedAvg(), concurrency=3, buffer_size=2)
    rows = run_on(grid, wrapper, 12)
    assert all(row["clients"] == 2 and row["rejected"] == 0 for row in rows)
    assert grid.now < 80
    assert grid.log.count(3) <= 2
    assert grid.log.count(1) >= 11


def test_clients_at_work_are_not_unanswered(no_pauses):
    grid = Late({1: 1, 2: 1, 3: 15})
    wrapper = FedBuff(FedAvg(), concurrency=3, buffer_size=1)
    rows = run_on(grid, wrapper, 50)
    assert {row["unanswered"] for row in rows} == {0}


def test_checkpoints_on_nodes_do_not_contain_clients_at_work(no_pauses):
    states = []

    class Watched(Late):
        def push_messages(self, messages):
            states.append(wrapper._snapshot())
            return super().push_messages(messages)

    wrapper = FedBuff(FedAvg(), concurrency=3, buffer_size=2)
    run_on(Watched({1: 1, 2: 1, 3: 40}), wrapper, 5)
    for state in states:
        assert not any("versions" in name for name in state.arrays)
        assert state.values["state"]["asynchronous"].keys() == {"updates"}
    assert sum(wrapper._run.participation.updates.values()) == 10


def test_replies_that_arrive_together_close_separate_versions(no_pauses):
    grid = Late({1: 1, 2: 1, 3: 1})
    wrapper = FedBuff(FedAvg(), concurrency=3, buffer_size=1)
    rows = run_on(grid, wrapper, 9)
    assert [row["clients"] for row in rows] == [1] * 9
    assert {row["staleness-max"] for row in rows} >= {0, 1, 2}


def test_last_evaluation_waits_for_clients_at_work(no_pauses):
    # Each client's accuracy is constant: 0, 0.1, 0.2 and 0.3.
    grid = Late({1: 1, 2: 3, 3: 5, 4: 40})
    wrapper = FedAsync(FedAvg(), concurrency=4)
    rows = run_on(grid, wrapper, 12, every=1)
    assert grid.now >= 40
    assert (rows[-1]["evaluated"], rows[-1]["clients"]) == (4, 1)
    assert rows[-1]["accuracy"] == pytest.approx(0.15)
    assert all("evaluated-before" not in row for row in (rows[0], rows[-1]))
    # Other evaluations do not wait; clients at work count with their latest metrics.
    assert [row["evaluated"] for row in rows[5:-1]] == [3] * 6
    assert all(row["accuracy"] == pytest.approx(0.1) for row in rows[5:-1])
    assert any(row["evaluated-before"] == 2 for row in rows[5:-1])
    assert grid.log.count(4) == 1


def test_silent_nodes_are_paused(no_pauses):
    grid = Late({1: 1, 2: math.inf, 3: math.inf})
    wrapper = FedBuff(FedAvg(), concurrency=3, buffer_size=2)
    rows = run_on(grid, wrapper, 5, timeout=0.5)
    # A version closes without silent clients.
    assert [row["clients"] for row in rows] == [1] * 5
    assert [grid.log.count(node) for node in (1, 2, 3)] == [5, 1, 1]


def test_failing_or_silent_node_is_replaced(no_pauses):
    grid = Late({1: 1, 2: 1, 3: 1, 4: math.inf}, failing=(3,))
    wrapper = FedBuff(FedAvg(), concurrency=4, buffer_size=2)
    rows = run_on(grid, wrapper, 10, timeout=0.05)
    assert all(row["clients"] == 2 for row in rows)
    assert sum(row["rejected"] for row in rows) > 0
    assert wrapper._run.participation.updates.keys() == {"000000", "000001"}


def test_client_that_returns_as_another_node_keeps_its_name(no_pauses):
    class Returning(Late):
        def get_node_ids(self):
            # Node 3 leaves while its reply is on its way, and returns as node 13.
            return [1, 2, 13 if self.now > 2 else 3]

    grid = Returning({1: 1, 2: 1, 3: 8, 13: 1})
    grid.contexts[13] = grid.contexts[3]
    wrapper = FedBuff(FedAvg(), concurrency=3, buffer_size=1)
    rows = run_on(grid, wrapper, 40)
    assert all(row["clients"] == 1 for row in rows)
    names = {"000000", "000001", "000002"}
    assert wrapper._run.participation.updates.keys() == names
    assert wrapper._run.clients.acknowledged.keys() == names
    assert (grid.log.count(3), grid.log.count(13) > 1) == (1, True)


def test_report_that_a_node_has_left_is_no_update(no_pauses):
    class Left(Late):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            for reply in replies:
                if reply.metadata.src_node_id == 4 and reply.has_error():
                    reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
            return replies

    # Node 1 would have the SuperLink's id.
    grid = Left({2: 1, 3: 1, 4: 1}, failing=(1,))
    grid.contexts[4] = grid.contexts.pop(1)
    wrapper = FedBuff(FedAvg(), concurrency=3, buffer_size=2)
    rows = run_on(grid, wrapper, 9)
    assert grid.log.count(4) > 1
    assert "000000" not in wrapper._run.participation.updates
    assert all(len(row["staleness"]) == row["clients"] for row in rows)
