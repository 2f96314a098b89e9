"""A strategy's traits, its public names, and the state that the base class saves."""

import json

import numpy as np
import pytest
from function_clients import grid_of, train_once

from flwr_frl.clients import FedRepClient
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import declared, setting
from flwr_frl.strategies import FedAvg, FedProx, FedRep, Strategy
from flwr_frl.strategies.server.checkpoint import State
from flwr_frl.strategies.server.traits import StrategySettings, StrategyTraits


def test_traits_are_inherited_and_overridden_by_class_keywords() -> None:
    class Mine(FedRep, client="mine:Client", takes_newcomers=False):
        pass

    class Below(Mine, evaluate_last_round_only=True):
        pass

    assert Mine._traits == StrategyTraits(client="mine:Client", takes_newcomers=False)
    assert Below._traits.client == "mine:Client"
    assert not Below._traits.takes_newcomers
    assert FedRep._traits.takes_newcomers


def test_an_override_of_aggregate_may_use_more_than_the_mean() -> None:
    class Mine(FedAvg):
        def aggregate(self, round):
            return None

    class Below(Mine):
        pass

    class Mixin:
        def aggregate(self, round):
            return None

    class Mixed(Mixin, FedAvg):
        pass

    class Stated(Mixin, FedAvg, uses_mean="only"):
        pass

    kinds = FedAvg, Mine, Below, Mixed, Stated
    uses = [kind._traits.uses_mean for kind in kinds]
    assert uses == ["only", "also", "also", "also", "only"]


@pytest.mark.parametrize("method", ["aggregate", "weights"])
def test_an_override_has_no_client_dp_unless_it_states_what_it_uses(method) -> None:
    kind = type("Mine", (FedAvg,), {method: lambda self, given: None})
    private = {"server_dp_noise": 1.0, "server_dp_clip": 1.0, "server_dp_delta": 1e-5}
    with pytest.raises(SettingsError) as caught:
        kind(**private)
    assert caught.value.code == "server-dp-noise"


def test_unknown_class_keyword_fails_with_a_one_line_error() -> None:
    with pytest.raises(SettingsError, match="did you mean 'client'"):
        type("Mine", (FedAvg,), {}, clinet="mine:Client")
    with pytest.raises(SettingsError, match=r"^uses_mean is True; expected only, .*$"):
        type("Mine", (FedAvg,), {}, uses_mean=True)


def test_settings_of_a_strategy_are_its_keyword_arguments() -> None:
    general, all_of_fedrep = declared(StrategySettings), declared(FedRep)
    assert all(all_of_fedrep[name] == general[name] for name in general)
    assert FedRep(fraction_train=1.0, weighting="examples").settings.fraction_train == 1
    with pytest.raises(TypeError, match="unknown"):
        FedRep(unknown=1)


def test_state_round_trip() -> None:
    strategy, other = Strategy(), Strategy()
    state = {
        "plain": np.arange(2),
        "heads": {"a/b": {"w": np.ones(3), "epochs": 4}, "c": {"w": np.zeros(1)}},
        "deep": {"x": {"y": {"z": {"w": np.eye(2)}}}},
        "names": ["a", "b"],
        "model": {"empty": {}, "value": None},
    }
    strategy.state.update(state)
    heads = other.state.setdefault("heads", {"gone": 1})
    snapshot = strategy._snapshot()
    strategy.state["heads"]["a/b"] = {}
    assert "heads/a/b/w" in snapshot.arrays
    other._restore(State(snapshot.arrays, json.loads(json.dumps(snapshot.values))))
    # In place, so that an algorithm may hold a reference to a part of it.
    assert other.state["heads"] is heads
    assert list(heads) == ["a/b", "c"]
    assert heads["a/b"].pop("epochs") == 4
    np.testing.assert_array_equal(heads["a/b"]["w"], np.ones(3))
    np.testing.assert_array_equal(other.state["deep"]["x"]["y"]["z"]["w"], np.eye(2))
    assert other.state["names"] == ["a", "b"]
    assert other.state["model"] == state["model"]


def test_a_snapshot_does_not_change_later() -> None:
    strategy = Strategy()
    strategy._run.clients.acknowledged = {"a": 1}
    strategy.state["nested"] = {"list": [1, [2, {"x": 3}]], "pair": (4, None)}
    snapshot = strategy._snapshot()
    strategy._run.clients.acknowledge({"a": 2, "b": 2}, 2)
    strategy.state["nested"]["list"][1][1]["x"] = 9
    strategy.state["nested"]["list"].append(5)
    strategy._run.clients.keys["c"] = "key"
    values = snapshot.values
    assert values["acknowledged"] == {"a": 1}
    assert values["keys"] == {}
    nested = values["state"]["nested"]
    assert nested == {"list": [1, [2, {"x": 3}]], "pair": [4, None]}


@pytest.mark.parametrize(
    "value", [{1, 2}, [1, {2}], {"deep": [b"x"]}, np.float32(1), [np.ones(1)]]
)
def test_unsupported_nested_value_fails_in_snapshot(value: object) -> None:
    strategy = Strategy()
    strategy.state["values"] = {"inner": value}
    with pytest.raises(SettingsError, match=r"^the strategy's state cannot be saved: "):
        strategy._snapshot()


class Nearly(FedProx):
    """Declares inherited settings again, and takes an argument that is none."""

    proximal_mu: float = setting(0.01, ge=0, le=1)
    seed: int = setting(0, ge=0)

    def __init__(self, extra=3, **base):
        super().__init__(**base)
        self.extra = extra


def test_a_setting_that_is_declared_again_keeps_its_value() -> None:
    near = Nearly._build({"proximal-mu": 0.5, "seed": 7})
    assert (near.proximal_mu, near.seed, near.settings.seed) == (0.5, 7, 7)
    assert Nearly(4).extra == 4
    with pytest.raises(SettingsError):
        Nearly(proximal_mu=2.0)


@pytest.mark.parametrize(
    ("base", "name", "near"),
    [(FedAvg, "agregate", "'aggregate'"), (FedRepClient, "udpate", "'update'")],
)
def test_a_misspelt_hook_is_an_error(base, name, near) -> None:
    def method(self, *arguments):
        pass

    with pytest.raises(SettingsError, match=near) as caught:
        type("Mine", (base,), {name: method})
    assert caught.value.code == "unknown-hook"


def test_arrays_that_aggregate_has_returned_cannot_be_changed() -> None:
    class Moving(FedAvg):
        def aggregate(self, round):
            self.kept = round.mean()
            return self.kept

    strategy = Moving(fraction_train=1.0)
    train_once(strategy, grid_of(3))
    with pytest.raises(ValueError, match="read-only"):
        strategy.kept["b"] += 1
