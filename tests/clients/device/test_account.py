"""The privacy account of a client is never rolled back."""

import json

import numpy as np
import pytest
import torch
from client_messages import (
    context_of,
    device,
    initial_arrays,
    message_of,
    properties_of,
    trained,
)
from disks import full
from flwr.app import Context, RecordDict
from refusals import assert_says
from torch import nn

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.account import FILE, PrivateTraining
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import TrainCall
from flwr_frl.task.training.privacy import ExamplePrivacy, epsilon
from flwr_frl.task.training.sgd import SGD

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
    training = PrivateTraining(PRIVATE, RecordDict(), tmp_path)
    assert_says("private training needs its account", training.train, call)
    assert torch.equal(call.model.head.weight, before)


@pytest.mark.parametrize("damage", ["", "[1]", '{"noise": [1.0], "steps": []}'])
def test_a_damaged_account_raises_a_one_line_error(tmp_path, damage):
    (tmp_path / FILE).write_text(damage)
    training = PrivateTraining(PRIVATE, RecordDict(), tmp_path)
    line = "the account 'privacy.json' of "
    assert_says(line, training.train, call_of(8, 1))
    assert_says(line, training.check, call_of(8, 1).model)


# Messages


def test_evaluations_report_epsilon(tmp_path):
    privacy = {"dp-noise": 2.0, "dp-clip": 1.0, "dp-delta": 1e-3, "head-epochs": 2}
    more = {"num-clients": 10, "model": "logistic", "batch-size": 20}
    app = make_app({"algorithm": "fedrep", **more, **privacy})
    context = context_of(0, 10, state_dir=str(tmp_path))
    arrays = initial_arrays(app, context)

    def told(context: Context, kind="evaluate", **config) -> dict[str, float]:
        message = message_of(kind, arrays, server_round=1, **config)
        (metrics,) = app(message, context).content.metric_records.values()
        return metrics

    def spent(rate: float, steps: int) -> float:
        expected = epsilon(((2.0, rate, steps),), 1e-3)
        return pytest.approx(expected, rel=1e-12)

    assert told(context)["example-epsilon"] == 0
    n = properties_of(app, context)["num-examples"]
    trained(app, arrays, context, server_round=1)
    # Two epochs of the head and one of the representation
    steps = 3 * int(np.ceil(n / 20))
    assert told(context)["example-epsilon"] == spent(20 / n, steps)
    # The reply was not acknowledged, and the device has restarted.
    again = context_of(0, 10, state_dir=str(tmp_path))
    trained(app, arrays, again, server_round=1, acknowledged_round=0)
    assert told(again)["example-epsilon"] == spent(20 / n, 2 * steps)
    # A newcomer trains its head for ten epochs.
    metrics = told(context_of(0, 10), "evaluate.newcomer")
    assert metrics["example-epsilon"] == spent(20 / n, 10 * int(np.ceil(n / 20)))


def test_a_device_can_set_its_own_noise():
    context = device(dp_noise=3.0, dp_clip=0.5, dp_delta=1e-4)
    setup = client_setup(context, {"algorithm": "fedavg"})
    of_device = setup.device
    values = of_device.dp_noise, of_device.dp_clip, of_device.dp_delta
    assert values == (3.0, 0.5, 1e-4)
