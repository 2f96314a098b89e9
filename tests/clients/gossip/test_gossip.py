"""Single gossip clients: exchanges, iterations and messages."""

import copy
from logging import WARNING

import numpy as np
import pytest
import torch
from client_messages import new_context
from gossip_clients import (
    by_algorithm,
    client_of,
    config_of,
    received,
)
from torch import nn

from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.dpsgd import DPSGDClient
from flwr_frl.clients.gossip.relayed import Relayed, exchanges
from flwr_frl.common.settings import SettingsError
from flwr_frl.task.base import ExampleTask
from flwr_frl.task.compression.per_tensor import SignTopK
from flwr_frl.task.examples import IGNORED, ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training import TrainingDivergedError

pytestmark = pytest.mark.usefixtures("softmax")


# Order of relayed messages


def test_exchanges_are_yielded_in_order_without_gaps():
    relayed = [
        (4, "b", 0.5, b"1"),
        (2, "a", 0.25, b"2"),
        (4, "a", 0.25, b"3"),
        (5, "b", 0.5, b"4"),
    ]
    by_round = dict(exchanges(config_of(7, relayed), 2))
    assert list(by_round) == [2, 3, 4, 5, 6]
    assert by_round[2] == [Relayed("a", 0.25, b"2")]
    assert by_round[4] == [Relayed("b", 0.5, b"1"), Relayed("a", 0.25, b"3")]
    assert by_round[5] == [Relayed("b", 0.5, b"4")]
    assert by_round[3] == by_round[6] == []
    # The first round relays nothing.
    assert list(exchanges(config_of(1), 0)) == [(0, [])]


# Iterations


@pytest.mark.parametrize("model", ["softmax", "digits-cnn", "resnet20"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_iterations_match_nesterov_momentum_of_torch(model, momentum):
    more = {
        "model": model,
        "momentum": momentum,
        "weight_decay": 0.01,
        "local_steps": 4,
        "batch_size": 12,
        "learning_rate": 0.05,
    }
    client = received(**more)
    other = copy.deepcopy(client.task.initial_model())
    torch.manual_seed(11)
    loss = client.iterate(1)
    momentum_vector = client.vector("momentum")

    named = list(other.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if n.endswith("bias") == bias],
            "weight_decay": w,
        }
        for bias, w in ((True, 0.0), (False, 0.01))
    ]
    optimizer = torch.optim.SGD(
        groups, lr=0.05, momentum=momentum, nesterov=momentum > 0
    )
    torch.manual_seed(11)
    other.train()
    losses = []
    for _ in range(4):
        inputs, targets = client.task.train_examples(0).draw(12)
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(other(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    for (name, p), q in zip(named, client.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6, msg=name)
    for (name, a), b in zip(other.named_buffers(), client.model.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=name)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    if momentum:
        start = 0
        for p, size in zip(other.parameters(), client.flat.sizes, strict=True):
            part = momentum_vector[start : start + size]
            buffer = optimizer.state[p]["momentum_buffer"]
            assert part.norm().item() == pytest.approx(
                buffer.norm().item(), rel=1e-4, abs=1e-6
            )
            start += size


def test_momentum_and_schedule_continue_across_rounds():
    more = {
        "momentum": 0.8,
        "local_steps": 2,
        "batch_size": 1000,
        "learning_rate": 1.0,
        "learning_rate_schedule": "inverse:10",
        "weight_decay": 0.0,
        # No message is sent, so only the iterations change the model.
        "trigger": "inf",
    }
    context = new_context()
    for server_round in (1, 2, 3):
        client = client_of(state=PersonalState(context), **more)
        client.fit([], config_of(server_round))
    other = client.task.initial_model()
    optimizer = torch.optim.SGD(other.parameters(), 1.0, 0.8, nesterov=True)
    ((inputs, targets),) = client.task.train_examples(0).batches(1000)
    for t in range(6):
        optimizer.param_groups[0]["lr"] = 1 / (t + 10)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(inputs), targets).backward()
        optimizer.step()
    kept = PersonalState(context).load()
    for name, value in other.state_dict().items():
        np.testing.assert_allclose(kept[name], value.numpy(), rtol=0, atol=2e-6)


def test_batches_depend_on_the_seed():
    models = []
    for seed in (1, 1, 2):
        client = received(local_steps=3, batch_size=5)
        torch.manual_seed(seed)
        client.iterate(1)
        models.append(client.x.clone())
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_nan_loss_raises_training_diverged():
    client = received(learning_rate=1e38, local_steps=5)
    with pytest.raises(
        TrainingDivergedError, match=r"in round 1 with learning-rate 1e\+38"
    ):
        client.iterate(1)


def test_skipped_batches_count_in_the_averaged_output():
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    # Half of all batches of one example are ignored by the loss.
    examples = ExampleSet(inputs, torch.tensor([0, 1, IGNORED, IGNORED]))
    task = ExampleTask(
        lambda: SplitModel(nn.Linear(3, 2), nn.Linear(2, 2)), [examples], [examples]
    )
    settings = DPSGDClient.settings_type(
        averaged_output=True, batch_size=1, learning_rate=0.1
    )
    context, iterates = new_context(), []
    for server_round in range(1, 9):
        client = DPSGDClient(task, 0, PersonalState(context), settings)
        client.receive([], {"server-round": server_round})
        iterates.append(client.x.clone())
        torch.manual_seed(server_round)
        client.iterate(server_round)
        client.save()
    assert 2 < len({tuple(x.tolist()) for x in iterates}) < 8
    expected = torch.stack(iterates).mean(0)
    torch.testing.assert_close(client.vector("average"), expected, rtol=0, atol=1e-6)


def test_a_batch_of_one_before_a_batch_norm_is_refused():
    node = received("dpsgd", task="softmax_runs:normed", batch_size=1, index=1)
    line = "^batch-size 1 leaves one of 9 examples alone, which this model's batch"
    with pytest.raises(SettingsError, match=line):
        node.iterate(1)


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("dpsgd", 1), ("choco-sgd", 1), ("squarm-sgd", 7)]
)
def test_number_of_iterations_between_two_exchanges(algorithm, expected):
    client = client_of(algorithm, local_steps=7)
    assert client.settings.local_steps == expected
    assert list(client.iterations(1)) == list(range(expected))
    assert list(client.iterations(3)) == list(range(2 * expected, 3 * expected))
    if algorithm == "squarm-sgd":
        with pytest.raises(SettingsError, match="local-steps is 0"):
            client_of(algorithm, local_steps=0)


# Messages


def test_estimate_is_updated_by_the_sent_message():
    client = received(compressor="sign-top-k", compressor_k=0.1)
    before = client.x.clone()
    data = client.message(1)
    assert data == SignTopK(0.1).compress(before, np.random.default_rng(0))
    expected = SignTopK(0.1).decompress(data, 650)
    assert torch.equal(client.vector("estimate"), expected)
    assert torch.equal(client.x, before)
    # The second message contains what the first one left out.
    second = client.message(2)
    rest = SignTopK(0.1).decompress(second, 650)
    assert torch.equal(client.vector("estimate"), expected + rest)
    assert second == SignTopK(0.1).compress(before - expected, np.random.default_rng(0))


@pytest.mark.parametrize(("factor", "sent"), [(0.999, True), (1.001, False)])
def test_the_trigger_compares_with_c_t_eta_t_squared(factor, sent):
    # H = 3: round 2 ends with t = 5, where eta = 2 / 15 and c = 4 + 6 * (5 // 2).
    more = {"learning_rate": 2.0, "learning_rate_schedule": "inverse:10"}
    client = received(local_steps=3, trigger="4:6:2", **more)
    length = 16 * (2 / 15) ** 2
    client.x.zero_()[7] = (length / factor) ** 0.5
    assert (client.message(2) != b"") is sent
    assert bool(client.vector("estimate").any()) is sent
    # D-PSGD and CHOCO have no trigger.
    for algorithm in ("dpsgd", "choco-sgd"):
        client = received(algorithm, trigger="inf", compressor="sign", **more)
        assert len(client.message(2)) > 0
    client = received("dpsgd", compressor="sign")
    assert client.message(1) == client.x.numpy().tobytes()
    # A difference of zero is not sent.
    client = received(trigger="0")
    client.x.zero_()
    assert client.message(1) == b""


def test_mixing_matches_hand_computed_values():
    # gamma = 1/2; neighbours a and b with weights 1/4 and 1/8.
    client = received(compressor="identity")
    with torch.no_grad():
        client.x.fill_(1.0)
    client.vector("estimate").fill_(2.0)
    client.vector("neighbours").fill_(0.5)
    q = [np.full(650, value, np.float32).tobytes() for value in (4, 8)]
    config = {"consensus-step": 0.5, "neighbour-weight": 3 / 8}
    messages = [Relayed("a", 1 / 4, q[0]), Relayed("b", 1 / 8, q[1])]
    client.mix(client.exchange(messages, config))
    # Sum 0.5 + 4/4 + 8/8 = 2.5; x = 1 + (2.5 - 3/8 * 2) / 2 = 1.875.
    assert (client.vector("neighbours") == 2.5).all()
    assert (client.vector("estimate") == 2).all()
    assert (client.x == 1.875).all()
    # A second step without messages: x = 1.875 + (2.5 - 0.75) / 2 = 2.75.
    client.mix(client.exchange([], config))
    assert (client.x == 2.75).all()


def test_dpsgd_mixing_matches_hand_computed_values():
    client = received("dpsgd")
    models = [np.full(650, value, np.float32).tobytes() for value in (3, 9)]
    messages = [
        Relayed("a", 1 / 4, models[0]),
        Relayed("b", 1 / 2, models[1]),
    ]
    with torch.no_grad():
        client.x.fill_(1.0)
    config = {"consensus-step": 0.5, "neighbour-weight": 3 / 4}
    client.mix(client.exchange(messages, config))
    # 1/4 * 3 + 1/2 * 9 + 1/4 * 1 = 5.5
    assert (client.x == 5.5).all()


@by_algorithm
@pytest.mark.parametrize(
    "values",
    [
        [np.nan] * 650,
        [0.0] * 649 + [np.inf],
        [-np.inf] + [0.0] * 649,
        [1e30] * 650,
        [0.0] * 649,
        [0.0] * 651,
        [],
    ],
)
def test_malformed_message_is_counted_and_ignored(algorithm, values, caplog):
    client = received(algorithm, compressor="identity")
    client.state.round = 1
    good = np.ones(650, np.float32).tobytes()
    bad = np.array(values, np.float32).tobytes()
    both, one = [], []
    for results, messages in (
        (both, [Relayed("good", 0.25, good), Relayed("bad", 0.25, bad)]),
        (one, [Relayed("good", 0.25, good)]),
    ):
        client = received(algorithm, compressor="identity")
        config = {"consensus-step": 0.5, "neighbour-weight": 0.5}
        with caplog.at_level(WARNING, "flwr"):
            client.mix(client.exchange(messages, config))
        results += [client.x.clone(), *map(torch.clone, client.saved.values())]
        assert client.refused == len(messages) - 1
    assert "message of neighbour bad refused" in caplog.text
    relayed = [(1, "a", 0.3, b"123"), (1, "b", 0.3, b""), (2, "a", 0.3, bytes(2600))]
    client = client_of(algorithm, compressor="identity")
    refused = client.fit([], config_of(3, relayed))[2]["refused"]
    # D-PSGD ignores messages of missed rounds.
    assert refused == (0 if algorithm == "dpsgd" else 2)
    for a, b in zip(both, one, strict=True):
        assert torch.equal(a, b)
