"""Federated representation learning for Flower.

Everything a user needs is imported from here: the strategies and clients of all
algorithms, the parts of a task, `simulate`, `compare` and `load_run`. Names are loaded
on first use, so that a server needs no torch.
"""

# ruff: noqa: E402 - the path comes first, as other threads may import modules below.
import os

# A wheel contains clients, strategies and task in this folder. In a checkout and in a
# Flower bundle they are beside it; a checkout's links only help editors and mypy.
_TASK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "task")
if os.path.islink(_TASK) or not os.path.isdir(_TASK):
    __path__.insert(0, os.path.dirname(os.path.dirname(_TASK)))

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_frl.clients import *  # noqa: F403
    from flwr_frl.predict import load_run as load_run
    from flwr_frl.results.methods import compare as compare
    from flwr_frl.run import Run as Run
    from flwr_frl.run import Runs as Runs
    from flwr_frl.running import simulate as simulate
    from flwr_frl.strategies import *  # noqa: F403
    from flwr_frl.task import *  # noqa: F403

_PACKAGES = ("task", "strategies", "clients")
# Modules of the names that no package contains.
_MODULES = {
    "Run": "run",
    "Runs": "run",
    "compare": "results.methods",
    "load_run": "predict",
    "simulate": "running",
}
__version__: str


def _load(name: str) -> Any:
    if name == "__version__":
        return import_module(f"{__name__}.common.settings").version()
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    # The import system looks up private names, which are never public API.
    for module in () if name.startswith("_") else map(_load, _PACKAGES):
        if name in module.public_names():
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names = {name for each in map(_load, _PACKAGES) for name in each.public_names()}
    return sorted({"__version__", *_MODULES, *names})


if not TYPE_CHECKING:
    # Type checkers use the imports above, and can report unknown names.
    __getattr__ = _load
