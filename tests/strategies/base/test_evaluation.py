"""Evaluation: plain means over all clients with valid replies."""

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType
from function_clients import START, evaluate_once, grid_of, honest, partition_of
from malformed import error_reply

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server.rounds import run_rounds


def test_evaluation_returns_plain_means_over_all_clients():
    # All clients are evaluated, sampled or not: accuracies 0, 0.1, 0.2 and 0.3, losses
    # 0 to 3.
    strategy = FedAvg(fraction_train=0.25)
    metrics = evaluate_once(strategy, grid_of(4))
    assert metrics["accuracy"] == pytest.approx(0.15)
    assert metrics["loss"] == 1.5
    assert metrics["evaluated"] == 4
    assert "num-examples" not in metrics
    assert strategy.evaluation.metrics["000002"] == {
        "num-examples": 3,
        "loss": 2.0,
        "accuracy": 0.2,
    }


def test_clients_that_do_not_reply_to_an_evaluation_are_named(caplog):
    strategy = FedAvg()
    grid = grid_of(4)
    messages = strategy.configure_evaluate(1, to_record(START), ConfigRecord(), grid)
    replies = [
        reply
        for reply in grid.send_and_receive(messages)
        if strategy.clients.name_of(reply.metadata.src_node_id) != "000003"
    ]
    metrics = strategy.aggregate_evaluate(1, replies)
    assert metrics["accuracy"] == pytest.approx(0.1)
    assert (metrics["evaluated"], metrics["evaluation-unanswered"]) == (3, 1)
    assert metrics["evaluation-rejected"] == 0
    assert "no reply of clients 000003" in caplog.text


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
    assert sorted(name for name, _ in strategy.evaluation.round.rejections) == [
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


@pytest.mark.parametrize("name", ["round", "train-loss", "clients", "rejected"])
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
    assert rows[0][name] != 99.0


def test_rejected_evaluations_are_counted_in_metrics_of_the_round():
    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.EVALUATE:
            error = partition_of(context) == 1
            return (error_reply if error else honest)(message, context)
        return honest(message, context)

    rows = []
    run_rounds(
        FedAvg(),
        grid_of(4, client),
        to_record(START),
        range(1, 2),
        after_round=lambda r, arrays, metrics: rows.append(metrics),
    )
    rejected = sum(value for name, value in rows[0].items() if "reject" in name)
    assert rejected == 1


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
        n for n in grid.get_node_ids() if strategy.clients.name_of(n) in busy
    )
    # It would now report another accuracy, but its last metrics count.
    strategy.evaluation.metrics["000005"]["accuracy"] = 0.9
    metrics = evaluate_once(strategy, grid, 2)
    # 0, 0.1, 0.2 and 0.3 in this round; 0.4 and 0.9 from round 1
    assert metrics["accuracy"] == pytest.approx(1.9 / 6)
    assert (metrics["evaluated"], metrics["evaluated-before"]) == (6, 2)
    assert strategy.evaluation.rounds["000005"] == 1
    assert strategy.evaluation.rounds["000003"] == 2
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


def test_only_sampled_busy_clients_count_with_earlier_metrics():
    strategy, grid = FedAvg(), grid_of(8)
    evaluate_once(strategy, grid)
    strategy.evaluation.fraction = 0.5
    tested = []
    for server_round in range(2, 8):
        strategy.clients.busy = frozenset(list(strategy.clients.known)[:6])
        strategy.identify = lambda grid: sorted(grid.get_node_ids())[6:]
        start = to_record(START)
        messages = strategy.configure_evaluate(
            server_round, start, ConfigRecord(), grid
        )
        replies = list(grid.send_and_receive(list(messages)))
        metrics = strategy.aggregate_evaluate(server_round, replies)
        tested.append(len(replies))
        # Four clients are sampled, at most two of them are available.
        assert metrics["evaluated"] == (4 if replies else 0)
        assert metrics.get("evaluated-before", 0) == (4 - len(replies)) % 4
    assert set(tested) >= {1, 2}


def test_metrics_of_clients_that_are_not_sampled_survive_a_resume():
    strategy = FedAvg(fraction_evaluate=0.5)
    for _ in range(2):
        evaluate_once(strategy, grid_of(8))
    resumed = FedAvg(fraction_evaluate=0.5)
    resumed.restore(strategy.snapshot()())
    assert len(resumed.evaluation.metrics) >= 4
    assert resumed.evaluation.metrics == strategy.evaluation.metrics
    assert resumed.evaluation.rounds == strategy.evaluation.rounds
    # With all clients in every evaluation, checkpoints do not contain the metrics.
    strategy = FedAvg()
    evaluate_once(strategy, grid_of(8))
    assert "tested" not in strategy.snapshot()().values


def test_earlier_metrics_alone_are_not_an_evaluation():
    strategy, grid = FedAvg(), grid_of(4)
    assert evaluate_once(strategy, grid)["evaluated"] == 4
    list(strategy.configure_evaluate(2, to_record(START), ConfigRecord(), grid))
    nodes = strategy.clients.known
    strategy.clients.busy = frozenset(n for n in nodes if n == max(nodes))
    metrics = strategy.aggregate_evaluate(2, [])
    assert metrics["evaluated"] == 0
    assert "accuracy" not in metrics


def test_clients_without_test_examples_are_named_once(caplog):
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        empty = partition_of(context) == 2
        if empty and message.metadata.message_type == MessageType.EVALUATE:
            reply.content.metric_records["metrics"]["num-examples"] = 0
        if empty and "properties" in reply.content:
            reply.content.config_records["properties"]["num-test-examples"] = 0
        return reply

    strategy, grid = FedAvg(), grid_of(4, client)
    for server_round in 1, 2:
        metrics = evaluate_once(strategy, grid, server_round)
        assert metrics["evaluated"] == 3
    lines = [m for m in caplog.messages if "without test examples: 000002" in m]
    assert len(lines) == 1
