"""The privacy account of a client is never rolled back."""

import json

import numpy as np
import pytest
import torch
from disks import full
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from torch import nn

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.account import FILE, PrivateTraining
from flwr_frl.common.settings import SettingsError
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training import SGD, TrainCall
from flwr_frl.task.training.privacy import ExamplePrivacy, epsilon

PRIVATE = ExamplePrivacy(1.0, 1.0, 1e-3)


def call_of(n: int, epochs: int, batch_size: int = 2) -> TrainCall:
    model = SplitModel(nn.Identity(), nn.Linear(1, 1))
    examples = ExampleSet(torch.zeros(n, 1), torch.zeros(n, 1))
    sgd = SGD(batch_size=batch_size)
    loss = nn.functional.mse_loss
    return TrainCall(model, "head", examples, loss, epochs, sgd, None, None)


def steps_in(directory) -> list[int]:
    return json.loads((directory / FILE).read_text())["steps"]


def test_steps_are_summed_by_noise_and_sampling_probability():
    training = PrivateTraining(PRIVATE, RecordDict(), None)
    assert training.epsilon() == 0
    training.train(call_of(8, 3))
    training.train(call_of(8, 2))
    training.train(call_of(4, 1))
    # Five epochs of four steps with 2 of 8 examples each, and two steps with 2 of 4.
    expected = epsilon(((1.0, 0.25, 20), (1.0, 0.5, 2)), 1e-3)
    assert training.epsilon() == pytest.approx(expected, rel=1e-12)


def test_steps_are_written_before_the_training(tmp_path, monkeypatch):
    first = PrivateTraining(PRIVATE, RecordDict(), tmp_path)
    first.train(call_of(8, 3))

    def killed(call, privacy):
        assert steps_in(tmp_path) == [16]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("flwr_frl.clients.device.account.train_privately", killed)
        with pytest.raises(KeyboardInterrupt):
            PrivateTraining(PRIVATE, RecordDict(), tmp_path).train(call_of(8, 1))
    later = PrivateTraining(PRIVATE, RecordDict(), tmp_path)
    assert later.epsilon() == epsilon(((1.0, 0.25, 16),), 1e-3)
    # Only the owner may read the file.
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_the_account_on_disk_takes_precedence_over_memory(tmp_path):
    records = RecordDict()
    PrivateTraining(PRIVATE, records, tmp_path).train(call_of(8, 1))
    PrivateTraining(PRIVATE, RecordDict(), tmp_path).train(call_of(8, 1))
    # The records in memory are older than the file: 4 steps instead of 8.
    PrivateTraining(PRIVATE, records, tmp_path).train(call_of(8, 1))
    assert steps_in(tmp_path) == [12]


def test_training_needs_a_writable_account(tmp_path, monkeypatch):
    monkeypatch.setattr("flwr_frl.clients.device.account.write_atomically", full)
    call = call_of(8, 1)
    before = call.model.head.weight.clone()
    with pytest.raises(SettingsError, match="private training needs its account"):
        PrivateTraining(PRIVATE, RecordDict(), tmp_path).train(call)
    assert torch.equal(call.model.head.weight, before)


@pytest.mark.parametrize("damage", ["", "[1]", '{"noise": [1.0], "steps": []}'])
def test_a_damaged_account_raises_a_one_line_error(tmp_path, damage):
    (tmp_path / FILE).write_text(damage)
    training = PrivateTraining(PRIVATE, RecordDict(), tmp_path)
    line = r"^the account 'privacy.json' of [^\n]*$"
    with pytest.raises(SettingsError, match=line):
        training.train(call_of(8, 1))
    with pytest.raises(SettingsError, match=line):
        training.check(call_of(8, 1).model)


# Messages


def context_of(**node) -> Context:
    return Context(1, 1, node, RecordDict(), {})


def message_of(kind: str, arrays: ArrayRecord | None = None, **config) -> Message:
    records = RecordDict({"config": ConfigRecord(config)})
    if arrays is not None:
        records["arrays"] = arrays
    return Message(records, 1, kind)


@pytest.fixture
def app():
    return make_app(
        {
            "algorithm": "fedrep",
            "num-clients": 10,
            "model": "logistic",
            "batch-size": 20,
            "head-epochs": 2,
            "dp-noise": 2.0,
            "dp-clip": 1.0,
            "dp-delta": 1e-3,
        }
    )


def test_evaluations_report_epsilon(app, tmp_path):
    node = {"partition-id": 0, "num-partitions": 10, "state-dir": str(tmp_path)}
    context = context_of(**node)
    reply = app(message_of("query.arrays"), context)
    arrays = reply.content.array_records["arrays"]

    def told(context: Context) -> float:
        reply = app(message_of("evaluate", arrays, **{"server-round": 1}), context)
        (metrics,) = reply.content.metric_records.values()
        assert isinstance(metrics, MetricRecord)
        return metrics["example-epsilon"]

    assert told(context) == 0
    query = app(message_of("query"), context)
    n = query.content.config_records["properties"]["num-examples"]
    app(message_of("train", arrays, **{"server-round": 1}), context)
    # Two epochs of the head and one of the representation
    steps = 3 * int(np.ceil(n / 20))
    expected = epsilon(((2.0, 20 / n, steps),), 1e-3)
    assert told(context) == pytest.approx(expected, rel=1e-12)
    # The reply was not acknowledged, and the device has restarted.
    again = context_of(**node)
    config = {"server-round": 1, "acknowledged-round": 0}
    app(message_of("train", arrays, **config), again)
    expected = epsilon(((2.0, 20 / n, 2 * steps),), 1e-3)
    assert told(again) == pytest.approx(expected, rel=1e-12)
    # A newcomer trains its head for ten epochs.
    message = message_of("evaluate.newcomer", arrays, share=0.5, **{"server-round": 1})
    newcomer = context_of(**{"partition-id": 0, "num-partitions": 10})
    (metrics,) = app(message, newcomer).content.metric_records.values()
    rate = 20 / metrics["fitted"]
    expected = epsilon(((2.0, rate, 10 * int(np.ceil(1 / rate))),), 1e-3)
    assert metrics["example-epsilon"] == pytest.approx(expected, rel=1e-12)


def test_a_device_can_set_its_own_noise():
    node_config = {"dp-noise": 3.0, "dp-clip": 0.5, "dp-delta": 1e-4}
    setup = client_setup(context_of(**node_config), {"algorithm": "fedavg"})
    assert setup.privacy == ExamplePrivacy(3.0, 0.5, 1e-4)
