"""The computations behind published numbers that no other test checks."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks import same_numbers
from benchmarks.attacks import ATTACKS, Known
from benchmarks.common import RESULTS
from benchmarks.natural import TASKS, Runs
from benchmarks.natural_page import (
    REFERENCES,
    Results,
    compare,
    sign_test,
    task_table,
    worst_decile,
)
from benchmarks.natural_tasks import auroc
from flwr_frl import cli, simulate
from flwr_frl.results.results import read_json
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.participation import Participation

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
    # Each of six clients is better or worse, so there are 64 outcomes. In two of them
    # all clients agree, and in twelve all but one.
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert sign_test(5, 1) == pytest.approx(14 / 64)
    assert sign_test(3, 3) == sign_test(0, 0) == 1
    # Means of a, b and c: 0.5, 0.7 and 0.2, and in the other runs 0.4, 0.7 and 0.3.
    one = [{"a": 0.4, "b": 0.8, "c": 0.1}, {"a": 0.6, "b": 0.6, "c": 0.3}]
    other = [{"a": 0.5, "b": 0.7, "c": 0.2}, {"a": 0.3, "b": 0.7, "c": 0.4}]
    assert compare(one, other, sign=1) == compare(one, other, sign=-1) == (1, 1)
    clients = {f"{i}": float(i) for i in range(20)}
    assert worst_decile(clients, sign=1) == 0.5
    assert worst_decile(clients, sign=-1) == 18.5


def test_the_tables_of_natural_clients_are_rendered_from_their_page(tmp_path: Path):
    page = read_json(RESULTS / "natural.json")
    lines = (RESULTS / "natural.md").read_text("utf-8").splitlines()
    for task, rows in page["tasks"].items():
        about, others = TASKS[task], {*rows} - {*REFERENCES}
        outcomes = {n: Runs(tmp_path, "data", task, n).kept(page) for n in others}
        results = Results(about.title, about.measure, about.seeds, outcomes)
        assert {*task_table(results).splitlines()} <= {*lines}


# Simulated times (srpfl_time-*.md)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_other_speeds_change_only_the_clock_of_a_base_algorithm(
    fraction, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    settings = {"num_clients": 10, "rounds": 3, "fraction": fraction, "seed": 3}
    fixed, dynamic = (
        simulate(
            *("fedrep", "inline"),
            **{**settings, "model": "logistic", "evaluate_last": 1},
            **{"output": tmp_path / speeds, "speed_model": speeds},
        ).rows
        for speeds in ("fixed", "dynamic")
    )
    speeds, participation = SpeedModel("dynamic", 10, 3), Participation(fraction, 1, 3)
    assert fixed[-1]["seconds-simulated"] != dynamic[-1]["seconds-simulated"]
    import_module("srpfl_time").set_clock(fixed, speeds, participation)
    for row, other in zip(fixed, dynamic, strict=True):
        row["seconds"] = other["seconds"]
        assert row == pytest.approx(other)


# The oracle of refactorings

# Training loss and accuracy of the second round on the digits. To regenerate a row
# after an intended change, copy the pair that the failing assertion shows.
ROUNDED = {
    "fedavg": (1.0844, 0.1642),
    "fedrep": (0.5729, 0.5287),
    "flute": (1.0844, 0.4389),
    "srpfl": (0.5684, 0.4211),
    "scaffold": (1.1615, 0.0751),
    "ditto": (1.0844, 0.4822),
}
SETTINGS = """
num-clients=10 evaluate-every=1 batch-size=20 learning-rate=0.05 head-epochs=2
initial-nodes=4 cohort="off"
"""


@pytest.mark.parametrize("algorithm", ROUNDED)
def test_two_rounds_give_the_recorded_results(algorithm, tmp_path):
    arguments = [algorithm, "--backend", "inline", "--rounds", "2"]
    arguments += ["--output", str(tmp_path), "--run-config", SETTINGS]
    assert cli.main(arguments) == 0
    last = (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()[-1]
    row = json.loads(last)
    rounded = (round(row["train-loss"], 4), round(row["accuracy"], 4))
    # Other builds of torch round differently; one image is 0.003 of the mean accuracy.
    assert rounded == pytest.approx(ROUNDED[algorithm], abs=0.01)


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
