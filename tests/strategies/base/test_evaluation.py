"""Evaluation: plain means over all clients with valid replies."""

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType
from function_clients import START, evaluate_once, grid_of, honest, partition_of

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.grids.simulation import InlineGrid
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
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.EVALUATE:
            record = reply.content.metric_records["metrics"]
            match partition_of(context):
                case 0:
                    record["accuracy"] = float("nan")
                case 1:
                    record["num-examples"] = -1
                case 2:
                    raise RuntimeError("broken")
                case 3:
                    # A client without test examples is valid, but does not count.
                    record["num-examples"] = 0
                    record["loss"] = record["accuracy"] = float("nan")
        return reply

    strategy = FedAvg()
    metrics = evaluate_once(strategy, grid_of(6, client))
    assert metrics["accuracy"] == pytest.approx(0.45)
    assert metrics["evaluated"] == 2
    assert sorted(name for name, _ in strategy._run.evaluation.round.rejections) == [
        "000000",
        "000001",
        "000002",
    ]


def test_each_metric_is_averaged_over_the_clients_that_report_it():
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.EVALUATE:
            record = reply.content.metric_records["metrics"]
            match partition_of(context):
                case 0:
                    reply.content.clear()
                case 1:
                    del record["loss"], record["num-examples"]
                case 2:
                    record["f1"] = 0.25
                    record["invented"] = 1.0
                case 3:
                    record["f1"] = 0.75
        return reply

    # Losses 2 and 3, accuracies 0.1, 0.2 and 0.3
    metrics = evaluate_once(FedAvg(), grid_of(4, client))
    assert metrics["loss"] == 2.5
    assert metrics["accuracy"] == pytest.approx(0.2)
    assert metrics["f1"] == 0.5
    # Fewer than half of the clients report it.
    assert "invented" not in metrics
    # A client without any metrics is neither evaluated nor rejected.
    assert (metrics["evaluated"], metrics["evaluation-rejected"]) == (3, 0)


def test_evaluation_without_valid_replies_has_no_means():
    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.EVALUATE:
            raise RuntimeError("broken")
        return honest(message, context)

    metrics = evaluate_once(FedAvg(), grid_of(3, client))
    counts = {"evaluated": 0, "evaluation-rejected": 3, "evaluation-unanswered": 0}
    sizes = {"bytes-up": 0, "bytes-down": metrics["bytes-down"]}
    assert metrics == counts | sizes
    assert metrics["bytes-down"] > 0


@pytest.mark.parametrize(
    "name", ["round", "train-loss", "clients", "rejected", "unanswered-clients"]
)
def test_evaluation_cannot_overwrite_metrics_of_the_round(name):
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.EVALUATE:
            reply.content.metric_records["metrics"][name] = 99.0
        return reply

    rows = []
    run_rounds(
        FedAvg(),
        grid_of(4, client),
        to_record(START),
        range(1, 2),
        after_round=lambda r, arrays, metrics: rows.append({"round": r, **metrics}),
    )
    assert rows[0].get(name) != 99.0


class Busy(InlineGrid):
    """A grid that does not list busy nodes, like `RealArrivals`."""

    left_alone: frozenset[int] = frozenset()

    def get_node_ids(self):
        self.connected = frozenset(super().get_node_ids())
        return sorted(self.connected - self.left_alone)


def test_busy_client_counts_with_its_last_metrics_and_in_the_sample_size():
    strategy, grid = FedAvg(fraction_train=0.5), Busy(honest, 6)
    assert evaluate_once(strategy, grid)["accuracy"] == pytest.approx(0.25)
    busy = "000004", "000005"
    grid.left_alone = frozenset(
        n for n in grid.get_node_ids() if strategy._run.clients.name_of(n) in busy
    )
    # It would now report another accuracy, but its last metrics count.
    strategy._run.evaluation.metrics["000005"]["accuracy"] = 0.9
    metrics = evaluate_once(strategy, grid, 2)
    # 0, 0.1, 0.2 and 0.3 in this round; 0.4 and 0.9 from round 1
    assert metrics["accuracy"] == pytest.approx(1.9 / 6)
    assert (metrics["evaluated"], metrics["evaluated-before"]) == (6, 2)
    assert strategy._run.evaluation.rounds["000005"] == 1
    assert strategy._run.evaluation.rounds["000003"] == 2
    # The sample is half of all six clients, and not half of the four available ones.
    arrays = to_record(START)
    sent = strategy.configure_train(3, arrays, ConfigRecord(), grid)
    nodes = {message.metadata.dst_node_id for message in sent}
    assert len(nodes) == 3
    assert not nodes & grid.left_alone
    # No client is busy any more.
    grid.left_alone = frozenset()
    assert "evaluated-before" not in evaluate_once(strategy, grid, 4)


def test_weight_is_limited_to_the_declared_number_of_examples():
    # Client i declares i + 1 test examples and has the accuracy i / 10. The last one
    # reports a larger number of examples.
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        i = partition_of(context)
        match message.metadata.message_type:
            case MessageType.QUERY if "properties" in reply.content.config_records:
                reply.content["properties"]["num-test-examples"] = i + 1
            case MessageType.EVALUATE:
                record = reply.content.metric_records["metrics"]
                record["num-examples"] = 10**9 if i == 3 else i + 1
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
    resumed._restore(strategy._snapshot()())
    assert len(resumed._run.evaluation.metrics) >= 4
    assert resumed._run.evaluation.metrics == strategy._run.evaluation.metrics
    assert resumed._run.evaluation.rounds == strategy._run.evaluation.rounds
    # With all clients in every evaluation, checkpoints do not contain the metrics.
    strategy = FedAvg()
    evaluate_once(strategy, grid_of(8))
    assert "tested" not in strategy._snapshot()().values
