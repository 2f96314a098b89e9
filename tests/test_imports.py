"""Import rules: clear dependencies between packages, and no torch on a server."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from flwr_frl.strategies.algorithms import ALGORITHMS, client_path, strategy_class
from flwr_frl.task.settings import resolve
from flwr_frl.task.tasks import TASKS

ROOT = Path(__file__).parents[1]
# Modules of `task` that a server may import: no data, no models and no training
SERVER_MAY_USE = {
    "flwr_frl.task.checkpoint",
    "flwr_frl.task.command_line",
    "flwr_frl.task.files",
    "flwr_frl.task.messages",
    "flwr_frl.task.npy",
    "flwr_frl.task.records",
    "flwr_frl.task.sealed",
    "flwr_frl.task.settings",
}
SERVER_COMPUTES = {
    # FLUTE's server takes a step on the clients' heads.
    "strategies/flute.py": {"flwr_frl.task.models.neural_collapse"},
    # Needs only NumPy.
    "strategies/representation_transfer.py": {"flwr_frl.task.transfer"},
}
FRONT = ("backend", "cli", "commands", "running")
# `client_class` asks the class of a strategy for its client.
CLIENT_ASKS = {"clients/algorithms.py": {"flwr_frl.strategies.algorithms"}}


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files_of(package: str) -> list[Path]:
    # The links in `flwr_frl` lead to the other packages.
    pattern = "*.py" if package == "flwr_frl" else "**/*.py"
    return sorted((ROOT / package).glob(pattern))


def module_of(path: Path) -> str:
    return ".".join(["flwr_frl", *path.relative_to(ROOT).with_suffix("").parts])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> set[str]:
    """Return the full names that a file imports, also inside functions."""
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # One dot is this package, two dots are its parent.
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def names_in(path: Path, package: str) -> set[str]:
    """Return the modules of a package that a file imports."""
    modules, prefix = set(), package if package == "flwr" else f"flwr_frl.{package}"
    for name in imports_of(path):
        if f"{name}.".startswith(f"{prefix}."):
            parts = name.split(".")
            # `from flwr_frl.task.models import Part` names a module and its member.
            while not is_module(".".join(parts)):
                parts.pop()
            modules.add(".".join(parts))
    return modules


# Imports


def test_the_import_rules_apply_to_files_and_find_imports():
    for package in ("task", "clients", "strategies"):
        files = files_of(package)
        assert len(files) > 3
        # Files of all depths are found.
        assert {len(path.relative_to(ROOT).parts) for path in files} >= {2, 3}
    # Imports of all forms are found, including those inside functions.
    assert "flwr" in {n.split(".")[0] for n in imports_of(ROOT / "clients" / "base.py")}
    assert names_in(ROOT / "clients" / "base.py", "task") >= {"flwr_frl.task.training"}
    assert names_in(ROOT / "flwr_frl" / "running.py", "clients") >= {
        "flwr_frl.clients.algorithms",
        "flwr_frl.clients.client_app",
    }
    for where in SERVER_COMPUTES.keys() | CLIENT_ASKS:
        assert (ROOT / where).is_file()


@pytest.mark.parametrize("path", files_of("task"), ids=place)
def test_task_imports_neither_flower_nor_its_siblings(path):
    for package in ("flwr", "clients", "strategies", *FRONT):
        assert names_in(path, package) == set()


@pytest.mark.parametrize("path", files_of("clients"), ids=place)
def test_clients_import_no_strategies(path):
    for module in FRONT:
        assert names_in(path, module) == set()
    assert names_in(path, "strategies") <= CLIENT_ASKS.get(place(path), set())


@pytest.mark.parametrize("path", files_of("strategies"), ids=place)
def test_strategies_import_no_clients_and_little_of_the_task(path):
    for package in ("clients", *FRONT):
        assert names_in(path, package) == set()
    computes = SERVER_COMPUTES.get(place(path), set())
    assert names_in(path, "task") <= SERVER_MAY_USE | computes


def printed_by(code: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout.split()


HEAVY = (
    "{'torch', 'torchvision', 'sklearn', 'ray', 'flwr_frl.clients', 'networkx', "
    "'datasets', 'flwr_datasets'}"
)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "module",
    [
        "flwr_frl.strategies.server_app",
        "strategies",
        "flwr_frl.task.settings",
        "flwr_frl.task.files",
        "flwr_frl.task.messages",
    ],
)
def test_a_server_loads_no_torch(module):
    code = f"import sys, {module}; print(*sorted({HEAVY} & set(sys.modules)))"
    assert printed_by(code) == []


@pytest.mark.e2e
def test_the_client_app_is_found_without_torch():
    # As `flwr run` does
    code = f"""if True:
        import sys
        from importlib.util import find_spec
        print(find_spec("flwr_frl.clients.client_app").name)
        print(*sorted({HEAVY} & set(sys.modules)))
    """
    assert printed_by(code) == [
        "flwr_frl.clients.client_app",
        "flwr_frl.clients",
    ]


@pytest.mark.e2e
def test_preparing_a_run_loads_no_torch_with_any_algorithm():
    code = f"""if True:
        import sys
        from flwr_frl.strategies import ALGORITHMS, build_strategy
        from flwr_frl.strategies.algorithms import client_path
        from flwr_frl.strategies.server_app import server_settings
        for task in ("digits", "linear", "transfer", "qcqp"):
            for name in ALGORITHMS:
                settings = server_settings({{"algorithm": name, "task": task}})
                strategy = build_strategy(settings)
                assert client_path(settings).startswith("flwr_frl.clients.")
        print(len(ALGORITHMS), *sorted({HEAVY} & set(sys.modules)))
    """
    assert printed_by(code) == [str(len(ALGORITHMS))]


@pytest.mark.e2e
def test_training_loads_heavy_modules_but_no_compiler():
    # torch's compiler takes seconds to load, and a device handles each message in a new
    # process.
    code = f"""if True:
    import sys, flwr_frl.clients.base, torch
    from flwr_frl import task
    model = task.SplitModel(torch.nn.Identity(), torch.nn.Linear(2, 2))
    examples = task.ExampleSet(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))
    loss = torch.nn.functional.cross_entropy
    task.train(model, "all", examples, loss, 1, task.SGD())
    print(model.head.bias.grad is not None, "torch._dynamo" in sys.modules)
    print(*{HEAVY} & set(sys.modules))
    """
    learned, compiler, *heavy = printed_by(code)
    assert (learned, compiler) == ("True", "False")
    assert {"flwr_frl.clients", "torch"} <= set(heavy)


@pytest.mark.e2e
def test_the_task_s_settings_load_no_flower():
    code = (
        "import sys, flwr_frl.task.settings, flwr_frl.task.files; "
        "import flwr_frl.task.messages; "
        "print('flwr' in sys.modules)"
    )
    assert printed_by(code) == ["False"]


def test_all_public_names_exist():
    import clients
    import strategies
    import task

    for package in (task, clients, strategies):
        for name in package.__all__:
            assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = task.nothing
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = clients.nothing


# Algorithm-specific code belongs in the classes of the algorithm


# Import paths of all strategies and clients, including those for specific tasks
PATHS = {
    path
    for algorithm in ALGORITHMS
    for task in TASKS
    for settings in [resolve({"algorithm": algorithm, "task": task})]
    for kind in [strategy_class(settings)]
    for path in (f"{kind.__module__}:{kind.__qualname__}", client_path(settings))
}
MODULES = {path.split(":")[0] for path in PATHS}
CLASSES = {path.split(":")[1] for path in PATHS}
# All files except the table and those of the algorithms
CENTRAL = [
    *files_of("flwr_frl"),
    *(
        path
        for package in ("strategies", "clients")
        for path in files_of(package)
        if module_of(path) not in MODULES
        and place(path) not in ("strategies/table.py", f"{package}/__init__.py")
    ),
]
# Allowed names of algorithms: defaults, and commands that the help shows
DEFAULTS = {
    "flwr_frl/commands.py": {"fedavg", "fedrep", "flute"},
    # An argument of Ray
    "strategies/grids/ray_workers.py": {"local"},
    "strategies/report/command_line.py": {"fedrep", "local"},
    "strategies/server/run_settings.py": {"fedrep"},
}
KINDS = CLASSES | {"Strategy", "Gossip", "Node"}


def texts_in(tree: ast.Module) -> list[str]:
    """Return all strings except docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documentation
    ]


def algorithms_named_in(path: Path) -> set[str]:
    """Return the algorithms whose names, classes or modules occur in a file."""
    tree = tree_of(path)
    words = {w for text in texts_in(tree) for w in re.findall(r"[\w.-]+", text)}
    identifiers = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = names_in(path, "strategies") | names_in(path, "clients")
    return words & ALGORITHMS.keys() | identifiers & CLASSES | imported & MODULES


def kinds_asked_for_in(path: Path) -> set[str]:
    """Return the algorithm classes in a file's calls of isinstance and issubclass."""
    return {
        name.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name) and name.id in KINDS
    }


def test_the_rules_on_algorithm_names_apply_to_files_and_find_names():
    assert {
        "flwr_frl.strategies.srpfl",
        "flwr_frl.clients.fedrep",
        "flwr_frl.clients.flute",
    } <= MODULES
    assert {"SRPFL", "FedRepLinear", "FedRepClient", "FLUTEStarClient"} <= CLASSES
    places = set(map(place, CENTRAL))
    assert places >= {
        "strategies/base.py",
        "strategies/traits.py",
        "strategies/server_app.py",
        "strategies/server/rounds.py",
        "strategies/grids/arrivals.py",
        "strategies/gossip/base.py",
        "clients/base.py",
        "clients/client_app.py",
        "clients/algorithms.py",
        "clients/device/setup.py",
        "clients/predict/loading.py",
    }
    assert not places & {"strategies/srpfl.py", "clients/fedrep.py"}
    # Names are found in files that contain them.
    srpfl = ROOT / "strategies" / "srpfl.py"
    assert {"fedrep", "lg-fedavg", "SRPFL"} <= algorithms_named_in(srpfl)
    assert kinds_asked_for_in(srpfl) == {"Strategy"}
    assert "flwr_frl.strategies.fedrep" in algorithms_named_in(
        ROOT / "strategies" / "flute.py"
    )


@pytest.mark.parametrize("path", CENTRAL, ids=place)
def test_shared_code_names_no_algorithm(path):
    assert algorithms_named_in(path) == DEFAULTS.get(place(path), set())
    # The common base class is not an algorithm.
    assert kinds_asked_for_in(path) <= {"Strategy"}
