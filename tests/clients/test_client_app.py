"""The ClientApp: messages, replies and reproducibility."""

import numpy as np
import pytest
import torch
from client_messages import (
    app_of,
    context_of,
    device,
    equal,
    initial_arrays,
    message_of,
    trained,
    values_of,
)
from flwr.app import Array, ArrayRecord, MessageType
from refusals import assert_says

from flwr_frl.clients import FedRepClient
from flwr_frl.common.settings import version


def test_replies_depend_neither_on_the_order_of_arrays_nor_on_earlier_clients():
    app = app_of(algorithm="fedrep")
    arrays = initial_arrays(app, context_of())
    turned = ArrayRecord(dict(reversed(arrays.items())))
    first, *_, second = (
        trained(app, sent, context_of(client), server_round=4)
        for client, sent in ((5, arrays), (1, arrays), (2, arrays), (5, turned))
    )
    assert list(second) == list(turned)
    assert equal(first, second)


@pytest.mark.parametrize(
    "change",
    [
        lambda *_: None,
        lambda a, n, m: (a[:-1], n, m),
        lambda a, n, m: ([torch.tensor(v) for v in a], n, m),
        lambda a, n, m: (a, n, {**m, "who": "me"}),
        lambda a, n, m: (a, n, {**m, "train-loss": torch.ones(2)}),
    ],
    ids=["nothing", "too few", "tensors", "text", "no number"],
)
def test_an_invalid_reply_of_fit_raises_a_one_line_error(monkeypatch, change):
    fit = FedRepClient.fit
    monkeypatch.setattr(FedRepClient, "fit", lambda *given: change(*fit(*given)))
    app, context = app_of(algorithm="fedrep"), context_of()
    arrays = initial_arrays(app, context)
    assert_says("FedRepClient.fit returns ", trained, app, arrays, context)


def test_an_array_that_fit_replaces_is_sent(monkeypatch):
    fit = FedRepClient.fit

    def doubled(self, parameters, config):
        arrays, *rest = fit(self, parameters, config)
        arrays[0] = 2 * arrays[0]
        return arrays, *rest

    app = app_of(algorithm="fedrep")
    arrays = initial_arrays(app, context_of())
    usual = values_of(trained(app, arrays, context_of(), server_round=1))
    monkeypatch.setattr(FedRepClient, "fit", doubled)
    name, *others = usual
    replaced = values_of(trained(app, arrays, context_of(), server_round=1))
    assert np.array_equal(replaced[name], 2 * usual[name])
    assert all(np.array_equal(replaced[other], usual[other]) for other in others)


def test_received_arrays_must_not_be_changed_in_place(monkeypatch):
    def update(self):
        self.received["representation.fc1.bias"] += 1
        return 0.0

    monkeypatch.setattr(FedRepClient, "update", update)
    app, context = app_of(algorithm="fedrep"), context_of()
    arrays = initial_arrays(app, context)
    line = "changes self.received['representation.fc1.bias'] in place"
    assert_says(line, trained, app, arrays, context)


@pytest.mark.parametrize("name", ["", "head.weight", "body.weight"])
def test_arrays_with_other_names_are_refused(name):
    app = app_of(algorithm="fedrep")
    arrays = initial_arrays(app, context_of())
    if name:
        arrays[name] = Array(np.zeros((10, 32), np.float32))
    else:
        del arrays[next(iter(arrays))]
    line = "do not fit this client's model"
    assert_says(line, trained, app, arrays, context_of(), server_round=1)


def test_replies_have_the_records_of_the_message():
    app, context = app_of(algorithm="fedavg"), context_of(2)
    arrays = values_of(initial_arrays(app, context))
    message = message_of(MessageType.TRAIN, server_round=1)
    for key, part in (("arrays", "representation."), ("head", "head.")):
        record = {n: Array(v) for n, v in arrays.items() if n.startswith(part)}
        message.content[key] = ArrayRecord(record)
    reply = app(message, context)
    for key, record in message.content.array_records.items():
        assert list(reply.content.array_records[key]) == list(record)


@pytest.mark.parametrize("dtype", ["float16", "longdouble", "int32", ">f4"])
def test_arrays_of_another_dtype_are_refused(dtype):
    app = app_of(algorithm="fedavg")
    arrays = values_of(initial_arrays(app, context_of()))
    sent = ArrayRecord({n: Array(value.astype(dtype)) for n, value in arrays.items()})
    assert_says("this client's model has", trained, app, sent, context_of())


def test_clients_rounds_and_seeds_shuffle_differently():
    # Without a partition, all clients train on the same data.
    cases = (0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1), (0, "a", 1)
    arrays = initial_arrays(app_of(algorithm="fedavg", seed=0), device())
    replies = [
        trained(
            app_of(algorithm="fedavg", seed=seed),
            arrays,
            device(name),
            server_round=server_round,
        )
        for seed, name, server_round in cases
    ]
    same = [[equal(a, b) for b in replies] for a in replies]
    assert same == [[a == b for b in cases] for a in cases]


@pytest.mark.parametrize(("part", "refuses"), [(0, True), (1, True), (2, False)])
def test_a_device_refuses_a_server_of_another_minor_version(part, refuses):
    numbers = version().split(".")
    numbers[part] = str(int(numbers[part]) + 1)
    other = ".".join(numbers)
    query = message_of(MessageType.QUERY, version=other)
    properties = app_of(algorithm="fedrep")(query, context_of()).content["properties"]
    assert ("refusal" in properties) == refuses
    if refuses:
        assert version() in properties["refusal"]
        assert other in properties["refusal"]
