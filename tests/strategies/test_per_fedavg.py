"""Per-FedAvg, FO and HF, compared with a NumPy implementation of server and clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from paper_rounds import VARIANTS, assert_losses, run_variant
from softmax_runs import (
    RATE,
    STEPS,
    N,
    assert_near,
    draw,
    gradient,
    loss_of,
    matrix,
    run,
    start,
)
from torch import nn

from flwr_frl.clients import HFMAMLClient, PerFedAvgClient
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

ALPHA = 0.4
BOTH = pytest.mark.parametrize("algorithm", ["per-fedavg", "hf-maml"])


def hessian(theta, i):
    """Return ∇²f_i(θ), of shape (15, 15), by central differences of its gradient."""
    columns = []
    for entry in np.eye(theta.size):
        move = 1e-5 * entry.reshape(theta.shape)
        columns.append(gradient(theta + move, i) - gradient(theta - move, i))
    return np.array(columns).reshape(theta.size, -1) / 2e-5


def meta_gradient(w, i, second_order, alpha=ALPHA):
    slope = gradient(w - alpha * gradient(w, i), i)
    if second_order:
        slope = slope - alpha * (hessian(w, i) @ slope.ravel()).reshape(w.shape)
    return slope


def numpy_per_fedavg(found, second_order):
    """Run Algorithm 1 with the clients that trained; return w by round."""
    w, rounds = start(), []
    for clients in found.trained:
        models = []
        for i in clients:
            local, velocity = w, 0.0
            for _ in range(STEPS):
                slope = meta_gradient(local, i, second_order)
                slope = slope + gradient(local, i, found["weight_decay"])
                velocity = found["momentum"] * velocity + slope - gradient(local, i)
                local = local - RATE * velocity
            models.append(local)
        w = found.mean(models, clients)
        rounds.append(w)
    return rounds


@BOTH
@pytest.mark.parametrize("variant", ["plain", "momentum", "examples"])
def test_every_round_matches_the_paper(algorithm, variant):
    more = {"inner_learning_rate": ALPHA, "evaluate": {3}, **VARIANTS[variant]}
    second, result = algorithm == "hf-maml", run_variant(algorithm, 3, **more)
    expected = numpy_per_fedavg(result, second)
    for arrays, w in zip(result.arrays, expected, strict=True):
        assert_near(matrix(arrays), w)
    # The Hessian term has an effect.
    w = expected[-1]
    assert np.abs(w - numpy_per_fedavg(result, not second)[-1]).max() > 1e-2
    # Clients are tested after one step from the meta-model, and keep no state.
    assert_losses(result, [w - ALPHA * gradient(w, i) for i in range(N)])
    assert not any(result.kept[-1])


def test_adaptation_epochs_are_local_sgd():
    result = run("per-fedavg", 2, evaluate=True, adaptation_epochs=3, weight_decay=0.1)
    for i, metrics in enumerate(result.metrics[-1]):
        adapted = matrix(result.arrays[-1])
        for _ in range(3):
            adapted = adapted - RATE * gradient(adapted, i, 0.1)
        assert metrics["loss"] == pytest.approx(loss_of(adapted, i), abs=1e-5)


@pytest.mark.parametrize("kind", [PerFedAvgClient, HFMAMLClient])
def test_each_step_draws_separate_batches(kind, monkeypatch):
    # A step uses two or more batches of the same size; each stream covers all examples.
    client = run("hf-maml", 0).client(3, 0)
    settings = replace(client.settings, batch_size=5, representation_epochs=2)
    client = kind(client.task, 3, PersonalState.holding({}), settings)
    seen = []
    original = client.gradient

    def noted(point, batch):
        seen.append(batch[0])
        return original(point, batch)

    monkeypatch.setattr(client, "gradient", noted)
    torch.manual_seed(3)
    client.fit(client.get_parameters({}), {"server-round": 1})
    each = 2 if kind is PerFedAvgClient else 4
    steps = [seen[k : k + each] for k in range(0, len(seen), each)]
    assert [len(step[0]) for step in steps] == [5, 5, 5] * 2
    inner, outer = steps[0][:2]
    assert not torch.equal(inner, outer)
    if kind is HFMAMLClient:
        assert all(torch.equal(step[2], step[3]) for step in steps)
        assert not torch.equal(steps[0][2], outer)
        assert not torch.equal(steps[0][2], inner)
    x = torch.from_numpy(draw(3)[0]).float()
    for part in range(2):
        for k in (0, 1, each - 1):
            covered = torch.cat([step[k] for step in steps[3 * part : 3 * part + 3]])
            assert torch.equal(covered.sort(0).values, x.sort(0).values)


def test_adaptation_step_averages_over_targets_that_are_not_ignored():
    # There is more than one evaluation batch, and most targets are ignored.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    y = torch.randint(3, (60,), generator=generator)
    y[:49] = -100

    def model():
        return SplitModel(nn.Identity(), nn.Linear(4, 3))

    task = ExampleTask(model, [ExampleSet(x, y)], [ExampleSet(x, y)])
    settings = PerFedAvgClient._settings_type(inner_learning_rate=1.0)
    client = PerFedAvgClient(task, 0, PersonalState.holding({}), settings)
    initial = client._initial_arrays(client.shared)
    client._receive([array.numpy() for array in initial.values()], {})
    weight = client.deployed_model().head.weight.detach().numpy()
    # Gradient of cross-entropy with respect to W
    w, b = (initial[f"head.{name}"].numpy() for name in ("weight", "bias"))
    inputs, classes = x[49:].numpy(), y[49:].numpy()
    outputs = np.exp(inputs @ w.T + b)
    error = outputs / outputs.sum(1, keepdims=True) - np.eye(3)[classes]
    np.testing.assert_allclose(weight, w - error.T @ inputs / 11, atol=1e-5)
