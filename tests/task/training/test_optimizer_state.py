"""An optimiser that continues from a saved state equals one that never stopped."""

from copy import deepcopy

import pytest
import torch
from refusals import code_of
from small_models import CE, assert_close, classes, torch_groups, trainer, without_noise
from small_models import classifier as model

from flwr_frl.clients.base import TrainingSettings
from flwr_frl.common.settings import build
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training import together, train
from flwr_frl.task.training.calls import TrainCall
from flwr_frl.task.training.privacy import train_privately

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
        train(ours, "all", examples, CE, epochs, trainer(name), state=state)
        # After a restart, only the tensors are left.
        state = deepcopy(state)
    uninterrupted(name, other, examples, 4)
    assert_close(ours, other)


def test_without_a_state_each_training_starts_anew():
    ours, other, examples = model(), model(), classes()
    for _ in range(2):
        train(ours, "all", examples, CE, 1, trainer("adamw"))
    uninterrupted("adamw", other, examples, 2)
    with pytest.raises(AssertionError):
        assert_close(ours, other)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_clients_in_a_cohort_continue_from_their_own_states(name, batched_calls):
    ours, other = [[model(seed) for seed in range(3)] for _ in range(2)]
    # The second client has no state yet.
    states: list[dict[str, torch.Tensor]] = [{}, {}, {}]

    def work(i: int, epochs: int = 2) -> float:
        data, state = classes(seed=i), states[i]
        return train(ours[i], "all", data, CE, epochs, trainer(name), state=state)

    for i in (0, 2):
        work(i)
    together([lambda i=i: work(i) for i in range(3)], 3)
    assert batched_calls["TrainCall"] == [3]
    for i in range(3):
        # Train alone again, with the state from the cohort.
        work(i, 1)
        uninterrupted(name, other[i], classes(seed=i), 3 if i == 1 else 5)
        assert_close(ours[i], other[i], rtol=1e-4, atol=1e-6)


def test_private_training_continues_from_the_state():
    ours, other, examples = model(), model(), classes()
    state: dict[str, torch.Tensor] = {}
    for _ in range(2):
        sgd = trainer("adamw")
        call = TrainCall(ours, "all", examples, CE, 2, sgd, None, None, state)
        train_privately(call, without_noise())
    uninterrupted("adamw", other, examples, 4)
    assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_alternately_trained_parts_keep_their_own_momentum():
    ours, other, examples = model(), model(), classes()
    states: dict[str, dict[str, torch.Tensor]] = {"head": {}, "representation": {}}
    for _ in range(3):
        for part, state in states.items():
            train(ours, part, examples, CE, 1, trainer("sgd"), state=state)
    optimizers = [TORCH["sgd"](torch_groups(other.part(part))) for part in states]
    for _ in range(3):
        for optimizer in optimizers:
            other.zero_grad()
            CE(other(examples.inputs), examples.targets).backward()
            optimizer.step()
    assert_close(ours, other)
    assert all(name.endswith(("weight", "bias")) for name in states["head"])
    assert all(".head." in name for name in states["head"])


def test_state_of_another_shape_is_ignored():
    ours, other, examples = model(), model(), classes()
    names = [f"momentum_buffer.{name}" for name, _ in ours.named_parameters()]
    state = {name: torch.ones(7) for name in names}
    train(ours, "all", examples, CE, 2, trainer("sgd"), state=state)
    uninterrupted("sgd", other, examples, 2)
    assert_close(ours, other)


@pytest.mark.parametrize(
    "path", [f"{__name__}:CountingOptimizer", "torch.optim:Adafactor"]
)
def test_state_of_other_types_and_shapes_is_rejected(path):
    call = (train, model(), "all", classes(), CE, 1, trainer(path))
    assert code_of(*call, state={}) == "optimizer-state"
    unknown = {"optimizer-state": "keep"}
    assert code_of(build, TrainingSettings, unknown) == "optimizer-state"
