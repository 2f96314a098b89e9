"""The ablation of FedAvg-FT: its heads equal those of a plain PyTorch loop."""

import copy

import pytest
import torch
from client_messages import new_context
from torch import nn

from benchmarks.fedavg_ft import (
    EPOCHS,
    RECEIVED,
    TRAINED,
    FedAvgHeadsClient,
    FedRepHeadsClient,
)
from benchmarks.run import read
from flwr_frl import simulate
from flwr_frl.clients.base import TrainingSettings
from flwr_frl.clients.device.conversions import under
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.fedrep import FedRepClient
from flwr_frl.task.base import ExampleTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel

# All examples are in one batch, so their order has no effect.
OPTIMIZER = {"batch_size": 32, "learning_rate": 0.3, "momentum": 0.5, "weight_decay": 0}


def random_model(seed: int) -> SplitModel:
    torch.manual_seed(seed)
    return SplitModel(nn.Linear(3, 4), nn.Linear(4, 3))


@pytest.fixture
def task() -> ExampleTask:
    generator = torch.Generator().manual_seed(5)
    sets = [
        ExampleSet(torch.randn(32, 3, generator=generator), torch.arange(32) % 3)
        for _ in range(2)
    ]
    return ExampleTask(
        lambda: random_model(0), sets[:1], sets[1:], classes=tuple("abc")
    )


def plain_loop(
    model: SplitModel, part: nn.Module, task: ExampleTask, epochs: int
) -> None:
    """Train a part of a model with PyTorch's SGD, with one batch per epoch."""
    examples = task.train_examples(0)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.3, momentum=0.5)
    for _ in range(epochs):
        optimizer.zero_grad()
        outputs = model.head(model.representation(examples.inputs))
        nn.functional.cross_entropy(outputs, examples.targets).backward()
        optimizer.step()


def accuracy(model: SplitModel, head: nn.Module, task: ExampleTask) -> float:
    examples = task.test_examples(0)
    outputs = head(model.representation(examples.inputs))
    return (outputs.argmax(1) == examples.targets).float().mean().item()


def arrays(model: SplitModel, prefix: str = "") -> list:
    state = model.state_dict()
    return [state[name].numpy().copy() for name in state if name.startswith(prefix)]


def assert_same_head(head: nn.Module, saved: dict) -> None:
    for name, value in head.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)


def test_old_heads_are_fine_tuned_on_the_model_of_the_sampled_round(task):
    settings, context = TrainingSettings(**OPTIMIZER), new_context()

    def client() -> FedAvgHeadsClient:
        return FedAvgHeadsClient(task, 0, PersonalState(context), settings)

    sampled, current = random_model(1), random_model(2)
    reply, _, _ = client().fit(arrays(sampled), {"server-round": 4})
    local = copy.deepcopy(sampled)
    plain_loop(local, local, task, 1)
    # The reply equals that of FedAvg.
    for sent, value in zip(reply, arrays(local), strict=True):
        torch.testing.assert_close(torch.from_numpy(sent), torch.from_numpy(value))
    plain_loop(sampled, sampled.head, task, EPOCHS)
    plain_loop(local, local.head, task, EPOCHS)

    tested = client()
    _, _, metrics = tested.evaluate(arrays(current), {"server-round": 6})
    assert metrics["head-age"] == 2
    assert_same_head(sampled.head, under(RECEIVED, tested.saved))
    assert_same_head(local.head, under(TRAINED, tested.saved))
    old = [accuracy(current, model.head, task) for model in (sampled, local)]
    assert metrics["accuracy-old-received"] == pytest.approx(old[0])
    assert metrics["accuracy-old-trained"] == pytest.approx(old[1])
    assert metrics["accuracy"] == pytest.approx(accuracy(current, current.head, task))


def test_the_old_head_of_a_client_never_sampled_is_the_received_one(task):
    settings, state = TrainingSettings(**OPTIMIZER), PersonalState(new_context())
    client = FedAvgHeadsClient(task, 0, state, settings)
    _, _, metrics = client.evaluate(arrays(random_model(2)), {"server-round": 6})
    assert metrics["accuracy-old-received"] == metrics["accuracy"]
    assert "head-age" not in metrics


def test_fresh_heads_are_trained_on_the_received_representation(task):
    settings = FedRepClient.settings_type(
        head_epochs=2, representation_epochs=0, **OPTIMIZER
    )
    context, current = new_context(), random_model(2)

    def client() -> FedRepHeadsClient:
        return FedRepHeadsClient(task, 0, PersonalState(context), settings)

    client().fit(arrays(random_model(1), "representation."), {"server-round": 1})
    kept = SplitModel(random_model(1).representation, random_model(0).head)
    plain_loop(kept, kept.head, task, 2)
    tested = client()
    received = arrays(current, "representation.")
    _, _, metrics = tested.evaluate(received, {"server-round": 2})
    assert metrics["accuracy"] == pytest.approx(accuracy(current, kept.head, task))
    starts = {"fresh": kept.head, "initial": random_model(0).head}
    for name, start in starts.items():
        fresh = SplitModel(current.representation, copy.deepcopy(start))
        plain_loop(fresh, fresh.head, task, EPOCHS)
        expected = accuracy(fresh, fresh.head, task)
        assert metrics[f"accuracy-{name}"] == pytest.approx(expected)
    # The last head that was trained started from the initial head.
    assert_same_head(fresh.head, tested.model.head.state_dict())


METHODS = {name: row["algorithm"] for name, row in read("fedavg_ft").rows.items()}


@pytest.mark.parametrize("method", METHODS)
def test_additional_heads_do_not_change_the_training(method, tmp_path):
    def curve(algorithm: str, name: str) -> list:
        more = {"num_server_rounds": 3, "evaluate_last": 2, "output": tmp_path / name}
        return simulate(algorithm, "inline", num_clients=10, **more).rows

    with_heads, plain = curve(METHODS[method], "a"), curve(method, "b")
    for row, other in zip(with_heads, plain, strict=True):
        assert row.get("accuracy") == other.get("accuracy")
        assert row["train-loss"] == other["train-loss"]
    assert "accuracy-fresh" in with_heads[-1]
