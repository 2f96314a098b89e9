"""Names and import paths are resolved to strategies and their clients."""

import pytest

from flwr_frl.clients.algorithms import client_class
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.algorithms import ALGORITHMS, settings_owners, strategy_class
from flwr_frl.strategies.fedrep import FedRep, FedRepLinear
from flwr_frl.strategies.flute import FLUTEStar
from flwr_frl.strategies.srpfl import FLANP, SRPFL


def settings_of(algorithm: str, task: str = "digits", **more):
    named = {name.replace("_", "-"): value for name, value in more.items()}
    return resolve({"algorithm": algorithm, "task": task, **named})


def path_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_name_and_import_path_give_the_same_classes(name):
    path, about = ALGORITHMS[name]
    strategy = strategy_class(settings_of(name))
    assert path_of(strategy) == path
    assert strategy_class(settings_of(path)) is strategy
    client = client_class(settings_of(name))
    assert client is client_class(settings_of(path))
    assert about
    assert "\n" not in about


@pytest.mark.parametrize(
    ("algorithm", "task", "strategy", "client"),
    [
        ("fedrep", "digits", "fedrep:FedRep", "fedrep:FedRepClient"),
        ("fedrep", "linear", "fedrep:FedRepLinear", "fedrep:FedRepLinearClient"),
        ("flute", "linear", "flute:FLUTELinear", "flute:FLUTELinearClient"),
        # Unlike FLUTE, FLUTE* has no class for linear tasks.
        ("flute-star", "linear", "flute:FLUTEStar", ""),
        ("fedavg", "linear", "averaging:FedAvg", "fedavg:FedAvgClient"),
        ("srpfl", "digits", "srpfl:SRPFL", "fedrep:FedRepClient"),
        ("srpfl", "linear", "srpfl:SRPFL", "fedrep:FedRepLinearClient"),
        ("lg-srpfl", "digits", "srpfl:LGSRPFL", "lg_fedavg:LGFedAvgClient"),
        ("flanp", "digits", "srpfl:FLANP", "fedavg:FedAvgClient"),
        ("flanp-ft", "digits", "srpfl:FLANPFT", "fedavg:FedAvgFTClient"),
        ("srpfl-flute", "linear", "srpfl:SRPFLFLUTE", "flute:FLUTELinearClient"),
        ("outsiders:Plain", "digits", "outsiders:Plain", ""),
        ("outsiders:Plain", "linear", "outsiders:Plain", ""),
        ("outsiders:Hooked", "digits", "outsiders:Hooked", "fedavg:FedAvgClient"),
        ("outsiders:Elsewhere.Plain", "digits", "outsiders:Elsewhere.Plain", ""),
        ("flwr_frl.strategies.flute:FLUTE", "linear", "flute:FLUTELinear", ""),
    ],
)
def test_a_task_may_have_its_own_classes(algorithm, task, strategy, client):
    settings = settings_of(algorithm, task)
    found = path_of(strategy_class(settings))
    assert found.removeprefix("flwr_frl.strategies.") == strategy
    if client:
        assert path_of(client_class(settings)) == f"flwr_frl.clients.{client}"


def test_classes_whose_settings_apply():
    assert settings_owners(settings_of("fedrep")) == [FedRep]
    assert settings_owners(settings_of("fedrep", "linear")) == [FedRepLinear]
    assert settings_owners(settings_of("srpfl")) == [SRPFL, FedRep]
    assert settings_owners(settings_of("srpfl", "linear")) == [SRPFL, FedRepLinear]
    star = settings_of("srpfl", srpfl_base="flute-star")
    assert settings_owners(star) == [SRPFL, FLUTEStar]
    # FLANP ignores srpfl-base.
    owners = settings_owners(settings_of("flanp", srpfl_base="flute-star"))
    assert owners[0] is FLANP
    assert path_of(owners[1]) == "flwr_frl.strategies.averaging:FedAvg"
