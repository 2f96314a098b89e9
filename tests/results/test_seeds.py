"""Several seeds: their settings, and means and standard deviations over seeds."""

import pytest
from refusals import code_of

from flwr_frl.common.errors import SettingsError
from flwr_frl.results.sweep import Sweep, in_folder, over_seeds, points_of


def planned(count, algorithms=("fedavg",), **given):
    sweep = Sweep(lambda names, settings: settings, dict, count)
    return sweep.plan(algorithms, {"output": "out", **given}).settings


def begun(output, *seeds):
    for seed in seeds:
        folder = output / f"seed-{seed}" / "fedavg"
        folder.mkdir(parents=True)
        (folder / "checkpoint.safetensors").touch()


def test_each_seed_has_a_folder_and_started_seeds_resume(tmp_path):
    assert planned(2, seed=5, momentum=0.9) == [
        {"momentum": 0.9, "seed": seed, "output": f"out/seed-{seed}", "resume": ""}
        for seed in (5, 6)
    ]
    begun(tmp_path, 5)
    root = str(tmp_path)
    runs = planned(2, ["fedper", "fedavg"], seed=5, resume=root)
    assert [run["resume"] for run in runs] == [f"{root}/seed-5", ""]
    assert code_of(planned, 2, seed=6, resume=root) == "resume"
    assert code_of(planned, 0) == "seeds"


def test_a_run_that_fails_does_not_end_the_others():
    made = []

    def run(algorithm, settings):
        made.append(algorithm)
        if algorithm == "fedavg":
            raise SettingsError("no round had a valid reply", "failed")
        return {}

    checked = {"output": "nowhere", "resume": "elsewhere"}
    sweep = Sweep(lambda names, given: checked, run)
    (outcome,) = sweep.carry_out([sweep.plan(["fedavg", "fedper"], checked)])
    assert (outcome["fedavg"].code, outcome["fedper"]) == ("failed", {})
    assert made == ["fedavg", "fedper"]


@pytest.mark.parametrize("link", ["seed-6", "fedavg", "fedavg/seed-6"])
def test_folder_of_a_seed_or_grid_point_must_not_be_a_link(tmp_path, link):
    (tmp_path / "theirs").mkdir()
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "theirs")
    name = "fedavg/seed-6" if "fedavg" in link else link
    assert code_of(in_folder, {}, str(tmp_path), name, ["fedavg"]) == "output"


def test_means_and_sample_standard_deviations():
    # Accuracies: mean 0.5, squared deviations 0.09 + 0.01 + 0.16 = 0.26, divided by 2.
    summaries = [
        {"accuracy": 0.2, "rounds": 5, "bytes": 10, "r2": 1.0, "f1": 0.4},
        {"accuracy": 0.4, "rounds": 5, "bytes": 20, "f1": 0.8},
        {"accuracy": 0.9, "rounds": 5, "bytes": 60, "f1": 1.8},
    ]
    assert over_seeds(summaries) == {
        "accuracy": pytest.approx(0.5),
        "accuracy-std-seeds": pytest.approx(0.13**0.5),
        "f1": pytest.approx(1.0),
        "f1-std-seeds": pytest.approx(2 * 0.13**0.5),
        "rounds": 5,
        "bytes": 30,
        "seeds": 3,
    }
    assert over_seeds(summaries[:1]) == {**summaries[0], "seeds": 1}
    # Privacy budgets are the maximum over seeds, not the mean.
    spent = [{"epsilon": e, "example-epsilon": 2 * e} for e in (1.0, 4.0, 2.0)]
    assert over_seeds(spent) == {"epsilon": 4.0, "example-epsilon": 8.0, "seeds": 3}
    protocols = [{"protocol": f"mean of last {n} rounds", "loss": None} for n in (3, 9)]
    text = "mean of last 3 rounds or mean of last 9 rounds"
    assert over_seeds(protocols) == {"protocol": text, "seeds": 2}


def test_the_points_of_a_grid():
    assert points_of("learning-rate=0.1,1 augment=false graph=ring") == [
        {"learning-rate": 0.1, "augment": False, "graph": "ring"},
        {"learning-rate": 1, "augment": False, "graph": "ring"},
    ]
    for grid in "", "momentum", "momentum=", "momentum=0.1 momentum=0.2", "seed=0,1":
        assert code_of(points_of, grid) == "grid", grid
