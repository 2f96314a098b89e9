"""Batch norms in shared and in personal models."""

import numpy as np
import pytest
from softmax_runs import N, draw, normed, run

NORM = "representation.1"


@pytest.mark.parametrize("algorithm", ["fedprox", "scaffold", "ditto", "apfl"])
def test_batch_norm_is_trained_and_counts_batches(algorithm):
    result = run(algorithm, 3, task="softmax_runs:normed", evaluate=True)
    first, last = result.arrays[0], result.arrays[-1]
    # Three steps per round, one per epoch
    assert [a[f"{NORM}.num_batches_tracked"] for a in result.arrays] == [3, 6, 9]
    assert (first[f"{NORM}.running_var"] > 0).all()
    moved = first[f"{NORM}.running_mean"] - last[f"{NORM}.running_mean"]
    assert np.abs(moved).max() > 0.01
    assert result.rows[-1]["loss"] < result.rows[0]["loss"]


@pytest.mark.parametrize("algorithm", ["ditto", "apfl"])
def test_a_personal_batch_norm_has_its_own_statistics(algorithm):
    # One step moves running statistics by a tenth towards those of the batch.
    result = run(algorithm, 1, task="softmax_runs:normed", representation_epochs=1)
    initial = {n: t.numpy() for n, t in normed(N).initial_state.items()}
    for i in result.trained[0]:
        x, _ = draw(i)
        features = x @ initial["representation.0.weight"].T
        features += initial["representation.0.bias"]
        kept = result.kept[0][i]
        running = kept[f"model.{NORM}.running_mean"]
        np.testing.assert_allclose(running, features.mean(0) / 10, atol=1e-6)
        running = kept[f"model.{NORM}.running_var"]
        variance = features.var(0, ddof=1)
        np.testing.assert_allclose(running, 0.9 + variance / 10, atol=1e-6)
    # The shared statistics are the mean over the clients, so they differ.
    shared = result.arrays[0][f"{NORM}.running_mean"]
    assert np.abs(shared - kept[f"model.{NORM}.running_mean"]).max() > 1e-3
