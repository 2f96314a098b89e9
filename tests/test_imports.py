"""Who may import whom, so that a reader finds things and a server needs no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a server may know of a task: settings and files, no data and no training.
SERVER_MAY_USE = {"task.settings", "task.files"}
# FLUTE's server makes a step on the clients' heads.
SERVER_COMPUTES = {
    "flute.py": {"task.neural_collapse"},
    # NumPy only.
    "representation_transfer.py": {"task.transfer"},
}


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).glob("**/*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """Yield the full names of all that a file imports, inside functions as well."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is this package, two its parent.
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def names_in(path: Path, package: str) -> set[str]:
    """Return the modules of a package that a file imports."""
    found = set()
    for name in imports_of(path):
        if name.split(".")[0] == package:
            parts = name.split(".")
            # `from task.models import Part` names a module and something in it.
            while not is_module(".".join(parts)):
                parts.pop()
            found.add(".".join(parts))
    return found


def test_the_rules_are_about_something():
    for package in ("task", "clients", "strategies"):
        assert len(files_of(package)) > 3
    # Imports of all forms are seen, also those within functions.
    assert "flwr" in {n.split(".")[0] for n in imports_of(ROOT / "clients" / "base.py")}
    assert names_in(ROOT / "clients" / "base.py", "task") >= {"task.training"}
    assert names_in(ROOT / "simulation.py", "clients") == {
        "clients.client_app",
        "clients.device.state",
    }


@pytest.mark.parametrize("path", files_of("task"), ids=lambda path: path.name)
def test_task_knows_neither_flower_nor_its_siblings(path):
    for package in ("flwr", "clients", "strategies", "simulation"):
        assert names_in(path, package) == set()


@pytest.mark.parametrize("path", files_of("clients"), ids=lambda path: path.name)
def test_clients_know_no_strategies(path):
    for package in ("strategies", "simulation"):
        assert names_in(path, package) == set()


@pytest.mark.parametrize("path", files_of("strategies"), ids=lambda path: path.name)
def test_strategies_know_no_clients_and_little_of_the_task(path):
    for package in ("clients", "simulation"):
        assert names_in(path, package) == set()
    computes = SERVER_COMPUTES.get(path.name, set())
    assert names_in(path, "task") <= SERVER_MAY_USE | computes


@pytest.mark.parametrize(
    "module", ["strategies.server_app", "strategies", "task.settings", "task.files"]
)
def test_a_server_loads_no_torch(module):
    heavy = "{'torch', 'torchvision', 'sklearn', 'ray', 'clients'}"
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout.split() == []


def test_task_settings_load_no_flower():
    code = "import sys, task.settings, task.files; print('flwr' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout.strip() == "False"


def test_what_the_packages_promise_is_there():
    import clients
    import strategies
    import task

    for package in (task, clients, strategies):
        for name in package.__all__:
            assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = task.nothing
