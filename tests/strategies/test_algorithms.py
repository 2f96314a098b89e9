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


FLUTE_LINEAR = "flwr_frl.strategies.flute:FLUTELinear"


@pytest.mark.parametrize(
    ("algorithm", "task", "expected"),
    [
        ("fedrep", "digits", "flwr_frl.strategies.fedrep:FedRep"),
        ("fedrep", "linear", "flwr_frl.strategies.fedrep:FedRepLinear"),
        ("flute", "linear", FLUTE_LINEAR),
        # Unlike FLUTE, FLUTE* has no class for linear tasks.
        ("flute-star", "linear", "flwr_frl.strategies.flute:FLUTEStar"),
        ("fedavg", "linear", "flwr_frl.strategies.averaging:FedAvg"),
        ("srpfl", "linear", "flwr_frl.strategies.srpfl:SRPFL"),
        ("outsiders:Plain", "digits", "outsiders:Plain"),
        ("outsiders:Plain", "linear", "outsiders:Plain"),
        ("flwr_frl.strategies.flute:FLUTE", "linear", FLUTE_LINEAR),
        ("outsiders:Elsewhere.Plain", "digits", "outsiders:Elsewhere.Plain"),
    ],
)
def test_task_may_have_its_own_strategy_class(algorithm, task, expected):
    assert path_of(strategy_class(settings_of(algorithm, task))) == expected


@pytest.mark.parametrize(
    ("algorithm", "task", "expected"),
    [
        ("fedrep", "digits", "flwr_frl.clients.fedrep:FedRepClient"),
        ("fedrep", "linear", "flwr_frl.clients.fedrep:FedRepLinearClient"),
        ("srpfl", "digits", "flwr_frl.clients.fedrep:FedRepClient"),
        ("srpfl", "linear", "flwr_frl.clients.fedrep:FedRepLinearClient"),
        ("lg-srpfl", "digits", "flwr_frl.clients.lg_fedavg:LGFedAvgClient"),
        ("flanp", "digits", "flwr_frl.clients.fedavg:FedAvgClient"),
        ("flanp-ft", "digits", "flwr_frl.clients.fedavg:FedAvgFTClient"),
        ("srpfl-flute", "linear", "flwr_frl.clients.flute:FLUTELinearClient"),
        ("outsiders:Hooked", "digits", "flwr_frl.clients.fedavg:FedAvgClient"),
    ],
)
def test_a_strategy_names_its_client(algorithm, task, expected):
    assert path_of(client_class(settings_of(algorithm, task))) == expected


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
