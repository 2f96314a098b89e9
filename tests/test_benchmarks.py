"""The computations behind published numbers that no other test checks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks import gpu, render, same_numbers
from benchmarks.attacks import ATTACKS, Known
from benchmarks.clocks import timed
from benchmarks.derived import compare, time_to, worst_decile
from benchmarks.natural_tasks import auroc
from benchmarks.run import CONFIGS, RESERVED, TUNING_SEED, Bench, read, reduced
from benchmarks.runs import DEFAULTS, load
from flwr_frl import simulate
from flwr_frl.results.results import write_json

# Byzantine clients (liars.md). Two honest clients have moved from (10, 10) by (1, 0)
# and (3, 4), the attacker by (2, -1). The honest mean is (2, 2), and the standard
# deviations are (1, 2).
HONEST = np.array([[1.0, 0.0], [3.0, 4.0]])
LAST = np.array([5.0, -1.0])
KNOWN = Known(np.array([10.0, 10.0]), LAST, np.array([2.0, -1.0]), HONEST)


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ("1e30", [1e30, 1e30]),
        ("sign flip", [-22, -19]),
        ("ALIE", [0.5, -1]),
        ("IPM 0.5", [-1, -1]),
        ("IPM 3", [-6, -6]),
        # The median norm is 3.
        ("ascent", [-3 / 2**0.5, -3 / 2**0.5]),
        # The squared distance of the honest clients is 20.
        ("min-max", [2 - (156**0.5 - 6) / 4] * 2),
        ("min-sum", [2 - 2.5**0.5] * 2),
        ("label flip", [2, -1]),
        # Three of ten clients replace the model.
        ("backdoor", [20 / 3, -10 / 3]),
        ("constrained backdoor", [2, 2 - (171**0.5 - 6) / 3]),
    ],
)
def test_attacks_match_hand_computed_values(attack: str, expected: list[float]) -> None:
    np.testing.assert_allclose(ATTACKS[attack](KNOWN), expected)


# Natural clients (natural.md)


def test_auroc_equals_that_of_scikit_learn():
    rng = np.random.default_rng(3)
    # Rounded scores have ties.
    outputs = torch.from_numpy(rng.standard_normal((60, 2)).round(1))
    targets = torch.from_numpy(rng.integers(0, 2, 60))
    score = (outputs[:, 1] - outputs[:, 0]).numpy()
    expected = roc_auc_score(targets.numpy(), score)
    assert float(auroc(outputs, targets)) == pytest.approx(expected, abs=1e-6)


def test_comparisons_of_clients_by_hand():
    # Means of a, b and c: 0.5, 0.7 and 0.2, and in the other runs 0.4, 0.7 and 0.3.
    one = [{"a": 0.4, "b": 0.8, "c": 0.1}, {"a": 0.6, "b": 0.6, "c": 0.3}]
    other = [{"a": 0.5, "b": 0.7, "c": 0.2}, {"a": 0.3, "b": 0.7, "c": 0.4}]
    assert compare(one, other, sign=1) == compare(one, other, sign=-1) == (1, 1)
    clients = {f"{i}": float(i) for i in range(20)}
    assert worst_decile(clients, sign=1) == 0.5
    assert worst_decile(clients, sign=-1) == 18.5


# The runner of configs

NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_config_names_settings_functions_and_partners_that_exist(name):
    config = read(name)
    given = {**config.common}
    for function in (config.function, config.measure, config.derive, config.seeds_from):
        assert not function or callable(load(function))
    for table in (*config.cells.values(), *config.rows.values()):
        assert {*table.get("cells", config.cells)} & config.cells.keys()
        assert {*table.get("only", [])} <= config.rows.keys()
        given |= table
    if not config.function:
        # "rows" is a setting of the guide's own task.
        unknown = given.keys() - DEFAULTS.keys() - {*RESERVED, "rows", "algorithm"}
        assert unknown == set()


@pytest.mark.parametrize("name", ["clustered", "privacy"])
def test_a_small_run_of_a_config_is_rendered_and_reused(name, tmp_path, monkeypatch):
    config = reduced(read(name))
    bench = Bench(config, tmp_path, {}, anew=True)
    bench.make(1)
    page = {**bench.content(), "about": {}}
    runs = [run for cells in page["results"].values() for (run,) in cells.values()]
    assert len(runs) == 2
    assert not [run for run in runs if "failed" in run]
    assert config.metric in render.body(config, page)
    for run in runs:
        run["commit"] = "0123456789"
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    write_json(tmp_path / f"{name}.json", page)
    assert Bench(config, tmp_path / "elsewhere", {}).waiting() == []
    # Runs with other settings, of unclean commits or that failed are repeated.
    changed = replace(config, common={**config.common, "batch-size": 7})
    assert len(Bench(changed, tmp_path / "elsewhere", {}).waiting()) == 2
    runs[0]["commit"] += "-dirty"
    runs[1]["failed"] = "ValueError"
    write_json(tmp_path / f"{name}.json", page)
    assert len(Bench(config, tmp_path / "elsewhere", {}).waiting()) == 2


def test_rates_are_extended_and_those_that_diverge_excluded(tmp_path):
    natural = read("natural")
    cells = {"school": natural.cells["school"]}
    config = replace(natural, rows={"fedrep": {}}, cells=cells)
    bench = Bench(config, tmp_path, {"data-dir": Path("data")}, anew=True)

    def finish(rate: float, seed: int, **result: float) -> None:
        job = bench.job("fedrep", "school", seed, {"learning-rate": rate})
        job.place.mkdir(parents=True)
        write_json(job.place / "result.json", {**result, "settings": job.settings})

    def chosen() -> tuple[float | None, list[float]]:
        settings, missing = bench.choose("fedrep", "school")
        assert all(job.settings["evaluate-on"] == "validation" for job in missing)
        rates = [job.settings["learning-rate"] for job in missing]
        return settings and settings["learning-rate"], rates

    assert chosen() == (None, [0.01, 0.05, 0.2])
    for rate, error in ((0.01, 1.3), (0.05, 1.0), (0.2, 1.2)):
        finish(rate, TUNING_SEED, rmse=error)
    assert chosen() == (0.05, [])
    assert [job.settings["seed"] for job in bench.waiting()] == [0, 1, 2, 3, 4]
    finish(0.05, 3, failed=1.0)
    # The next best is the largest, so that a larger one is tried.
    assert chosen() == (None, [0.8])
    finish(0.8, TUNING_SEED, rmse=50.0)
    assert chosen() == (0.2, [])
    # An error above 10 counts as divergence. Four rates are the most.
    finish(0.2, 0, rmse=10.5)
    assert chosen() == (None, [0.0025])
    finish(0.0025, TUNING_SEED, rmse=1.25)
    assert chosen() == (0.0025, [])


# Simulated times (srpfl_time.md)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_runs_that_differ_only_in_their_clock_are_carried_out_once(
    fraction, monkeypatch, tmp_path
):
    common = {"num-clients": 10, "num-server-rounds": 3, "fraction-train": fraction}
    common |= {"evaluate-every": 1, "evaluate-last": 1, "model": "logistic", "seed": 3}

    def run(algorithm: str, **own) -> dict:
        settings = {**common, "algorithm": algorithm, **own}
        return timed(settings, tmp_path / "cell" / algorithm / "0")

    place = {"output": tmp_path, "algorithm": "fedrep", "speed-model": "dynamic"}
    settings = {**common, **place}
    rows = simulate(settings.pop("algorithm"), "inline", **settings).rows
    fixed = run("fedrep", **{"speed-model": "fixed"})
    monkeypatch.setattr("benchmarks.runs.simulate", None)
    dynamic = run("fedrep", **{"speed-model": "dynamic"})
    times = [row["seconds-simulated"] for row in rows]
    assert dynamic["curve"]["time"][0] == pytest.approx(times)
    assert dynamic["accuracy"] == fixed["accuracy"] == rows[-1]["accuracy"]
    assert dynamic["time"] != fixed["time"]
    later = run("fedrep", **{"speed-model": "dynamic", "communication-time": 10.0})
    assert later["time"] == pytest.approx(times[-1] + 30)
    # SRPFL waits only for the first clients.
    with pytest.raises(RuntimeError):
        run("srpfl", **{"speed-model": "dynamic", "initial-nodes": 2})


def test_times_to_a_level_are_interpolated_between_tests():
    curve = [[1.0, 3.0], [0.2, 0.6], [1, 2]]
    assert time_to(curve, 0.4) == pytest.approx(2)
    assert time_to(curve, 0.4, per_round=10) == pytest.approx(17)


# The oracle of refactorings


def test_each_difference_of_two_recordings_is_reported(tmp_path, capsys):
    def record(folder: str, name: str, loss: float, **arrays: str) -> None:
        path = tmp_path / folder / "digits" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files = {"checkpoint.safetensors": arrays}
        numbers = {"loss": loss}
        path.write_text(json.dumps({"exit": 0, "numbers": numbers, "arrays": files}))

    old, new = tmp_path / "old", tmp_path / "new"
    record("old", "equal", float("nan"), a="1", b="2")
    # A renamed array is no difference, but a swap is.
    record("new", "equal", float("nan"), a="1", c="2", d="3")
    assert same_numbers.compare(old, new, "", False) == 0
    record("old", "fedrep", 1.0, a="1", b="2", gone="3")
    record("new", "fedrep", 1.5, a="1", b="4")
    record("old", "lost", 1.0)
    record("old", "swapped", 1.0, a="1", b="2")
    record("new", "swapped", 1.0, a="2", b="1")
    capsys.readouterr()
    assert same_numbers.compare(old, new, "", True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("digits/fedrep",) * 3,
        "digits/lost",
        *("digits/swapped",) * 2,
        "4 runs, 3 differ",
    ]


def test_gpu_benchmark_runs_on_a_cpu_with_a_stand_in_for_graphs(capsys):
    sizes = "--clients 2 --examples 8 --nodes 2 --rounds 1 --only FLUTE"
    gpu.main(["--device", "cpu", *sizes.split()])
    *_, names, _, row = capsys.readouterr().out.strip().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in (names, row)]
    numbers = dict(zip(*cells, strict=True))
    assert numbers["captured and together"] == "0.0e+00"
    assert float(numbers["arithmetic"]) > 0
