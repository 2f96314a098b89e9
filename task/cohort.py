"""Clients of one process that train together: equal calls of theirs made as one.

Each client's work runs unchanged in a greenlet of its own, up to its next call of
`flwr_frl.task.training.train`, `gradient` or `evaluate`. When all have come so far,
calls of the same shape are made together, with their models stacked, and every client
goes on with its own result. A call without companions is made alone. One client runs at
a time, and torch's generator is that client's own whenever something is drawn for it,
so the numbers are those of one by one, to rounding.
"""

from collections.abc import Callable, Hashable, Sequence
from logging import getLogger
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from greenlet import getcurrent, greenlet

from flwr_frl.task.devices import CPU, current, random_state, set_random_state
from flwr_frl.task.remembered import when_forgetting
from flwr_frl.task.stacked import forget_calls

if TYPE_CHECKING:
    from flwr_frl.task.base import Task
    from flwr_frl.task.models import SplitModel

Result = TypeVar("Result")
log = getLogger("task")


class Call(Protocol):
    """A call that several clients may make together."""

    @property
    def key(self) -> Hashable:
        """Equal for calls that can be made together; None for one that cannot."""

    @property
    def fewest(self) -> int | None:
        """How many clients are faster together; None where none ever are."""

    def alone(self) -> Any:
        """Make the call for one client."""

    @staticmethod
    def together(calls: Sequence[Any], streams: Sequence["RngContext"]) -> list[Any]:
        """Make calls with the same key; the results, or exceptions in their place.

        What is drawn at random for a client is drawn within its stream. Nothing of the
        clients is changed if it raises an exception.
        """


class RngContext:
    """A client's random numbers: torch's generators while in this context."""

    def __init__(self) -> None:
        self.state: tuple[torch.Tensor, ...] | None = None

    def __enter__(self) -> Self:
        """Go on where this client's numbers stopped."""
        if self.state is not None:
            set_random_state(self.state)
        return self

    def __exit__(self, *error: object) -> None:
        """Remember where they stop."""
        self.state = random_state()


class _ClientCoroutine(greenlet):
    """One client's work, as far as it has come."""

    def __init__(
        self, work: Callable[[], Any], number: int, where_it_pays: bool
    ) -> None:
        super().__init__(work)
        self.number = number
        self.where_it_pays = where_it_pays
        # Whether it makes all calls alone: then it has no model of its own.
        self.by_itself = False
        self.stream = RngContext()

    def go_on(self, answer: Any = None) -> Any:
        """Return the next call, or what the work returns."""
        with self.stream:
            return self.switch(*([] if answer is None else [answer]))


def make(call: Call) -> Any:
    """Make a call, with companions where there are any."""
    here = getcurrent()
    if not isinstance(here, _ClientCoroutine) or not _has_key(call):
        return call.alone()
    # These modes are the thread's: the next client's as well.
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(current().type):
        return call.alone()
    if here.by_itself or (here.where_it_pays and call.fewest is None):
        return call.alone()
    assert here.parent is not None
    (answer,) = here.parent.switch(call)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _has_key(call: Call) -> bool:
    """Return whether a call can be compared; a loss or a regularizer may not be."""
    try:
        hash(call.key)
    except TypeError:
        return False
    return call.key is not None


def together(
    works: Sequence[Callable[[], Result]], size: int, where_it_pays: bool = False
) -> list[Result]:
    """Return the results of some clients' works, so many of them at a time.

    Parameters
    ----------
    works : sequence of callable
        Each seeds torch's generator before it draws.
    size : int
        How many clients train together at most; each has a model of its own meanwhile,
        unless it makes all calls alone.
    where_it_pays : bool, default False
        Whether calls of so few clients that they are faster one by one
        (`flwr_frl.task.calls.fewest`) are made so.

    Returns
    -------
    list
        In the order of ``works``.
    """
    results: list[Result] = []
    for start in range(0, len(works), size):
        results += _cohort(works[start : start + size], where_it_pays)
    return results


def _cohort(works: Sequence[Callable[[], Any]], where_it_pays: bool) -> list[Any]:
    seats = [
        _ClientCoroutine(work, number, where_it_pays)
        for number, work in enumerate(works)
    ]
    results: dict[_ClientCoroutine, Any] = {}
    open_: dict[_ClientCoroutine, Any] = {seat: seat.go_on() for seat in seats}
    while open_:
        for seat in [seat for seat in open_ if seat.dead]:
            results[seat] = open_.pop(seat)
        answers: dict[_ClientCoroutine, Any] = {}
        groups: dict[Hashable, list[_ClientCoroutine]] = {}
        for seat, call in open_.items():
            groups.setdefault(call.key, []).append(seat)
        for key, members in groups.items():
            calls = [open_[seat] for seat in members]
            # Those that never are have not come here.
            fewest = calls[0].fewest or 2 if where_it_pays else 2
            made = _made(key, calls, members, fewest)
            answers |= zip(members, made, strict=True)
        open_ = {seat: seat.go_on((answer,)) for seat, answer in answers.items()}
    return [results[seat] for seat in seats]


# Keys of calls that turned out not to be possible together.
_REFUSED: set[Hashable] = set()


def _made(
    key: Hashable, calls: Sequence[Call], seats: Sequence[_ClientCoroutine], fewest: int
) -> list[Any]:
    streams = [seat.stream for seat in seats]
    if len(calls) >= fewest and key not in _REFUSED:
        before = [stream.state for stream in streams]
        try:
            return calls[0].together(calls, streams)
        # Whatever torch cannot do for several models at once.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
        # Not in the handler: the traceback holds the stacked models in memory.
        for stream, state in zip(streams, before, strict=True):
            stream.state = state
        answers = [_alone(*pair) for pair in zip(calls, streams, strict=True)]
        # Otherwise it was one client's data.
        if not any(isinstance(answer, Exception) for answer in answers):
            _REFUSED.add(key)
            log.warning("clients are trained one by one, not together: %s", reason)
        return answers
    return [_alone(*pair) for pair in zip(calls, streams, strict=True)]


def _alone(call: Call, stream: RngContext) -> Any:
    with stream:
        try:
            return call.alone()
        except Exception as error:
            return error


# Above this, on a CPU, each model alone stays in the cache and all of them do not
# (``benchmarks/cohort.py``).
MOST_PARAMETERS = 50_000


def is_large(model: "SplitModel") -> bool:
    """Return whether a model is never faster with others on the CPU."""
    return sum(tensor.numel() for tensor in model.tensors.values()) > MOST_PARAMETERS


# Tasks that are kept: clients may have models of their own, and so tasks. They come in
# turn, so that with one less than there are models none would ever be found again.
TASKS_AT_A_TIME = 16
# Of those that were asked for last and where, by number of the seat.
_MODELS: "list[tuple[Task, torch.device, dict[int, SplitModel]]]" = []
when_forgetting(_MODELS.clear)


def scratch_model(task: "Task") -> "SplitModel":
    """Return a model to work with, whatever its content; for now no other client's.

    It is on the device of this process; the task's own one stays on the CPU.
    """
    here, device = getcurrent(), current()
    number = here.number if isinstance(here, _ClientCoroutine) else 0
    if device == CPU and isinstance(here, _ClientCoroutine) and here.where_it_pays:
        here.by_itself |= is_large(task.scratch_model)
    if device == CPU and (not isinstance(here, _ClientCoroutine) or here.by_itself):
        return task.scratch_model
    known = (models for of, at, models in _MODELS if of is task and at == device)
    models = next(known, None)
    if models is None:
        models = {}
        _MODELS[:] = [*_MODELS[1 - TASKS_AT_A_TIME :], (task, device, models)]
        # They are about models and losses of another task.
        _REFUSED.clear()
        forget_calls()
    if number not in models:
        models[number] = task.initial_model().to(device)
    return models[number]
