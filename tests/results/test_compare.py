"""Comparison of the methods of results folders."""

import json
import re

import pytest
from compared_runs import FEDAVG, FEDPER, FEDREP, with_seeds, write_runs
from named_tasks import dashed
from refusals import code_of

from flwr_frl import compare
from flwr_frl.cli import main
from flwr_frl.results.page_data import read_folder
from flwr_frl.results.results import SUMMARY, write_json


def test_methods_are_tested_against_the_best_one(tmp_path):
    write_runs(tmp_path, rounds=12, fedavg=FEDAVG, fedrep=FEDREP, fedper=FEDPER)
    comparison = compare(tmp_path)
    best, second, third = comparison.rows
    assert [row.method for row in comparison.rows] == ["fedrep", "fedper", "fedavg"]
    assert best.result == pytest.approx(5.5 / 8)
    assert best.reference
    assert best.on_clients is None
    assert second.result == pytest.approx(5.4 / 8)
    # One of eight pairs differs: p = 1. FedAvg loses all: 2 / 2^8, times 2 by Holm.
    assert second.on_clients.p == 1
    assert second.differs is False
    assert (second.on_clients.ties, second.on_clients.losses) == (7, 1)
    assert third.on_clients.losses == 8
    assert third.differs is True
    assert third.on_clients.difference == pytest.approx(-1.9 / 8)
    # One seed is one pair.
    assert third.on_seeds.pairs == 1
    assert third.on_seeds.p is None
    assert "mean of last 10 rounds" in comparison.legend
    lines = str(comparison).splitlines()
    assert any(re.search(r"fedavg .*-23.75% .*0.016 .*0/0/8", line) for line in lines)
    assert any(re.search(r"fedper .*-1.25% .*1.000 .*0/7/1", line) for line in lines)
    # By name or path
    assert len(compare(str(tmp_path)).rows) == 3
    assert len(compare(tmp_path / "nowhere" / "..").rows) == 3


def test_other_protocols_and_a_baseline(tmp_path):
    write_runs(tmp_path, rounds=12, fedavg=FEDAVG, fedrep=FEDREP)
    comparison = compare(tmp_path, protocol="last", baseline="fedavg")
    first, second = comparison.rows
    assert "last evaluated round" in comparison.legend
    assert (first.method, first.on_clients.wins, second.reference) == (
        "fedrep",
        8,
        True,
    )
    assert code_of(compare, tmp_path, baseline="fedpre") == "baseline"
    by_path = compare(tmp_path, protocol="last", baseline="mine:fedavg")
    assert by_path == comparison
    assert code_of(compare, tmp_path, protocol="best") == "result-protocol"


def test_a_method_tested_once_is_compared_by_the_last_round(tmp_path):
    write_runs(tmp_path, rounds=12, fedavg=FEDAVG, fedrep=FEDREP)
    journal = tmp_path / "fedavg" / "metrics.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    for row in rows[:-1]:
        row.pop("accuracy")
        row["evaluated"] = 0
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = compare(tmp_path)
    assert "last evaluated round" in comparison.legend
    assert "mean of last" not in comparison.legend
    assert "because of fedavg, tested once" in comparison.legend
    assert comparison.rows[1].on_clients.losses == 8
    # The page has the same results.
    page = read_folder(tmp_path)
    assert page["legend"] == comparison.legend
    assert [method["clients"] for method in page["methods"]] == [
        row.clients for row in comparison.rows
    ]
    # With means of ten rounds, it is not tested.
    text = str(compare(tmp_path, protocol="mean-last"))
    assert "0/0/8" not in text
    assert "mean of last 10 rounds (fedrep)" in text


def test_seeds_are_one_row_and_pairs(tmp_path):
    with_seeds(tmp_path, 6, fedavg=FEDAVG, fedrep=FEDREP)
    best, other = compare(tmp_path).rows
    # Mean of 0.6875 and of 0, 0.01, … 0.05 less; deviation 0.01 * sqrt(3.5)
    assert best.result == pytest.approx(0.6875 - 0.025)
    deviation = best.summary["accuracy-std-seeds"]
    assert deviation == pytest.approx(0.01 * 3.5**0.5)
    assert list(best.seeds) == [0, 1, 2, 3, 4, 5]
    assert best.clients["000003"] == pytest.approx(0.7 - 0.025)
    # Six equal differences of one sign
    assert (other.on_seeds.pairs, other.on_seeds.losses) == (6, 6)
    assert other.on_clients.pairs == 8


def test_a_method_of_two_folders_is_two_methods(tmp_path):
    one = write_runs(tmp_path / "slow", fedavg=FEDAVG, fedrep=FEDPER)
    two = write_runs(tmp_path / "fast", fedrep=FEDREP)
    comparison = compare(one, two)
    names = [row.method for row in comparison.rows]
    assert names == ["fedrep (fast)", "fedrep (slow)", "fedavg"]
    # Folders of the same name have other parents.
    again = write_runs(tmp_path / "more" / "slow", fedper=FEDPER, fedrep=FEDREP)
    names = {row.method for row in compare(one, again).rows}
    assert names == {"fedavg", "fedper", "fedrep (slow)", "fedrep (more/slow)"}


def test_folders_with_other_examples_or_seeds_are_refused(tmp_path):
    one = write_runs(tmp_path / "one", fedavg=FEDAVG)
    more = write_runs(tmp_path / "more", examples=11, fedrep=FEDREP)
    seed = write_runs(tmp_path / "seed", seed=1, fedrep=FEDREP)
    for other in (more, seed):
        assert code_of(compare, one, other) == "compare"


def with_settings(run, **settings):
    """Change settings of a finished run."""
    places = {run / "status.json": "settings", run.parent / SUMMARY: "config"}
    for path, key in places.items():
        content = json.loads(path.read_text())
        content[key] |= dashed(settings)
        write_json(path, content)


def test_other_rounds_and_protocols_are_named(tmp_path):
    one = write_runs(tmp_path / "one", rounds=12, fedavg=FEDAVG)
    other = write_runs(tmp_path / "other", rounds=15, fedrep=FEDREP)
    comparison = compare(one, other)
    assert "rounds: 15 (fedrep), 12 (fedavg)" in comparison.legend
    assert comparison.rows[1].on_clients.losses == 8
    with_settings(other / "fedrep", evaluate_last=5)
    comparison = compare(one, other)
    protocols = "mean of last 5 rounds (fedrep), mean of last 10 rounds (fedavg)"
    assert protocols in comparison.legend
    # Results by other protocols are not tested.
    assert comparison.rows[1].on_clients.pairs == 0
    with_settings(other / "fedrep", evaluate_last=10, evaluate_on="validation")
    comparison = compare(one, other)
    assert "validation (fedrep), test (fedavg) examples" in comparison.legend
    assert comparison.rows[1].on_clients.pairs == 0


def test_runs_without_a_status_have_the_settings_of_the_summary(tmp_path):
    folder = write_runs(tmp_path / "one", fedavg=FEDAVG, fedrep=FEDREP)
    before = str(compare(folder))
    (folder / "fedavg" / "status.json").unlink()
    (folder / "fedrep" / "status.json").write_text('{"settings": 5}')
    assert str(compare(folder)) == before


def test_a_folder_without_results_is_refused(tmp_path):
    assert code_of(compare, tmp_path) == "compare"


def test_the_command_prints_and_writes_a_comparison(tmp_path, capsys):
    folder = str(write_runs(tmp_path / "one", fedavg=FEDAVG, fedrep=FEDREP))
    before = {path.name for path in (tmp_path / "one").iterdir()}
    assert main(["compare", folder, "--baseline", "fedavg"]) == 0
    assert "against fedavg" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "one").iterdir()} == before
    assert main(["compare", folder, "--output", str(tmp_path / "paper")]) == 0
    assert "FedAvg" in (tmp_path / "paper" / "table.tex").read_text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "DIR"),
        (["nowhere"], "nowhere"),
        ([".", "--seed", "3"], "--seed"),
        ([".", "--protocol", "best"], "result-protocol"),
    ],
)
def test_bad_input_of_the_command(tmp_path, monkeypatch, capsys, words, named):
    monkeypatch.chdir(write_runs(tmp_path / "one", fedavg=FEDAVG))
    assert main(["compare", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_run_that_ended_before_its_first_round_is_left_out(tmp_path):
    write_runs(tmp_path, fedavg=FEDAVG, fedrep=FEDREP)
    (tmp_path / "fedavg" / "metrics.jsonl").write_text("")
    assert [row.method for row in compare(tmp_path).rows] == ["fedrep"]
    (tmp_path / "fedrep" / "metrics.jsonl").write_text("")
    assert code_of(compare, tmp_path) == "compare"
