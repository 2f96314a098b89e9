"""Measures of the benchmark on natural clients."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.common import RESULTS
from benchmarks.natural import TASKS, TUNING_SEED, Runs, choice_of_rates, job_of
from benchmarks.natural_page import (
    REFERENCES,
    Results,
    balance,
    compare,
    sign_test,
    task_table,
    worst_decile,
)
from benchmarks.natural_tasks import auroc
from flwr_frl.results.results import read_json, write_json


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


def finish(output: Path, rate: float, seed: int, **result: float):
    job = job_of(output, "data", "school", "fedrep", rate, seed)
    job.place.mkdir(parents=True)
    write_json(job.place / "result.json", {**result, "settings": job.settings})


def test_the_rates_are_extended_while_the_best_is_at_an_end(tmp_path: Path):
    runs = Runs(tmp_path, "data", "school", "fedrep")
    rate, jobs = runs.choose()
    assert rate is None
    assert [job.settings["learning-rate"] for job in jobs] == [0.01, 0.05, 0.2]
    for rate, error in ((0.01, 1.0), (0.05, 1.2), (0.2, 1.1)):
        finish(tmp_path, rate, TUNING_SEED, rmse=error)
    rate, (job,) = runs.choose()
    assert (rate, job.settings["learning-rate"]) == (None, 0.0025)
    assert job.settings["evaluate-on"] == "validation"
    # Four rates are the most, even if the best of them is at an end.
    finish(tmp_path, 0.0025, TUNING_SEED, rmse=0.9)
    rate, jobs = runs.choose()
    assert rate == 0.0025
    assert [job.settings["seed"] for job in jobs] == [0, 1, 2, 3, 4]
    assert "evaluate-on" not in jobs[0].settings


def test_a_page_keeps_the_rows_of_algorithms_that_are_not_named(tmp_path: Path):
    page = read_json(RESULTS / "natural.json")
    lines = (RESULTS / "natural.md").read_text("utf-8").splitlines()
    for task, rows in page["tasks"].items():
        about, others = TASKS[task], {*rows} - {*REFERENCES}
        outcomes = {n: Runs(tmp_path, "data", task, n).kept(page) for n in others}
        results = Results(about.title, about.measure, about.seeds, outcomes)
        assert {*task_table(results).splitlines()} <= {*lines}
        assert {n: row["values"] for n, row in results.numbers().items() if row} == {
            n: rows[n]["values"] for n in others if rows[n]
        }
    # Clients are compared with those of new runs.
    runs = Runs(tmp_path, "data", "roles", "local")
    assert runs.kept(page) is None
    rate, jobs = runs.choose()
    assert rate == page["tasks"]["roles"]["local"]["rate"]
    assert [job.settings["seed"] for job in jobs] == [0, 1, 2, 3, 4]


def test_rates_with_a_diverged_run_are_excluded(tmp_path: Path):
    runs = Runs(tmp_path, "data", "school", "fedrep")
    for rate, error in ((0.01, 1.3), (0.05, 1.0), (0.2, 1.2)):
        finish(tmp_path, rate, TUNING_SEED, rmse=error)
    assert runs.choose()[0] == 0.05
    finish(tmp_path, 0.05, 3, failed=1.0)
    # The next best is the largest, so that a larger one is tried.
    rate, (job,) = runs.choose()
    assert (rate, job.settings["learning-rate"]) == (None, 0.8)
    finish(tmp_path, 0.8, TUNING_SEED, rmse=50.0)
    assert runs.choose()[0] == 0.2
    # An error above 10 counts as divergence.
    finish(tmp_path, 0.2, 0, rmse=10.5)
    finish(tmp_path, 0.01, 0, rmse=np.nan)
    # If all rates diverge, a smaller one is tried.
    rate, (job,) = runs.choose()
    assert (rate, job.settings["learning-rate"]) == (None, 0.0025)
    finish(tmp_path, 0.0025, TUNING_SEED, rmse=50.0)
    assert runs.choose() == (None, [])


def test_the_rates_of_another_task_are_those_of_its_page(tmp_path: Path):
    page = read_json(RESULTS / "natural.json")["tasks"]["roles"]
    runs = Runs(tmp_path, "data", "leaf_roles", "gpfl")
    rate, (job,) = runs.choose()
    assert rate == job.settings["learning-rate"] == page["gpfl"]["rate"]
    assert job.settings["seed"] == 0
    assert "chosen for\n`roles`" in choice_of_rates(["leaf_roles"])
    # A page keeps single runs, so that others can be added without them.
    result = {"accuracy": 0.25, "bytes": 2e6, "commit": "0123456789", "cpu-seconds": 9}
    write_json(job.place / "result.json", {**result, "settings": job.settings})
    write_json(job.place / "gpfl" / "clients.json", {"a": {"accuracy": 0.25}})
    outcome = runs.outcome()
    assert (outcome.values, outcome.clients) == ([0.25], [{"a": 0.25}])
    assert "data-dir" not in outcome.run["settings"]
    numbers = Results("roles", "accuracy", 1, {"gpfl": outcome}).numbers()
    page = {"tasks": {"leaf_roles": numbers}}
    elsewhere = Runs(tmp_path / "other", "other data", "leaf_roles", "gpfl")
    assert elsewhere.on_page(page) == outcome
    assert Runs(tmp_path, "data", "leaf_roles", "fedavg").on_page(page) is None
    numbers["gpfl"]["run"]["settings"]["batch-size"] = 7
    assert elsewhere.on_page(page) is None
    assert "0.2, 0.8, 3.2 for `roles`" in choice_of_rates(["heart", "roles"])
