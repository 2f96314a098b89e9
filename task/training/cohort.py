"""Clients of one process that train together: their equal calls are computed as one.

Each client's work runs unchanged in its own greenlet, up to its next call of
`local_training.train` or `gradient`. When all have arrived at one, calls of the same
shape are computed together on stacked models, and each client continues with its
result. Other calls are made alone. One client runs at a time, with its own state of
torch's generators, so the numbers equal those of one client after another, up to
rounding. Evaluation is not batched: together it takes 0.8 to 1.9 times as long.
"""

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from logging import getLogger
from typing import Any, Protocol, TypeVar

import torch
from greenlet import getcurrent, greenlet

from flwr_frl.common.run_cache import run_cache, run_object
from flwr_frl.task.base import Task
from flwr_frl.task.devices import CPU, RngContext, current, is_out_of_memory
from flwr_frl.task.models.frozen import new_model
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training.captured import forget

Result = TypeVar("Result")
log = getLogger("task")
# On a CPU, clients share one model if it has more values, as a model for each client of
# a cohort would take too much memory.
MOST_HELD = 1_000_000
# Number of scratch models in a process: of two cohorts, or of clients with different
# tasks, which are used in turn.
MODELS_AT_A_TIME = 256


class Call(Protocol):
    """A call that several clients can make together."""

    @property
    def key(self) -> Hashable:
        """Equal for calls that can be made together; None for a call made alone."""

    @property
    def fewest(self) -> int | None:
        """Fewest clients that are faster together; None if they never are."""

    def alone(self) -> Any:
        """Make the call for one client."""

    @staticmethod
    def together(calls: Sequence[Any], streams: Sequence[RngContext]) -> list[Any]:
        """Make calls with the same key.

        Parameters
        ----------
        calls : sequence of Call
            One for each client.
        streams : sequence of RngContext
            Random numbers for a client are drawn within its context.

        Returns
        -------
        list
            A result or an exception for each call. If this method itself raises, the
            clients are unchanged.
        """


class ClientCoroutine(greenlet):
    """One client's work, which pauses at each call.

    Parameters
    ----------
    work : callable
        The work; its result is the client's result.
    number : int
        The client's place among those that wait in its cohort, from 0.
    only_if_faster : bool
        See `each_together`.
    """

    def __init__(
        self, work: Callable[[], Any], number: int, only_if_faster: bool
    ) -> None:
        super().__init__(work)
        self.number = number
        self.only_if_faster = only_if_faster
        # True if this client joins no batched call, as its model is above `MOST_HELD`.
        # Such clients share the task's model instead of holding a copy each.
        self.is_alone = False
        self.stream = RngContext()

    def resume(self, *answer: Any) -> Any:
        """Return the next call, or the result of the work."""
        with self.stream:
            return self.switch(*answer)


class RefusedKeys(set[Hashable]):
    """Keys of a run's calls that torch failed to batch."""


class CohortLimit:
    """Most clients of a run that train together, fewer after memory has run out."""

    most = sys.maxsize

    def halve(self, count: int, error: Exception) -> bool:
        """Halve the limit if memory has run out, and return whether it has changed.

        Parameters
        ----------
        count : int
            Number of clients that were trained together.
        error : Exception
            The exception that was raised.
        """
        if not is_out_of_memory(error):
            return False
        forget()
        if count < 2:
            return False
        self.most = count // 2
        text = "device %r is out of memory with %d clients together; continuing with %d"
        log.warning(text, str(current()), count, self.most)
        return True


def make(call: Call) -> Any:
    """Return a call's result, computed with those of other clients' equal calls."""
    client = getcurrent()
    if not isinstance(client, ClientCoroutine) or not _has_key(call):
        return call.alone()
    # Gradient mode and autocast belong to the thread, so they would affect the other
    # clients, which run while this one waits.
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(current().type):
        return call.alone()
    if client.is_alone or (client.only_if_faster and call.fewest is None):
        return call.alone()
    assert client.parent is not None
    (answer,) = client.parent.switch(call)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _has_key(call: Call) -> bool:
    """Return True if a call can be made together; its loss may not be hashable."""
    try:
        hash(call.key)
    except TypeError:
        return False
    return call.key is not None


def each_together(
    works: Sequence[Callable[[], Result]], size: int, only_if_faster: bool = False
) -> Iterator[Result]:
    """Run the work of several clients, in cohorts of at most ``size``.

    Clients that make all calls alone run one after the other, and the result of each is
    yielded at once. As soon as a client waits for a batched call, results are held
    until its cohort has finished.

    Parameters
    ----------
    works : sequence of callable
        Each seeds torch's generator before it draws.
    size : int
        Most clients that train together; with 1, the steps of each are captured. A
        client that waits for others holds its own model.
    only_if_faster : bool, default False
        Make calls one by one where batching them would not be faster.

    Yields
    ------
    object
        The results, in the order of ``works``.
    """
    waiting, limit = deque(works), run_object(CohortLimit)
    least = min(size, 2)
    while waiting:
        yield from _cohort(waiting, min(size, limit.most), least, only_if_faster)


def _cohort(
    works: deque[Callable[[], Any]], size: int, least: int, only_if_faster: bool
) -> Iterator[Any]:
    """Run works, which are removed, until a cohort is complete and has finished.

    ``least`` is the fewest clients that are batched if it need not be faster.
    """
    clients: list[ClientCoroutine] = []
    results: dict[ClientCoroutine, Any] = {}
    pending: dict[ClientCoroutine, Any] = {}
    while works and len(clients) < size:
        client = ClientCoroutine(works.popleft(), len(clients), only_if_faster)
        pending[client] = client.resume()
        if client.dead and len(pending) == 1:
            yield pending.pop(client)
            continue
        clients.append(client)
    while pending:
        for client in [client for client in pending if client.dead]:
            results[client] = pending.pop(client)
        groups: dict[Hashable, list[ClientCoroutine]] = {}
        for client, call in pending.items():
            groups.setdefault(call.key, []).append(client)
        answers: dict[ClientCoroutine, Any] = {}
        for members in groups.values():
            calls = [pending[client] for client in members]
            # Calls that never gain from batching did not leave `make`.
            fewest = calls[0].fewest or 2 if only_if_faster else least
            answers |= zip(members, _answers(calls, members, fewest), strict=True)
        pending = {client: client.resume((a,)) for client, a in answers.items()}
    yield from (results[client] for client in clients)


def _answers(
    calls: Sequence[Call], clients: Sequence[ClientCoroutine], fewest: int
) -> list[Any]:
    """Return the result, or the exception, of each of some calls with the same key."""
    key, refused, limit = calls[0].key, run_object(RefusedKeys), run_object(CohortLimit)
    if len(calls) > limit.most:
        parts = [slice(i, i + limit.most) for i in range(0, len(calls), limit.most)]
        halves = (_answers(calls[part], clients[part], fewest) for part in parts)
        return list(chain.from_iterable(halves))
    streams = [client.stream for client in clients]
    reason, halved = "", False
    if len(calls) >= fewest and key not in refused:
        states = [stream.state for stream in streams]
        try:
            return calls[0].together(calls, streams)
        # torch raises exceptions of many types for what it cannot batch.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            halved = limit.halve(len(calls), error)
        # Outside of the handler, whose traceback keeps the stacked models in memory.
        for stream, state in zip(streams, states, strict=True):
            stream.state = state
        if halved:
            return _answers(calls, clients, fewest)
    answers = [_alone(*pair) for pair in zip(calls, streams, strict=True)]
    # If a call also fails alone, the cause is that client's data, not the batching.
    if reason and not any(isinstance(answer, Exception) for answer in answers):
        refused.add(key)
        log.warning("clients are trained one by one, not together: %s", reason)
    return answers


def _alone(call: Call, stream: RngContext) -> Any:
    with stream:
        try:
            return call.alone()
        except Exception as error:
            return error


@run_cache(maxsize=MODELS_AT_A_TIME)
def _model_of(task: Task, device: torch.device, number: int) -> SplitModel:
    """Return the scratch model of the client with this place in its cohort."""
    return new_model(task).to(device)


def scratch_model(task: Task) -> SplitModel:
    """Return a model with arbitrary content that no other client uses meanwhile.

    It is on the device of this process; the task's own model stays on the CPU.
    """
    client, is_on_cpu = getcurrent(), current() == CPU
    if not isinstance(client, ClientCoroutine):
        return task.scratch_model if is_on_cpu else _model_of(task, current(), 0)
    if is_on_cpu and client.only_if_faster:
        client.is_alone |= task.scratch_model.structure.num_values > MOST_HELD
    if is_on_cpu and client.is_alone:
        return task.scratch_model
    return _model_of(task, current(), client.number)
