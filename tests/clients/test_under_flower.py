"""Our ClientApp works with the strategies of Flower."""

import numpy as np
import pytest
from client_messages import values_of
from flwr.serverapp import strategy as flower

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import FedAvg, FedProx
from flwr_frl.strategies.grids.simulation import InlineGrid

N = 5
ALL = {"fraction_train": 1.0, "fraction_evaluate": 1.0}


def grid_of(algorithm: str) -> InlineGrid:
    usual = {"num-clients": N, "model": "mlp-2", "batch-size": 50}
    usual |= {"learning-rate": 0.1, "head-epochs": 1}
    return InlineGrid(make_app(resolve({"algorithm": algorithm, **usual})), N)


def test_fedprox_of_flower_keeps_our_clients_near_the_global_model():
    grid = grid_of("fedavg")
    start = FedAvg().initialize(grid)
    theirs = flower.FedProx(**ALL, proximal_mu=2.0).start(grid, start, num_rounds=2)
    ours = FedProx(proximal_mu=2.0, fraction_train=1.0, weighting="examples")
    same = ours.start(grid_of("fedprox"), start, num_rounds=2)
    free = flower.FedAvg(**ALL).start(grid_of("fedavg"), start, num_rounds=2)
    begin, held, own, far = map(
        values_of, (start, theirs.arrays, same.arrays, free.arrays)
    )
    for name, array in held.items():
        np.testing.assert_allclose(array, own[name], rtol=0, atol=1e-6)

    def distance(arrays):
        return sum(np.square(arrays[n] - begin[n]).sum() for n in begin)

    assert distance(held) < 0.8 * distance(far)


@pytest.mark.parametrize(
    "strategy",
    [
        flower.Krum(**ALL, num_malicious_nodes=1),
        flower.FedMedian(**ALL),
        flower.FedTrimmedAvg(**ALL, beta=0.2),
        flower.FedAdam(**ALL),
        flower.FedYogi(**ALL),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_robust_and_adaptive_strategies_of_flower_train_our_clients(strategy):
    grid = grid_of("fedavg")
    start = FedAvg().initialize(grid)
    result = strategy.start(grid, start, num_rounds=1)
    before, after = values_of(start), values_of(result.arrays)
    assert all(np.isfinite(array).all() for array in after.values())
    assert not np.array_equal(after["head.weight"], before["head.weight"])
