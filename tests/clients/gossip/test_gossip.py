"""Single gossip clients: iterations, messages and state."""

import copy
from logging import WARNING

import numpy as np
import pytest
import torch
from client_messages import new_context
from torch import nn

from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.device.parameter_groups import array_names, personal_arrays
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.relayed import Relayed, exchanges
from flwr_frl.clients.gossip.sketch import SKETCH, SMALLEST_SKETCHED, sketch
from flwr_frl.task.compression.per_tensor import Identity, PerTensor, SignTopK, TopK
from flwr_frl.task.settings import SettingsError, build, resolve
from flwr_frl.task.tasks import build_task
from flwr_frl.task.training import TrainingDivergedError

GOSSIP = ("dpsgd", "choco-sgd", "squarm-sgd")
pytestmark = pytest.mark.usefixtures("softmax")
by_algorithm = pytest.mark.parametrize("algorithm", GOSSIP)
# What the server of an exchange of nothing says.
QUIET = {"exchanged-round": 0, "consensus-step": 0.5, "neighbour-weight": 2 / 3}


def settings_of(algorithm: str = "squarm-sgd", **more):
    names = {name.replace("_", "-"): value for name, value in more.items()}
    settings = {"num-clients": 5, "head-layers": 1, "model": "softmax"}
    return resolve({**settings, "algorithm": algorithm, **names})


def client_of(algorithm: str = "squarm-sgd", state=None, index=0, **more):
    settings = settings_of(algorithm, **more)
    state = PersonalState(new_context()) if state is None else state
    kind = client_class(settings)
    own = build(kind.settings_type, settings)
    return kind(build_task(settings, 5), index, state, own)


def received(algorithm: str = "squarm-sgd", **more):
    client = client_of(algorithm, **more)
    client.receive([], {})
    return client


def config_of(server_round: int, relayed=(), exchanged=None, **more):
    config = {**QUIET, "server-round": server_round, **more}
    config["exchanged-round"] = server_round - 1 if exchanged is None else exchanged
    if relayed:
        rounds, senders, weights, data = zip(*relayed, strict=True)
        config["relayed-rounds"], config["relayed-senders"] = (
            list(rounds),
            list(senders),
        )
        config["relayed-weights"], config["relayed-data"] = list(weights), list(data)
    return config


# What is relayed, in its order


def test_exchanges_are_yielded_in_order_without_gaps():
    relayed = [
        (4, "b", 0.5, b"1"),
        (2, "a", 0.25, b"2"),
        (4, "a", 0.25, b"3"),
        (5, "b", 0.5, b"4"),
    ]
    found = dict(exchanges(config_of(7, relayed), 2))
    assert list(found) == [2, 3, 4, 5, 6]
    assert found[2] == [Relayed("a", 0.25, b"2")]
    assert found[4] == [Relayed("b", 0.5, b"1"), Relayed("a", 0.25, b"3")]
    assert found[5] == [Relayed("b", 0.5, b"4")]
    assert found[3] == found[6] == []
    # The first round relays nothing.
    assert list(exchanges(config_of(1), 0)) == [(0, [])]


# Iterations


@pytest.mark.parametrize("model", ["softmax", "digits-cnn", "resnet20"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_iterations_equal_torch_s_nesterov(model, momentum):
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
            found = momentum_vector[start : start + size]
            buffer = optimizer.state[p]["momentum_buffer"]
            assert found.norm().item() == pytest.approx(
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
        # No message, so that nothing but the iterations moves the model.
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


def test_a_batch_of_one_before_a_batch_norm_is_refused():
    node = received("dpsgd", task="softmax_runs:normed", batch_size=1, index=1)
    line = "^batch-size 1 leaves one of 9 examples alone, which this model's batch"
    with pytest.raises(SettingsError, match=line):
        node.iterate(1)


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("dpsgd", 1), ("choco-sgd", 1), ("squarm-sgd", 7)]
)
def test_iterations_between_two_exchanges(algorithm, expected):
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
    # The next message has what the first one left out.
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


def test_mixing_by_hand():
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
    # And once more without a message: x = 1.875 + (2.5 - 0.75) / 2.
    client.mix(client.exchange([], config))
    assert (client.x == 2.75).all()


def test_dpsgd_mixes_by_hand():
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
    # 1/4 * 3 + 1/2 * 9 + 1/4 * 1.
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
    for found, messages in (
        (both, [Relayed("good", 0.25, good), Relayed("bad", 0.25, bad)]),
        (one, [Relayed("good", 0.25, good)]),
    ):
        client = received(algorithm, compressor="identity")
        config = {"consensus-step": 0.5, "neighbour-weight": 0.5}
        with caplog.at_level(WARNING, "flwr"):
            client.mix(client.exchange(messages, config))
        found += [client.x.clone(), *map(torch.clone, client.saved.values())]
        assert client.refused == len(messages) - 1
    assert "message of neighbour bad refused" in caplog.text
    relayed = [(1, "a", 0.3, b"123"), (1, "b", 0.3, b""), (2, "a", 0.3, bytes(2600))]
    client = client_of(algorithm, compressor="identity")
    own_round = client.fit([], config_of(3, relayed))[2]["refused"]
    # D-PSGD ignores messages of rounds that it missed.
    assert own_round == (0 if algorithm == "dpsgd" else 2)
    for a, b in zip(both, one, strict=True):
        assert torch.equal(a, b)


# What a node tells, and what it keeps


@by_algorithm
def test_node_properties(algorithm):
    client = client_of(algorithm, compressor="top-k", compressor_k=0.1)
    properties = client.get_properties({})
    expected = (2600, 1.0) if algorithm == "dpsgd" else (4 * 65 + 82, 0.1)
    assert (properties["message-bytes"], properties["omega"]) == expected
    # Of the model it tells no name that could be asked for.
    assert array_names(client, client.shared) == []
    assert client.get_parameters({}) == []
    # The state is the common model, and vectors of zeros in a group of their own.
    client = received(algorithm, compressor="top-k", compressor_k=0.1, per_tensor=True)
    for name, value in client.task.initial_state.items():
        assert torch.equal(client.model.state_dict()[name], value)
    more = () if algorithm == "dpsgd" else ("estimate", "neighbours")
    assert set(client.vectors) == {"momentum", *more}
    assert all((client.vector(name) == 0).all() for name in client.vectors)
    saved = {f"gossip.{n}" for n in client.vectors} | client.task.initial_state.keys()
    assert set(personal_arrays(client, client.personal)) == saved
    per_tensor = PerTensor(TopK(0.1), (640, 10))
    assert client.compressor == (per_tensor if more else Identity())


def test_nodes_must_agree_on_the_operator_and_on_the_model():
    digests = {
        client_of(**more).get_properties({})["structure"]
        for more in (
            {"compressor": "top-k", "compressor_k": 0.1},
            {"compressor": "top-k", "compressor_k": 0.2},
            {"compressor": "sign"},
            {"compressor": "sign", "per_tensor": True},
            {"compressor": "sign", "model": "digits-cnn"},
        )
    }
    assert len(digests) == 5
    # Each operator's own settings only.
    same = [
        client_of("dpsgd", compressor=c).get_properties({})["structure"]
        for c in ("sign", "top-k")
    ]
    assert same[0] == same[1]


@by_algorithm
def test_a_reply_has_no_arrays(algorithm):
    client = client_of(algorithm)
    arrays, n, metrics = client.fit([], config_of(1))
    assert arrays == []
    assert n == len(client.task.train_examples(0))
    assert set(metrics) == {"train-loss", "refused"}
    # The message goes beside the numbers.
    assert list(client.attachments) == ["message"]
    assert isinstance(client.attachments["message"], bytes)


@pytest.mark.parametrize("least", [650, 651])
def test_a_device_sends_no_sketch_of_a_small_model(least, monkeypatch):
    # The best that one tells of 25,600 parameters: a cosine of 0.1.
    assert (SKETCH / SMALLEST_SKETCHED) ** 0.5 == 0.1
    monkeypatch.setattr("flwr_frl.clients.gossip.base.SMALLEST_SKETCHED", least)
    client = client_of("choco-sgd")
    client._own_data = True
    client.evaluate([], config_of(1))
    assert ("sketch" in client.attachments) is (least == 650)


@by_algorithm
def test_evaluation_saves_nothing(algorithm):
    context = new_context()
    client = client_of(algorithm, PersonalState(context), compressor="identity")
    client.fit([], config_of(1))
    state = PersonalState(context)
    before = {n: v.copy() for n, v in state.load().items()}
    q = np.full(650, 0.1, np.float32).tobytes()
    config = config_of(1, [(1, "a", 1 / 3, q), (1, "b", 1 / 3, q)], exchanged=1)
    client = client_of(algorithm, state, compressor="identity")
    loss, n, metrics = client.evaluate([], config)
    assert not np.array_equal(client.x.numpy()[:640], before["head.weight"].ravel())
    assert metrics.keys() >= {"accuracy"}
    assert client.attachments == {"sketch": sketch(client.x.numpy()).tobytes()}
    assert len(client.attachments["sketch"]) == 4 * SKETCH == 1024
    assert (n, np.isfinite(loss)) == (len(client.task.test_examples(0)), True)
    after = state.load()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


@by_algorithm
def test_a_state_older_than_the_acknowledged_round_is_an_error(algorithm):
    client = client_of(algorithm)
    config = config_of(5, **{"acknowledged-round": 4})
    for call in (client.fit, client.evaluate):
        with pytest.raises(RuntimeError, match="not that of round 4"):
            call([], config)


def test_only_the_model_of_an_earlier_run_is_reused(tmp_path):
    def state_of(run: str, acknowledged: int) -> PersonalState:
        return PersonalState(new_context(), tmp_path, acknowledged, 0, run, "me")

    first = client_of(state=state_of("a", 0), trigger="0")
    first.fit([], config_of(1))
    kept = state_of("a", 1).load()
    assert np.abs(kept["gossip.estimate"]).max() > 0
    second = client_of(state=state_of("b", 0), trigger="0")
    second.receive([], {})
    np.testing.assert_array_equal(second.x.numpy()[:640], kept["head.weight"].ravel())
    # The neighbours' estimates of this node begin at 0, and so must its own.
    for name in second.vectors:
        assert (second.vector(name) == 0).all()


def test_two_nodes_in_one_process_are_independent():
    # They share one scratch model.
    contexts = [new_context(), new_context()]
    for i in (0, 1):
        state = PersonalState(contexts[i])
        client_of(state=state, index=i, compressor="identity").fit([], config_of(1))
    task = client_of(compressor="identity").task
    first, second = (PersonalState(c).load()["head.weight"] for c in contexts)
    assert not np.array_equal(first, second)
    initial = task.initial_state["head.weight"]
    torch.testing.assert_close(
        initial, task.initial_model().state_dict()["head.weight"]
    )
