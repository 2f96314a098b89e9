"""What a process remembers of tasks and classes by their names, for one command.

Between two commands of one process, cells of a notebook say, a function may have been
edited, a module reloaded or a file written anew under the same name.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar
from uuid import uuid4

F = TypeVar("F", bound=Callable[..., object])

_to_forget: list[Callable[[], None]] = []
# Of the command whose things are remembered; workers get it with its messages.
_command = [""]


def run_cache(maxsize: int | None) -> Callable[[F], F]:
    """Return a decorator: `functools.lru_cache` of a function, up to `forget`."""

    def decorate(function: F) -> F:
        cached = lru_cache(maxsize)(function)
        when_forgetting(cached.cache_clear)
        return cached  # type: ignore[return-value]

    return decorate


def when_forgetting(act: Callable[[], None]) -> None:
    """Have a function called by each `forget`."""
    _to_forget.append(act)


def forget(command: str | None = None) -> None:
    """Begin a command: what is remembered of another one is not used any more.

    Parameters
    ----------
    command : str, optional
        Whose; nothing is forgotten where it is the one that is under way. A new one by
        default.
    """
    if command == _command[0]:
        return
    _command[0] = uuid4().hex if command is None else command
    for act in _to_forget:
        act()


def command() -> str:
    """Return which command is under way in this process."""
    return _command[0]
