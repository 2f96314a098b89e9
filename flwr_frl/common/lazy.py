"""Load a package's public names on first use, so that a server needs no torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from flwr_frl.common.short_names import alias


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
