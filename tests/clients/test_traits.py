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
from flwr_frl.clients.device.traits import needs_classes
from flwr_frl.common.settings import SettingsError, build, require, resolve, setting
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


def test_a_client_has_at_most_27_public_names():
    names = set(dir(client_of(FedAvgClient))) - set(dir(NumPyClient))
    public = sorted(name for name in names if not name.startswith("_"))
    assert len(public) <= 27, public


def test_traits_are_inherited():
    class Own(LGFedAvgClient, requires=(needs_classes,)):
        pass

    class Below(Own, task_settings={"head-layers": 3}):
        pass

    assert Own._traits.task_settings == {"head-layers": 2}
    assert Below._traits.requires == (needs_classes,)
    assert Below._traits.task_settings == {"head-layers": 3}
    assert not LGFedAvgClient._traits.requires


def test_a_new_fit_does_not_inherit_example_level_privacy():
    class Same(FedRepClient):
        pass

    class Changed(FedRepClient, assumes_sgd=True):
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
    support = [kind._traits.supports_example_dp for kind in classes]
    assert support == [True, False, False, False, False, True]
    assert FLUTEStarClient._traits.supports_example_dp
    assert not FedBNClient._traits.supports_example_dp


def test_algorithms_that_support_example_level_privacy():
    names = {
        name
        for name in ALGORITHMS
        if client_class(resolve({"algorithm": name}))._traits.supports_example_dp
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
        ({"assumes_sgd": True}, {}, "Own.assumes_sgd must be a class keyword"),
        ({}, {"require": ()}, "did you mean 'requires'"),
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


class Keeps(FedAvgClient):
    personal = "memory"
    decay: float = setting(0.5, ge=0)

    def initial_group(self, group):
        return {"x": torch.zeros(2)}

    @staticmethod
    def check_settings(settings):
        require(settings.decay != 0.125, "decay", settings.decay, "another one")


class Grows(FedAvgClient):
    growth: int = setting(3, ge=1)


class Both(Grows, Keeps):
    """Has the settings of both."""


def test_a_class_has_the_settings_of_all_its_bases():
    settings = build(Both.settings_type, {"decay": 0.25})
    assert (settings.growth, settings.decay, settings.batch_size) == (3, 0.25, 10)
    for values in ({"growth": 0}, {"decay": -1.0}, {"decay": 0.125}):
        with pytest.raises(SettingsError, match="expected"):
            build(Both.settings_type, values)


def test_a_personal_array_keeps_its_shape():
    class Longer(Keeps):
        def update(self):
            self.saved["memory.x"] = torch.zeros(3)
            return 0.0

    client = client_of(Longer)
    with pytest.raises(SettingsError, match=r"'memory.x' of shape \(3,\); expected"):
        client.fit(client.get_parameters({}), {"server-round": 1})
