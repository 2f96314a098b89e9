"""Objects and results that a process keeps for one run, and drops before the next.

Between two runs of one process, as in a notebook, a function may have been edited, a
module reloaded or a file rewritten under the same name.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar
from uuid import uuid4

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

# Number of tasks in a cache. Clients with different models have different tasks, which
# are used in turn, so a cache with room for one too few would never have a hit.
TASKS_AT_A_TIME = 16


class _Run:
    """The current run of this process, and its objects by the function that made them.

    Parameters
    ----------
    run_id : str
        Identifies the run; workers get it with its messages.
    """

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self.objects: dict[Callable[[], Any], Any] = {}


_current = _Run()


def run_object(make: Callable[[], T]) -> T:
    """Return what a class or function returns; call it once per run."""
    if make not in _current.objects:
        _current.objects[make] = make()
    cached: T = _current.objects[make]
    return cached


def run_cache(maxsize: int | None) -> Callable[[F], F]:
    """Decorate a function with a `functools.lru_cache` that lasts for one run."""

    def decorate(function: F) -> F:
        def make() -> Callable[..., object]:
            return lru_cache(maxsize)(function)

        @wraps(function)
        def cached(*args: Any, **kwargs: Any) -> object:
            return run_object(make)(*args, **kwargs)

        return cached  # type: ignore[return-value]

    return decorate


def begin_run(run_id: str | None = None) -> None:
    """Begin a run: drop everything that was cached for an earlier one.

    Parameters
    ----------
    run_id : str, optional
        Id of the run. If it is the current one, nothing is dropped. By default, a new
        run begins.
    """
    global _current
    if run_id is None or run_id != _current.run_id:
        _current = _Run(uuid4().hex if run_id is None else run_id)


def current_run() -> str:
    """Return the id of the run of this process."""
    return _current.run_id
