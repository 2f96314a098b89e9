"""Content of messages, and how their bytes are counted."""

import numpy as np
from flwr.app import ConfigRecord
from function_clients import START, averaging, grid_of, train_once
from malformed import MALFORMED, with_one_bad

from flwr_frl.strategies.server.replies import to_record


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
    bad = with_one_bad(MALFORMED["nan"])
    _, metrics = train_once(averaging(), grid_of(4, bad))
    assert metrics["bytes-up"] == honest_metrics["bytes-up"]
    _, twice = train_once(averaging(), grid_of(4), order=lambda replies: replies * 2)
    assert twice["bytes-up"] == 2 * honest_metrics["bytes-up"]


def test_messages_of_a_round_and_their_config():
    strategy, grid = averaging(), grid_of(3)
    strategy._identify(grid)
    # Round of the last checkpoint that was written
    strategy._run.clients.checkpointed = 5
    strategy._run.clients.acknowledged = {"000001": 6}
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
