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
