"""The bundle of ``flwr build``, and the checks of Flower Hub before an upload."""

import io
import re
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.common.constant import FAB_MAX_SIZE

ROOT = Path(__file__).parents[1]
PACKAGES = ("clients", "flwr_frl", "strategies", "task")


@pytest.fixture(scope="module")
def bundle() -> tuple[int, set[str]]:
    built = build_fab_from_disk(ROOT)
    with zipfile.ZipFile(io.BytesIO(built)) as files:
        return len(built), set(files.namelist())


def test_the_bundle_has_all_modules_the_readme_and_the_licence(
    bundle: tuple[int, set[str]],
) -> None:
    # flwr_frl/{clients,strategies,task} are links to the folders next to flwr_frl.
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    modules = {n for n in modules if not re.match(r"flwr_frl/\w+/", n)}
    size, names = bundle
    assert modules <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "simulation.py"} <= names
    others = {n for n in names if n.split("/")[0] in ("tests", "docs", "benchmarks")}
    assert others == set()
    assert size < FAB_MAX_SIZE / 4


def test_flower_hub_accepts_the_project() -> None:
    config, warnings = load_and_validate(ROOT / "pyproject.toml", check_module=False)
    assert warnings == []
    import_module("flwr.cli.app_cmd.publish")
    # The package exports a function with the name of the module.
    publish = sys.modules["flwr.cli.app_cmd.publish"]
    project = config["project"]
    publish._validate_app_name(project["name"], "name")
    publish._validate_description(project["description"])
    assert len(project["description"]) <= 200
    publish._validate_files(publish._collect_file_paths(ROOT))
