"""Settings and state of a strategy."""

import pytest
from refusals import code_of

from flwr_frl.common.settings import SettingsError, resolve
from flwr_frl.strategies import SRPFL, FedAvg, FedAvgFT, FedBuff, build_strategy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("fraction-train", value) for value in (0.0, 1.01, float("nan"), "all")),
        ("min-train-nodes", 0),
        ("min-available-nodes", 0),
        ("weighting", "even"),
        *(("seed", value) for value in (-1, "one")),
    ],
)
def test_settings_out_of_range_are_errors(name, value):
    assert code_of(FedAvg, **{name.replace("-", "_"): value}) == name


@pytest.mark.parametrize("wrapper", [SRPFL, FedBuff])
def test_wrapping_a_class_instead_of_a_strategy_is_an_error(wrapper):
    with pytest.raises(SettingsError, match="strategy is") as error:
        wrapper(FedAvg)
    assert error.value.code == "strategy"


def test_build_strategy_from_settings():
    settings = resolve(
        {
            "algorithm": "fedavg-ft",
            "fraction-train": 0.25,
            "min-train-nodes": 3,
            "weighting": "examples",
            "seed": 9,
        }
    )
    strategy = build_strategy(settings)
    assert type(strategy) is FedAvgFT
    assert strategy.settings.fraction_train == 0.25
    assert strategy.settings.min_train_nodes == 3
    assert strategy.settings.weighting == "examples"
    assert strategy.settings.seed == 9
    with pytest.raises(SettingsError, match="unknown algorithm 'fedavgft'; did you"):
        build_strategy(resolve({"algorithm": "fedavgft"}))
