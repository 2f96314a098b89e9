"""L2GD compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from function_clients import grid_of
from paper_rounds import VARIANTS, assert_losses, assert_rounds, run_variant
from softmax_runs import N, assert_near, matrix, run, start

from flwr_frl.strategies import L2GD

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


def test_mean_covers_all_models_including_those_of_latecomers():
    result = run("l2gd", 6, late=(0, 4), spoilt={(1, 2), (3, 5)}, **OWN)
    for arrays, kept in zip(result.arrays, result.kept, strict=True):
        models = [matrix(state, "model.") for state in kept if state]
        assert_near(matrix(arrays), np.mean(models, axis=0), 1e-6)


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


def test_batch_of_a_single_example_before_a_batch_norm_is_skipped():
    # Client 1 has 9 examples.
    task = {"task": "softmax_runs:normed", "batch_size": 8}
    client = run("l2gd", 0, **OWN, **task).client(1, 0)
    client._receive(client.get_parameters({}), {})
    assert client.local_steps(3) > 0
    assert int(client.model.representation[1].num_batches_tracked) == 3
