"""Figures in the README and in guides agree with their pages; errors are detected."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.figures import (
    PAGES,
    RESULTS_PAGE,
    agrees,
    dirty,
    figures,
    numbers,
    wrong_figures,
)
from benchmarks.reproduce import check, entries

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (
    "README.md",
    RESULTS_PAGE,
    "docs/choose.md",
    "docs/claims.md",
    "docs/methods/squarm-sgd.md",
    "docs/methods/srpfl.md",
    "docs/privacy.md",
    "deploy/README.md",
)
MINUS = "\u2212"


@pytest.fixture
def copy(tmp_path):
    """A folder with copies of the texts, and links to pages that tests can replace."""
    for name in TEXTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
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
    pages = sorted({figure.page for figure in figures() if figure.file in named})
    assert [line for page in pages for line in dirty(ROOT, page)] == []


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (RESULTS_PAGE, "[72.90]", "[70.00]", "papers_tables has 7"),
        (RESULTS_PAGE, f"never; {MINUS}4.15", f"0.9; {MINUS}4.15", "time has nan"),
        (RESULTS_PAGE, f"{MINUS}1.68 | |", f"{MINUS}1.68 | 0.1 |", "'0.1' has no page"),
        (RESULTS_PAGE, "multi_task.md) | 7, 30", "speed.md) | 7, 30", "no link to"),
        (RESULTS_PAGE, "## The papers' results", "## Results", "has no section"),
        ("docs/claims.md", "takes [10,420", "takes [9,999", "multi_task_gap has 10"),
        ("docs/claims.md", "at 0 of 20](", "at 9 of 20](", "srpfl_time has 73"),
        ("docs/choose.md", "| 72.8 |", "| 78.2 |", "leaderboard-20x40 has 72"),
        ("README.md", "takes 0.23 of", "takes 0.32 of", "peers has 0.2"),
        ("docs/privacy.md", "| 0.906 | 0.990 |", "| 0.096 | 0.990 |", "privacy has"),
        ("deploy/README.md", "34 kB with", "43 kB with", "slow_links has"),
    ],
)
def test_a_wrong_figure_is_found(copy, file, old, new, says):
    edit(copy / file, old, new)
    errors = [line for line in wrong_figures(copy) if says in line]
    assert errors
    assert all(line.startswith(file) for line in errors)


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
