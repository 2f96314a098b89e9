"""Traits: how they are declared, inherited and checked."""

import pytest
import torch
from flwr.client import NumPyClient
from torch import nn

from flwr_frl.clients import (
    Client,
    FedAvgClient,
    FedBNClient,
    FedRepClient,
    FedRepLinearClient,
    FLUTEClient,
    FLUTEStarClient,
    LGFedAvgClient,
    RepresentationTransferClient,
    SyntheticMultiTaskClient,
)
from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.settings import SettingsError, build, resolve
from flwr_frl.strategies.algorithms import ALGORITHMS
from flwr_frl.task.base import ExampleTask, Task
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks import build_task
from flwr_frl.task.tasks.linear import LinearTask
from flwr_frl.task.tasks.multi_task import MultiTaskSetup

EXAMPLES = [ExampleSet(torch.ones(2, 3), torch.tensor([0, 1]))]
WITHOUT_CLASSES = ExampleTask(
    lambda: SplitModel(nn.Linear(3, 4), nn.Linear(4, 2)), EXAMPLES, EXAMPLES
)


def client_of(kind: type[Client], task: Task | None = None) -> Client:
    task = task or build_task(resolve({"task": "digits"}), 5)
    return kind(task, 0, PersonalState.holding({}), build(kind.settings_type, {}))


def test_a_client_has_at_most_28_public_names():
    names = set(dir(client_of(FedAvgClient))) - set(dir(NumPyClient))
    public = sorted(name for name in names if not name.startswith("_"))
    assert len(public) <= 28, public


def test_traits_are_inherited():
    class Own(LGFedAvgClient, needs_classes=True):
        pass

    class Below(Own, head_layers=3):
        pass

    assert Own.traits.head_layers == 2
    assert Below.traits.needs_classes
    assert Below.traits.head_layers == 3
    assert not LGFedAvgClient.traits.needs_classes


def test_a_new_fit_does_not_inherit_example_level_privacy():
    class Same(FedRepClient):
        pass

    class Changed(FedRepClient, also_test_global=True):
        def fit(self, parameters, config):
            return super().fit(parameters, config)

    class Updated(FedRepClient):
        def update(self):
            return super().update()

    class Mixin:
        def fit(self, parameters, config):
            raise NotImplementedError

    class Mixed(Mixin, FedRepClient):
        pass

    class Trained(FedRepClient):
        def train(self, *arguments, **options):
            return super().train(*arguments, **options)

    class Declared(Mixin, FedRepClient, supports_example_dp=True):
        pass

    classes = (Same, Changed, Updated, Mixed, Trained, Declared)
    support = [kind.traits.supports_example_dp for kind in classes]
    assert support == [True, False, False, False, False, True]
    assert FLUTEStarClient.traits.supports_example_dp
    assert not FedBNClient.traits.supports_example_dp


def test_algorithms_that_support_example_level_privacy():
    names = {
        name
        for name in ALGORITHMS
        if client_class(resolve({"algorithm": name})).traits.supports_example_dp
    }
    assert names == {
        *("fedrep", "fedper", "lg-fedavg", "flute", "flute-star", "local", "fedbabu"),
        *("fedavg", "fedavg-ft", "fedprox", "fedprox-ft", "scaffold", "scaffold-ft"),
        *("fedamp", "knn-per", "pfedhn", "fedsa-lora", "ffa-lora", "feddpa"),
        *(
            "ditto",
            "fed-mtl",
            "fedbuff",
            "fedasync",
            "srpfl",
            "lg-srpfl",
            "srpfl-flute",
            "flanp",
            "flanp-ft",
        ),
    }


@pytest.mark.parametrize(
    ("body", "traits", "words"),
    [
        ({"needs_classes": True}, {}, "Own.needs_classes must be a class keyword"),
        ({}, {"need_classes": True}, "did you mean 'needs_classes'"),
    ],
)
def test_invalid_traits_raise_a_one_line_error(body, traits, words):
    with pytest.raises(SettingsError, match=words) as error:
        type("Own", (Client,), body, **traits)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "task", "words"),
    [
        (FedAvgClient, MultiTaskSetup("qcqp"), "nothing to train on.* multi-task"),
        (FLUTEClient, WITHOUT_CLASSES, "needs .*classes, to which its heads belong"),
        (FedRepLinearClient, WITHOUT_CLASSES, "needs a LinearTask"),
        (RepresentationTransferClient, LinearTask(), "needs a TransferTask"),
        (SyntheticMultiTaskClient, LinearTask(), "needs a MultiTaskSetup"),
    ],
)
def test_a_task_that_an_algorithm_cannot_use_is_refused(kind, task, words):
    with pytest.raises(SettingsError, match=words) as error:
        client_of(kind, task)
    assert "\n" not in str(error.value)
