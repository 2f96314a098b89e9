"""pFedHN compared with torch, server and clients."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from softmax_runs import (
    CLASSES,
    DIMENSION,
    RATE,
    STEPS,
    N,
    assert_near,
    gradient,
    loss_of,
    matrix,
    run,
)
from torch import nn

from flwr_frl.strategies import PFedHN
from flwr_frl.strategies.pfedhn import clipped
from flwr_frl.strategies.server.round import Round

NAMES = [f"{i:06d}" for i in range(N)]
SMALL = {"hypernetwork_width": 7, "hypernetwork_layers": 2}
FAST = {
    "hypernetwork_learning_rate": 0.05,
    "hypernetwork_momentum": 0.8,
    "hypernetwork_weight_decay": 0.02,
}


def hypernetwork(values):
    """Return the same h as a torch module."""
    layers: list[nn.Module] = []
    depth = len(values) // 2
    for i in range(depth):
        weight, bias = (torch.tensor(values[f"{i}.{n}"]) for n in ("weight", "bias"))
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data, layer.bias.data = weight, bias
        layers += [layer, nn.ReLU()] if i < depth - 2 else [layer]
    return nn.Sequential(*layers)


def theta_of(flat):
    """Return θ = [W | b] from the flattened parameters of the model."""
    weight, bias = np.split(np.asarray(flat, float), [CLASSES * DIMENSION])
    return np.column_stack([weight.reshape(CLASSES, DIMENSION), bias])


def flat_of(theta):
    return np.concatenate([theta[:, :-1].ravel(), theta[:, -1]])


class Reference:
    """The hypernetwork and all v_i of a run's strategy, as torch modules."""

    def __init__(self, result):
        # The initial values are those of an untrained strategy.
        first = PFedHN(**SMALL)
        first._run.clients.known = dict.fromkeys(range(1, N + 1))
        initial = result.grid.replies[N].content["arrays"]
        first._open_round(Round(first, 1, initial, ConfigRecord()), result.grid)
        self.h = hypernetwork(first.network["values"])
        self.v = [
            nn.Parameter(torch.tensor(first._embedding(name)["values"]))
            for name in NAMES
        ]
        options = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.02}
        self.common = torch.optim.SGD(self.h.parameters(), **options)
        self.private = [torch.optim.SGD([v], **options) for v in self.v]

    def theta(self, i):
        return theta_of(self.h(self.v[i]).detach())

    def step(self, i):
        theta = before = self.theta(i)
        for _ in range(STEPS):
            theta = theta - RATE * gradient(theta, i)
        change = torch.tensor(flat_of(theta - before)).float()
        both = [*self.h.parameters(), self.v[i]]
        for parameter in both:
            parameter.grad = None
        self.h(self.v[i]).backward(-change)
        self.private[i].step()
        self.common.step()

    def assert_network(self, result):
        state = result.strategy.network["values"]
        for name, parameter in zip(state, self.h.parameters(), strict=True):
            np.testing.assert_allclose(state[name], parameter.detach(), atol=1e-6)


def test_every_round_matches_the_paper():
    result = run("pfedhn", 5, evaluate=True, **SMALL, **FAST)
    assert [len(clients) for clients in result.trained] == [3] * 5
    reference = Reference(result)
    assert reference.v[0].shape == (1 + N // 4,)
    asked = [m.metadata.dst_node_id - 1 for m, _ in result.between("train")]
    orders = [asked[3 * now : 3 * now + 3] for now in range(5)]
    for now, (order, clients) in enumerate(zip(orders, result.trained, strict=True)):
        assert sorted(order) == clients
        for i in order:
            reference.step(i)
        for i in range(N):
            # All clients have new models, including those that have never trained.
            loss = loss_of(reference.theta(i), i)
            assert result.metrics[now][i]["loss"] == pytest.approx(loss, abs=1e-6)
    # One after another, clients are served in random order.
    assert orders != result.trained
    for i, name in enumerate(NAMES):
        if name in result.strategy.models:
            found = matrix(result.strategy.models[name])
            assert_near(found, reference.theta(i), 1e-6)
    reference.assert_network(result)


def test_large_gradient_is_clipped():
    # The norm is 100, so the gradient is halved; a short one is not changed.
    gradient = clipped({"a": np.array([60.0, 0.0]), "b": np.array([80.0])})
    np.testing.assert_allclose(gradient["a"], [30, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient["b"], [40], rtol=1e-6)
    assert clipped({"a": np.array([3.0, 4.0])})["a"].tolist() == [3, 4]
