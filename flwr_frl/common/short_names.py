"""Make ``strategies``, ``clients`` and ``task`` of a checkout aliases of `flwr_frl`'s.

Without this, ``from strategies import FedRep`` would load every module a second time,
and its classes would not be those that the package itself uses.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

FULL = "flwr_frl."


class _Alias(Loader):
    """Load ``strategies.base`` as ``flwr_frl.strategies.base``."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns the module that is in `sys.modules` afterwards.
        sys.modules[module.__name__] = import_module(FULL + module.__name__)


class _Finder(MetaPathFinder):
    """Find the modules below the short names that `alias` has registered."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package not in self.packages or not rest:
            return None
        real = find_spec(FULL + fullname)
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        return ModuleSpec(fullname, _Alias(), origin=real.origin, is_package=is_package)


_FINDER = _Finder()


def alias(package: str) -> None:
    """Make a package's short name, and all modules below it, aliases of `flwr_frl`'s.

    Parameters
    ----------
    package : str
        ``"strategies"``, ``"clients"`` or ``"task"``.
    """
    # Another thread may be importing it; this call waits until it has finished.
    import_module(FULL.removesuffix("."))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.packages.add(package)
    sys.modules[package] = import_module(FULL + package)
