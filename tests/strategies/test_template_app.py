"""An app of Flower's PyTorch template with two changed lines in server_app.py."""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.grids.simulation import InlineGrid

APP = Path(__file__).parents[1] / "e2e" / "template_app"
CONFIG = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
    "config"
]
IMPORT = "from flwr.serverapp.strategy import FedAvg"
STRATEGY = "FedAvg(fraction_evaluate=fraction_evaluate)"
OURS = "from flwr_frl.strategies import {}"
N = 4
GUIDE = (Path(__file__).parents[2] / "docs" / "flower-app.md").read_text()
SENTENCE = GUIDE.split("with an unchanged ClientApp: ")[1].split(",\nand ")[0]
# Strategies that work with any ClientApp, as the guide lists them.
LISTED = re.findall(r"`(\w+)`", SENTENCE)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(APP)
    yield
    for name in [name for name in sys.modules if name.startswith("templateapp")]:
        del sys.modules[name]


class ConnectedGrid(InlineGrid):
    """Treated as a network, like Flower's grids."""

    in_process = False


def client_app() -> ClientApp:
    app: ClientApp = import_module("templateapp.client_app").app
    return app


def run(imported: str, strategy: str, app: ClientApp | None = None) -> Result:
    """Run the app with another import and another strategy in its ServerApp."""
    source = (APP / "templateapp" / "server_app.py").read_text()
    assert source.count(IMPORT) == source.count(STRATEGY) == 1
    source = source.replace(IMPORT, imported).replace(STRATEGY, strategy)
    server_app = ModuleType("changed")
    exec(source, vars(server_app))
    grid = ConnectedGrid(app or client_app(), N, CONFIG)
    context = Context(1, 0, {}, RecordDict(), CONFIG)
    result: Result = server_app.main(grid, context)
    return result


def weights(result: Result) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in result.arrays.items()}


@pytest.mark.parametrize(
    "arguments",
    [
        'weighting="examples"',
        'weighting="examples", min_evaluate_nodes=2',
    ],
)
def test_fedavg_equals_that_of_flower(arguments: str) -> None:
    ours = run(
        OURS.format("FedAvg"),
        f"FedAvg(fraction_train=1.0, fraction_evaluate=fraction_evaluate, {arguments})",
    )
    theirs = run(IMPORT, STRATEGY)
    for name, array in weights(theirs).items():
        np.testing.assert_allclose(weights(ours)[name], array, rtol=1e-5, atol=1e-6)
    for server_round in range(CONFIG["num-server-rounds"] + 1):
        mine = ours.evaluate_metrics_serverapp[server_round]
        assert (
            mine["accuracy"]
            == theirs.evaluate_metrics_serverapp[server_round]["accuracy"]
        )
    # All clients have 40 test examples.
    last = CONFIG["num-server-rounds"]
    mine = ours.evaluate_metrics_clientapp[last]
    for name, value in theirs.evaluate_metrics_clientapp[last].items():
        assert mine[name] == pytest.approx(value, rel=1e-5)
    assert ours.evaluate_metrics_serverapp[last]["accuracy"] > 0.6


@pytest.mark.parametrize(
    ("imported", "strategy"),
    [
        (
            "SRPFL, FedAvg",
            "SRPFL(FedAvg(fraction_train=1.0, fraction_evaluate=fraction_evaluate))",
        ),
        (
            "SRPFL, FedRep",
            "SRPFL(FedRep(fraction_train=1.0, fraction_evaluate=fraction_evaluate))",
        ),
        (
            "FedBuff, FedAvg",
            "FedBuff(FedAvg(fraction_evaluate=fraction_evaluate), concurrency=4, "
            "buffer_size=2)",
        ),
    ],
)
def test_unchanged_client_app_trains(imported: str, strategy: str) -> None:
    result = run(OURS.format(imported), strategy)
    rounds = CONFIG["num-server-rounds"]
    for server_round in range(1, rounds + 1):
        assert result.train_metrics_clientapp[server_round]["rejected"] == 0
        # FedBuff does not test clients that are still training.
        least = 2 if "FedBuff" in imported else N
        assert (
            N >= result.evaluate_metrics_clientapp[server_round]["evaluated"] >= least
        )
    losses = [result.evaluate_metrics_serverapp[r]["loss"] for r in (0, rounds)]
    assert losses[1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", LISTED)
def test_listed_strategies_average_complete_models_like_fedavg(name: str) -> None:
    arguments = "fraction_train=1.0, fraction_evaluate=fraction_evaluate"
    ours = run(OURS.format(name), f"{name}({arguments})")
    theirs = run(OURS.format("FedAvg"), f"FedAvg({arguments})")
    for array, expected in zip(
        weights(ours).values(), weights(theirs).values(), strict=True
    ):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    assert ours.train_metrics_clientapp[1]["rejected"] == 0


@pytest.mark.parametrize("name", ["FedProto", "FedDBE", "FedPAC"])
def test_missing_additional_arrays_are_an_error(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        run(OURS.format(name), f"{name}()")
    assert caught.value.code == "initial-arrays"


# Query handlers


# Arguments of Flower's FedAvg


@pytest.mark.parametrize(
    ("fraction", "least", "evaluated"),
    [(1.0, 1, 4), (0.5, 1, 2), (0.5, 3, 3), (0.1, 1, 1), (0.1, 9, 4), (0.0, 2, 0)],
)
def test_fraction_evaluate_and_min_evaluate_nodes(
    fraction: float, least: int, evaluated: int
) -> None:
    arguments = f"fraction_evaluate={fraction}, min_evaluate_nodes={least}"
    result = run(OURS.format("FedAvg"), f"FedAvg({arguments})")
    metrics = result.evaluate_metrics_clientapp.values()
    assert [m["evaluated"] for m in metrics] == [evaluated] * len(metrics)
    assert all(("eval_acc" in m) == (evaluated > 0) for m in metrics)


# Our ClientApp in another app


def test_unknown_keys_of_another_app_are_ignored_by_our_clients() -> None:
    config = {**CONFIG, "algorithm": "fedavg", "classes-per-client": 5}
    grid = InlineGrid(make_app(config), N)
    initial = FedAvg().initialize(grid)
    for server in FlowerFedAvg(), FedAvg():
        result = server.start(grid, initial, num_rounds=1)
        assert result.arrays.keys() == initial.keys()
        assert result.train_metrics_clientapp
