"""A tensor with two names is trained like one that is used twice."""

import pytest
import softmax_runs
import torch
from refusals import code_of
from softmax_runs import CLASSES, DIMENSION, assert_near, example_sets, run
from torch import nn

from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.device.groups import under
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import resolve
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel


class Once(nn.Module):
    """A layer with one name that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIMENSION, DIMENSION)

    def forward(self, x):
        return self.first(torch.tanh(self.first(x)))


class TwoModules(Once):
    """The same layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self.first

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class TwoLayers(Once):
    """Two layers that share their parameters."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.second = nn.Linear(DIMENSION, DIMENSION)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def task_of(kind, in_head):
    def split():
        if in_head:
            last = nn.Linear(DIMENSION, CLASSES)
            return SplitModel(nn.Identity(), nn.Sequential(kind(), last))
        return SplitModel(kind(), nn.Linear(DIMENSION, CLASSES))

    return softmax_runs.task_of(split, classes=("a", "b", "c"))


def once(num_clients):
    return task_of(Once, False)


def two_modules(num_clients):
    return task_of(TwoModules, False)


def once_in_head(num_clients):
    return task_of(Once, True)


def two_layers_in_head(num_clients):
    return task_of(TwoLayers, True)


SETTINGS = {
    "fedavg": {},
    "fedrep": {},
    "scaffold": {"global_learning_rate": 0.5},
    "apfl": {},
    "pfedme": {"pfedme_beta": 0.6, "learning_rate": 0.01},
    "l2gd": {},
    "fedala": {"ala_learning_rate": 0.5},
}


@pytest.mark.parametrize(
    ("kind", "place"), [("two_modules", ""), ("two_layers", "_in_head")]
)
@pytest.mark.parametrize("algorithm", list(SETTINGS))
def test_second_name_of_a_tensor_changes_nothing(algorithm, kind, place):
    more = SETTINGS[algorithm] | {"learning_rate": 0.01}
    result, expected = (
        run(algorithm, 2, task=f"{__name__}:{name}{place}", evaluate=True, **more)
        for name in (kind, "once")
    )
    for arrays, others in zip(result.arrays, expected.arrays, strict=True):
        for name, value in others.items():
            assert_near(arrays[name], value)
        for name in arrays.keys() - others.keys():
            assert_near(arrays[name], others[name.replace("second", "first")])
    for row, other in zip(result.metrics, expected.metrics, strict=True):
        losses = [[of["loss"] for of in clients] for clients in (row, other)]
        assert_near(*losses)


def in_both_parts() -> SplitModel:
    layer, head = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)
    head.weight = layer.weight
    return SplitModel(nn.Sequential(layer, nn.Tanh()), head)


def tied(num_clients):
    """A model whose head has the weight of a layer of the representation."""
    sets = [
        [ExampleSet(s.inputs[:, :CLASSES], s.targets) for s in example_sets(test)]
        for test in (False, True)
    ]
    return ExampleTask(in_both_parts, *sets, classes=("a", "b", "c"))


TIED = {"task": f"{__name__}:tied"}


def deployed(client, arrays):
    """Return the received representation's features, and the deployed outputs."""
    client._receive(arrays, {})
    inputs = client.task.train[0].inputs
    with torch.no_grad():
        features = client.model.eval().representation(inputs)
        return features, client.deployed_model().eval()(inputs)


def test_personal_head_of_fedrod_leaves_the_representation_alone():
    result = run("fedrod", 3, fraction_train=1.0, **TIED)
    client = result.client(0, 3)
    features, outputs = deployed(client, list(result.arrays[-1].values()))
    personal = under("personal-head.", client.saved)
    assert personal["weight"].abs().max() > 0.01
    added = torch.nn.functional.linear(features, **personal)
    assert_near(outputs, (client.model.head(features) + added).detach())


def test_prototypes_of_fedproto_leave_the_representation_alone():
    result = run("fedproto", 3, fraction_train=1.0, **TIED)
    arrays = list(result.arrays[-1].values())
    features, outputs = deployed(result.client(0, 3), arrays)
    nearest = torch.cdist(features, torch.from_numpy(arrays[0])).argmin(1)
    assert outputs.argmax(1).tolist() == nearest.tolist()


ONE_HEAD_EACH = ["fedcp", "fedpac", "flute", "flute-star"]


@pytest.mark.parametrize("algorithm", ONE_HEAD_EACH)
def test_shared_weight_is_rejected_if_each_client_has_a_head(algorithm):
    client = client_class(resolve({"algorithm": algorithm, **TIED}))
    assert code_of(lambda: client(tied(2), 0, None, None)) == "tied-head"
    with pytest.raises(SettingsError, match="tied weights"):
        run(algorithm, 1, **TIED)
