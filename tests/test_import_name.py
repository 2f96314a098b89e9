"""The package is imported as `flwr_frl`, and hides no modules of its users."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from deploy_commands import command
from environments import build_wheel, install, make_environment

import flwr_frl
from docs import settings as settings_page

ROOT = Path(__file__).parents[1]
# Modules next to a user's script, with names that folders of the checkout have, too
FOREIGN = {
    "task.py": "NAME = 'mine'\n",
    "clients/__init__.py": "",
    "clients/base.py": "NAME = 'mine'\n",
    "strategies/__init__.py": "NAME = 'mine'\n",
}
SCRIPT = """
import task, clients.base, strategies
from flwr_frl import FedRep, FedRepClient, SplitModel, simulate
run = simulate("fedrep", backend="inline", rounds=1, clients=5, output={output!r},
               model="mlp-2", head_epochs=1)
print(task.NAME, clients.base.NAME, strategies.NAME, len(run.rows))
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def printed_by(
    python: Path | str, arguments: Sequence[str], folder: Path, path: str = ""
) -> str:
    """Run a program in a folder without the checkout on its path; return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    where = {"cwd": folder, "env": environment}
    result = command(python, *arguments, seconds=300, **where)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with our wheel and without the checkout."""
    home = tmp_path_factory.mktemp("wheel")
    environment = home / "environment"
    install(build_wheel(ROOT, home), make_environment(environment))
    return environment / "bin" / "python"


@pytest.mark.e2e
def test_the_wheel_installs_one_name_and_hides_no_modules_of_scripts(
    installed: Path, tmp_path: Path
) -> None:
    [site] = installed.parents[1].glob("lib/python*/site-packages")
    names = {p.name for p in site.iterdir() if not p.name.startswith("flwr_frl-")}
    assert names == {"dependencies.pth", "flwr_frl", "bin"}
    write(tmp_path, FOREIGN)
    code = SCRIPT.format(output=str(tmp_path / "results"))
    write(tmp_path, {"script.py": code})
    assert printed_by(installed, ["script.py"], tmp_path).split()[-4:] == [
        *("mine",) * 3,
        "1",
    ]
    code = "from flwr_frl.cli import main; main(['--list'])"
    assert "fedrep" in printed_by(installed, ["-c", code], tmp_path)
    # The wheel contains the units of a device, and what they refer to.
    deploy = site / "flwr_frl" / "deploy"
    assert (deploy / "supernode.service").is_file()
    assert os.access(deploy / "warm" / "flower-superexec", os.X_OK)
    assert os.access(deploy / "watchdog", os.X_OK)


@pytest.mark.e2e
def test_a_script_next_to_a_foreign_task_runs_from_a_checkout_without_links(
    tmp_path: Path,
) -> None:
    # Without symbolic links, Git writes files that contain the path of the target.
    checkout = tmp_path / "checkout"
    (checkout / "flwr_frl").mkdir(parents=True)
    for name in ("strategies", "clients", "task", "pyproject.toml"):
        (checkout / name).symlink_to(ROOT / name)
    for path in (ROOT / "flwr_frl").iterdir():
        if path.is_symlink():
            (checkout / "flwr_frl" / path.name).write_text(f"../{path.name}")
        else:
            (checkout / "flwr_frl" / path.name).symlink_to(path)
    write(tmp_path, FOREIGN)
    write(tmp_path, {"script.py": SCRIPT.format(output=str(tmp_path / "results"))})
    printed = printed_by(sys.executable, ["script.py"], tmp_path, str(checkout))
    assert printed.split()[-4:] == ["mine", "mine", "mine", "1"]


@pytest.mark.e2e
def test_short_names_in_a_checkout_give_the_same_objects() -> None:
    code = """
import strategies.server_app, clients.client_app
from strategies import FedRep
from clients import FedRepClient
from task import SplitModel
import flwr_frl
assert FedRep is flwr_frl.FedRep
assert FedRepClient is flwr_frl.FedRepClient
assert SplitModel is flwr_frl.SplitModel
print("same")
"""
    assert printed_by(sys.executable, ["-c", code], ROOT).strip() == "same"


@pytest.mark.parametrize("package", settings_page.PACKAGES)
def test_type_checkers_see_the_public_names(package: str) -> None:
    stub = (ROOT / package / "__init__.pyi").read_text(encoding="utf-8")
    assert stub == settings_page.stub(package), "run `python -m docs.settings`"


def test_the_public_names_are_those_of_the_packages_and_of_simulate() -> None:
    names = dir(flwr_frl)
    expected = {"simulate", "load_run", "FedRep", "FedRepClient", "SplitModel", "Task"}
    assert expected <= set(names)
    for name in names:
        assert getattr(flwr_frl, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = flwr_frl.nothing
