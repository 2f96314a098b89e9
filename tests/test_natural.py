"""Measures of the benchmark on natural clients."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.derived import balance, compare, sign_test, worst_decile
from benchmarks.natural_tasks import auroc
from benchmarks.run import TUNING_SEED, Bench, read
from flwr_frl.results.results import write_json


def test_auroc_equals_that_of_scikit_learn():
    rng = np.random.default_rng(3)
    # Rounded scores have ties.
    outputs = torch.from_numpy(rng.standard_normal((60, 2)).round(1))
    targets = torch.from_numpy(rng.integers(0, 2, 60))
    score = (outputs[:, 1] - outputs[:, 0]).numpy()
    assert len(np.unique(score)) < len(score)
    expected = roc_auc_score(targets.numpy(), score)
    assert float(auroc(outputs, targets)) == pytest.approx(expected, abs=1e-6)


def test_auroc_of_a_single_class_is_undefined():
    assert math.isnan(auroc(torch.rand(3, 2), torch.ones(3)))


def test_sign_test_counts_the_outcomes_that_are_as_unlikely():
    # Each of six clients is better or worse, so there are 64 outcomes. In two of them
    # all clients agree, and in twelve all but one.
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert sign_test(5, 1) == pytest.approx(14 / 64)
    assert sign_test(3, 3) == sign_test(0, 0) == 1


def test_clients_are_compared_by_their_means_over_seeds():
    # Means of a, b and c: 0.5, 0.7 and 0.2, and in the other runs 0.4, 0.7 and 0.3.
    one = [{"a": 0.4, "b": 0.8, "c": 0.1}, {"a": 0.6, "b": 0.6, "c": 0.3}]
    other = [{"a": 0.5, "b": 0.7, "c": 0.2}, {"a": 0.3, "b": 0.7, "c": 0.4}]
    assert compare(one, other, sign=1) == (1, 1)
    # A client that has no measure in some run is left out.
    assert compare([one[0], {"a": 0.6}], other, sign=1) == (1, 0)
    assert compare(one, other, sign=-1) == (1, 1)


def test_worst_decile_is_the_mean_of_the_worst_tenth():
    clients = {f"{i}": float(i) for i in range(20)}
    assert worst_decile(clients, sign=1) == 0.5
    assert worst_decile(clients, sign=-1) == 18.5
    assert worst_decile({"a": 3.0, "b": 1.0}, sign=1) == 1.0


def test_only_significant_differences_count():
    assert balance((29, 1)) == pytest.approx(28 / 30)
    assert balance((1, 29)) == pytest.approx(-28 / 30)
    assert balance((3, 0)) == balance((0, 0)) == balance(None) == 0


# The choice of a learning rate


def bench(output: Path) -> Bench:
    config = read("natural")
    rows, cells = {"fedrep": {}}, {"school": config.cells["school"]}
    reduced = replace(config, rows=rows, cells=cells)
    return Bench(reduced, output, {"data-dir": Path("data")}, anew=True)


def finish(bench: Bench, rate: float, seed: int, **result: float) -> None:
    job = bench.job("fedrep", "school", seed, {"learning-rate": rate})
    job.place.mkdir(parents=True)
    write_json(job.place / "result.json", {**result, "settings": job.settings})


def chosen(bench: Bench) -> tuple[float | None, list[float]]:
    """Return the chosen rate, and those of the runs that are missing."""
    settings, missing = bench.choose("fedrep", "school")
    rates = [job.settings["learning-rate"] for job in missing]
    assert all(job.settings["evaluate-on"] == "validation" for job in missing)
    return settings and settings["learning-rate"], rates


def test_the_rates_are_extended_while_the_best_is_at_an_end(tmp_path: Path):
    runs = bench(tmp_path)
    assert chosen(runs) == (None, [0.01, 0.05, 0.2])
    for rate, error in ((0.01, 1.0), (0.05, 1.2), (0.2, 1.1)):
        finish(runs, rate, TUNING_SEED, rmse=error)
    assert chosen(runs) == (None, [0.0025])
    # Four rates are the most, even if the best of them is at an end.
    finish(runs, 0.0025, TUNING_SEED, rmse=0.9)
    assert chosen(runs) == (0.0025, [])
    assert [job.settings["seed"] for job in runs.waiting()] == [0, 1, 2, 3, 4]
    assert "evaluate-on" not in runs.waiting()[0].settings


def test_rates_with_a_diverged_run_are_excluded(tmp_path: Path):
    runs = bench(tmp_path)
    for rate, error in ((0.01, 1.3), (0.05, 1.0), (0.2, 1.2)):
        finish(runs, rate, TUNING_SEED, rmse=error)
    assert chosen(runs) == (0.05, [])
    finish(runs, 0.05, 3, failed=1.0)
    # The next best is the largest, so that a larger one is tried.
    assert chosen(runs) == (None, [0.8])
    finish(runs, 0.8, TUNING_SEED, rmse=50.0)
    assert chosen(runs) == (0.2, [])
    # An error above 10 counts as divergence.
    finish(runs, 0.2, 0, rmse=10.5)
    finish(runs, 0.01, 0, rmse=np.nan)
    # If all rates diverge, a smaller one is tried.
    assert chosen(runs) == (None, [0.0025])
    finish(runs, 0.0025, TUNING_SEED, rmse=50.0)
    assert chosen(runs) == (None, [])
