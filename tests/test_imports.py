"""Who may know whom, so that a reader finds things and a server needs no torch."""

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
# What a server may know of a task: no data, no models and no training.
SERVER_MAY_USE = {
    "flwr_frl.task.checkpoint",
    "flwr_frl.task.command_line",
    "flwr_frl.task.files",
    "flwr_frl.task.messages",
    "flwr_frl.task.npy",
    "flwr_frl.task.records",
    "flwr_frl.task.settings",
}
SERVER_COMPUTES = {
    # FLUTE's server makes a step on the clients' heads.
    "strategies/flute.py": {"flwr_frl.task.models.neural_collapse"},
    # NumPy only.
    "strategies/representation_transfer.py": {"flwr_frl.task.transfer"},
}
# A client asks its strategy's class which client belongs to it.
FRONT = ("backend", "cli", "commands", "running")
CLIENT_ASKS = {"clients/algorithms.py": {"flwr_frl.strategies.algorithms"}}


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files_of(package: str) -> list[Path]:
    # The links in `flwr_frl` are the packages themselves.
    pattern = "*.py" if package == "flwr_frl" else "**/*.py"
    return sorted((ROOT / package).glob(pattern))


def module_of(path: Path) -> str:
    return ".".join(["flwr_frl", *path.relative_to(ROOT).with_suffix("").parts])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> set[str]:
    """Return the full names of all that a file imports, inside functions as well."""
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # One dot is this package, two its parent.
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
    found, prefix = set(), package if package == "flwr" else f"flwr_frl.{package}"
    for name in imports_of(path):
        if f"{name}.".startswith(f"{prefix}."):
            parts = name.split(".")
            # `from flwr_frl.task.models import Part` names a module and something in
            # it.
            while not is_module(".".join(parts)):
                parts.pop()
            found.add(".".join(parts))
    return found


# Imports


def test_the_rules_are_about_something():
    for package in ("task", "clients", "strategies"):
        files = files_of(package)
        assert len(files) > 3
        # At all depths.
        assert {len(path.relative_to(ROOT).parts) for path in files} >= {2, 3}
    # Imports of all forms are seen, also those within functions.
    assert "flwr" in {n.split(".")[0] for n in imports_of(ROOT / "clients" / "base.py")}
    assert names_in(ROOT / "clients" / "base.py", "task") >= {"flwr_frl.task.training"}
    assert names_in(ROOT / "flwr_frl" / "running.py", "clients") >= {
        "flwr_frl.clients.algorithms",
        "flwr_frl.clients.client_app",
    }
    for where in SERVER_COMPUTES.keys() | CLIENT_ASKS:
        assert (ROOT / where).is_file()


@pytest.mark.parametrize("path", files_of("task"), ids=place)
def test_task_knows_neither_flower_nor_its_siblings(path):
    for package in ("flwr", "clients", "strategies", *FRONT):
        assert names_in(path, package) == set()


@pytest.mark.parametrize("path", files_of("clients"), ids=place)
def test_clients_know_no_strategies(path):
    for module in FRONT:
        assert names_in(path, module) == set()
    assert names_in(path, "strategies") <= CLIENT_ASKS.get(place(path), set())


@pytest.mark.parametrize("path", files_of("strategies"), ids=place)
def test_strategies_know_no_clients_and_little_of_the_task(path):
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
def test_whether_there_is_a_client_app_is_known_without_torch():
    # As `flwr run` asks.
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
def test_what_a_server_does_before_a_run_loads_no_torch_with_any_algorithm():
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
def test_what_is_called_heavy_is_found_and_training_alone_loads_no_compiler():
    # torch's takes seconds, and a device handles each message in a new process.
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


def test_what_the_packages_promise_is_there():
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


# What is special about an algorithm is said by its class


# Import paths of all strategies and clients, with those for tasks of their own.
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
# Everything but the table and the algorithms' own files.
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
# Nothing but defaults, and the commands that the help shows.
DEFAULTS = {
    "flwr_frl/commands.py": {"fedavg", "fedrep", "flute"},
    # Ray's word.
    "strategies/grids/ray_workers.py": {"local"},
    "strategies/report/command_line.py": {"fedrep", "local"},
    "strategies/server/rounds.py": {"fedrep"},
}
KINDS = CLASSES | {"BaseStrategy", "Gossip", "GossipClient", "Strategy"}


def texts_in(tree: ast.Module) -> list[str]:
    """Return all texts but the docstrings."""
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
    """Return the algorithms whose names, classes or modules a file has."""
    tree = tree_of(path)
    words = {w for text in texts_in(tree) for w in re.findall(r"[\w.-]+", text)}
    identifiers = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = names_in(path, "strategies") | names_in(path, "clients")
    return words & ALGORITHMS.keys() | identifiers & CLASSES | imported & MODULES


def kinds_asked_for_in(path: Path) -> set[str]:
    """Return the classes of algorithms that a file asks an object or class for."""
    return {
        name.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name) and name.id in KINDS
    }


def test_these_rules_are_about_something_too():
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
    # Where there is something to find, it is found.
    srpfl = ROOT / "strategies" / "srpfl.py"
    assert {"fedrep", "lg-fedavg", "SRPFL"} <= algorithms_named_in(srpfl)
    assert kinds_asked_for_in(srpfl) == {"BaseStrategy"}
    assert "flwr_frl.strategies.fedrep" in algorithms_named_in(
        ROOT / "strategies" / "flute.py"
    )


@pytest.mark.parametrize("path", CENTRAL, ids=place)
def test_what_all_algorithms_share_names_none_of_them(path):
    assert algorithms_named_in(path) == DEFAULTS.get(place(path), set())
    # The base class of all is no algorithm.
    assert kinds_asked_for_in(path) <= {"BaseStrategy"}
