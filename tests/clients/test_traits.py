"""Traits: how they are declared, inherited and checked."""

from typing import Any

import pytest
import torch
from named_tasks import task_of
from refusals import assert_says, code_of
from torch import nn

from flwr_frl.clients import (
    Client,
    DittoClient,
    FedAvgClient,
    FedAvgFTClient,
    FedRepClient,
    FedRepLinearClient,
    FLUTEClient,
    LGFedAvgClient,
    RepresentationTransferClient,
    SyntheticMultiTaskClient,
)
from flwr_frl.clients.base import deployed_kind, needs_classes
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.errors import require
from flwr_frl.common.messages import TESTED_MODELS
from flwr_frl.common.settings import build, setting
from flwr_frl.task.base import ExampleTask, Task
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks.linear import LinearTask
from flwr_frl.task.tasks.multi_task import MultiTaskSetup

EXAMPLES = [ExampleSet(torch.ones(2, 3), torch.tensor([0, 1]))]
WITHOUT_CLASSES = ExampleTask(
    lambda: SplitModel(nn.Linear(3, 4), nn.Linear(4, 2)), EXAMPLES, EXAMPLES
)


def client_of(kind: type[Client], task: Task | None = None) -> Client:
    task = task or task_of("digits", 5)
    return kind(task, 0, PersonalState.holding({}), build(kind._settings_type, {}))


def test_traits_are_inherited():
    class Own(LGFedAvgClient, requires=(needs_classes,)):
        pass

    class Below(Own, task_settings={"head-layers": 3}):
        pass

    assert Own._traits.task_settings == {"head-layers": 2}
    assert Below._traits.requires == (needs_classes,)
    assert Below._traits.task_settings == {"head-layers": 3}
    assert not LGFedAvgClient._traits.requires


def test_tested_models():
    class Own(FedRepClient):
        pass

    kinds = FedAvgClient, Own, DittoClient, FedAvgFTClient
    assert tuple(map(deployed_kind, kinds)) == TESTED_MODELS


def supports(kind: type[Client]) -> bool:
    return kind._traits.supports_example_dp


def test_a_new_fit_does_not_inherit_example_level_privacy():
    class Mixin:
        def fit(self, parameters, config):
            raise NotImplementedError

    def changed(self, *arguments, **options):
        raise NotImplementedError

    def heir(*bases: type, **body: Any) -> type:
        return type("Heir", (*bases, FedRepClient), body)

    assert supports(heir())
    for method in ("fit", "update", "train"):
        assert not supports(heir(**{method: changed})), method
    assert not supports(heir(Mixin))
    declared = type("Heir", (Mixin, FedRepClient), {}, supports_example_dp=True)
    assert supports(declared)


def test_invalid_traits_raise_a_one_line_error():
    assert_says("did you mean 'requires'", type, "Own", (Client,), {}, require=())


@pytest.mark.parametrize(
    ("kind", "task", "line"),
    [
        (FedAvgClient, MultiTaskSetup("qcqp"), "nothing to train on"),
        (FLUTEClient, WITHOUT_CLASSES, "classes, to which its heads belong"),
        (FedRepLinearClient, WITHOUT_CLASSES, "needs a RegressionTask"),
        (RepresentationTransferClient, WITHOUT_CLASSES, "needs a RegressionTask"),
        (SyntheticMultiTaskClient, LinearTask(), "needs a MultiTaskSetup"),
    ],
)
def test_a_task_that_an_algorithm_cannot_use_is_refused(kind, task, line):
    assert_says(line, client_of, kind, task)


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


def test_a_class_has_the_settings_of_all_its_bases():
    kind = type("Both", (Grows, Keeps), {})._settings_type
    settings = build(kind, {"decay": 0.25})
    assert (settings.growth, settings.decay, settings.batch_size) == (3, 0.25, 10)
    for name, value in (("growth", 0), ("decay", -1.0), ("decay", 0.125)):
        assert code_of(build, kind, {name: value}) == name
