"""Fed-MTL compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from paper_rounds import VARIANTS, assert_losses, assert_rounds, run_variant
from softmax_runs import N, assert_near, matrix, run, start


def numpy_fed_mtl(found, pull):
    """Return (w̄, columns of W) by round; None for a client that has not trained.

    The gradient of λ tr(W Ω Wᵀ) is 2λ W Ω with Ω = (I − 11ᵀ/m)². W is that of the start
    of the round, except for the column that moves.
    """
    mean, columns, rounds = start(), [None] * N, []
    for clients in found.trained:
        columns = [
            found.descend(mean if w is None else w, i, pull=2 * pull, anchor=mean)
            if i in clients
            else w
            for i, w in enumerate(columns)
        ]
        mean = np.mean([w for w in columns if w is not None], axis=0)
        rounds.append((mean, columns))
    return rounds


@pytest.mark.parametrize("variant", ["plain", "momentum", "srpfl"])
def test_every_round_matches_the_paper(variant):
    more = VARIANTS[variant]
    result = run_variant("fed-mtl", 5, mtl_lambda=0.4, evaluate={5}, **more)
    expected = numpy_fed_mtl(result, 0.4)
    assert_rounds(result, expected)
    mean, columns = expected[-1]
    assert_losses(result, [mean if w is None else w for w in columns])
    # The pull towards w̄ has an effect.
    alone = numpy_fed_mtl(result, 0.0)[-1][1]
    pairs = [(w, v) for w, v in zip(columns, alone, strict=True) if w is not None]
    assert max(np.abs(w - v).max() for w, v in pairs) > 1e-2


def test_noisy_mean_moves_towards_the_models_of_clients_that_replied():
    noise = {"server_dp_noise": 0.001, "server_dp_clip": 4.0, "server_dp_delta": 1e-5}
    first = run("fed-mtl", 2)
    gone = {(i, 2) for i in first.trained[1][:2]}
    result = run("fed-mtl", 3, spoilt=gone, **noise)
    assert [len(clients) for clients in result.trained] == [3, 1, 3]
    shared = [matrix(arrays) for arrays in result.arrays]
    (answered,) = result.trained[1]
    # Clients without a reply have no effect.
    asked = {*result.trained[0], *first.trained[1]}
    column = matrix(result.kept[1][answered], "model.")
    moved = (column - shared[0]) / len(asked)
    # The noise of a round has the standard deviation 0.001 × 4 / N with N >= 3.
    assert_near(shared[1] - shared[0], moved, 0.01)
    assert np.abs(moved).max() > 0.02


@pytest.mark.parametrize("algorithm", ["fed-mtl", "l2gd"])
def test_noise_does_not_add_up_in_the_mean(algorithm, monkeypatch):
    # Accumulated noise had a norm of 1.1 to 1.4 after 40 rounds, and 2.5 after 160.
    monkeypatch.setattr(
        "flwr_frl.strategies.server.privacy.ClientPrivacy.spent", lambda _: {}
    )
    noise = {"server_dp_noise": 0.3, "server_dp_clip": 1.0, "server_dp_delta": 1e-5}
    method = {"fed-mtl": {"mtl_lambda": 0.5}, "l2gd": {"l2gd_lambda": 0.5}}[algorithm]
    usual = {"fraction_train": 1.0, "learning_rate": 0.1, "weight_decay": 0.05}
    result = run(algorithm, 40, watched=False, **usual, **method, **noise)
    models = [matrix(state, "model.") for state in result.kept[-1]]
    gap = matrix(result.arrays[-1]) - np.mean(models, axis=0)
    assert np.linalg.norm(gap) < 0.6
