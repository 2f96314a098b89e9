"""The apps of ``apps/``: built as for Flower's Hub, and run on a local SuperLink."""

import shutil
from pathlib import Path

import pytest
from deploy_commands import command
from federation import BIN, ROOT, read_lines

NAMES = "fedrep", "fedsa-lora", "flute", "squarm-sgd", "srpfl"
NODES = "num-supernodes=10 client-resources-num-cpus=1 init-args-num-cpus=2"


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_an_app_builds_and_runs(
    name: str, local: dict[str, str], tmp_path: Path
) -> None:
    app = tmp_path / "app"
    shutil.copytree(ROOT / "apps" / name, app)
    command(BIN / "flwr", "build", cwd=app, env=local, seconds=120, check=True)
    assert [*app.glob("*.fab")]
    config = f'num-server-rounds=2 output="{tmp_path}"'
    options = ("--federation-config", NODES, "--run-config", config)
    words = (BIN / "flwr", "run", app, "local", "--stream", *options)
    result = command(*words, seconds=400, env=local, cwd=tmp_path)
    rows = read_lines(tmp_path / name / "metrics.jsonl")
    assert len(rows) == 2, result.stdout + result.stderr
    assert all(row["rejected"] == 0 for row in rows)
