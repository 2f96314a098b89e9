"""SRPFL in simulated runs."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from refusals import code_of
from srpfl_runs import recorded, settings_of, simulated

from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies import SRPFL, FedAvg, FedBuff, build_strategy
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server_app import serve
from flwr_frl.strategies.srpfl import FirstReplies


@pytest.mark.parametrize("algorithm", ["srpfl", "srpfl-flute"])
def test_only_the_fastest_clients_train(algorithm: str, tmp_path) -> None:
    settings = settings_of(algorithm, output=str(tmp_path), rounds_per_stage="2")
    inner = InlineGrid(make_app(settings), 20)
    trained = recorded(inner)
    summary = serve(inner, settings)
    times = SpeedModel("fixed", 20).times(1)
    fastest = np.argsort(times)
    assert [sorted(t) for t in trained] == [sorted(fastest[:n]) for n in (5, 5, 10, 10)]
    # Simulated time: twice the fifth fastest client, and twice the tenth
    expected = 2 * times[fastest[4]] + 2 * times[fastest[9]]
    assert summary["seconds-simulated"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "base", ["fedavg", "flwr_frl.strategies.averaging:FedAvg", "flute"]
)
def test_srpfl_base_selects_the_wrapped_algorithm(base: str, tmp_path) -> None:
    options = {"output": str(tmp_path), "num_server_rounds": 3, "rounds_per_stage": "2"}
    settings = settings_of("srpfl", srpfl_base=base, **options)
    strategy = build_strategy(settings)
    assert isinstance(strategy._run.participation, FirstReplies)
    wrapped = {**settings, "algorithm": base}
    assert type(strategy) is type(build_strategy(wrapped))
    assert client_class(settings) is client_class(wrapped)
    # The results equal those under the algorithm's own name.
    named = {"flute": "srpfl-flute"}.get(base, "flanp")
    rows = []
    for algorithm in ("srpfl", named):
        chosen = {**settings, "algorithm": algorithm}
        serve(InlineGrid(make_app(chosen), 20), chosen)
        lines = (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()
        rows.append([{**json.loads(line), "seconds": 0} for line in lines])
    assert rows[0] == rows[1]
    assert [row["clients"] for row in rows[0]] == [5, 5, 10]


@pytest.mark.parametrize("real", [False, True])
def test_srpfl_inside_differential_privacy(real: bool) -> None:
    settings = settings_of("fedavg")
    base = build_strategy(settings)
    private = DifferentialPrivacyServerSideFixedClipping(
        SRPFL(base, initial_nodes=5, rounds_per_stage=2),
        noise_multiplier=0.0,
        clipping_norm=1e-3,
        num_sampled_clients=5,
    )
    inner, grid = simulated(settings, base)
    if real:
        # Replies are checked before they are clipped.
        grid = Inbox(inner)
    start = base.initialize(inner)
    counts = []
    end = run_rounds(
        private,
        grid,
        start,
        range(1, 3),
        evaluated=lambda _: False,
        after_round=lambda r, a, metrics: counts.append(metrics["clients"]),
    )
    assert counts == [5, 5]
    moved = sum(np.sum((end[n].numpy() - start[n].numpy()) ** 2) for n in start) ** 0.5
    # In two rounds, each update is clipped to a norm of 1e-3.
    assert 0 < moved <= 2.01e-3


def test_grid_that_closes_no_round_early_is_rejected() -> None:
    settings = settings_of("fedavg")
    strategy = SRPFL(build_strategy(settings), initial_nodes=5, rounds_per_stage=1)
    inner, _ = simulated(settings, strategy)
    start = strategy.initialize(inner)
    with pytest.raises(SettingsError) as caught:
        strategy.configure_train(1, start, ConfigRecord(), inner)
    assert caught.value.code == "speed-model"


@pytest.mark.parametrize("wrapper", [SRPFL, FedBuff])
@pytest.mark.parametrize("strategy", [FlowerFedAvg(), FedAvg])
def test_only_strategies_of_this_package_can_be_wrapped(wrapper, strategy) -> None:
    assert code_of(wrapper, strategy) == "strategy"
