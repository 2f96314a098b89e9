"""An optimiser that continues from a saved state equals one that never stopped."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from trainer_models import assert_close, classes, model, settings, torch_groups

from flwr_frl.clients.base import TrainingSettings
from flwr_frl.common.settings import SettingsError, build
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training import together, train
from flwr_frl.task.training.calls import TrainCall
from flwr_frl.task.training.privacy import ExamplePrivacy, train_privately

CE = nn.functional.cross_entropy
TORCH = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.5),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.05),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.05),
    "torch.optim:RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.05),
}


class CountingOptimizer(torch.optim.SGD):
    """Keeps a count that is not a tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = 1


def uninterrupted(name: str, of: SplitModel, examples: ExampleSet, steps: int) -> None:
    optimizer = TORCH[name](torch_groups(of))
    for _ in range(steps):
        optimizer.zero_grad()
        CE(of(examples.inputs), examples.targets).backward()
        optimizer.step()


@pytest.mark.parametrize("name", TORCH)
def test_three_trainings_equal_one_uninterrupted_torch_optimizer(name):
    ours, other, examples = model(), model(), classes()
    state: dict[str, torch.Tensor] = {}
    for epochs in (1, 2, 1):
        train(ours, "all", examples, CE, epochs, settings(name), state=state)
        # After a restart, only the tensors are left.
        state = deepcopy(state)
    uninterrupted(name, other, examples, 4)
    assert_close(ours, other)


def test_without_a_state_each_training_starts_anew():
    ours, other, examples = model(), model(), classes()
    for _ in range(2):
        train(ours, "all", examples, CE, 1, settings("adamw"))
    uninterrupted("adamw", other, examples, 2)
    with pytest.raises(AssertionError):
        assert_close(ours, other)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_clients_in_a_cohort_continue_from_their_own_states(name, batched_calls):
    ours, other = [[model(seed) for seed in range(3)] for _ in range(2)]
    # The second client has no state yet.
    states: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for i in (0, 2):
        train(ours[i], "all", classes(seed=i), CE, 2, settings(name), state=states[i])

    def work(i: int) -> float:
        return train(
            ours[i], "all", classes(seed=i), CE, 2, settings(name), state=states[i]
        )

    together([lambda i=i: work(i) for i in range(3)], 3)
    assert batched_calls["TrainCall"] == [3]
    for i in range(3):
        # Train alone again, with the state from the cohort.
        train(ours[i], "all", classes(seed=i), CE, 1, settings(name), state=states[i])
        uninterrupted(name, other[i], classes(seed=i), 3 if i == 1 else 5)
        assert_close(ours[i], other[i], rtol=1e-4, atol=1e-6)


def test_private_training_continues_from_the_state():
    ours, other, examples = model(), model(), classes()
    privacy = ExamplePrivacy(1.0, 1e9, 1e-5)
    object.__setattr__(privacy, "dp_noise", 0.0)
    state: dict[str, torch.Tensor] = {}
    for _ in range(2):
        sgd = settings("adamw")
        call = TrainCall(ours, "all", examples, CE, 2, sgd, None, None, state)
        train_privately(call, privacy)
    uninterrupted("adamw", other, examples, 4)
    assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_alternately_trained_parts_keep_their_own_momentum():
    ours, other, examples = model(), model(), classes()
    states: dict[str, dict[str, torch.Tensor]] = {"head": {}, "representation": {}}
    for _ in range(3):
        for part, state in states.items():
            train(ours, part, examples, CE, 1, settings("sgd"), state=state)
    optimizers = {}
    for part in states:
        named = dict(other.named_parameters(prefix=""))
        named = {n: p for n, p in named.items() if n.startswith(part)}
        weights = [p for n, p in named.items() if n.endswith("weight")]
        biases = [p for n, p in named.items() if n.endswith("bias")]
        groups = [
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "weight_decay": 0.0},
        ]
        optimizers[part] = torch.optim.SGD(groups, lr=0.05, momentum=0.5)
    for _ in range(3):
        for optimizer in optimizers.values():
            other.zero_grad()
            CE(other(examples.inputs), examples.targets).backward()
            optimizer.step()
    assert_close(ours, other)
    assert all(name.endswith(("weight", "bias")) for name in states["head"])
    assert all(".head." in name for name in states["head"])


def test_state_of_another_shape_is_ignored():
    ours, other, examples = model(), model(), classes()
    state = {
        f"momentum_buffer.{name}": torch.ones(7) for name, _ in ours.named_parameters()
    }
    train(ours, "all", examples, CE, 2, settings("sgd"), state=state)
    uninterrupted("sgd", other, examples, 2)
    assert_close(ours, other)


@pytest.mark.parametrize(
    "path", [f"{__name__}:CountingOptimizer", "torch.optim:Adafactor"]
)
def test_state_of_other_types_and_shapes_is_rejected(path):
    with pytest.raises(SettingsError) as caught:
        train(model(), "all", classes(), CE, 1, settings(path), state={})
    assert caught.value.code == "optimizer-state"


def test_unknown_optimizer_state_is_rejected():
    with pytest.raises(SettingsError) as caught:
        build(TrainingSettings, {"optimizer-state": "keep"})
    assert caught.value.code == "optimizer-state"
