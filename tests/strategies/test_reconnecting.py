"""Resumed runs with missing clients, and strategies started twice."""

import pytest
from function_clients import START, grid_of

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.algorithms import simulation_defaults
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server_app import serve


@pytest.mark.parametrize(
    ("algorithm", "own", "back"),
    [
        ("fedrep", {"fraction-train": 0.2}, 4),
        ("srpfl", {"fraction-train": 1.0, "speed-model": "fixed"}, 3),
        ("dpsgd", {"model": "logistic"}, 1),
        ("representation-transfer", {"num-sources": 4, "source-epochs": 1}, 4),
    ],
)
def test_resumed_run_continues_with_the_connected_clients(
    tmp_path, algorithm, own, back
):
    given = {
        "algorithm": algorithm,
        "num-clients": 10,
        "num-server-rounds": 2,
        "checkpoint-every": 1,
        "output": str(tmp_path),
        "model": "mlp-2",
        "head-epochs": 1,
        "batch-size": 50,
        **own,
    }
    settings = resolve(given)
    serve(InlineGrid(make_app(settings), 10), settings)
    again = resolve({**given, "num-server-rounds": 4, "resume": str(tmp_path)})
    grid = InlineGrid(make_app(again), 10)
    grid.contexts.data = dict(list(grid.contexts.items())[:back])
    assert serve(grid, again)["rounds"] == 4


def run_with_roles(tmp_path, roles):
    # The server's settings name ten sources, but the devices' roles take precedence.
    settings = resolve(
        {
            "algorithm": "representation-transfer",
            "output": str(tmp_path),
            "num-server-rounds": 2,
            "model": "mlp-2",
            "source-epochs": 1,
            "batch-size": 50,
        }
    )
    grid = InlineGrid(make_app(settings), 3)
    for i, (role, context) in enumerate(
        zip(roles, grid.contexts.values(), strict=True)
    ):
        context.node_config = {"client-name": "abc"[i], **role}
    return serve(grid, settings)


def test_devices_declare_their_role(tmp_path):
    summary = run_with_roles(tmp_path, [{}, {"role": "source"}, {"role": "target"}])
    assert summary["rounds"] == 2
    assert 0 <= summary["accuracy"] <= 1


@pytest.mark.parametrize("role", ["auto", "source", "target"])
def test_run_with_roles_needs_sources_and_targets(tmp_path, role):
    with pytest.raises(SettingsError) as caught:
        run_with_roles(tmp_path, [{"role": role}] * 3)
    assert caught.value.code == "role"
    assert "\n" not in str(caught.value)


def test_a_strategy_can_be_started_twice():
    strategy, arrays = FedAvg(fraction_train=1.0), to_record(START)
    for _ in range(2):
        result = strategy.start(grid_of(3), arrays, num_rounds=2)
        assert result.arrays["b"].numpy().tolist() == [4.0] * 4


# SRPFL around other strategies


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("fedavg", {"speed-model": "fixed"}),
        ("fedsa-lora", {"speed-model": "fixed", "adapters": "lora"}),
    ],
)
def test_srpfl_has_the_simulation_defaults_of_its_base(base, expected):
    settings = resolve({"algorithm": "srpfl", "srpfl-base": base})
    assert simulation_defaults(settings) == expected
