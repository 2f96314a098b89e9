"""Load a package's public names on first use, so that a server needs no torch.

In a checkout and in a Flower bundle, ``strategies``, ``clients`` and ``task`` can be
imported by these short names as well. They are then aliases of `flwr_frl`'s packages:
otherwise ``from strategies import FedRep`` would load every module a second time, and
its classes would not be those that the package itself uses.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

FULL = "flwr_frl."


class _Aliases(MetaPathFinder, Loader):
    """Load ``strategies.base`` as ``flwr_frl.strategies.base``."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        ours = sys.modules.get(FULL + package)
        # A package of the same name that is not ours is left alone.
        if not rest or ours is None or sys.modules.get(package) is not ours:
            return None
        # Flower reads the file of a component to look for its app.
        real = find_spec(FULL + fullname)
        return real and ModuleSpec(fullname, self, origin=real.origin)

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns the module that is in `sys.modules` afterwards.
        sys.modules[module.__name__] = import_module(FULL + module.__name__)


_ALIASES = _Aliases()


def alias(package: str) -> None:
    """Make a package's short name, and all modules below it, aliases of `flwr_frl`'s.

    Parameters
    ----------
    package : str
        ``"strategies"``, ``"clients"`` or ``"task"``.
    """
    # Another thread may be importing it; this call waits until it has finished.
    import_module(FULL.removesuffix("."))
    sys.modules[package] = import_module(FULL + package)
    if _ALIASES not in sys.meta_path:
        sys.meta_path.insert(0, _ALIASES)


def attach(
    package: str, public_names: Callable[[], Mapping[str, str]]
) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which also answers ``__all__``.

    In a checkout and in a Flower bundle, packages can be imported by their short names
    as well, such as ``strategies``; they are then made aliases (`alias`).

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    public_names : callable
        Returns the import path of each public name, ``package.module:Name``. Type
        checkers read them from a stub, which ``python -m docs.settings`` generates.
    """
    if "." not in package:
        alias(package)

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(public_names())
        # The import system looks up private names, which are never public.
        if name.startswith("_") or name not in public_names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, member = public_names()[name].partition(":")
        return getattr(import_module(module), member)

    return get
