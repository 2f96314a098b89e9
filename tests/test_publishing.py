"""The files with which a version is published agree with ``pyproject.toml``."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from docs import versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = (ROOT / "deploy" / "conda" / "recipe.yaml").read_text()
PAPER = (ROOT / "paper" / "paper.md").read_text()


def test_the_conda_recipe_has_the_dependencies_of_the_wheel():
    section = RECIPE.split("\n  run:\n")[1].split("\n\n")[0]
    listed = {line.split("- ")[1].replace(" ", "") for line in section.splitlines()}
    needed = {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]}
    assert {name.replace("pytorch", "torch") for name in listed} == needed


def test_all_files_name_the_same_version():
    version = PROJECT["version"]
    assert f'version: "{version}"' in RECIPE
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_apps_allow_the_same_versions_of_flower():
    [flower] = [name for name in PROJECT["dependencies"] if name.startswith("flwr>")]
    for path in (ROOT / "apps").glob("*/pyproject.toml"):
        assert flower in tomllib.loads(path.read_text())["project"]["dependencies"]


def test_the_paper_is_short_and_lists_what_it_cites():
    assert len(PAPER.split()) <= 1000
    listed = re.findall(r"@\w+\{(\w+),", (ROOT / "paper" / "paper.bib").read_text())
    assert set(re.findall(r"@(\w+)", PAPER)) == set(listed)


def test_the_notebooks_for_colab_are_the_tutorials():
    notebooks = pytest.importorskip("docs.notebooks")
    assert len(notebooks.TUTORIALS) == 5
    for path in notebooks.TUTORIALS:
        first, *cells = notebooks.notebook(path).cells
        text = path.read_text()
        assert f'"flwr-frl[simulation]=={PROJECT["version"]}"' in first.source
        exec(first.source.replace("%pip", "raise SystemExit #"))
        sources = {kind: [] for kind in ("code", "markdown")}
        for cell in cells:
            sources[cell.cell_type].append(cell.source)
        assert len(sources["code"]) == text.count("```{code-cell}")
        assert all(source in text for source in sources["code"])
        # Colab has no other pages, so links are absolute.
        prose = "".join(sources["markdown"])
        assert re.findall(r"\]\((?!https://)\S+\)", prose) == []
        repository = PROJECT["urls"]["Repository"].split("github.com/")[1]
        link = f"/{repository}/blob/gh-pages/tutorials/{path.stem}.ipynb)"
        assert link in notebooks.with_link(text, path)


def test_the_page_of_tested_versions_is_current():
    written = versions.PAGE.read_text(encoding="utf-8")
    assert written == versions.page(), "run `python -m docs.versions`"


def test_ci_tests_the_oldest_versions_that_the_project_allows():
    job = yaml.safe_load(versions.WORKFLOW.read_text())["jobs"]["platforms"]
    (oldest,) = job["strategy"]["matrix"]["include"]
    given = (Requirement(text) for text in oldest["versions"].split())
    tested = {r.name: str(r.specifier).strip("=") for r in given}
    allowed = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    for name, number in tested.items():
        lowest = next(s.version for s in allowed[name] if s.operator == ">=")
        assert Version(number) == Version(lowest)
    assert f">={oldest['python']}" == PROJECT["requires-python"]
