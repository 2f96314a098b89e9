"""Our ClientApp works with the strategies of Flower."""

import numpy as np
import pytest
from client_messages import values_of
from flwr.app import ConfigRecord
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


def answers_to(arrays) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Return the arrays that FedAvg's clients send in round 1, and their examples."""
    grid, ours = grid_of("fedavg"), FedAvg(fraction_train=1.0)
    messages = ours.configure_train(1, arrays, ConfigRecord(), grid)
    replies = list(grid.send_and_receive(messages))
    replies.sort(key=lambda reply: reply.metadata.src_node_id)
    sizes = [reply.content["metrics"]["num-examples"] for reply in replies]
    return [values_of(reply.content["arrays"]) for reply in replies], np.array(sizes)


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


def test_fedadam_of_flower_takes_an_adam_step_with_our_clients():
    grid = grid_of("fedavg")
    start = FedAvg().initialize(grid)
    answers, sizes = answers_to(start)
    adam = flower.FedAdam(**ALL, eta=0.1, beta_1=0.9, beta_2=0.99, tau=0.01)
    result = adam.start(grid, start, num_rounds=1)
    before = values_of(start)
    for name, array in values_of(result.arrays).items():
        mean = sum(s * a[name] for s, a in zip(sizes, answers, strict=True))
        delta = mean / sizes.sum() - before[name].astype(np.float64)
        m, v = 0.1 * delta, 0.01 * delta**2
        # Flower corrects the step for the bias in round 1.
        step = 0.1 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)
        expected = before[name] + step * m / (np.sqrt(v) + 0.01)
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [
        flower.Krum(**ALL, num_malicious_nodes=1),
        flower.FedMedian(**ALL),
        flower.FedTrimmedAvg(**ALL, beta=0.2),
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
