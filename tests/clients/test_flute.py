"""FLUTE's clients follow the paper's equations."""

import numpy as np
import pytest
import torch
from client_messages import new_context
from named_tasks import dashed

from flwr_frl.clients import FLUTEClient, FLUTELinearClient, FLUTEStarClient
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.settings import build, resolve
from flwr_frl.task.tasks import build_task
from flwr_frl.task.tasks.linear import LinearTask


def client(kind=FLUTEClient, **more):
    usual = {"num-clients": 20, "batch-size": 1000, "head-layers": 1}
    usual |= {"momentum": 0.0, "weight-decay": 0.0}
    settings = resolve({**usual, **dashed(more)})
    state = PersonalState(new_context())
    client_settings = build(kind._settings_type, settings)
    return kind(build_task(settings, 20), 0, state, client_settings)


def written_out_loss(model, inputs, targets, classes, feature_weight):
    """Return the loss of equation 10."""
    features = model.representation(inputs)
    logits = features @ model.head.weight.T + model.head.bias
    entropy = -torch.log_softmax(logits, 1)[torch.arange(len(targets)), targets].mean()
    h, m = model.head.weight.T, 10
    gram = h.T @ h
    simplex = torch.eye(m) - torch.ones(m, m) / m
    target = torch.outer(classes, classes) * simplex / (m - 1) ** 0.5
    collapse = ((gram / (gram**2).sum().sqrt() - target) ** 2).sum().sqrt()
    penalties = feature_weight * (features**2).sum() + 0.0025 * (h**2).sum()
    return entropy + penalties + 0.25 * collapse


ONE_HEAD_EPOCH = {"head_epochs": 1, "representation_epochs": 0}


@pytest.mark.parametrize(
    ("kind", "trained", "weight", "settings"),
    [
        (FLUTEClient, ("representation.", "head."), 0.0005, {}),
        # Head epochs have no feature term.
        (FLUTEStarClient, ("head.",), 0.0, ONE_HEAD_EPOCH),
    ],
)
def test_a_step_follows_equation_10(kind, trained, weight, settings) -> None:
    flute = client(kind, **settings)
    arrays, _, _ = flute.fit(flute.get_parameters({}), {"server-round": 1})
    other = flute.task.initial_model()
    (batch,) = flute.task.train_examples(0).batches(1000)
    classes = torch.zeros(10)
    classes[batch[1]] = 1
    written_out_loss(other, *batch, classes, weight).backward()
    parameters = dict(other.named_parameters())
    names = flute._array_names(flute.shared)
    for name, array in zip(names, arrays, strict=True):
        p = parameters[name]
        step = 0.01 * p.grad if name.startswith(trained) else 0
        np.testing.assert_allclose(array, (p - step).detach(), atol=1e-6)


@pytest.mark.parametrize(
    ("order", "parts"), [("before", ["head", "all"]), ("after", ["all", "head"])]
)
def test_head_epochs_come_before_or_after_the_joint_ones(order, parts, monkeypatch):
    flute, trained = client(FLUTEStarClient, head_epochs_order=order), []
    monkeypatch.setattr(flute, "train", lambda part, *_: trained.append(part) or 0.0)
    flute.fit(flute.get_parameters({}), {"server-round": 1})
    assert trained == parts


def test_the_reported_classes_are_those_of_the_training_data() -> None:
    flute = client()
    present = set(flute.task.train_examples(0).targets.tolist())
    mask = flute.get_properties({})["classes"]
    assert {i for i, has in enumerate(mask) if has == "1"} == present
    assert len(mask) == 10


def test_linear_gradients_match_autograd_of_the_paper_s_loss() -> None:
    # L(B, w) = 1/(2N) Σ (xᵀ B w − y)², differentiated by torch; all rounds are equal.
    task = LinearTask(dimension=4, rank=2, samples=6, num_clients=3)
    state, settings = PersonalState(new_context()), FLUTELinearClient._settings_type()
    flute = FLUTELinearClient(task, 1, state, settings)
    x, y = map(torch.from_numpy, task.draw(1))
    rng = np.random.default_rng(0)
    b, w = rng.standard_normal((2, 4)), rng.standard_normal((1, 2))
    parameters = [torch.from_numpy(a).requires_grad_() for a in (b, w)]
    loss = ((x @ parameters[0].T @ parameters[1][0] - y) ** 2).sum() / (2 * 6)
    loss.backward()
    for server_round in (1, 2):
        arrays, n, metrics = flute.fit([b, w], {"server-round": server_round})
        for array, parameter in zip(arrays, parameters, strict=True):
            np.testing.assert_allclose(array, parameter.grad.numpy(), rtol=1e-10)
        assert n == 6
        assert metrics == {"train-loss": pytest.approx(loss.item()), "is-change": 1}
    names = ["gradient.representation.weight", "gradient.head.weight"]
    assert flute._array_names(flute.sent) == names
    # The client saves nothing. Models are compared with the truth.
    assert state.load() is None
    b = task.representation.T
    loss, _, metrics = flute.evaluate([b, w], {})
    error = np.linalg.norm(b.T @ w[0] - task.models[:, 1])
    assert (loss, metrics["error"]) == (
        pytest.approx(error**2 / 2),
        pytest.approx(error),
    )
