"""Evaluation: plain means over all clients with valid replies."""

import pytest
from flwr.app import Context, Message, MessageType
from function_clients import START, changing, evaluate_once, grid_of, partition_of
from participants import properties_of

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server.replies import to_record


def test_evaluation_returns_plain_means_over_all_clients():
    # All clients are evaluated, sampled or not: accuracies 0, 0.1, 0.2 and 0.3, losses
    # 0 to 3.
    strategy = FedAvg(fraction_train=0.25)
    metrics = evaluate_once(strategy, grid_of(4))
    assert metrics["accuracy"] == pytest.approx(0.15)
    assert metrics["loss"] == 1.5
    assert metrics["evaluated"] == 4
    assert "num-examples" not in metrics
    assert strategy._run.evaluation.metrics["000002"] == {
        "num-examples": 3,
        "loss": 2.0,
        "accuracy": 0.2,
    }


def test_invalid_evaluations_are_left_out():
    def change(content, i):
        record = content.metric_records["metrics"]
        if i == 0:
            record["accuracy"] = float("nan")
        elif i == 1:
            record["num-examples"] = -1
        elif i == 2:
            raise RuntimeError("broken")
        elif i == 3:
            # A client without test examples is valid, but does not count.
            record["num-examples"] = 0
            record["loss"] = record["accuracy"] = float("nan")

    strategy, client = FedAvg(), changing(MessageType.EVALUATE, change)
    metrics = evaluate_once(strategy, grid_of(6, client))
    assert metrics["accuracy"] == pytest.approx(0.45)
    assert metrics["evaluated"] == 2
    rejected = sorted(name for name, _ in strategy._run.evaluation.round.rejections)
    assert rejected == ["000000", "000001", "000002"]


def test_each_metric_is_averaged_over_the_clients_that_report_it():
    def change(content, i):
        record = content.metric_records["metrics"]
        if i == 0:
            content.clear()
        elif i == 1:
            del record["loss"], record["num-examples"]
        elif i == 2:
            record["f1"], record["invented"] = 0.25, 1.0
        elif i == 3:
            record["f1"] = 0.75

    # Losses 2 and 3, accuracies 0.1, 0.2 and 0.3
    grid = grid_of(4, changing(MessageType.EVALUATE, change))
    metrics = evaluate_once(FedAvg(), grid)
    assert metrics["loss"] == 2.5
    assert metrics["accuracy"] == pytest.approx(0.2)
    assert metrics["f1"] == 0.5
    # Fewer than half of the clients report it.
    assert "invented" not in metrics
    # A client without any metrics is neither evaluated nor rejected.
    assert (metrics["evaluated"], metrics["evaluation-rejected"]) == (3, 0)


def test_evaluation_without_valid_replies_has_no_means():
    def fail(content, i):
        raise RuntimeError("broken")

    grid = grid_of(3, changing(MessageType.EVALUATE, fail))
    metrics = evaluate_once(FedAvg(), grid)
    counts = {"evaluated": 0, "evaluation-rejected": 3, "evaluation-unanswered": 0}
    sizes = {"bytes-up": 0, "bytes-down": metrics["bytes-down"]}
    assert metrics == counts | sizes
    assert metrics["bytes-down"] > 0


@pytest.mark.parametrize(
    "name", ["round", "train-loss", "clients", "rejected", "unanswered-clients"]
)
def test_evaluation_cannot_overwrite_metrics_of_the_round(name):
    def change(content, i):
        content.metric_records["metrics"][name] = 99.0

    rows = []
    run_rounds(
        FedAvg(),
        grid_of(4, changing(MessageType.EVALUATE, change)),
        to_record(START),
        range(1, 2),
        after_round=lambda r, arrays, metrics: rows.append({"round": r, **metrics}),
    )
    assert rows[0].get(name) != 99.0


def test_weight_is_limited_to_the_declared_number_of_examples():
    # Client i declares i + 1 test examples and has the accuracy i / 10. The last one
    # reports a larger number of examples.
    declaring = properties_of(**{"num-test-examples": {i: i + 1 for i in range(4)}})

    def client(message: Message, context: Context) -> Message:
        reply = declaring(message, context)
        evaluates = message.metadata.message_type == MessageType.EVALUATE
        if evaluates and partition_of(context) == 3:
            reply.content.metric_records["metrics"]["num-examples"] = 10**9
        return reply

    metrics = evaluate_once(FedAvg(), grid_of(4, client))
    # (1 · 0 + 2 · 1 + 3 · 2 + 4 · 3) / 10
    assert metrics["accuracy-weighted"] == pytest.approx(0.2)
    assert metrics["loss-weighted"] == pytest.approx(2.0)


def test_metrics_of_clients_that_are_not_sampled_survive_a_resume():
    strategy = FedAvg(fraction_evaluate=0.5)
    for _ in range(2):
        evaluate_once(strategy, grid_of(8))
    resumed = FedAvg(fraction_evaluate=0.5)
    resumed._restore(strategy._snapshot())
    assert len(resumed._run.evaluation.metrics) >= 4
    assert resumed._run.evaluation.metrics == strategy._run.evaluation.metrics
    assert resumed._run.evaluation.rounds == strategy._run.evaluation.rounds
    # With all clients in every evaluation, checkpoints do not contain the metrics.
    strategy = FedAvg()
    evaluate_once(strategy, grid_of(8))
    assert "tested" not in strategy._snapshot().values
