"""The base of all strategies: who is asked, what counts, and what is averaged.

The clients here are functions: client i answers with what it was sent plus i + 1.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from strategies import FedAvg, FedAvgFT, build_strategy
from strategies.base import BaseStrategy
from strategies.grids import InlineGrid
from strategies.replies import count_bytes, to_record
from strategies.server_app import run_rounds
from task.settings import SettingsError, resolve

Client = Callable[[Message, Context], Message]
START = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def reply_with(message: Message, arrays: dict | ArrayRecord, **metrics) -> Message:
    record = arrays if isinstance(arrays, ArrayRecord) else to_record(arrays)
    values = {name.replace("_", "-"): value for name, value in metrics.items()}
    content = {"arrays": record, "metrics": MetricRecord(values)}
    return Message(RecordDict(content), reply_to=message)


def partition_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def honest(message: Message, context: Context) -> Message:
    """What an honest client answers to every kind of message."""
    i = partition_of(context)
    if message.metadata.message_type == MessageType.QUERY:
        properties = {"client": f"{i:06d}", "structure": "usual", "num-examples": i + 1}
        content = {"properties": ConfigRecord(properties)}
        return Message(RecordDict(content), reply_to=message)
    if message.metadata.message_type == MessageType.EVALUATE:
        metrics = {"num-examples": i + 1, "loss": float(i), "accuracy": i / 10}
        content = {"metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)
    if message.metadata.message_type != MessageType.TRAIN:
        content = {"arrays": to_record(START)}
        return Message(RecordDict(content), reply_to=message)
    sent = message.content.array_records["arrays"]
    arrays = {name: array.numpy() + np.float32(i + 1) for name, array in sent.items()}
    return reply_with(message, arrays, num_examples=i + 1, train_loss=float(i))


def grid_of(
    n: int, app: Client = honest, partitions: dict[int, int] | None = None
) -> InlineGrid:
    """A grid of n nodes; ``partitions`` says which node has which partition."""
    grid = InlineGrid(app, n)
    if partitions is not None:
        contexts = {i + 1: context for i, context in enumerate(grid.contexts.values())}
        grid.contexts = {node: contexts[i + 1] for node, i in partitions.items()}
    return grid


def train_once(
    strategy: BaseStrategy, grid: InlineGrid, start: dict | None = None, order=list
) -> tuple[ArrayRecord | None, MetricRecord]:
    arrays = to_record(START if start is None else start)
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    replies = grid.send_and_receive(messages)
    return strategy.aggregate_train(1, order(replies))


# The mean


def test_uniform_mean_by_hand():
    # 1, 2, 3 and 4 added to 0: 2.5. Losses 0, 1, 2, 3 by examples 1 to 4: 20/10.
    arrays, metrics = train_once(FedAvg(), grid_of(4))
    assert list(arrays) == ["w", "b"]
    assert arrays["w"].numpy().tolist() == [[2.5] * 3] * 2
    assert arrays["b"].numpy().dtype == np.float32
    assert metrics["train-loss"] == 2.0
    assert metrics["clients"] == 4
    assert metrics["rejected"] == 0
    assert metrics["unanswered"] == 0


def test_mean_by_examples_by_hand():
    # (1*1 + 2*2 + 3*3 + 4*4) / 10 = 3.
    arrays, _ = train_once(FedAvg(weighting="examples"), grid_of(4))
    assert arrays["b"].numpy().tolist() == [3.0] * 4


def shuffled(seed: int) -> Callable[[list], list]:
    def shuffle(replies: list) -> list:
        order = np.random.default_rng(seed).permutation(len(replies))
        return [replies[i] for i in order]

    return shuffle


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_order_of_arrival_does_not_change_a_bit(weighting):
    def noisy(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        i = partition_of(context)
        # Over 20 orders of magnitude, so that every order of summation rounds anew.
        rng = np.random.default_rng(i)
        values = rng.standard_normal(500) * 10.0 ** rng.integers(-10, 10, 500)
        return reply_with(message, {"x": values}, num_examples=i + 3, train_loss=1 / 3)

    start = {"x": np.zeros(500)}
    results = [
        train_once(FedAvg(weighting=weighting), grid_of(17, noisy), start, order)
        for order in (list, shuffled(1), shuffled(2))
    ]
    sums = [arrays["x"].data for arrays, _ in results]
    assert sums[0] == sums[1] == sums[2]
    assert len({metrics["train-loss"] for _, metrics in results}) == 1


def test_node_ids_do_not_change_a_bit():
    first, _ = train_once(FedAvg(fraction_train=0.5, seed=4), grid_of(6))
    mapping = {901: 3, 17: 0, 555: 5, 18: 1, 7: 4, 90: 2}
    second, _ = train_once(
        FedAvg(fraction_train=0.5, seed=4), grid_of(6, partitions=mapping)
    )
    assert first["w"].data == second["w"].data


def test_integers_are_rounded():
    def counting(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        steps = np.array([[1, 2, 4][partition_of(context)]])
        return reply_with(message, {"n": steps}, num_examples=1, train_loss=0.0)

    # 7/3 = 2.33.
    arrays, _ = train_once(FedAvg(), grid_of(3, counting), {"n": np.array([0])})
    assert arrays["n"].numpy().tolist() == [2]
    assert arrays["n"].numpy().dtype == np.int64


def test_no_examples_at_all():
    def without(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        return reply_with(message, START, num_examples=0, train_loss=0.0)

    arrays, metrics = train_once(FedAvg(), grid_of(3, without))
    assert arrays["w"].numpy().tolist() == [[0.0] * 3] * 2
    assert metrics["train-loss"] == 0.0
    # By examples there is nothing to weigh with: the old arrays stay.
    arrays, _ = train_once(FedAvg(weighting="examples"), grid_of(3, without))
    assert arrays is None


# Malformed replies


def honest_arrays(message: Message, context: Context) -> dict[str, np.ndarray]:
    record = honest(message, context).content.array_records["arrays"]
    return {name: array.numpy() for name, array in record.items()}


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


class Trap:
    """Writes a file when it is unpickled."""

    path = Path()

    def __reduce__(self):
        return (Path.touch, (self.path,))


def changed(change: Callable[[dict], dict | ArrayRecord]) -> Client:
    """Answer honestly but for a change of the arrays."""

    def client(message: Message, context: Context) -> Message:
        arrays = change(honest_arrays(message, context))
        return reply_with(message, arrays, num_examples=5, train_loss=1.0)

    return client


def with_metrics(**metrics) -> Client:
    def client(message: Message, context: Context) -> Message:
        return reply_with(message, honest_arrays(message, context), **metrics)

    return client


def with_records(change: Callable[[RecordDict], object]) -> Client:
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        change(reply.content)
        return reply

    return client


def replaced(array: Callable[[], Array]) -> Client:
    """Answer with another ``w``."""

    def change(arrays: dict) -> ArrayRecord:
        record = to_record(arrays)
        record["w"] = array()
        return record

    return changed(change)


def claimed(data: bytes, shape=(2, 3), dtype="float32") -> Array:
    return Array(dtype=dtype, shape=shape, stype="numpy.ndarray", data=data)


def error_reply(message: Message, _: Context) -> Message:
    return Message(Error(2, "it\nbroke"), reply_to=message)


def crash(*_: object) -> Message:
    raise ZeroDivisionError("no examples")


def set_entry(value: float) -> Callable[[dict], dict]:
    return lambda arrays: arrays | {"w": np.where(np.eye(2, 3) > 0, value, arrays["w"])}


def as_single(change: Callable[[dict], dict]) -> Callable[[dict], dict]:
    return lambda arrays: {n: v.astype(np.float32) for n, v in change(arrays).items()}


MALFORMED: dict[str, tuple[Client, str]] = {
    "missing name": (changed(lambda a: {"w": a["w"]}), "lacks arrays ['b']"),
    "extra name": (changed(lambda a: a | {"c": a["b"]}), "unknown arrays ['c']"),
    "renamed": (changed(lambda a: {"w": a["w"], "B": a["b"]}), "lacks arrays ['b']"),
    "a head": (
        changed(lambda a: a | {"head.weight": a["w"]}),
        "unknown arrays ['head.weight']",
    ),
    "wrong shape": (changed(lambda a: a | {"w": a["w"].T}), "is float32[3, 2]"),
    "wrong dtype": (
        changed(lambda a: a | {"w": a["w"].astype(np.float64)}),
        "is float64[2, 3]",
    ),
    "nan": (changed(as_single(set_entry(np.nan))), "not finite"),
    "infinity": (changed(as_single(set_entry(np.inf))), "not finite"),
    "minus infinity": (changed(as_single(set_entry(-np.inf))), "not finite"),
    "empty record": (changed(lambda a: {}), "lacks arrays ['b', 'w']"),
    "no record": (with_records(lambda c: c.pop("arrays")), "has no arrays"),
    "empty content": (with_records(lambda c: c.clear()), "has no arrays"),
    "another key": (
        with_records(lambda c: c.update({"other": c.pop("arrays")})),
        "has no arrays under 'arrays'",
    ),
    "no bytes": (replaced(lambda: claimed(b"")), "no valid .npy header"),
    "huge": (
        replaced(lambda: claimed(npy(START["w"]) + bytes(20_000_000))),
        "has 20,000,152 bytes, not about 24",
    ),
    "claims to be huge": (
        replaced(lambda: claimed(npy(START["w"]), shape=(10**6, 10**6))),
        "is float32[1000000, 1000000], not float32[2, 3]",
    ),
    "header of another shape": (
        replaced(lambda: claimed(npy(START["w"].reshape(6)))),
        "holds float32[6]",
    ),
    "header of another dtype": (
        replaced(lambda: claimed(npy(START["w"].astype(np.int32)))),
        "holds int32[2, 3]",
    ),
    "unreadable header": (
        replaced(lambda: claimed(b"\x93NUMPY\x01\x00\x0b\x00{'descr': (" + bytes(24))),
        "no valid .npy header",
    ),
    "header without end": (
        replaced(
            lambda: claimed(b"\x93NUMPY\x01\x00\xb8\x0b" + b"-" * 3000 + bytes(24))
        ),
        "no valid .npy header",
    ),
    "pickled objects": (
        replaced(lambda: claimed(npy(np.array([[Trap()] * 3] * 2, dtype=object)))),
        "holds object[2, 3]",
    ),
    "pickle": (replaced(lambda: claimed(pickle.dumps(Trap()))), "no valid .npy header"),
    "no metrics": (with_records(lambda c: c.pop("metrics")), "has 0 metric records"),
    "two metrics": (
        with_records(lambda c: c.update({"more": MetricRecord({"x": 1})})),
        "has 2 metric records",
    ),
    "no examples": (with_metrics(train_loss=1.0), "lacks the metric 'num-examples'"),
    "no loss": (with_metrics(num_examples=1), "lacks the metric 'train-loss'"),
    "nan loss": (
        with_metrics(num_examples=1, train_loss=float("nan")),
        "metric 'train-loss' is nan",
    ),
    "infinite loss": (
        with_metrics(num_examples=1, train_loss=float("inf")),
        "metric 'train-loss' is inf",
    ),
    "nan examples": (
        with_metrics(num_examples=float("nan"), train_loss=1.0),
        "metric 'num-examples' is nan",
    ),
    "negative examples": (
        with_metrics(num_examples=-3, train_loss=1.0),
        "num-examples is -3",
    ),
    "list of losses": (
        with_metrics(num_examples=3, train_loss=[1.0, 2.0]),
        "lacks the metric 'train-loss'",
    ),
    "of another round": (
        with_metrics(num_examples=3, train_loss=1.0, server_round=7),
        "is of round 7, not of round 1",
    ),
    "error": (error_reply, "is an error: it broke"),
    "crash": (crash, "is an error: ZeroDivisionError: no examples"),
}


def with_one_bad(bad: Client, who: int = 1) -> Client:
    def client(message: Message, context: Context) -> Message:
        training = message.metadata.message_type == MessageType.TRAIN
        liar = training and partition_of(context) == who
        return (bad if liar else honest)(message, context)

    return client


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("name", list(MALFORMED))
def test_a_malformed_reply_is_left_out(name, weighting, tmp_path, monkeypatch):
    monkeypatch.setattr(Trap, "path", tmp_path / "sprung")
    bad, reason = MALFORMED[name]
    strategy = FedAvg(weighting=weighting)
    arrays, metrics = train_once(strategy, grid_of(4, with_one_bad(bad)))
    # Without client 1: (1 + 3 + 4)/3, or by 1, 3 and 4 examples (1 + 9 + 16)/8.
    expected = np.float32(8 / 3 if weighting == "uniform" else 26 / 8)
    assert arrays["w"].numpy().tolist() == [[expected] * 3] * 2
    assert arrays["b"].numpy().tolist() == [expected] * 4
    # Losses 0, 2 and 3 by 1, 3 and 4 examples: 18/8.
    assert metrics["train-loss"] == 18 / 8
    assert metrics["clients"] == 3
    assert metrics["rejected"] == 1
    ((who, why),) = strategy.rejections
    assert who == "000001"
    assert reason in why
    assert "\n" not in why
    assert strategy.acknowledged == {"000000": 1, "000002": 1, "000003": 1}
    assert list(tmp_path.iterdir()) == []


def test_a_reply_that_comes_twice_counts_once():
    strategy = FedAvg()
    arrays, metrics = train_once(
        strategy, grid_of(4), order=lambda replies: [*replies, replies[2], replies[2]]
    )
    assert arrays["b"].numpy().tolist() == [2.5] * 4
    assert metrics["clients"] == 4
    assert metrics["rejected"] == 2
    assert strategy.rejections == [("000002", "comes twice")] * 2


def test_a_reply_of_a_node_that_was_not_asked():
    strategy, grid = FedAvg(), grid_of(4)
    nodes = strategy.identify(grid)
    config = ConfigRecord({"server-round": 1})
    strategy._expected = {"arrays": to_record(START)}
    messages = strategy._messages(
        nodes[:2], to_record(START), config, 1, MessageType.TRAIN
    )
    others = strategy.content(4, to_record(START), config)
    stranger = Message(others, 4, MessageType.TRAIN)
    replies = grid.send_and_receive([*messages, stranger])
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays["b"].numpy().tolist() == [1.5] * 4
    assert metrics["rejected"] == 1
    assert strategy.rejections == [("000003", "comes from a node that was not asked")]


def test_a_reply_that_never_comes():
    strategy = FedAvg()
    arrays, metrics = train_once(
        strategy, grid_of(4), order=lambda replies: replies[:3]
    )
    assert arrays["b"].numpy().tolist() == [2.0] * 4
    assert metrics["unanswered"] == 1
    assert strategy.silent == ["000003"]
    assert metrics["clients"] == 3
    assert "000003" not in strategy.acknowledged


def test_a_node_that_has_left_has_not_answered():
    # The SuperLink says so under its own id, which is nobody's here.
    def and_a_notice(replies: list) -> list:
        replies[3].metadata.__dict__["_src_node_id"] = 99
        return replies

    def client(message: Message, context: Context) -> Message:
        training = message.metadata.message_type == MessageType.TRAIN
        gone = training and partition_of(context) == 3
        return (error_reply if gone else honest)(message, context)

    strategy = FedAvg()
    arrays, metrics = train_once(strategy, grid_of(4, client), order=and_a_notice)
    assert arrays["b"].numpy().tolist() == [2.0] * 4
    assert (metrics["clients"], metrics["rejected"], metrics["unanswered"]) == (3, 0, 1)
    assert strategy.rejections == []
    assert strategy.silent == ["000003"]


@pytest.mark.parametrize("name", ["nan", "unreadable header", "error", "no metrics"])
def test_a_round_without_a_valid_reply_keeps_the_arrays_and_the_run_goes_on(name):
    bad, _ = MALFORMED[name]

    def client(message: Message, context: Context) -> Message:
        second = message.metadata.group_id == "2"
        training = message.metadata.message_type == MessageType.TRAIN
        return (bad if training and second else honest)(message, context)

    seen = []
    strategy = FedAvg()
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
    assert set(strategy.acknowledged.values()) == {3}


def test_a_round_without_any_reply():
    strategy = FedAvg()
    arrays, metrics = train_once(strategy, grid_of(4), order=lambda replies: [])
    assert arrays is None
    assert metrics["unanswered"] == 4
    assert metrics["clients"] == 0
    assert "train-loss" not in metrics


# Evaluation


def evaluate_once(strategy: BaseStrategy, grid: InlineGrid) -> MetricRecord | None:
    messages = strategy.configure_evaluate(1, to_record(START), ConfigRecord(), grid)
    return strategy.aggregate_evaluate(1, grid.send_and_receive(messages))


def test_evaluation_is_the_plain_mean_over_all_clients():
    # Accuracies 0, 0.1, 0.2 and 0.3, losses 0 to 3; sampled or not.
    strategy = FedAvg(fraction_train=0.25)
    metrics = evaluate_once(strategy, grid_of(4))
    assert metrics["accuracy"] == pytest.approx(0.15)
    assert metrics["loss"] == 1.5
    assert metrics["evaluated"] == 4
    assert "num-examples" not in metrics
    assert strategy.client_metrics["000002"] == {
        "num-examples": 3,
        "loss": 2.0,
        "accuracy": 0.2,
    }


def test_who_is_silent_in_an_evaluation_is_named(caplog):
    strategy = FedAvg()
    grid = grid_of(4)
    messages = strategy.configure_evaluate(1, to_record(START), ConfigRecord(), grid)
    replies = [
        reply
        for reply in grid.send_and_receive(messages)
        if strategy.name_of(reply.metadata.src_node_id) != "000003"
    ]
    metrics = strategy.aggregate_evaluate(1, replies)
    assert metrics["accuracy"] == pytest.approx(0.1)
    assert (metrics["evaluated"], metrics["evaluation-unanswered"]) == (3, 1)
    assert metrics["evaluation-rejected"] == 0
    assert "no reply of clients 000003" in caplog.text


def test_malformed_evaluations_are_left_out():
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.EVALUATE:
            record = reply.content.metric_records["metrics"]
            match partition_of(context):
                case 0:
                    record["accuracy"] = float("nan")
                case 1:
                    del record["loss"]
                case 2:
                    raise RuntimeError("broken")
                case 3:
                    # A client without test examples is no liar, but has no say.
                    record["num-examples"] = 0
                    record["loss"] = record["accuracy"] = float("nan")
        return reply

    strategy = FedAvg()
    metrics = evaluate_once(strategy, grid_of(6, client))
    assert metrics["accuracy"] == pytest.approx(0.45)
    assert metrics["evaluated"] == 2
    assert sorted(name for name, _ in strategy.evaluation_rejections) == [
        "000000",
        "000001",
        "000002",
    ]


def test_no_valid_evaluation():
    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.EVALUATE:
            raise RuntimeError("broken")
        return honest(message, context)

    assert evaluate_once(FedAvg(), grid_of(3, client)) is None


@pytest.mark.parametrize("name", ["round", "train-loss", "clients", "rejected"])
def test_an_evaluation_cannot_overwrite_the_round_s_metrics(name):
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


def test_rejected_evaluations_are_counted_in_the_round_s_metrics():
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


# Sampling


def names_sampled(
    strategy: BaseStrategy, grid: InlineGrid, rounds: int
) -> list[list[str]]:
    nodes = strategy.identify(grid)
    return [
        [strategy.name_of(node) for node in strategy.sample(r, nodes)]
        for r in range(1, rounds + 1)
    ]


def test_sampling_follows_seed_and_names_and_not_node_ids():
    n, rounds = 12, 20
    ids = np.random.default_rng(3).integers(1, 2**62, n).tolist()
    mapping = dict(
        zip(ids, np.random.default_rng(4).permutation(n).tolist(), strict=True)
    )
    plain = names_sampled(FedAvg(fraction_train=0.25, seed=1), grid_of(n), rounds)
    mixed = names_sampled(
        FedAvg(fraction_train=0.25, seed=1), grid_of(n, partitions=mapping), rounds
    )
    other = names_sampled(FedAvg(fraction_train=0.25, seed=2), grid_of(n), rounds)
    assert plain == mixed
    assert plain != other
    assert {len(names) for names in plain} == {3}
    assert all(names == sorted(set(names)) for names in plain)
    # Rounds differ, and with 60 draws everyone gets a turn but for luck of 1e-7.
    assert len({tuple(names) for names in plain}) > 10
    assert len({name for names in plain for name in names}) == n


def test_sampling_is_even():
    strategy = FedAvg(fraction_train=0.3)
    counts = np.zeros(10)
    for r in range(1, 1001):
        counts[strategy.sample(r, list(range(10)))] += 1
    # Binomial(1000, 0.3): standard deviation 14.5.
    assert np.all(np.abs(counts - 300) < 5 * 14.5)


@pytest.mark.parametrize(
    ("fraction", "least", "nodes", "expected"),
    [
        (1.0, 1, 7, 7),
        (0.5, 1, 7, 3),
        (0.1, 1, 100, 10),
        (0.3, 1, 10, 3),
        (0.07, 1, 100, 7),
        (0.29, 1, 100, 29),
        (0.1, 4, 10, 4),
        (0.01, 2, 10, 2),
        (0.5, 20, 10, 10),
        (0.5, 1, 0, 0),
    ],
)
def test_how_many_are_sampled(fraction, least, nodes, expected):
    strategy = FedAvg(fraction_train=fraction, min_train_nodes=least)
    assert len(strategy.sample(1, list(range(nodes)))) == expected


def test_a_fraction_that_samples_nobody():
    line = "fraction-train is 0.05: of 10 clients it samples nobody; it must be at"
    with pytest.raises(SettingsError, match=f"{line} least 0.1"):
        FedAvg(fraction_train=0.05).sample(1, list(range(10)))


# Who is there


def test_each_node_is_asked_once():
    asked = []

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            asked.append(context.node_id)
        return honest(message, context)

    strategy, grid = FedAvg(), grid_of(3, client)
    for _ in range(3):
        assert strategy.identify(grid) == [1, 2, 3]
    assert asked == [1, 2, 3]


def test_a_node_that_does_not_answer_is_asked_again():
    silent = {2}

    def client(message: Message, context: Context) -> Message:
        if context.node_id in silent:
            raise RuntimeError("not ready")
        return honest(message, context)

    strategy, grid = FedAvg(), grid_of(3, client)
    assert strategy.identify(grid) == [1, 3]
    silent.clear()
    assert strategy.identify(grid) == [1, 2, 3]


def test_nodes_are_ordered_by_name():
    grid = grid_of(4, partitions={40: 2, 10: 3, 30: 0, 20: 1})
    strategy = FedAvg()
    assert strategy.identify(grid) == [30, 20, 40, 10]
    assert strategy.name_of(10) == "000003"
    assert strategy.name_of(77) == "77"


def properties_of(**changes: dict[int, object]) -> Client:
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.QUERY:
            record = reply.content.config_records["properties"]
            for name, values in changes.items():
                if partition_of(context) in values:
                    record[name] = values[partition_of(context)]
        return reply

    return client


def test_two_nodes_of_the_same_name():
    grid = grid_of(4, properties_of(client={1: "same", 3: "same"}))
    strategy = FedAvg()
    # The one with the smaller id keeps the name; the other stays out.
    for _ in range(2):
        assert strategy.identify(grid) == [1, 3, 2]
    assert [strategy.name_of(n) for n in (1, 3, 2)] == ["000000", "000002", "same"]


def test_a_client_that_comes_back_as_another_node():
    grid, strategy = grid_of(3), FedAvg()
    strategy.identify(grid)
    strategy.acknowledged = {"000001": 4}
    grid.contexts[99] = grid.contexts.pop(2)
    assert strategy.identify(grid) == [1, 99, 3]
    assert strategy.name_of(99) == "000001"
    content = strategy.content(99, to_record(START), ConfigRecord({"server-round": 5}))
    assert content.config_records["config"]["acknowledged-round"] == 4


def test_a_minority_with_another_model_stays_out():
    grid = grid_of(5, properties_of(structure={0: "other", 3: "third"}))
    strategy = FedAvg()
    assert strategy.identify(grid) == [2, 3, 5]
    arrays, metrics = train_once(strategy, grid)
    # Clients 1, 2 and 4 add 2, 3 and 5.
    assert arrays["b"].numpy().tolist() == [np.float32(10 / 3)] * 4
    assert metrics["clients"] == 3


def test_a_tie_between_structures_is_decided_alike():
    for who in ({0: "a", 1: "b"}, {0: "b", 1: "a"}):
        grid = grid_of(2, properties_of(structure=who))
        (node,) = FedAvg().identify(grid)
        assert who[node - 1] == "a"


def test_nobody_answers():
    grid = grid_of(3, crash)
    assert FedAvg().identify(grid) == []
    with pytest.raises(SettingsError, match="no client has told its initial arrays"):
        FedAvg().initialize(grid)


def test_enough_nodes_are_waited_for(monkeypatch):
    grid = grid_of(3)
    late = grid.contexts.pop(3)
    waited = []

    def arrive(seconds: float) -> None:
        waited.append(seconds)
        grid.contexts[3] = late

    monkeypatch.setattr("strategies.participants.time.sleep", arrive)
    assert FedAvg(min_available_nodes=3).identify(grid) == [1, 2, 3]
    assert len(waited) == 1


def test_the_first_client_that_answers_gives_the_initial_arrays():
    def client(message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if kind == f"{MessageType.QUERY}.arrays" and partition_of(context) == 0:
            raise RuntimeError("broken")
        return honest(message, context)

    arrays = FedAvg().initialize(grid_of(3, client))
    assert list(arrays) == ["w", "b"]


@pytest.mark.parametrize("bad", ["nothing", "nan"])
def test_malformed_initial_arrays_of_one_client_do_not_end_the_run(bad):
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        kind = message.metadata.message_type
        if kind == f"{MessageType.QUERY}.arrays" and partition_of(context) == 0:
            if bad == "nothing":
                reply.content.clear()
            else:
                nan = {n: np.full_like(v, np.nan) for n, v in START.items()}
                reply.content["arrays"] = to_record(nan)
        return reply

    arrays = FedAvg().initialize(grid_of(3, client))
    assert arrays["w"].numpy().tolist() == START["w"].tolist()


# Bytes


def test_bytes_are_counted_as_serialised():
    sizes = []
    for entries in (10, 35):
        start = {"w": np.zeros(entries, np.float32)}
        _, metrics = train_once(FedAvg(), grid_of(4), start)
        sizes.append((metrics["bytes-down"], metrics["bytes-up"]))
    # 25 more floats of 4 bytes for each of 4 clients, in both directions.
    (down, up), (more_down, more_up) = sizes
    assert more_down - down == 4 * 25 * 4
    assert more_up - up == 4 * 25 * 4
    # Up: the names arrays, w, metrics, num-examples and train-loss, a header of 128, 40
    # bytes of floats and two numbers of 8.
    assert up == 4 * (6 + 1 + 7 + 12 + 10 + 128 + 40 + 16)


def test_rejected_and_repeated_replies_have_cost_bytes_too():
    _, honest_metrics = train_once(FedAvg(), grid_of(4))
    bad = with_one_bad(MALFORMED["nan"][0])
    _, metrics = train_once(FedAvg(), grid_of(4, bad))
    assert metrics["bytes-up"] == honest_metrics["bytes-up"]
    _, twice = train_once(FedAvg(), grid_of(4), order=lambda replies: replies * 2)
    assert twice["bytes-up"] == 2 * honest_metrics["bytes-up"]


def test_an_error_costs_nothing_up():
    grid = grid_of(2, with_one_bad(error_reply))
    _, metrics = train_once(FedAvg(), grid)
    _, alone = train_once(FedAvg(), grid_of(1))
    assert metrics["bytes-up"] == alone["bytes-up"]


# Messages


def test_what_a_client_is_sent():
    strategy, grid = FedAvg(checkpoint_every=5), grid_of(3)
    strategy.identify(grid)
    # The last checkpoint that was really written.
    strategy.checkpointed = 5
    strategy.acknowledged = {"000001": 6}
    config = ConfigRecord({"own": 3})
    messages = strategy.configure_train(8, to_record(START), config, grid)
    # Deployment needs a list.
    assert isinstance(messages, list)
    records = [message.content.config_records["config"] for message in messages]
    assert [dict(record) for record in records] == [
        {
            "own": 3,
            "server-round": 8,
            "acknowledged-round": acknowledged,
            # The newest checkpoint is that of round 5.
            "checkpoint-round": 5,
        }
        for acknowledged in (0, 6, 0)
    ]
    assert all(m.metadata.group_id == "8" for m in messages)
    assert isinstance(
        strategy.configure_evaluate(8, to_record(START), config, grid), list
    )


def test_down_is_the_sum_of_the_messages():
    strategy, grid = FedAvg(), grid_of(3)
    messages = strategy.configure_train(1, to_record(START), ConfigRecord(), grid)
    _, metrics = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert metrics["bytes-down"] == sum(count_bytes(message) for message in messages)


# Making one


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"fraction_train": 0.0}, r"fraction-train is 0.0; it must be in \(0, 1\]"),
        ({"fraction_train": 1.01}, "fraction-train is 1.01"),
        ({"fraction_train": -0.1}, "fraction-train is -0.1"),
        ({"fraction_train": float("nan")}, "fraction-train is nan"),
        ({"min_train_nodes": 0}, "min-train-nodes is 0; it must be at least 1"),
        ({"min_available_nodes": 0}, "min-available-nodes is 0"),
        ({"weighting": "even"}, "weighting is 'even'; it must be uniform or examples"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
    ],
)
def test_values_out_of_range(values, line):
    with pytest.raises(SettingsError, match=line):
        FedAvg(**values)


def test_from_settings():
    settings = resolve(
        {
            "algorithm": "fedavg-ft",
            "fraction-train": 0.25,
            "min-train-nodes": 3,
            "weighting": "examples",
            "seed": 9,
            "checkpoint-every": 4,
        }
    )
    strategy = build_strategy(settings)
    assert type(strategy) is FedAvgFT
    assert strategy.fraction_train == 0.25
    assert strategy.min_train_nodes == 3
    assert strategy.weighting == "examples"
    assert strategy.seed == 9
    assert strategy.checkpoint_every == 4
    with pytest.raises(SettingsError, match="unknown algorithm 'fedavgft'; did you"):
        build_strategy(resolve({"algorithm": "fedavgft"}))


def test_the_state_goes_into_another_strategy():
    strategy = FedAvg()
    train_once(strategy, grid_of(3))
    other = FedAvg()
    other.load_state_dict(*strategy.state_dict())
    assert other.acknowledged == {"000000": 1, "000001": 1, "000002": 1}
