"""Limits of size and layering, import rules, and no torch on a server."""

import ast
import math
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import networkx as nx
import own_tasks
import pytest
from flwr.client import NumPyClient
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from benchmarks.one_round import functions_of_a_round
from flwr_frl.clients.base import Client, ClientTraits
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import Strategy
from flwr_frl.strategies.algorithms import ALGORITHMS, settings_owners, strategy_class
from flwr_frl.strategies.server import loop
from flwr_frl.strategies.server.traits import StrategyTraits
from flwr_frl.task.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
# Files and functions that a FedRep round passes through, including those that write
# ``status.json``, as a slow round does; may only be lowered
ROUND_FILES, ROUND_FUNCTIONS = 29, 152
CLIMBING_IMPORTS = 0  # may only be lowered
ROOMS_IN_CIRCLES = 0  # may only be lowered
TRAITS = 9  # of strategies and clients; may only be lowered
CLIENT_NAMES = 16  # public names of a client beyond Flower's; may only be lowered
# Public names that `Strategy` and its attributes add to Flower's; may only be lowered
STRATEGY_NAMES = 30

# Floor and room of modules; a submodule without an entry is where its package is.
ROOMS = {
    "flwr_frl": (5, "doors"),
    "flwr_frl.common": (0, "common"),
    "flwr_frl.task": (1, "task"),
    "flwr_frl.results": (1, "results"),
    "flwr_frl.strategies.base": (2, "server"),
    "flwr_frl.strategies.server": (2, "server"),
    "flwr_frl.strategies.grids": (2, "grids"),
    "flwr_frl.strategies.gossip": (2, "relay"),
    "flwr_frl.clients.base": (2, "device"),
    "flwr_frl.clients.device": (2, "device"),
    "flwr_frl.clients.gossip": (2, "nodes"),
    "flwr_frl.strategies": (3, "strategies"),
    "flwr_frl.clients": (3, "clients"),
    "flwr_frl.predict": (4, "predict"),
    "flwr_frl.strategies.server_app": (5, "doors"),
    "flwr_frl.clients.client_app": (5, "doors"),
}
FRONT = [f"flwr_frl.{name}" for name in ("cli", "running")]
FORBIDDEN = {
    "task": ["flwr", "flwr_frl.clients", "flwr_frl.strategies", *FRONT],
    "clients": ["flwr_frl.strategies", *FRONT],
    "strategies": ["flwr_frl.clients", "flwr_frl.task", *FRONT],
}
EXCEPTIONS = {
    # FLUTE's server takes a step on the clients' heads.
    ("strategies/flute.py", "flwr_frl.task.models.neural_collapse"),
    # Needs only NumPy.
    ("strategies/representation_transfer.py", "flwr_frl.task.transfer"),
    # `client_class` asks the class of a strategy for its client.
    ("clients/algorithms.py", "flwr_frl.strategies.algorithms"),
    # The public clients are those that strategies name.
    ("clients/__init__.py", "flwr_frl.strategies"),
}


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files_of(package: str) -> list[Path]:
    # The links in `flwr_frl` lead to the other packages.
    paths = sorted((ROOT / package).rglob("*.py"))
    return [path for path in paths if path == path.resolve()]


def module_of(path: Path) -> str:
    names = path.relative_to(ROOT).with_suffix("").parts
    package = () if names[0] == "flwr_frl" else ("flwr_frl",)
    return ".".join([*package, *names]).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


FILES = {
    package: files_of(package)
    for package in ("task", "clients", "strategies", "flwr_frl")
}
MODULES = {module_of(path) for paths in FILES.values() for path in paths}


def containing(name: str) -> str:
    """Return the module of ours with an imported name; for Flower's, ``flwr``."""
    if name.split(".")[0] == "flwr":
        return "flwr"
    name = re.sub(r"^(task|clients|strategies)\b", r"flwr_frl.\1", name)
    # `from flwr_frl.task.models import Part` names a module and its member.
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imports_in(tree: ast.Module, package: str) -> set[str]:
    """Return our modules, and Flower, that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # One dot is this package, two dots are its parent.
            parents = package.split(".")
            above = parents[: len(parents) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return set(map(containing, names)) - {""}


@cache
def imports_of(path: Path) -> set[str]:
    return imports_in(tree_of(path), module_of(path.parent))


def room_of(module: str) -> tuple[int, str]:
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return ROOMS[module]


# Rooms of the importing and the imported module, by file and imported module
BETWEEN_ROOMS = {
    (place(path), module): (room_of(module_of(path)), room_of(module))
    for paths in FILES.values()
    for path in paths
    for module in imports_of(path) - {"flwr"}
}


# Limits


def test_a_fedrep_round_passes_through_no_more_code(monkeypatch):
    # On a busy machine, a round may take so long that it also writes the status.
    monkeypatch.setattr(loop, "INTERVAL", math.inf)
    calls = functions_of_a_round()
    assert len({file for file, _ in calls}) <= ROUND_FILES
    assert 0 < len(calls) <= ROUND_FUNCTIONS


def test_no_more_imports_climb():
    assert len(BETWEEN_ROOMS) > 500
    climbs = [e for e, (here, there) in BETWEEN_ROOMS.items() if there[0] > here[0]]
    assert len(climbs) <= CLIMBING_IMPORTS, climbs


def test_no_more_rooms_form_circles():
    graph = nx.DiGraph((here, there) for here, there in BETWEEN_ROOMS.values())
    circles = [c for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert sum(map(len, circles)) <= ROOMS_IN_CIRCLES, circles


def test_there_are_no_more_traits():
    assert len(fields(StrategyTraits)) + len(fields(ClientTraits)) <= TRAITS


def test_a_client_has_no_more_public_names():
    settings = Client._settings_type()
    client = Client(own_tasks.task_of(), 0, PersonalState.holding({}), settings)
    attributes = {*dir(client), *Client.__annotations__} - {*dir(NumPyClient)}
    public = sorted(name for name in attributes if not name.startswith("_"))
    assert len(public) <= CLIENT_NAMES, public


def names_of(instance: object) -> set[str]:
    return {name for name in dir(instance) if not name.startswith("_")}


def test_an_author_meets_no_more_names_on_a_strategy():
    strategy = Strategy()
    own = names_of(strategy) - names_of(FlowerStrategy)
    values = {name: getattr(strategy, name) for name in own}
    parts = [v for v in values.values() if type(v).__module__.startswith("flwr_frl")]
    names = [*own, *(name for part in parts for name in names_of(part))]
    assert len(names) <= STRATEGY_NAMES, sorted(names)


# Imports


def test_packages_import_only_what_they_may():
    found = {
        (place(path), module)
        for package, forbidden in FORBIDDEN.items()
        for path in FILES[package]
        for module in imports_of(path)
        if any(f"{module}.".startswith(f"{name}.") for name in forbidden)
    }
    assert found == EXCEPTIONS


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
    "'datasets'}"
)


@pytest.mark.e2e
def test_settings_files_and_messages_load_neither_torch_nor_flower():
    modules = (
        "flwr_frl.common.settings, flwr_frl.common.files, flwr_frl.common.messages"
    )
    code = f"import sys, {modules}; print(*({HEAVY} | {{'flwr'}}) & set(sys.modules))"
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
    assert printed_by(code) == ["flwr_frl.clients.client_app", "flwr_frl.clients"]


@pytest.mark.e2e
def test_a_server_loads_torch_only_to_train_a_network():
    code = f"""if True:
        import sys, strategies
        from flwr_frl.strategies.server_app import server_settings
        for task in ("digits", "linear", "transfer", "qcqp"):
            for name in strategies.ALGORITHMS.keys() - {{"fedtgp"}}:
                settings = server_settings({{"algorithm": name, "task": task}})
                strategies.build_strategy(settings)
        print(len(strategies.ALGORITHMS), *{HEAVY} & set(sys.modules))
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


# Algorithm-specific code belongs in the classes of the algorithm


# Import paths of all strategies and clients, including those for specific tasks
PATHS = {
    path
    for algorithm in ALGORITHMS
    for task in TASKS
    for settings in [resolve({"algorithm": algorithm, "task": task})]
    for kind in [strategy_class(settings)]
    for client in [settings_owners(settings)[-1]._traits.client]
    for path in (f"{kind.__module__}:{kind.__qualname__}", client)
}
ALGORITHM_MODULES = {path.split(":")[0] for path in PATHS}
CLASSES = {path.split(":")[1] for path in PATHS}
TABLES = {"flwr_frl/common/algorithms.py"}
TABLES |= {f"{package}/__init__.py" for package in ("strategies", "clients")}
# All files except these and those of the algorithms
CENTRAL = [
    path
    for package in ("flwr_frl", "strategies", "clients")
    for path in FILES[package]
    if module_of(path) not in ALGORITHM_MODULES and place(path) not in TABLES
]
# Allowed names of algorithms: defaults, and commands that the help shows
DEFAULTS = {
    "flwr_frl/running.py": {"fedavg", "fedrep", "flute"},
    # An argument of Ray
    "strategies/grids/ray_workers.py": {"local"},
    "strategies/server/run_settings.py": {"fedrep"},
}


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
    """Return the algorithms whose names, classes or modules occur in a file.

    Gossip is a kind of algorithm that central code must not ask for either.
    """
    tree = tree_of(path)
    words = {w for text in texts_in(tree) for w in re.findall(r"[\w.-]+", text)}
    identifiers = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    asked = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("isinstance", "issubclass")
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name)
    }
    kinds = identifiers & CLASSES | asked & {"Gossip", "Node"}
    return words & ALGORITHMS.keys() | kinds | imports_of(path) & ALGORITHM_MODULES


def test_shared_code_names_no_algorithm():
    named = {place(path): algorithms_named_in(path) for path in CENTRAL}
    assert {path: names for path, names in named.items() if names} == DEFAULTS
