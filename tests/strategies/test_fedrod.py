"""FedRoD against a few lines of NumPy, server and clients."""

from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from softmax_runs import (
    CLASSES,
    DIMENSION,
    RATE,
    STEPS,
    N,
    assert_near,
    deep_head,
    draw,
    linear,
    loss_of,
    matrix,
    mean,
    run,
    start,
    weights,
)
from torch import nn

from flwr_frl.clients import FedRoDClient
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.fedrod import BothLosses, TwoHeads
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.settings import SettingsError


def slope_of(scores, i):
    """The gradient of mean cross-entropy in θ, at scores of client i's examples."""
    x, y = draw(i)
    x = np.column_stack([x, np.ones(len(x))])
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return (shares - np.eye(CLASSES)[y]).T @ x / len(y)


def numpy_fedrod(trained, momentum=0.0, decay=0.0, weighting="uniform"):
    """g and all p after each round, of the clients that counted."""
    g, found = start(), []
    personal = [np.zeros_like(g)] * N
    only_weights = np.array([1.0] * DIMENSION + [0.0])
    for clients in trained:
        models = []
        for i in clients:
            x, y = draw(i)
            x = np.column_stack([x, np.ones(len(x))])
            counts = np.bincount(y, minlength=CLASSES)
            own, p, velocity_g, velocity_p = g, personal[i], 0.0, 0.0
            for _ in range(STEPS):
                # Softmax of g_c + log N_c.
                balanced = slope_of(x @ own.T + np.log(counts), i)
                summed = slope_of(x @ (own + p).T, i)
                velocity_g = momentum * velocity_g + balanced
                velocity_g = velocity_g + decay * own * only_weights
                velocity_p = momentum * velocity_p + summed + decay * p * only_weights
                own, p = own - RATE * velocity_g, p - RATE * velocity_p
            models.append(own)
            personal = [p if j == i else personal[j] for j in range(N)]
        g = mean(models, weights(clients, weighting))
        found.append((g, personal))
    return found


def assert_all_near(found, expected):
    rounds = zip(found.arrays, found.kept, expected, strict=True)
    for arrays, kept, (g, personal) in rounds:
        assert_near(matrix(arrays), g)
        for state, p in zip(kept, personal, strict=True):
            named = {name.replace("personal-", ""): a for name, a in state.items()}
            assert_near(matrix(named) if state else np.zeros_like(p), p)


@pytest.mark.parametrize(
    "more",
    [{}, {"momentum": 0.6, "weight_decay": 0.05}, {"weighting": "examples"}],
    ids=["plain", "momentum", "examples"],
)
def test_every_round_is_that_of_the_paper(more):
    found = run("fedrod", **more)
    assert [len(c) for c in found.trained] == [3] * 4
    expected = numpy_fedrod(
        found.trained,
        more.get("momentum", 0.0),
        more.get("weight_decay", 0.0),
        more.get("weighting", "uniform"),
    )
    assert_all_near(found, expected)
    # The classes' counts are felt.
    plain = run("fedavg", **more)
    assert np.abs(matrix(found.arrays[-1]) - matrix(plain.arrays[-1])).max() > 1e-2


def test_a_class_that_a_client_has_not_is_left_alone():
    torch.manual_seed(0)
    heads = TwoHeads(nn.Linear(4, 3), nn.Linear(4, 3), torch.tensor([3.0, 0, 5]).log())
    loss = BothLosses(nn.functional.cross_entropy)
    value = loss(heads(torch.randn(8, 4)), torch.tensor([0, 2] * 4))
    value.backward()
    assert value.isfinite()
    for parameter in heads.generic.parameters():
        assert (parameter.grad[1] == 0).all()
        assert (parameter.grad[[0, 2]] != 0).all()
    for parameter in heads.personal.parameters():
        assert (parameter.grad != 0).all()


def test_a_reply_that_does_not_count_moves_neither_g_nor_p():
    first = run("fedrod", 3)
    lost = next(i for i in first.trained[1] if i in first.trained[2])
    found = run("fedrod", 5, spoilt={(lost, 2)})
    assert lost not in found.trained[1]
    assert_all_near(found, numpy_fedrod(found.trained))


def balanced(num_clients):
    """Equally many examples of each class, and a representation that learns."""

    def examples(i):
        generator = torch.Generator().manual_seed(i)
        y = torch.arange(12) % CLASSES
        x = torch.randn(12, DIMENSION, generator=generator) + y[:, None]
        return ExampleSet(x, y)

    def model():
        layers = nn.Sequential(nn.Linear(DIMENSION, 5), nn.Tanh())
        return SplitModel(layers, nn.Linear(5, CLASSES))

    sets = [examples(i) for i in range(num_clients)]
    return ExampleTask(model, sets, sets, classes=("a", "b", "c"))


def test_on_balanced_data_the_generic_model_is_fedavg_s():
    # log N is a constant; and the personalised head moves no representation.
    usual = {"task": f"{__name__}:balanced", "momentum": 0.5, "weight_decay": 1e-3}
    usual |= {"batch_size": 5, "evaluate": True}
    found, plain = run("fedrod", **usual), run("fedavg", **usual)
    for arrays, others in zip(found.arrays, plain.arrays, strict=True):
        for name, value in others.items():
            np.testing.assert_allclose(arrays[name], value, rtol=0, atol=1e-6)
    for metrics, others in zip(found.metrics[-1], plain.metrics[-1], strict=True):
        assert metrics["accuracy-global"] == others["accuracy"]
    assert np.abs(found.kept[-1][0]["personal-head.weight"]).max() > 1e-2


def test_clients_are_tested_with_the_sum_of_their_heads():
    found = run("fedrod", 2, evaluate=True)
    g, personal = numpy_fedrod(found.trained)[-1]
    seen = {i for clients in found.trained for i in clients}
    assert len(seen) < N
    for i, metrics in enumerate(found.metrics[-1]):
        # A client that never trained predicts as the generic model does.
        assert metrics["loss"] == pytest.approx(loss_of(g + personal[i], i), abs=1e-5)
        apart = abs(metrics["loss"] - loss_of(g, i))
        assert apart > 1e-3 if i in seen else apart < 1e-5


def test_p_does_not_leave():
    found = run("fedrod", 2)
    for message, reply in found.between("train"):
        assert list(message.content["arrays"]) == ["head.weight", "head.bias"]
        assert list(reply.content["arrays"]) == ["head.weight", "head.bias"]


def test_it_is_held_near_the_global_model_where_a_server_asks_for_it():
    client = run("fedrod", 0).client(2, 0)
    sent = client.get_parameters({})
    held, _, _ = client.fit(sent, {"server-round": 1, "proximal-mu": 1 / RATE})
    x, y = draw(2)
    x = np.column_stack([x, np.ones(len(x))])
    own = start()
    for _ in range(STEPS):
        slope = slope_of(x @ own.T + np.log(np.bincount(y, minlength=CLASSES)), 2)
        own = start() - RATE * slope
    assert_near(np.column_stack(held), own)


def test_a_head_that_is_not_linear_is_refused():
    line = (
        "^FedRoD needs a head that is one linear layer; this model's is a Sequential; "
        "head-layers=1 may give one$"
    )
    with pytest.raises(SettingsError, match=line):
        FedRoDClient.traits.check(deep_head(2))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("held", [2, 3])
def test_label_smoothing_is_refused_where_a_class_has_no_examples(smoothing, held):
    loss = partial(nn.functional.cross_entropy, label_smoothing=smoothing)
    sets = [ExampleSet(torch.ones(6, DIMENSION), torch.arange(6) % held)]
    task = ExampleTask(linear, sets, sets, loss, classes=("a", "b", "c"))
    state = PersonalState(Context(0, 0, {}, RecordDict(), {}))
    client = FedRoDClient(task, 0, state, FedRoDClient.settings_type())
    if smoothing and held < CLASSES:
        with pytest.raises(SettingsError, match="FedRoD needs a loss that is finite"):
            client.get_properties({})
    else:
        assert client.get_properties({})["num-examples"] == 6
