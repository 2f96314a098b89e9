"""L2GD compared with a NumPy implementation of server and clients."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from function_clients import grid_of
from paper_rounds import (
    VARIANTS,
    assert_losses,
    assert_rounds,
    run_variant,
)
from softmax_runs import (
    RATE,
    N,
    assert_near,
    gradient,
    matrix,
    run,
    start,
)

from flwr_frl.clients import L2GDClient
from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies import L2GD
from flwr_frl.task import SplitModel

P = 0.4
# αλ/(np) = ηλ (1 − p)/p = 0.45 λ
LAMBDA = 0.3
OWN = {"l2gd_lambda": LAMBDA, "l2gd_probability": P}


def throws(found, p=P):
    """Return the numbers of aggregations and local steps of each round."""
    seeds = {m.content["config"]["coins"]: None for m, _ in found.between("train")}
    rngs = [np.random.default_rng(seed) for seed in seeds]
    return [(int(r.geometric(1 - p)), int(r.geometric(p))) for r in rngs]


def numpy_l2gd(found):
    """Run Algorithm 1; return (x̄, all x_i) by round, with None before training."""
    mean, models, rounds, pull = start(), [None] * N, [], 0.45 * LAMBDA
    for clients, (aggregations, steps) in zip(
        found.trained, throws(found), strict=True
    ):
        models = list(models)
        for i in clients:
            x = mean if models[i] is None else models[i]
            for _ in range(aggregations):
                x = (1 - pull) * x + pull * mean
            models[i] = found.descend(x, i, steps)
        mean = np.mean([x for x in models if x is not None], axis=0)
        rounds.append((mean, models))
    return rounds


@pytest.mark.parametrize("variant", ["plain", "momentum", "srpfl"])
def test_every_round_matches_the_paper(variant):
    result = run_variant("l2gd", 5, evaluate={5}, **OWN, **VARIANTS[variant])
    assert len(set(throws(result))) > 2
    expected = numpy_l2gd(result)
    assert_rounds(result, expected)
    mean, models = expected[-1]
    assert_losses(result, [mean if x is None else x for x in models])


def test_every_coin_toss_matches_the_paper():
    # All n devices take part with the paper's α, and every aggregation computes x̄.
    result = run("l2gd", 6, fraction_train=1.0, **OWN)
    alpha = RATE * N * (1 - P)
    x = [start()] * N
    for server_round, (aggregations, steps) in enumerate(throws(result)):
        for xi in [1] * aggregations + [0] * steps:
            mean, share = np.mean(x, axis=0), alpha * LAMBDA / (N * P)
            if xi:
                x = [(1 - share) * model + share * mean for model in x]
            else:
                step = alpha / (N * (1 - P))
                x = [model - step * gradient(model, i) for i, model in enumerate(x)]
        assert_near(matrix(result.arrays[server_round]), np.mean(x, axis=0))
        for state, model in zip(result.kept[server_round], x, strict=True):
            assert_near(matrix(state, "model."), model)


def test_mean_covers_all_models_including_those_of_latecomers():
    result = run("l2gd", 6, late=(0, 4), spoilt={(1, 2), (3, 5)}, **OWN)
    for arrays, kept in zip(result.arrays, result.kept, strict=True):
        models = [matrix(state, "model.") for state in kept if state]
        assert_near(matrix(arrays), np.mean(models, axis=0), 1e-6)


def test_largest_lambda_equals_fedavg():
    # An aggregation yields x̄. With all clients and one local step per round, this
    # is FedAvg with one epoch.
    more = {"fraction_train": 1.0, "l2gd_probability": 1 - 1e-9}
    result = run("l2gd", 3, l2gd_lambda=0.999e9 / RATE, **more)
    assert [steps for _, steps in throws(result, 1 - 1e-9)] == [1, 1, 1]
    plain = run("fedavg", 3, fraction_train=1.0, representation_epochs=1)
    for arrays, others in zip(result.arrays, plain.arrays, strict=True):
        assert_near(matrix(arrays), matrix(others))


def test_coins_are_shared_by_clients_and_differ_by_round_and_run():
    def told(seed):
        strategy, grid = L2GD(seed=seed, fraction_train=1.0), grid_of(3)
        coins = []
        for server_round in range(1, 401):
            arrays, config = ArrayRecord(), ConfigRecord()
            messages = strategy.configure_train(server_round, arrays, config, grid)
            sent = {m.content["config"]["coins"] for m in messages}
            assert len(sent) == 1
            coins += sent
        return coins

    first, second = told(1), told(2)
    assert len({*first, *second}) == 800
    assert told(1) == first
    steps = [np.random.default_rng(seed).geometric(1 - P) for seed in first]
    # The mean is 1/0.6, with a standard error of 0.053.
    assert np.mean(steps) == pytest.approx(1 / 0.6, abs=0.2)


def test_batch_of_a_single_example_before_a_batch_norm_is_skipped():
    # Client 1 has 9 examples.
    def trained(size: int) -> tuple[float, int]:
        task = {"task": "softmax_runs:normed", "batch_size": size}
        client = run("l2gd", 0, **OWN, **task).client(1, 0)
        client._receive(client.get_parameters({}), {})
        loss = client.local_steps(3)
        return loss, int(client.model.representation[1].num_batches_tracked)

    loss, steps = trained(8)
    assert loss > 0
    assert steps == 3
    line = "^batch-size 1 leaves one of 9 examples alone, which this model's batch"
    with pytest.raises(SettingsError, match=line):
        trained(1)


def test_tied_tensor_is_updated_once():
    layer = torch.nn.Linear(2, 2)
    model = SplitModel(torch.nn.Sequential(layer, layer), torch.nn.Linear(2, 1))
    before = {name: value.detach().clone() for name, value in model.tensors.items()}
    there = {name: torch.ones_like(value) for name, value in before.items()}
    settings = L2GDClient._settings_type(
        l2gd_lambda=0.5, l2gd_probability=0.2, learning_rate=0.1, momentum=0.0
    )
    self = SimpleNamespace(model=model, received=there, settings=settings)
    self.pull = L2GDClient.pull.fget(self)
    L2GDClient.aggregate(self, 2)
    # A fraction (1 − ηλ (1 − p) / p)² of the distance remains.
    left = (1 - 0.1 * 0.5 * 0.8 / 0.2) ** 2
    for name, value in model.tensors.items():
        expected = 1 + left * (before[name] - 1)
        torch.testing.assert_close(value.detach(), expected)
