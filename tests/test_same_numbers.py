"""The comparison of results before and after a refactoring, and a small part of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import paired_speed, same_numbers
from flwr_frl import cli

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


def run_of(folder: Path, name: str, numbers: dict, arrays: dict | None = None) -> None:
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {"checkpoint.safetensors": arrays or {}}
    path.write_text(json.dumps({"exit": 0, "numbers": numbers, "arrays": files}))


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


def test_equal_runs_do_not_differ(tmp_path, capsys):
    for folder in ("old", "new"):
        run_of(tmp_path / folder, "digits/fedrep", {"loss": float("nan")}, {"w": "1"})
    run_of(tmp_path / "new", "digits/later", {"loss": 1.0})
    assert same_numbers.compare(tmp_path / "old", tmp_path / "new", "", False) == 0
    assert capsys.readouterr().out == "1 runs, 0 differ\n"


def test_each_difference_is_reported_in_one_line(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    run_of(old, "digits/fedrep", {"loss": 1.0}, {"a": "1", "b": "2", "gone": "3"})
    run_of(new, "digits/fedrep", {"loss": 1.5}, {"a": "1", "b": "4"})
    run_of(old, "digits/lost", {})
    assert same_numbers.compare(old, new, "", True) == 1
    assert capsys.readouterr().out.splitlines() == [
        "digits/fedrep: loss: was 1.0, is 1.5",
        "digits/fedrep: checkpoint.safetensors, array b differs",
        "digits/fedrep: checkpoint.safetensors, array gone is missing",
        "digits/lost: it was not recorded",
        "2 runs, 2 differ",
    ]
    assert same_numbers.compare(old, new, "fedrep", False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits/fedrep: loss: was 1.0, is 1.5 (and 2 more)"


def test_a_renamed_array_is_no_difference_but_a_swap_is(tmp_path):
    run_of(tmp_path / "old", "digits/fedrep", {}, {"a": "1", "b": "2"})
    run_of(tmp_path / "renamed", "digits/fedrep", {}, {"a": "1", "c": "2", "d": "3"})
    run_of(tmp_path / "swapped", "digits/fedrep", {}, {"a": "2", "b": "1"})
    old, renamed, swapped = (tmp_path / name for name in ("old", "renamed", "swapped"))
    assert same_numbers.compare(old, renamed, "", False) == 0
    assert same_numbers.compare(old, swapped, "", False) == 1


def test_a_hash_depends_on_type_shape_and_values():
    array = np.arange(6, dtype="f4")
    others = [array.reshape(2, 3), array.astype("f8"), array + 1]
    hashes = {same_numbers.digest(a) for a in (array, array.copy(), *others)}
    assert len(hashes) == 4


def test_a_repeated_run_has_the_same_results(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    settings = {**same_numbers.SETTINGS, "resumed": True}
    runs = [
        same_numbers.numbers_of_run("resumed/fedrep", settings, tmp_path / name)
        for name in ("first", "second")
    ]
    assert runs[0] == runs[1]
    assert runs[0]["exit"] == 0
    assert "round 3, accuracy" in runs[0]["numbers"]
    kept = [name for name in runs[0]["arrays"] if name.startswith("clients/")]
    assert "checkpoint.safetensors" in runs[0]["arrays"]
    # The names of files do not contain the random token of the run.
    assert all(Path(name).stem.isdigit() for name in kept)
    assert len(kept) > 5


def test_speed_pairs_alternate_and_a_slower_checkout_is_reported(monkeypatch, capsys):
    asked = []

    def cpu_time(checkout, arguments):
        asked.append(checkout.name)
        return {"old": 2.0, "new": 3.0}[checkout.name]

    monkeypatch.setattr(paired_speed, "cpu_time", cpu_time)
    monkeypatch.setattr(paired_speed, "COMMANDS", {"a run": []})
    assert paired_speed.compare_speed(Path("old"), Path("new"), 2) == 1
    assert asked == ["old", "new", "new", "old"]
    assert "a run: new / old = 1.500" in capsys.readouterr().out
    assert paired_speed.compare_speed(Path("old"), Path("old"), 2) == 0
