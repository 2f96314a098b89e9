"""The ClientApp: messages, replies and reproducibility."""

import numpy as np
import pytest
import torch
from client_messages import (
    FAST,
    app_of,
    context_of,
    equal,
    initial_arrays,
    message_of,
    values_of,
)
from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    MessageType,
    RecordDict,
)

from flwr_frl.clients import DittoClient, FedRepClient
from flwr_frl.common.settings import SettingsError, resolve
from flwr_frl.task.tasks import build_task


def test_a_training_message_and_its_reply():
    app, context = app_of(algorithm="fedrep"), context_of(3)
    arrays = initial_arrays(app, context)
    message = message_of(MessageType.TRAIN, arrays, server_round=1)
    reply = app(message, context)
    assert list(reply.content) == ["arrays", "metrics"]
    trained = reply.content.array_records["arrays"]
    assert list(trained) == list(arrays)
    for name, value in values_of(trained).items():
        sent = arrays[name].numpy()
        assert value.shape == sent.shape
        assert value.dtype == sent.dtype
        assert not np.array_equal(value, sent)
    metrics = reply.content.metric_records["metrics"]
    assert metrics["num-examples"] == len(build_task(resolve(FAST), 20).train[3])
    assert metrics["train-loss"] > 0
    assert metrics["server-round"] == 1
    assert reply.metadata.src_node_id == message.metadata.dst_node_id


def test_evaluations_and_queries_are_answered():
    app, context = app_of(algorithm="fedrep"), context_of(7)
    arrays = initial_arrays(app, context)
    reply = app(message_of(MessageType.EVALUATE, arrays, server_round=1), context)
    assert list(reply.content) == ["metrics"]
    metrics = reply.content.metric_records["metrics"]
    task = build_task(resolve(FAST), 20)
    assert 0 <= metrics["accuracy"] <= 1
    assert metrics["num-examples"] == len(task.test[7])
    assert np.isfinite(metrics["loss"])
    reply = app(message_of(MessageType.QUERY), context)
    properties = reply.content.config_records["properties"]
    assert properties["client"] == "000007"
    assert properties["num-examples"] == len(task.train[7])
    assert properties["num-test-examples"] == len(task.test[7])


def test_replies_depend_neither_on_the_order_of_arrays_nor_on_earlier_clients():
    app = app_of(algorithm="fedrep")
    arrays = initial_arrays(app, context_of())
    turned = ArrayRecord(dict(reversed(arrays.items())))
    message, other = (
        message_of(MessageType.TRAIN, sent, server_round=4) for sent in (arrays, turned)
    )
    first = app(message, context_of(5)).content.array_records["arrays"]
    for client in (1, 2):
        app(message, context_of(client))
    second = app(other, context_of(5)).content.array_records["arrays"]
    assert list(second) == list(turned)
    assert equal(first, second)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda *_: None,
            "returns a NoneType; expected arrays, a number of examples",
        ),
        (
            lambda a, n, m: (a[:-1], n, m),
            "returns 1 arrays; expected 2, those of rep",
        ),
        (
            lambda a, n, m: ([torch.tensor(v) for v in a], n, m),
            "returns a Tensor for 'representation.fc1.weight'; expected a NumPy",
        ),
        (
            lambda a, n, m: (a, n, {**m, "who": "me"}),
            "returns the metric 'who' as 'me'; expected a number",
        ),
    ],
    ids=["nothing", "too few", "tensors", "text"],
)
def test_an_invalid_reply_of_fit_raises_a_one_line_error(monkeypatch, change, line):
    fit = FedRepClient.fit
    monkeypatch.setattr(FedRepClient, "fit", lambda *given: change(*fit(*given)))
    app, context = app_of(algorithm="fedrep"), context_of()
    message = message_of(MessageType.TRAIN, initial_arrays(app, context))
    with pytest.raises(SettingsError) as caught:
        app(message, context)
    assert str(caught.value).startswith(f"FedRepClient.fit {line}")


def test_initial_values_must_be_tensors(monkeypatch):
    monkeypatch.setattr(DittoClient, "initial_group", lambda *_: {"w": np.zeros(3)})
    app, context = app_of(algorithm="ditto"), context_of()
    with pytest.raises(SettingsError, match=r"initial_group returns a ndarray for 'mo"):
        app(message_of(MessageType.TRAIN, initial_arrays(app, context)), context)


@pytest.mark.parametrize("change", ["missing", "head", "unknown"])
def test_arrays_with_other_names_are_refused(change):
    app = app_of(algorithm="fedrep")
    arrays = initial_arrays(app, context_of())
    if change == "missing":
        del arrays[next(iter(arrays))]
    else:
        name = {"head": "head.weight", "unknown": "body.weight"}[change]
        arrays[name] = Array(np.zeros((10, 32), np.float32))
    with pytest.raises(Exception, match="do not fit this client's model"):
        app(message_of(MessageType.TRAIN, arrays, server_round=1), context_of())


def test_sent_groups_that_are_not_shared_have_their_own_names():
    app, context = app_of(algorithm="flute", task="linear"), context_of(2)
    arrays = initial_arrays(app, context)
    message = message_of(MessageType.TRAIN, server_round=1)
    # FLUTE's server sends each client its head in a separate record.
    for key, name in (("arrays", "representation.weight"), ("head", "head.weight")):
        message.content[key] = ArrayRecord({name: arrays[name]})
    reply = app(message, context)
    assert set(reply.content) == {"arrays", "metrics"}
    replied = values_of(reply.content.array_records["arrays"])
    assert {name: array.shape for name, array in replied.items()} == {
        "gradient.representation.weight": (2, 10),
        "gradient.head.weight": (1, 2),
    }


def test_replies_have_the_records_and_the_precision_of_the_message():
    app, context = app_of(algorithm="fedavg"), context_of(2)
    arrays = values_of(initial_arrays(app, context))
    message = message_of(MessageType.TRAIN, server_round=1)
    for key, part, kind in (
        ("arrays", "representation.", np.float16),
        ("head", "head.", np.float32),
    ):
        part_arrays = {
            n: Array(a.astype(kind)) for n, a in arrays.items() if n.startswith(part)
        }
        message.content[key] = ArrayRecord(part_arrays)
    reply = app(message, context)
    for key, kind in (("arrays", "float16"), ("head", "float32")):
        record = reply.content.array_records[key]
        assert list(record) == list(message.content.array_records[key])
        assert {array.dtype for array in record.values()} == {kind}


def test_attachments_are_in_a_record_of_bytes():
    app, context = app_of(algorithm="dpsgd", num_clients=20), context_of(2)
    config = {"exchanged_round": 0, "consensus_step": 0.5, "neighbour_weight": 0.5}
    message = message_of(MessageType.TRAIN, server_round=1, **config)
    reply = app(message, context)
    assert set(reply.content) == {"metrics", "bytes"}
    (name,) = reply.content.config_records["bytes"]
    assert name == "message"
    numbers = reply.content.metric_records["metrics"]
    assert set(numbers) == {"num-examples", "train-loss", "refused", "server-round"}
    # The message is the model after the round: d float32 numbers.
    model = build_task(resolve(FAST), 20).initial_model()
    d = sum(p.numel() for p in model.parameters())
    assert len(reply.content.config_records["bytes"]["message"]) == 4 * d


def test_a_target_of_representation_transfer_sends_no_arrays():
    app = app_of(algorithm="representation-transfer", task="transfer")
    context = context_of(12)
    arrays = initial_arrays(app, context)
    basis = ArrayRecord({name: Array(np.eye(10)[:2]) for name in arrays})
    reply = app(message_of(MessageType.TRAIN, basis, server_round=2), context)
    assert not any(reply.content.array_records.values())
    assert reply.content.metric_records["metrics"]["num-examples"] == 8


def statistics_of(app, context: Context) -> dict[str, np.ndarray]:
    reply = app(message_of(f"{MessageType.QUERY}.statistics"), context)
    return values_of(reply.content.array_records["arrays"])


def test_statistics_have_their_own_query():
    assert statistics_of(app_of(algorithm="fedrep"), context_of()) == {}
    statistics = statistics_of(app_of(algorithm="fedrep", task="linear"), context_of(3))
    x, y = build_task(resolve({"task": "linear"}), 20).draw(3)
    expected = sum(v**2 * np.outer(row, row) for row, v in zip(x, y, strict=True)) / 5
    assert list(statistics) == ["moments"]
    np.testing.assert_allclose(statistics["moments"], expected)


# Reproducibility


def test_clients_rounds_and_seeds_shuffle_differently():
    # Without a partition, all clients train on the same data.
    replies = []
    for seed, name, server_round in (
        (0, "a", 1),
        (0, "a", 2),
        (0, "b", 1),
        (1, "a", 1),
        (0, "a", 1),
    ):
        app = app_of(algorithm="local", seed=0)
        context = Context(1, 1, {"client-name": name}, RecordDict(), {})
        arrays = initial_arrays(app, context)
        app = app_of(algorithm="fedavg", seed=seed)
        arrays = initial_arrays(app_of(algorithm="fedavg", seed=0), context)
        message = message_of(MessageType.TRAIN, arrays, server_round=server_round)
        replies.append(app(message, context).content.array_records["arrays"])
    same = [[equal(a, b) for b in replies] for a in replies]
    expected = np.eye(5, dtype=bool)
    expected[0, 4] = expected[4, 0] = True
    assert np.array_equal(same, expected)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", "l2gd"])
def test_a_client_without_training_examples_is_tested_but_not_trained(
    algorithm, write_module
):
    text = """
import torch
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

def empty(num_clients):
    x, y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    build = lambda: SplitModel(nn.Linear(2, 2), nn.Linear(2, 2))
    train = [ExampleSet(x[:4 * i], y[:4 * i]) for i in range(num_clients)]
    test = [ExampleSet(x, y)] * num_clients
    return ExampleTask(build, train, test, classes=("a", "b"))
"""
    app = app_of(algorithm=algorithm, task=f"{write_module('empties', text)}:empty")
    arrays = initial_arrays(app, context_of(1))
    message = message_of(MessageType.TRAIN, arrays, server_round=1, coins=0)
    with pytest.raises(SettingsError, match=r"^there are no training examples$"):
        app(message, context_of(0))
    # The client can be tested nevertheless.
    message = message_of(MessageType.EVALUATE, arrays, server_round=1)
    assert "accuracy" in app(message, context_of(0)).content["metrics"]
