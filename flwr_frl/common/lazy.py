"""Load a package's public names on first use, so that a server needs no torch."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return a package's ``__all__`` and ``__getattr__``.

    The names are those that the package imports for type checkers, in its ``if
    TYPE_CHECKING:`` block as ``from module import Name as Name``, so that there is only
    one list.

    Parameters
    ----------
    package, file : str
        The package's ``__name__`` and ``__file__``.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    modules = {
        alias.asname: str(node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }

    def get(name: str) -> Any:
        if name in modules:
            return getattr(import_module(modules[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return list(modules), get
