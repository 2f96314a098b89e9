"""FLUTE's clients follow the paper's equations."""

import numpy as np
import pytest
import torch
from client_messages import new_context

from flwr_frl.clients import FLUTEClient, FLUTELinearClient, FLUTEStarClient
from flwr_frl.clients.device.parameter_groups import array_names
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.settings import SettingsError, build, resolve
from flwr_frl.task.tasks import build_task
from flwr_frl.task.tasks.linear import LinearTask


def client(kind=FLUTEClient, **more):
    settings = resolve(
        {
            "num-clients": 20,
            "batch-size": 1000,
            "momentum": 0.0,
            "weight-decay": 0.0,
            "head-layers": 1,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
    )
    state = PersonalState(new_context())
    client_settings = build(kind.settings_type, settings)
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
    return (
        entropy
        + feature_weight * (features**2).sum()
        + 0.0025 * (h**2).sum()
        + 0.25 * collapse
    )


def one_step(kind, part, feature_weight, **settings):
    """Return a client's arrays after one step, and those expected by autograd."""
    flute = client(kind, **settings)
    start = flute.get_parameters({})
    arrays, _, _ = flute.fit(start, {"server-round": 1})
    names = array_names(flute, flute.shared)
    other = flute.task.initial_model()
    (batch,) = flute.task.train_examples(0).batches(1000)
    classes = torch.zeros(10)
    classes[batch[1]] = 1
    loss = written_out_loss(other, *batch, classes, feature_weight)
    parameters = dict(other.named_parameters())
    trained = [n for n in names if n.startswith(part)]
    gradients = torch.autograd.grad(loss, [parameters[n] for n in trained])
    moved = dict(zip(trained, gradients, strict=True))
    expected = [
        (parameters[n] - 0.01 * moved[n] if n in moved else parameters[n])
        .detach()
        .numpy()
        for n in names
    ]
    return arrays, expected


@pytest.mark.parametrize(
    ("kind", "part", "weight", "settings"),
    [
        (FLUTEClient, ("representation.", "head."), 0.0005, {}),
        # Head epochs have no feature term.
        (
            FLUTEStarClient,
            ("head.",),
            0.0,
            {"head_epochs": 1, "representation_epochs": 0},
        ),
    ],
)
def test_a_step_follows_equation_10(kind, part, weight, settings) -> None:
    arrays, expected = one_step(kind, part, weight, **settings)
    for a, b in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("order", "parts"), [("before", ["head", "all"]), ("after", ["all", "head"])]
)
def test_head_epochs_come_before_or_after_the_joint_ones(
    order: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flute = client(FLUTEStarClient, head_epochs_order=order)
    trained: list[str] = []

    def record(part: str, *_: object) -> float:
        trained.append(part)
        return 0.0

    monkeypatch.setattr(flute, "train", record)
    flute.fit(flute.get_parameters({}), {"server-round": 1})
    assert trained == parts


def test_the_reported_classes_are_those_of_the_training_data() -> None:
    flute = client()
    present = set(flute.task.train_examples(0).targets.tolist())
    mask = flute.get_properties({})["classes"]
    assert {i for i, has in enumerate(mask) if has == "1"} == present
    assert len(mask) == 10


def linear_client() -> FLUTELinearClient:
    task = LinearTask(dimension=4, rank=2, samples=6, num_clients=3)
    state = PersonalState(new_context())
    return FLUTELinearClient(task, 1, state, FLUTELinearClient.settings_type())


def test_linear_gradients_match_autograd_of_the_paper_s_loss() -> None:
    # L(B, w) = 1/(2N) Σ (xᵀ B w − y)², differentiated by torch; all rounds are equal.
    flute = linear_client()
    x, y = map(torch.from_numpy, flute.task.draw(1))
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
    assert array_names(flute, flute.sent) == names
    # The client saves nothing, and its initial arrays are those of the task's model.
    assert flute.state.load() is None
    initial = flute.task.initial_state.values()
    for array, tensor in zip(flute.get_parameters({}), initial, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy())


def test_linear_models_are_compared_with_the_truth() -> None:
    flute = linear_client()
    b, w = flute.task.representation.T, np.array([[1.0, -2.0]])
    loss, n, metrics = flute.evaluate([b, w], {})
    error = np.linalg.norm(b.T @ w[0] - flute.task.models[:, 1])
    assert (loss, n) == (pytest.approx(error**2 / 2), 6)
    assert metrics["error"] == pytest.approx(error)
    assert metrics["distance"] == pytest.approx(0, abs=1e-9)


def test_head_of_two_layers_is_refused() -> None:
    with pytest.raises(SettingsError, match="one linear layer"):
        client(head_layers=2).get_properties({})
