"""Objects and results that a process keeps for one run, and drops before the next.

Between two runs of one process, as in a notebook, a function may have been edited, a
module reloaded or a file rewritten under the same name.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar, cast
from uuid import uuid4

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

# Number of tasks in a cache. Clients with different models have different tasks, which
# are used in turn, so a cache with room for one too few would never have a hit.
TASKS_AT_A_TIME = 16

# Functions that empty the caches of this process, and the id of its run, which workers
# get with the run's messages.
_CLEAR: list[Callable[[], None]] = []
_run_id = ""


def run_cache(maxsize: int | None) -> Callable[[F], F]:
    """Decorate a function with a `functools.lru_cache` that lasts for one run."""

    def decorate(function: F) -> F:
        cached = lru_cache(maxsize)(function)
        _CLEAR.append(cached.cache_clear)
        return cast(F, cached)

    return decorate


@run_cache(maxsize=None)
def run_object(make: Callable[[], T]) -> T:
    """Return what a class or function returns; call it once per run."""
    return make()


def begin_run(run_id: str | None = None) -> None:
    """Begin a run: drop everything that was cached for an earlier one.

    Parameters
    ----------
    run_id : str, optional
        Id of the run. If it is the current one, nothing is dropped. By default, a new
        run begins.
    """
    global _run_id
    if run_id is None or run_id != _run_id:
        _run_id = uuid4().hex if run_id is None else run_id
        for clear in _CLEAR:
            clear()


def current_run() -> str:
    """Return the id of the run of this process."""
    return _run_id
