"""Federated representation learning for Flower.

Everything a user needs is imported from here: the strategies and clients of all
algorithms, the parts of a task, and `simulate`. Names are loaded on first use, so that
a server needs no torch.
"""

import tomllib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_frl.clients import *  # noqa: F403
    from flwr_frl.running import Run as Run
    from flwr_frl.running import simulate as simulate
    from flwr_frl.strategies import *  # noqa: F403
    from flwr_frl.task import *  # noqa: F403

_HERE = Path(__file__).parent
# A wheel holds the three packages in this folder. In a checkout and in a Flower bundle
# they lie beside it; the links of a checkout only help editors and type checkers.
_IN_WHEEL = (_HERE / "task").is_dir() and not (_HERE / "task").is_symlink()
if not _IN_WHEEL:
    __path__.insert(0, str(_HERE.parent))  # noqa: F405

# The last one is expensive to import.
_MODULES = ("task", "clients", "strategies", "running")
__version__: str


def _load(name: str) -> Any:
    if name == "__version__":
        pyproject = (_HERE if _IN_WHEEL else _HERE.parent) / "pyproject.toml"
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        return project["version"]
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    # The import system asks for private names, which are never public API.
    for module in () if name.startswith("_") else map(_load, _MODULES):
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    modules = [_load(name) for name in _MODULES]
    return sorted({"__version__"}.union(*(module.__all__ for module in modules)))


if not TYPE_CHECKING:
    # Type checkers know the names from above, and that there are no others.
    __getattr__ = _load
