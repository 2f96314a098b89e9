"""Content of messages, and how their bytes are counted."""

import numpy as np
from flwr.app import ConfigRecord, MessageType
from function_clients import START, averaging, grid_of, honest, train_once
from malformed import MALFORMED, error_reply, with_one_bad

from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.replies import count_bytes, to_record


def test_bytes_are_counted_as_serialised():
    sizes = []
    for entries in (10, 35):
        start = {"w": np.zeros(entries, np.float32)}
        _, metrics = train_once(averaging(), grid_of(4), start)
        sizes.append((metrics["bytes-down"], metrics["bytes-up"]))
    # 25 more floats of 4 bytes for each of 4 clients, in both directions.
    (down, up), (more_down, more_up) = sizes
    assert more_down - down == 4 * 25 * 4
    assert more_up - up == 4 * 25 * 4
    # Upload: the names arrays, w, metrics, num-examples and train-loss, a header of 128
    # bytes, floats of 40 bytes and two numbers of 8 bytes.
    assert up == 4 * (6 + 1 + 7 + 12 + 10 + 128 + 40 + 16)


def test_bytes_of_rejected_and_repeated_replies_are_counted():
    _, honest_metrics = train_once(averaging(), grid_of(4))
    bad = with_one_bad(MALFORMED["nan"][0])
    _, metrics = train_once(averaging(), grid_of(4, bad))
    assert metrics["bytes-up"] == honest_metrics["bytes-up"]
    _, twice = train_once(averaging(), grid_of(4), order=lambda replies: replies * 2)
    assert twice["bytes-up"] == 2 * honest_metrics["bytes-up"]


def test_error_replies_have_no_bytes_up():
    grid = grid_of(2, with_one_bad(error_reply))
    _, metrics = train_once(averaging(), grid)
    _, alone = train_once(averaging(), grid_of(1))
    assert metrics["bytes-up"] == alone["bytes-up"]


def test_messages_of_a_round_and_their_config():
    strategy, grid = averaging(checkpoint_every=5), grid_of(3)
    strategy.identify(grid)
    # Round of the last checkpoint that was written
    strategy.ledger.checkpointed = 5
    strategy.ledger.acknowledged = {"000001": 6}
    config = ConfigRecord({"own": 3})
    messages = strategy.configure_train(8, to_record(START), config, grid)
    # Flower needs a list in a deployment.
    assert isinstance(messages, list)
    records = [message.content.config_records["config"] for message in messages]
    assert [dict(record) for record in records] == [
        {
            "own": 3,
            "server-round": 8,
            "acknowledged-round": acknowledged,
            "checkpoint-round": 5,
        }
        for acknowledged in (0, 6, 0)
    ]
    assert all(m.metadata.group_id == "8" for m in messages)
    assert isinstance(
        strategy.configure_evaluate(8, to_record(START), config, grid), list
    )


def test_bytes_down_is_the_sum_over_the_messages():
    strategy, grid = averaging(), grid_of(3)
    messages = strategy.configure_train(1, to_record(START), ConfigRecord(), grid)
    _, metrics = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert metrics["bytes-down"] == sum(count_bytes(message) for message in messages)


class Devices(InlineGrid):
    """Three nodes, of which node 2 does not reply to training."""

    in_process = False

    def __init__(self):
        super().__init__(honest, 3)
        self.pushed = []

    def push_messages(self, messages):
        self.pushed = list(messages)
        return super().push_messages(self.pushed)

    def pull_messages(self, message_ids, *, timeout=None):
        return [
            reply
            for reply in super().pull_messages(message_ids)
            if (reply.metadata.src_node_id, reply.metadata.message_type)
            != (2, MessageType.TRAIN)
        ]


def test_messages_withheld_from_silent_nodes_are_not_counted():
    devices = Devices()
    strategy, grid = averaging(), Inbox(devices, longest=0.5)
    _, trained = train_once(strategy, grid)
    assert (trained["clients"], trained["unanswered"]) == (2, 1)
    assert trained["bytes-down"] == sum(map(count_bytes, devices.pushed))
    messages = strategy.configure_evaluate(1, to_record(START), ConfigRecord(), grid)
    metrics = strategy.aggregate_evaluate(1, grid.send_and_receive(messages))
    assert [m.metadata.dst_node_id for m in devices.pushed] == [1, 3]
    assert strategy.evaluation.round.asked == {1, 3}
    assert metrics["bytes-down"] == sum(map(count_bytes, devices.pushed))
    assert (metrics["evaluated"], metrics["evaluation-unanswered"]) == (2, 0)
