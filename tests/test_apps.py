"""The apps of ``apps/`` learn with the settings in their ``pyproject.toml``."""

import tomllib
from pathlib import Path

import pytest

from flwr_frl import simulate

APPS = Path(__file__).parents[1] / "apps"
NAMES = sorted(path.name for path in APPS.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", NAMES)
def test_an_app_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(APPS / name)
    project = tomllib.loads((APPS / name / "pyproject.toml").read_text())
    settings = project["tool"]["flwr"]["app"]["config"]
    algorithm, clients = settings.pop("algorithm"), settings.pop("num-clients")
    keywords = {key.replace("-", "_"): value for key, value in settings.items()}
    keywords["output"] = str(tmp_path)
    run = simulate(algorithm, "inline", clients=clients, **keywords)
    assert run.summary["accuracy"] > 0.9
