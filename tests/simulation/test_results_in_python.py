"""`Run` and `Runs`: the results of `simulate` as tables, plots and models."""

import sys

import numpy as np
import pytest
import torch
from command_line import json_of
from refusals import code_of

from flwr_frl import Runs, compare, simulate
from flwr_frl.predict import load_run
from flwr_frl.task import SplitModel
from flwr_frl.task.tasks import build_task

QUICK = {"backend": "inline", "model": "mlp-2", "batch_size": 50, "head_epochs": 1}
QUICK |= {"clients": 5, "rounds": 2, "fraction": 1.0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    output = tmp_path_factory.mktemp("results")
    return simulate(["fedavg", "fedrep"], seeds=2, output=output, **QUICK)


def test_several_algorithms_and_seeds_are_tables(runs):
    output = runs["fedrep"].folders[0].parents[1]
    written = json_of(output / "summary.json")["algorithms"]
    assert {name: run.summary for name, run in runs.items()} == written
    table = runs.summary.set_index("algorithm")
    assert table["accuracy"].to_dict() == {n: written[n]["accuracy"] for n in written}
    keys = [(name, seed) for name in runs for seed in (0, 1)]
    for frame, each in ((runs.rounds, 2), (runs.clients, 5)):
        sizes = frame.groupby(["algorithm", "seed"]).size()
        assert sizes.to_dict() == dict.fromkeys(keys, each)
    mean = runs["fedrep"].rounds.groupby("seed")["accuracy"].mean().mean()
    assert mean == pytest.approx(written["fedrep"]["accuracy"])


def test_without_pandas_tables_are_lists_of_dicts(runs, monkeypatch):
    frame = runs["fedrep"].clients
    monkeypatch.setitem(sys.modules, "pandas", None)
    records = runs["fedrep"].clients
    assert records == frame.to_dict("records")
    assert [row["client"] for row in records] == [f"{i:06d}" for i in range(5)] * 2


def test_runs_are_shown_as_a_table_and_a_run_as_a_short_line(runs):
    for name, run in runs.items():
        (line,) = repr(run).splitlines()
        accuracy = f"{run.summary['accuracy']:.2%}"
        assert accuracy in line
        assert len(line) < 100 + len(str(run.folders[0]))
        (row,) = (text for text in repr(runs).splitlines() if f" {name} " in text)
        assert f" {accuracy} ±" in row
        assert run.summary["protocol"] in repr(runs)


def test_runs_are_compared(runs):
    comparison = compare(next(iter(runs["fedrep"].folders.values())).parents[1])
    of_methods = {row.method: row for row in comparison.rows}
    assert of_methods.keys() == runs.keys()
    for name, row in of_methods.items():
        assert row.result == runs[name].summary["accuracy"]
        assert (len(row.clients), list(row.seeds)) == (5, [0, 1])
    assert " fedrep " in repr(comparison)


def test_a_plot_has_a_curve_per_algorithm(runs):
    figure = runs.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.lines] == ["FedAvg", "FedRep"]
    rounds = runs["fedrep"].rounds
    means = rounds.groupby("round")["accuracy"].mean()
    np.testing.assert_allclose(axes.lines[1].get_ydata(), means)


def assert_models_give_final_accuracies(run):
    for _, row in run.clients.iterrows():
        seed, client = row.get("seed", 0), row["client"]
        test = build_task(run.settings[seed], 5).test_examples(int(client))
        predicted = run.predict(test.inputs, client, seed).classes
        hits = np.array(predicted, int) == test.targets.numpy()
        assert hits.mean() == pytest.approx(row["accuracy"])


def test_models_of_clients_give_their_final_accuracies(runs):
    run = runs["fedrep"]
    assert_models_give_final_accuracies(run)
    model = run.model("000002", 1)
    assert isinstance(model, SplitModel)
    head = load_run(run.folders[1], "000002").model.head
    assert torch.equal(model.head.weight, head.weight)


@pytest.mark.parametrize("algorithm", ["fedrep", "flute"])
def test_clients_that_never_trained_have_the_initial_head(algorithm, tmp_path):
    fewer = {**QUICK, "fraction": 0.4, "rounds": 1}
    run = simulate(algorithm, output=tmp_path, **fewer)
    assert (run.clients["last-round"] == 0).sum() == 3
    assert_models_give_final_accuracies(run)
    assert code_of(load_run, tmp_path / algorithm, "000005") == "client-name"


def test_models_of_unknown_clients_seeds_and_later_runs_are_refused(tmp_path):
    run = simulate("fedavg", output=tmp_path, **QUICK)
    assert run.model("000002").head.out_features == 10
    assert code_of(run.model, "nobody") == "client"
    assert code_of(run.model, "000002", seed=3) == "seed"
    simulate("fedavg", output=tmp_path, **QUICK | {"rounds": 1})
    assert code_of(run.model, "000002") == "output"
    assert len(run.rounds) == 2
