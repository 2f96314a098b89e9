"""Load a package's public names on first use, so that a server needs no torch.

In a checkout and in a Flower bundle, ``strategies``, ``clients`` and ``task`` can be
imported by these short names as well. Their public names are then those of `flwr_frl`'s
packages. Modules inside them are imported by their full names.
"""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any


def attach(
    package: str, import_paths: Callable[[], Iterable[str]]
) -> tuple[Callable[[], dict[str, str]], Callable[[str], Any]]:
    """Return a package's ``public_names`` and ``__getattr__``.

    Type checkers read the names from a stub, which ``python -m docs.settings`` writes.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    import_paths : callable
        Returns the import paths of the public names, ``package.module:Name``.

    Returns
    -------
    public_names : callable
        Returns the import path of each public name.
    __getattr__ : callable
        Returns the object of a public name, and the names for ``__all__``.
    """
    # Another thread may be importing it; this call waits until it has finished.
    import_module("flwr_frl")

    @cache
    def public_names() -> dict[str, str]:
        """Return the import path of each public name."""
        return {path.rpartition(":")[2]: path for path in import_paths()}

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(public_names())
        # The import system looks up private names, which are never public.
        if name.startswith("_") or name not in public_names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, member = public_names()[name].partition(":")
        return getattr(import_module(module), member)

    return public_names, get
