"""Invalid and missing replies are left out, and their clients are named."""

import logging

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord
from function_clients import (
    START,
    averaging,
    changing,
    grid_of,
    honest,
    reply_with,
    train_once,
)
from malformed import MALFORMED, RETICENT, Trap, with_one_bad

from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server.round import Round


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("name", list(MALFORMED))
def test_invalid_reply_is_left_out(name, weighting, tmp_path, monkeypatch):
    monkeypatch.setattr(Trap, "path", tmp_path / "sprung")
    bad = MALFORMED[name]
    strategy = averaging(weighting=weighting)
    arrays, metrics = train_once(strategy, grid_of(4, with_one_bad(bad)))
    # Without client 1: (1 + 3 + 4)/3, or weighted by examples (1 + 9 + 16)/8.
    expected = np.float32(8 / 3 if weighting == "uniform" else 26 / 8)
    assert arrays["w"].numpy().tolist() == [[expected] * 3] * 2
    assert arrays["b"].numpy().tolist() == [expected] * 4
    # Losses 0, 2 and 3, weighted by 1, 3 and 4 examples: 18/8
    assert metrics["train-loss"] == 18 / 8
    assert metrics["clients"] == 3
    assert metrics["rejected"] == 1
    ((who, why),) = strategy._run.round.rejections
    assert who == "000001"
    assert "\n" not in why
    assert strategy._run.clients.acknowledged == {"000000": 1, "000002": 1, "000003": 1}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", list(RETICENT))
def test_metrics_that_a_client_may_omit(name):
    taciturn, loss = RETICENT[name]
    strategy = averaging()
    arrays, metrics = train_once(strategy, grid_of(4, with_one_bad(taciturn)))
    assert arrays["b"].numpy().tolist() == [2.5] * 4
    assert metrics["train-loss"] == pytest.approx(loss)
    assert (metrics["clients"], metrics["rejected"]) == (4, 0)
    # Weighting by examples requires num-examples, but no other metric.
    strategy = averaging(weighting="examples")
    arrays, metrics = train_once(strategy, grid_of(4, with_one_bad(taciturn)))
    if "loss" in name:
        # Weighted by 1, 2, 3 and 4 examples: 30/10
        assert arrays["b"].numpy().tolist() == [3.0] * 4
    else:
        assert arrays["b"].numpy().tolist() == [26 / 8] * 4
        assert strategy._run.round.rejections == [
            ("000001", "lacks the metric 'num-examples'")
        ]


def test_repeated_reply_counts_once():
    strategy = averaging()
    arrays, metrics = train_once(
        strategy, grid_of(4), order=lambda replies: [*replies, replies[2], replies[2]]
    )
    assert arrays["b"].numpy().tolist() == [2.5] * 4
    assert metrics["clients"] == 4
    assert metrics["rejected"] == 2
    assert strategy._run.round.rejections == [("000002", "comes twice")] * 2


def test_reply_of_a_node_that_was_not_asked_is_rejected():
    strategy, grid = averaging(), grid_of(4)
    nodes = strategy._identify(grid)
    config = ConfigRecord({"server-round": 1})
    round = Round(strategy, 1, to_record(START), config, nodes[:2])
    messages = strategy._open_round(round, grid)
    stranger = Message(messages[0].content, 4, MessageType.TRAIN)
    replies = grid.send_and_receive([*messages, stranger])
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays["b"].numpy().tolist() == [1.5] * 4
    assert metrics["rejected"] == 1
    assert strategy._run.round.rejections == [
        ("000003", "comes from a node that was not asked")
    ]


@pytest.mark.parametrize("said", ["other classes\nERROR", "", 7, [b"1"]])
def test_client_that_continues_without_its_state_is_logged(said, caplog):
    def change(content, i):
        if i == 1:
            content["properties"] = ConfigRecord({"unused-state": said})

    strategy = averaging()
    grid = grid_of(3, changing(MessageType.TRAIN, change))
    with caplog.at_level(logging.WARNING, "flwr"):
        arrays, metrics = train_once(strategy, grid)
    # Its reply still counts.
    assert arrays["b"].numpy().tolist() == [2.0] * 4
    assert metrics["clients"] == 3
    expected = "client 000001 does not continue from its last state: " + (
        "other classes ERROR"
    )
    assert caplog.messages == ([expected] if said == "other classes\nERROR" else [])


def test_missing_reply_is_counted_as_unanswered():
    strategy = averaging()
    arrays, metrics = train_once(
        strategy, grid_of(4), order=lambda replies: replies[:3]
    )
    assert arrays["b"].numpy().tolist() == [2.0] * 4
    assert metrics["unanswered"] == 1
    assert strategy._run.round.silent == ["000003"]
    assert metrics["clients"] == 3
    assert "000003" not in strategy._run.clients.acknowledged


@pytest.mark.parametrize("name", ["nan", "unreadable header", "error", "two metrics"])
def test_round_without_valid_replies_keeps_the_arrays(name):
    bad = MALFORMED[name]

    def client(message: Message, context: Context) -> Message:
        second = message.metadata.group_id == "2"
        training = message.metadata.message_type == MessageType.TRAIN
        return (bad if training and second else honest)(message, context)

    seen = []
    strategy = averaging()
    final = run_rounds(
        strategy,
        grid_of(4, client),
        to_record(START),
        range(1, 4),
        evaluated=lambda server_round: False,
        after_round=lambda r, arrays, metrics: seen.append(
            (r, float(arrays["b"].numpy()[0]), metrics["clients"], metrics["rejected"])
        ),
    )
    assert seen == [(1, 2.5, 4, 0), (2, 2.5, 0, 4), (3, 5.0, 4, 0)]
    assert final["b"].numpy().tolist() == [5.0] * 4
    assert set(strategy._run.clients.acknowledged.values()) == {3}


def test_a_run_without_a_round_that_counts_is_an_error():
    class Broken(FedAvg):
        def aggregate(self, round):
            return {n: np.full_like(v, np.nan) for n, v in round.arrays.items()}

    with pytest.raises(SettingsError, match="in no round did a client's reply count"):
        Broken(fraction_train=1.0).start(grid_of(3), to_record(START), 2)


def test_an_override_may_return_its_own_metrics():
    class Mine(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, _ = super().aggregate_train(server_round, replies)
            return arrays, MetricRecord({"mine": 1.0})

    result = Mine(fraction_train=1.0).start(grid_of(3), to_record(START), 1)
    assert result.arrays["b"].numpy().tolist() == [2.0] * 4


def test_changes_are_measured_from_what_was_sent_whatever_is_expected():
    class Expecting(FedAvg):
        def begin(self, round):
            round.expected = {n: np.ones(v.shape) for n, v in round.arrays.items()}

    settings = {"server_optimizer": "momentum", "server_optimizer_rate": 0.5}
    settings |= {"fraction_train": 1.0}
    means = [
        train_once(kind(**settings), grid_of(3))[0] for kind in (FedAvg, Expecting)
    ]
    assert means[0]["w"].numpy().tolist() == means[1]["w"].numpy().tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: {n: v.T for n, v in a.items()}, r"expected \(2, 3\)"),
        (lambda a: {"w": a["w"]}, "returns 'b' with the shape None"),
        (lambda a: to_record(START), "returns .*; expected "),
        (lambda a: [START["w"]], "returns .*; expected "),
        (lambda a: {"w": 1.0}, "returns .*; expected "),
        (lambda a: 1.0, "returns .*; expected "),
    ],
)
def test_result_of_aggregate_must_match_the_sent_arrays(change, said):
    class Wrong(FedAvg):
        def aggregate(self, round):
            return change(round.mean())

    with pytest.raises(SettingsError, match=rf"^Wrong\.aggregate .*{said}"):
        train_once(Wrong(fraction_train=1.0), grid_of(3))


def test_arithmetic_on_the_result_of_aggregate_may_change_its_dtypes():
    # A batch norm's counter has no dimensions, and becomes a scalar.
    start = {**START, "counter": np.array(4)}

    class Moving(FedAvg):
        def aggregate(self, round):
            return {n: old + 0.5 * (old + 1 - old) for n, old in round.arrays.items()}

    def client(message, context):
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        return reply_with(message, start, num_examples=1, train_loss=0.0)

    strategy = Moving(fraction_train=1.0)
    record, _ = train_once(strategy, grid_of(3, client), start)
    new = {name: array.numpy() for name, array in record.items()}
    assert {n: a.dtype for n, a in new.items()} == {
        n: a.dtype for n, a in start.items()
    }
    assert new["counter"] == 4
    np.testing.assert_allclose(new["w"], START["w"] + 0.5)
