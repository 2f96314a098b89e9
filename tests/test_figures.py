"""Figures in the README and in guides agree with their pages; errors are detected."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import fedrep_samples
from benchmarks.figures import PAGES, RESULTS_PAGE
from benchmarks.held import ALL_FIGURES, agrees, dirty, numbers, wrong_figures
from benchmarks.reproduce import Entry, check, duration, entries, main, seconds, show

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (
    "README.md",
    RESULTS_PAGE,
    "docs/choose.md",
    "docs/claims.md",
    "docs/privacy.md",
    "deploy/README.md",
)
MINUS = "\u2212"
CONVEX = PAGES / "gossip_convex.json"


@pytest.fixture
def copy(tmp_path):
    """A folder with copies of the texts, and links to pages that tests can replace."""
    for name in TEXTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / PAGES).mkdir(parents=True)
    for page in (ROOT / PAGES).iterdir():
        (tmp_path / PAGES / page.name).symlink_to(page)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    path.unlink()
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_every_figure_agrees_with_its_page():
    assert list(wrong_figures(ROOT)) == []


def test_pages_of_results_have_clean_commits():
    named = ("README.md", RESULTS_PAGE)
    pages = sorted({figure.page for figure in ALL_FIGURES if figure.file in named})
    assert [line for page in pages for line in dirty(ROOT, page)] == []


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (RESULTS_PAGE, "[72.90]", "[70.00]", "papers_tables has 7"),
        (RESULTS_PAGE, "[0.61, 0.18", "[0.18", "srpfl_speedup has"),
        (RESULTS_PAGE, f"0.97; {MINUS}0.62", "0.97; +0.62", "plain has 0.20"),
        (RESULTS_PAGE, f"never; {MINUS}4.15", f"0.9; {MINUS}4.15", "0.2 has nan"),
        (
            RESULTS_PAGE,
            "| `fedper`, b",
            "| `fedbn` | 9.9 | |\n| `fedper`, b",
            "'9.9' has",
        ),
        (RESULTS_PAGE, f"{MINUS}1.68 | |", f"{MINUS}1.68 | 0.1 |", "'0.1' has no page"),
        (RESULTS_PAGE, "| 0.23 | 1.04 |", "| 0.23 | 1.40 |", "peers has 0.2"),
        (RESULTS_PAGE, "multi_task.md) | 7, 30", "speed.md) | 7, 30", "no link to"),
        (RESULTS_PAGE, "## The papers' results", "## Results", "has no section"),
        (RESULTS_PAGE, "| 73.81 (F", "| 99.81 (F", "papers_tables has 73.81"),
        (RESULTS_PAGE, "53.22 / 77.09](", "53.22 / 70.00](", "papers_tables has 53"),
        (
            RESULTS_PAGE,
            "81.73; 44.31",
            "81.73; 44.13",
            "papers_tables has 83.27",
        ),
        (RESULTS_PAGE, "1 head epoch (3 s", "1 head epoch (9 s", "papers_tables has 3"),
        (RESULTS_PAGE, "bits to 9.3 %", "bits to 9.9 %", "gossip_convex has 9.3"),
        (RESULTS_PAGE, "[2 of these 6", "[1 of these 6", "gossip_convex has 2, 6"),
        (RESULTS_PAGE, "`flute-star` 2nd", "`flute-star` 1nd", "20x40 has 37, 1, 2"),
        ("docs/claims.md", "[8.1, 6.7,", "[8.1, 7.6,", "multi_task has 8.1"),
        ("docs/claims.md", "at 0 of 20](", "at 9 of 20](", "dynamic-1-plain has 73"),
        ("docs/choose.md", "| 72.8 |", "| 78.2 |", "leaderboard-20x40 has 72"),
        ("README.md", "reaches 45 %", "reaches 54 %", "first_result has 45"),
        ("README.md", "takes 0.23 of", "takes 0.32 of", "peers has 0.2"),
        (RESULTS_PAGE, "| QCQP to", "| Quadratic to", "in 0 places"),
        ("docs/privacy.md", "| 0.906 | 0.990 |", "| 0.096 | 0.990 |", "privacy has"),
        ("deploy/README.md", "34 kB with", "43 kB with", "slow_links has"),
    ],
)
def test_a_wrong_figure_is_found(copy, file, old, new, says):
    edit(copy / file, old, new)
    errors = [line for line in wrong_figures(copy) if says in line]
    assert errors
    assert all(line.startswith(file) for line in errors)


def test_a_regenerated_page_with_other_numbers_is_found(copy):
    data = json.loads((copy / CONVEX).read_text())
    data["measured"]["D-PSGD"]["error"][0] += 0.03
    (copy / CONVEX).unlink()
    (copy / CONVEX).write_text(json.dumps(data))
    (line,) = wrong_figures(copy)
    # One of three seeds increases by 0.03, so the mean in % increases by 1.
    match = re.search(r"says (\S+) and gossip_convex has (\S+)", line)
    before, after = map(float, match.groups())
    assert after == pytest.approx(before + 1, abs=0.01)


def test_missing_dirty_and_unknown_pages_are_found(copy):
    before = list(check(copy, entries()))
    (copy / PAGES / "speed.json").unlink()
    commits = {
        page: json.loads((copy / PAGES / f"{page}.json").read_text())["about"]["commit"]
        for page in ("cohort", "liars")
    }
    cohort, liars = commits.values()
    edit(copy / PAGES / "cohort.json", cohort, f"{cohort}-dirty")
    edit(copy / PAGES / "liars.md", f"commit {liars};", "commit 0123456789;")
    (copy / PAGES / "new.md").touch()
    new = [line for line in check(copy, entries()) if line not in before]
    assert len(new) == 6
    assert new[0].endswith(f"{PAGES}/speed.json is missing")
    assert new[1] == f"{PAGES}/speed.json is missing"
    assert f"cohort.md: {cohort}-dirty is no clean" in new[2]
    assert "cohort.md: not the commit" in new[3]
    assert f"liars.md: not the commit {liars} of its JSON" in new[4]
    assert new[5] == f"{PAGES}/new.md is not in benchmarks/reproduce.toml"


def test_a_run_of_a_commit_that_is_not_clean_is_found(copy):
    page = copy / PAGES / "papers_tables.json"
    data = json.loads(page.read_text())
    data["results"]["100x5"]["fedrep"]["1"]["commit"] += "-dirty"
    page.unlink()
    page.write_text(json.dumps(data))
    (line,) = dirty(copy, "papers_tables")
    assert "-dirty is no clean commit" in line


def test_a_number_agrees_if_it_is_the_rounded_value():
    assert agrees("1,088", 1087.6)
    assert not agrees("1,088", 1088.6)
    assert agrees("-0.62", -0.6249)
    assert not agrees("0.6", 0.66)
    assert agrees("never", float("nan"))
    assert not agrees("0.97", float("nan"))
    assert not agrees("never", 0.97)
    assert numbers(f"[1,088, 4.9; {MINUS}0.5](a-100x5.md) k2 never") == [
        "1,088", "4.9", "-0.5", "never"
    ]  # fmt: skip


def test_times_are_summed_over_the_runs_of_a_page():
    # 1359 + 1104 + 1973 + 1946 + 3281 + 2395: the run of FLANP-FT includes FLANP.
    pages = {"srpfl_time-fixed-1-plain": 12058, "multi_task": 375}
    for page, expected in pages.items():
        data = json.loads((ROOT / PAGES / f"{page}.json").read_text())
        assert seconds(ROOT, page, data) == expected
    runs = {"about": {"seconds": 3}, "fedrep": {"runs": [{"seconds": 60.0}] * 3}}
    assert duration(seconds(ROOT, "", runs)) == "3 min"


def test_the_list_gives_the_reason_if_there_is_no_page():
    entry = Entry(shows="Figure 1", why="a drawing")
    assert show(ROOT, "nothing", entry) == "nothing: Figure 1\n    not here: a drawing"


def test_figure_1_of_fedrep_has_the_settings_of_section_5_1():
    shown = (fedrep_samples.CLIENTS, fedrep_samples.DIMENSION, fedrep_samples.RANK)
    assert shown == (100, 20, 2)
    assert fedrep_samples.METHODS == ("Local only", "FedAvg", "FedRep")
    assert entries()["fedrep_samples"].command


def test_no_reason_claims_that_a_task_is_missing():
    assert [n for n, entry in entries().items() if "no task" in entry.why] == []


def test_a_name_runs_its_command_with_the_folders_filled_in(
    monkeypatch, capsys, tmp_path
):
    ran = []

    class Done:
        returncode = 3

    monkeypatch.setattr("subprocess.run", lambda words, **_: ran.append(words) or Done)
    command = """python table.py 'flute:order="after"' --data-dir DATA"""
    table = {"table": Entry(shows="a table", command=command)}
    monkeypatch.setattr("benchmarks.reproduce.entries", lambda: table)
    arguments = ["reproduce", "table", "--data-dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert main() == 3
    assert ran[0][-1] == str(tmp_path)
    assert 'flute:order="after"' in ran[0]
    monkeypatch.setattr("sys.argv", arguments[:2])
    assert main() == 2
    assert capsys.readouterr().err == "table needs --data-dir\n"
    monkeypatch.setattr("sys.argv", [*arguments[:3], "/nowhere"])
    assert main() == 2
    assert capsys.readouterr().err == "--data-dir /nowhere does not exist\n"
