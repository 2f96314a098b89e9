"""Custom models: tied weights, random layers, masks and norms."""

import copy

import pytest
import torch
from algorithm_runs import run_tiny
from client_messages import new_context
from refusals import assert_says
from safetensors.numpy import load_file
from small_models import CE, assert_close
from torch import nn

from flwr_frl import FedRep, setting, simulate
from flwr_frl.clients import FedAvgClient, FedProtoClient, FedRepClient
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import build
from flwr_frl.task.base import ExampleTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import train
from flwr_frl.task.training.sgd import SGD, Proximal


class Tied(SplitModel):
    """A word model whose head shares the weights of the embedding."""

    def __init__(self):
        super().__init__(
            nn.Sequential(nn.Embedding(5, 3), nn.Flatten(1, 2)), nn.Linear(3, 5)
        )
        self.head.weight = self.representation[0].weight


def client_of(kind, model, examples, **more):
    task = ExampleTask(model, [examples], [examples], **more)
    state = PersonalState(new_context())
    return kind(task, 0, state, build(kind._settings_type, {}))


def small() -> SplitModel:
    return SplitModel(nn.Linear(4, 3), nn.Linear(3, 2))


def one_round(client, **config):
    return client.fit(client.get_parameters({}), {"server-round": 1, **config})


def test_a_parameter_is_not_both_shared_and_personal():
    words = ExampleSet(torch.tensor([[0], [1], [4]]), torch.tensor([1, 2, 0]))
    line = "'representation.0.weight' and 'head.weight' are one parameter"
    assert_says(line, client_of(FedRepClient, Tied, words).get_properties, {})
    assert client_of(FedAvgClient, Tied, words).get_properties({})["num-examples"] == 3


def numbers(n: int = 6) -> ExampleSet:
    generator = torch.Generator().manual_seed(0)
    return ExampleSet(torch.randn(n, 4, generator=generator), torch.arange(n) % 2)


def test_training_a_head_with_tied_weights_equals_torch():
    torch.manual_seed(0)
    model, sgd = Tied(), SGD(0.1, 0.0, 0.0, batch_size=2)
    expected = copy.deepcopy(model)
    x, y = torch.tensor([[1], [3]]), torch.tensor([2, 4])
    train(model, "head", ExampleSet(x, y), CE, 2, sgd)
    optimizer = torch.optim.SGD(expected.head.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        CE(expected(x), y).backward()
        optimizer.step()
    assert_close(model, expected)


MASKED = """
import torch
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

class Masked(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x):
        return super().forward(x) * self.mask

def masked(num_clients):
    torch.manual_seed(2)
    sets = [ExampleSet(torch.randn(6, 3), torch.arange(6) % 2) for _ in range(3)]
    return ExampleTask(lambda: SplitModel(Masked(), nn.Linear(4, 2)), sets, sets)
"""


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "l2gd", "fed-mtl"])
def test_a_model_with_a_boolean_mask(algorithm, write_module, tmp_path):
    task = write_module("masks", MASKED) + ":masked"
    more = {"backend": "inline", "output": str(tmp_path), "fraction": 1.0}
    simulate(algorithm, task=task, clients=3, rounds=2, checkpoint_every=1, **more)
    arrays = load_file(tmp_path / algorithm / "checkpoint.safetensors")
    (mask,) = (v for n, v in arrays.items() if n.endswith("representation.mask"))
    assert mask.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    "algorithm", ["fedrep", "fedavg-ft", "fedbabu", "fedala", "feddbe"]
)
def test_models_in_double_precision_can_be_trained(algorithm):
    result = run_tiny(algorithm, task="cohort_tasks:doubles", fraction_train=1.0)
    assert result.rows[-1]["evaluated"] == result.rows[-1]["clients"] == 5
    shared = [a for n, a in result.arrays.items() if n.startswith("server/arrays/")]
    assert {array.dtype.name for array in shared} == {"float64"}


class Misnamed(FedAvgClient):
    """Names the parameters of the anchor wrongly."""

    def update(self):
        named = self.model.representation.named_parameters()
        near = Proximal(1e3, {n: p.detach() for n, p in named})
        return self.train("head", 1, near)


def test_wrong_names_of_parameters_are_an_error():
    line = "the anchor is ['weight', 'bias']; expected names that begin with"
    assert_says(line, one_round, client_of(Misnamed, small, numbers()))


def test_without_received_parameters_there_is_no_proximal_term():
    # FedProto's clients receive prototypes only.
    losses = set()
    for config in ({}, {"proximal-mu": 0.5}):
        torch.manual_seed(0)
        client = client_of(FedProtoClient, small, numbers(), classes=("a", "b"))
        losses.add(one_round(client, **config)[2]["train-loss"])
    assert len(losses) == 1


class SeveralModels(FedRepClient):
    client_models: str = setting("")


class SharesSeveral(FedRep, client=SeveralModels):
    pass


def test_models_with_different_numbers_of_shared_arrays_are_refused(tmp_path):
    with pytest.raises(SettingsError) as caught:
        simulate(
            SharesSeveral,
            "inline",
            clients=5,
            rounds=1,
            output=str(tmp_path),
            client_models="logistic mlp",
        )
    assert caught.value.code == "client-models"
