"""Our ClientApp works with the strategies of Flower."""

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import FedAvg, FedProx
from flwr_frl.strategies.grids.simulation import InlineGrid

N = 5
ALL = {"fraction_train": 1.0, "fraction_evaluate": 1.0}


def grid_of(algorithm: str) -> InlineGrid:
    settings = {
        "algorithm": algorithm,
        "num-clients": N,
        "model": "mlp-2",
        "batch-size": 50,
        "learning-rate": 0.1,
        "head-epochs": 1,
    }
    return InlineGrid(make_app(resolve(settings)), N)


def trained_by(grid: InlineGrid, arrays) -> list[dict[str, np.ndarray]]:
    """Return the arrays that each client sends in round 1."""
    ours = FedAvg(fraction_train=1.0)
    messages = ours.configure_train(1, arrays, ConfigRecord(), grid)
    replies = sorted(
        grid.send_and_receive(messages), key=lambda r: r.metadata.src_node_id
    )
    return [
        {n: a.numpy() for n, a in r.content.array_records["arrays"].items()}
        for r in replies
    ]


def test_fedprox_of_flower_keeps_our_clients_near_the_global_model():
    grid = grid_of("fedavg")
    start = FedAvg().initialize(grid)
    theirs = flower.FedProx(**ALL, proximal_mu=2.0).start(grid, start, num_rounds=2)
    ours = FedProx(proximal_mu=2.0, fraction_train=1.0, weighting="examples")
    same = ours.start(grid_of("fedprox"), start, num_rounds=2)
    free = flower.FedAvg(**ALL).start(grid_of("fedavg"), start, num_rounds=2)
    for name, array in theirs.arrays.items():
        np.testing.assert_allclose(
            array.numpy(), same.arrays[name].numpy(), rtol=0, atol=1e-6
        )
    distance = {
        which: sum(
            float(np.square(run.arrays[n].numpy() - start[n].numpy()).sum())
            for n in start
        )
        for which, run in (("held", theirs), ("free", free))
    }
    assert distance["held"] < 0.8 * distance["free"]


def test_fedadam_of_flower_takes_an_adam_step_with_our_clients():
    grid = grid_of("fedavg")
    start = FedAvg().initialize(grid)
    answers = trained_by(grid_of("fedavg"), start)
    adam = flower.FedAdam(**ALL, eta=0.1, beta_1=0.9, beta_2=0.99, tau=0.01)
    result = adam.start(grid, start, num_rounds=1)
    assert result.arrays is not None
    sizes = np.array([m["num-examples"] for m in _properties(grid)], float)
    for name, array in result.arrays.items():
        old = start[name].numpy().astype(np.float64)
        mean = sum(s * a[name] for s, a in zip(sizes, answers, strict=True))
        delta = mean / sizes.sum() - old
        m = 0.1 * delta
        v = 0.01 * delta**2
        # Flower corrects the step for the bias in round 1.
        step = 0.1 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)
        np.testing.assert_allclose(
            array.numpy(), old + step * m / (np.sqrt(v) + 0.01), rtol=0, atol=1e-5
        )


def _properties(grid: InlineGrid) -> list[dict]:
    ours = FedAvg(fraction_train=1.0)
    return [ours.clients.known[n].properties for n in ours.identify(grid)]


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
    answers = trained_by(grid_of("fedavg"), start)
    result = strategy.start(grid, start, num_rounds=1)
    name = "head.weight"
    aggregated = result.arrays[name].numpy()
    stacked = np.stack([answer[name] for answer in answers])
    if isinstance(strategy, flower.Krum):
        assert any(np.array_equal(aggregated, one) for one in stacked)
    elif isinstance(strategy, flower.FedMedian):
        np.testing.assert_allclose(aggregated, np.median(stacked, axis=0), atol=1e-7)
    elif isinstance(strategy, flower.FedTrimmedAvg):
        middle = np.sort(stacked, axis=0)[1:-1].mean(axis=0)
        np.testing.assert_allclose(aggregated, middle, atol=1e-6)
    else:
        assert np.isfinite(aggregated).all()
        assert not np.array_equal(aggregated, start[name].numpy())


def test_heads_are_not_sent_under_fedavg_of_flower():
    grid = grid_of("fedrep")
    start = FedAvg().initialize(grid)
    seen = []
    inner = grid.send_and_receive

    def watched(messages, *, timeout=None):
        messages = list(messages)
        replies = list(inner(messages, timeout=timeout))
        seen.extend([*messages, *replies])
        return replies

    grid.send_and_receive = watched
    flower.FedAvg(**ALL).start(grid, start, num_rounds=2)
    names = {
        name
        for message in seen
        for record in message.content.array_records.values()
        for name in record
    }
    assert names
    assert not any(name.startswith("head.") for name in names)
    # Every client has saved its own head.
    kept = [list(context.state) for context in grid.contexts.values()]
    assert all(any(name.startswith("personal-") for name in one) for one in kept)
