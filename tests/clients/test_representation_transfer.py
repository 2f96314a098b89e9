"""Source and target clients match NumPy and torch implementations."""

import numpy as np
import pytest
import torch
from client_messages import new_context
from flwr.app import Context
from named_tasks import dashed
from refusals import code_of
from small_models import CE, MSE
from torch import nn

from flwr_frl import simulate
from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.representation_transfer import (
    FeatureTransferClient,
    RepresentationTransferClient,
)
from flwr_frl.common.settings import build, resolve
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.tasks import build_task


def client_of(index: int, context: Context | None = None, **overrides):
    selected = {"algorithm": "representation-transfer", "task": "transfer"}
    settings = resolve({**selected, **dashed(overrides)})
    task = build_task(settings, int(settings["num-clients"]))
    state = PersonalState(context or new_context())
    kind = client_class(settings)
    return kind(task, index, state, build(kind._settings_type, settings))


# Linear models


def test_roles_and_classes():
    for index, more, role in (
        (9, {}, "source"),
        (10, {}, "target"),
        (0, {"num_sources": 0}, "target"),
        (0, {"role": "target"}, "target"),
        (11, {"role": "source"}, "source"),
    ):
        properties = client_of(index, **more).get_properties({})
        assert properties["role"] == role
        assert properties["num-examples"] == (100 if role == "source" else 8)
    assert type(client_of(0)) is RepresentationTransferClient
    assert type(client_of(0, **IMAGES)) is FeatureTransferClient
    for name, value in (("num-sources", -1), ("rank-tolerance", 1.0)):
        assert code_of(client_of, 0, task="digits", **{name: value}) == name


# Image models


IMAGES = {"task": "digits", "num_clients": 10, "num_sources": 2}
IMAGES |= {"source_epochs": 3, "head_epochs": 4}


def test_a_source_trains_its_whole_model_and_sends_the_representation():
    context = new_context()
    client = client_of(0, context, **IMAGES)
    start = client.get_parameters({})
    names = client._array_names(("representation.",))
    torch.manual_seed(5)
    arrays, n, _ = client.fit(start, {"server-round": 1})
    assert n == len(client.task.train_examples(0))
    torch.manual_seed(5)
    client._receive(start, {})
    client.train("all", 3)
    state = client.model.state_dict()
    for name, array in zip(names, arrays, strict=True):
        np.testing.assert_array_equal(array, state[name].numpy())
    assert set(PersonalState(context).load()) == {"head.weight", "head.bias"}


def stacked_sources() -> list[np.ndarray]:
    sources = []
    for index in (0, 1):
        client = client_of(index, **IMAGES)
        sources.append(client.fit(client.get_parameters({}), {"server-round": 1})[0])
    return [np.stack(arrays) for arrays in zip(*sources, strict=True)]


def representations(client, parameters) -> list[nn.Module]:
    """Return the representations of both sources as modules."""
    names = [n[15:] for n in client._array_names(("representation.",))]
    sources = []
    for i in (0, 1):
        source = client.task.initial_model().representation
        arrays = [torch.from_numpy(p[i]) for p in parameters]
        source.load_state_dict(dict(zip(names, arrays, strict=True)))
        sources.append(source)
    return sources


@torch.no_grad()
def features_of(client, parameters, examples) -> np.ndarray:
    (inputs, _), *_ = examples.without_augmentation().batches(len(examples))
    sources = representations(client, parameters)
    return torch.cat([source.eval()(inputs) for source in sources], dim=1).numpy()


def test_a_target_trains_its_head_on_projected_features():
    parameters, context = stacked_sources(), new_context()
    client = client_of(5, context, **IMAGES)
    arrays, _, metrics = client.fit(parameters, {"server-round": 2})
    assert arrays == client._array_names(client.sent) == []
    kept = PersonalState(context).load()
    v = kept["representation.basis"]
    np.testing.assert_allclose(v.T @ v, np.eye(v.shape[1]), atol=1e-5)
    # The part of the training features outside the basis is below the tolerance.
    features = features_of(client, parameters, client.task.train_examples(5))
    values = np.linalg.svd(features, compute_uv=False)
    assert v.shape[1] == np.sum(values > 0.01 * values[0]) < features.shape[1] == 64
    rest = np.linalg.norm(features - features @ v @ v.T, 2)
    assert rest <= 0.01 * values[0] * (1 + 1e-3)
    # Evaluations apply the head to the projected features.
    loss, n, tested = client_of(5, context, **IMAGES).evaluate(parameters, {})
    examples = client.task.test_examples(5)
    projected = features_of(client, parameters, examples) @ v
    logits = projected @ kept["head.weight"].T + kept["head.bias"]
    right = logits.argmax(1) == examples.targets.numpy()
    assert (n, tested["accuracy"]) == (len(examples), pytest.approx(right.mean()))
    entropy = CE(torch.tensor(logits), examples.targets)
    assert loss == pytest.approx(entropy.item(), rel=1e-4)
    assert np.isfinite(metrics["train-loss"])
    assert right.mean() > 0.5


def small_target(targets, loss, outputs, dtype):
    """Return a target with a small model, and the arrays of two sources."""
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)).to(dtype)

    def model():
        layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        return SplitModel(layers, nn.Linear(5, outputs)).to(dtype)

    sets = [ExampleSet(inputs, targets)] * 2
    settings = FeatureTransferClient._settings_type(num_sources=1, phase_two_epochs=2)
    task, state = ExampleTask(model, sets, sets, loss), PersonalState(new_context())
    client = FeatureTransferClient(task, 1, state, settings)
    client.get_properties({})
    return client, [np.stack([a, 2 * a]) for a in client.get_parameters({})]


@pytest.mark.parametrize(
    ("targets", "loss", "outputs", "dtype"),
    [
        (torch.arange(20) % 3, CE, 3, torch.float32),
        (torch.arange(20) % 3, CE, 3, torch.float64),
        (torch.arange(20)[:, None] / 20, MSE, 1, torch.float32),
        (torch.rand(20, 2), MSE, 2, torch.float32),
    ],
    ids=["unnamed classes", "float64", "numbers", "pairs of numbers"],
)
def test_head_of_a_target_fits_the_model(targets, loss, outputs, dtype):
    client, parameters = small_target(targets, loss, outputs, dtype)
    model, _ = client.fit_target(parameters)
    assert len(model["head.weight"]) == outputs
    assert {f"torch.{value.dtype}" for value in model.values()} == {str(dtype)}
    tested, n, _ = client.test_target(parameters, model)
    assert (n, np.isfinite(tested)) == (20, True)


def test_phase_two_trains_the_whole_model_on_the_other_half(monkeypatch):
    # Arrays share no memory with tensors, as on a GPU.
    numpy = torch.Tensor.numpy
    monkeypatch.setattr(torch.Tensor, "numpy", lambda *a, **b: numpy(*a, **b).copy())
    parameters = stacked_sources()
    # One batch per epoch, so the order of the examples does not matter
    plain = {**IMAGES, "batch_size": 200, "momentum": 0.0, "weight_decay": 0.0}
    plain |= {"learning_rate": 0.05}
    context = new_context()
    client = client_of(5, context, **plain, phase_two_epochs=5)
    torch.manual_seed(7)
    _, _, metrics = client.fit(parameters, {"server-round": 2})
    kept = PersonalState(context).load()
    # Phase 1 on the first half
    examples = client.task.train_examples(5)
    torch.manual_seed(7)
    order = torch.randperm(len(examples))
    half = len(examples) // 2
    alone = client_of(5, **plain)
    model, _ = alone.phase_one(parameters, examples.subset(order[:half]))
    v, head = model.representation.basis, model.head
    # Phase 2: gradient descent on all parameters, starting from phase 1
    sources = representations(client, parameters)
    v = v.detach().clone()
    trained = [*sources[0].parameters(), *sources[1].parameters()]
    trained += [v, head.weight, head.bias]
    for parameter in trained:
        parameter.requires_grad_()

    def entropy(of) -> torch.Tensor:
        (inputs, targets), *_ = of.batches(len(of))
        features = torch.cat([source(inputs) for source in sources], dim=1)
        logits = features @ v @ head.weight.T + head.bias
        return nn.functional.cross_entropy(logits, targets)

    for _ in range(5):
        loss = entropy(examples.subset(order[half:]))
        steps = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for parameter, step in zip(trained, steps, strict=True):
                parameter -= 0.05 * step
    assert metrics["train-loss"] == pytest.approx(loss.item(), abs=1e-5)
    expected = {"representation.basis": v, "head.weight": head.weight}
    for i, source in enumerate(sources):
        for name, value in source.state_dict().items():
            expected[f"representation.sources.{i}.{name}"] = value
    for name, value in expected.items():
        found = kept[name]
        np.testing.assert_allclose(found, value.detach(), atol=1e-5, err_msg=name)
    assert (
        np.abs(kept["representation.sources.0.conv1.weight"] - parameters[0][0]).sum()
        > 1e-3
    )
    # Evaluations use the trained parameters.
    again = client_of(5, context, **plain, phase_two_epochs=5)
    tested_loss, _, tested = again.evaluate(parameters, {})
    unseen = entropy(client.task.test_examples(5)).item()
    assert tested_loss == pytest.approx(unseen, abs=1e-4)
    assert 0 <= tested["accuracy"] <= 1


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_target_predicts_a_class_at_every_text_position(tmp_path, epochs):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("abcd" * 20)
    more = {"task": "text-folder", "data_dir": str(tmp_path), "lstm_width": 4}
    more |= {"sequence_length": 4, "num_sources": 2, "clients": 3, "rounds": 2}
    more |= {"phase_two_epochs": epochs, "output": str(tmp_path / "out")}
    row = simulate("representation-transfer", "inline", **more).rows[-1]
    assert row["rejected"] == 0
    assert 0 <= row["accuracy"] <= 1
