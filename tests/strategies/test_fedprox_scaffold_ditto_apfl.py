"""FedProx, SCAFFOLD, Ditto and APFL with float16, batch norms, SRPFL and bad values."""

import json

import numpy as np
import pytest
from softmax_runs import N, draw, normed, run

from flwr_frl import cli, simulate

ALGORITHMS = ("fedprox", "scaffold", "ditto", "apfl")
USUAL = {"momentum": 0.5, "weight_decay": 1e-3, "learning_rate": 0.1}
NORM = "representation.1"
EACH = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.mark.parametrize(
    ("algorithm", "name", "value", "allowed"),
    [
        ("fedprox", "proximal-mu", -1.0, "at least 0"),
        ("fedprox", "proximal-mu", float("inf"), "at least 0 and finite"),
        ("scaffold", "global-learning-rate", 0.0, "above 0"),
        ("scaffold", "global-learning-rate", -0.5, "above 0"),
        ("ditto", "ditto-lambda", -1.0, "at least 0"),
        ("ditto", "personal-epochs", -1, "at least 0"),
        ("apfl", "apfl-alpha", 1.5, "in [0, 1]"),
        ("apfl", "apfl-alpha", -0.1, "in [0, 1]"),
        ("apfl", "apfl-alpha", float("nan"), "in [0, 1]"),
        ("apfl", "apfl-adaptive", 1, "of type bool"),
    ],
)
@pytest.mark.parametrize("srpfl", [False, True])
def test_a_bad_value_is_one_line(
    algorithm, name, value, allowed, srpfl, tmp_path, capsys
):
    # A file can hold what Flower's own list on the command line cannot.
    text = json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = {text}\nsrpfl-base = {algorithm!r}\n")
    chosen = "srpfl" if srpfl else algorithm
    assert cli.main([chosen, "--backend", "inline", "--run-config", str(file)]) == 2
    line = f"error: {name} is {value}; expected {allowed}\n"
    assert capsys.readouterr().err == line


@EACH
def test_float16_on_the_way_changes_little(algorithm):
    wide, narrow = (
        run(algorithm, transport=t, **USUAL) for t in ("float32", "float16")
    )
    assert [row["rejected"] for row in narrow.rows] == [0] * 4
    for arrays, others in zip(narrow.arrays, wide.arrays, strict=True):
        for name, value in arrays.items():
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, others[name], atol=5e-3)
    for kept, others in zip(narrow.kept[-1], wide.kept[-1], strict=True):
        for name, value in kept.items():
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, others[name], atol=5e-3)
    for message, reply in narrow.between("train"):
        for part in (message, reply):
            kinds = {a.dtype for a in part.content["arrays"].values()}
            assert kinds == {"float16"}


@EACH
def test_a_batch_norm_learns_and_counts(algorithm):
    found = run(algorithm, task="softmax_runs:normed", evaluate=True)
    first, last = found.arrays[0], found.arrays[-1]
    # Three steps a round, one an epoch.
    assert [a[f"{NORM}.num_batches_tracked"] for a in found.arrays] == [3, 6, 9, 12]
    assert (first[f"{NORM}.running_var"] > 0).all()
    assert (
        np.abs(first[f"{NORM}.running_mean"] - last[f"{NORM}.running_mean"]).max()
        > 0.01
    )
    assert found.rows[-1]["loss"] < found.rows[0]["loss"]


@pytest.mark.parametrize("algorithm", ["ditto", "apfl"])
def test_a_personal_batch_norm_has_its_own_statistics(algorithm):
    # After one step from the initial model: a tenth of the way to the batch's mean.
    found = run(algorithm, 1, task="softmax_runs:normed", representation_epochs=1)
    initial = {n: t.numpy() for n, t in normed(N).initial_state.items()}
    for i in found.trained[0]:
        x, _ = draw(i)
        features = x @ initial["representation.0.weight"].T
        features += initial["representation.0.bias"]
        kept = found.kept[0][i]
        running = kept[f"model.{NORM}.running_mean"]
        np.testing.assert_allclose(running, features.mean(0) / 10, atol=1e-6)
        running = kept[f"model.{NORM}.running_var"]
        variance = features.var(0, ddof=1)
        np.testing.assert_allclose(running, 0.9 + variance / 10, atol=1e-6)
    # What is shared is the mean over the clients, and something else.
    shared = found.arrays[0][f"{NORM}.running_mean"]
    assert np.abs(shared - kept[f"model.{NORM}.running_mean"]).max() > 1e-3


@EACH
def test_resnet20(algorithm, tmp_path):
    more = {"clients": 40, "fraction": 0.05, "batch_size": 20, "evaluate_last": 0}
    more |= {"model": "resnet20", "evaluate_every": 0, "partition": "iid"}
    _, rows = simulate(algorithm, "inline", rounds=2, output=str(tmp_path), **more)
    assert [(row["clients"], row["rejected"]) for row in rows] == [(2, 0)] * 2
    assert all(0 < row["train-loss"] < 10 for row in rows)


@EACH
def test_under_srpfl_on_the_command_line(algorithm, tmp_path):
    more = {"srpfl_base": algorithm, "initial_nodes": 1, "rounds_per_stage": "1"}
    more |= {"output": str(tmp_path), "task": "softmax_runs:softmax", **USUAL}
    _, rows = simulate("srpfl", "inline", clients=N, rounds=4, fraction=1.0, **more)
    assert [row["clients"] for row in rows] == [1, 2, 4, 6]
    assert rows[-1]["loss"] < 1.2
    times = [row["seconds-simulated"] for row in rows]
    assert times == sorted(times)
