"""The files with which a version is published agree with ``pyproject.toml``."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

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
        assert "google.colab" not in sys.modules
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
