"""Clients of one process that train together: their equal calls are computed as one.

Each client's work runs unchanged in its own greenlet, up to its next call of
`local_training.train` or `gradient`. When all have arrived at one, calls of the same
shape are computed together on stacked models, and each client continues with its
result. Other calls are made alone. One client runs at a time, with its own state of
torch's generators, so the numbers equal those of one client after another, up to
rounding. Evaluation is not batched: together it takes 0.8 to 1.9 times as long.
"""

from collections.abc import Callable, Hashable, Sequence
from logging import getLogger
from typing import Any, Protocol, TypeVar

import torch
from greenlet import getcurrent, greenlet

from flwr_frl.task.devices import RngContext, current
from flwr_frl.task.run_cache import run_object

Result = TypeVar("Result")
log = getLogger("task")


class Call(Protocol):
    """A call that several clients can make together."""

    @property
    def key(self) -> Hashable:
        """Equal for calls that can be made together; None for a call made alone."""

    @property
    def fewest(self) -> int | None:
        """Fewest clients that are faster together; None if no number is."""

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
    """One client's work, which pauses at each call."""

    def __init__(
        self, work: Callable[[], Any], number: int, where_it_pays: bool
    ) -> None:
        super().__init__(work)
        self.number = number
        self.where_it_pays = where_it_pays
        # True if this client never joins a batched call; it then shares the task's
        # model instead of holding a copy.
        self.is_alone = False
        self.stream = RngContext()

    def resume(self, answer: Any = None) -> Any:
        """Return the next call, or the result of the work."""
        with self.stream:
            return self.switch(*([] if answer is None else [answer]))


def current_client() -> ClientCoroutine | None:
    """Return the client at work; None outside of a cohort."""
    client = getcurrent()
    return client if isinstance(client, ClientCoroutine) else None


class RefusedKeys(set[Hashable]):
    """Keys of calls of a run that torch cannot make together."""


def make(call: Call) -> Any:
    """Make a call, together with equal calls of other clients if there are any."""
    client = current_client()
    if client is None or not _has_key(call):
        return call.alone()
    # Gradient mode and autocast are the thread's: they would reach other clients.
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(current().type):
        return call.alone()
    if client.is_alone or (client.where_it_pays and call.fewest is None):
        return call.alone()
    assert client.parent is not None
    (answer,) = client.parent.switch(call)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _has_key(call: Call) -> bool:
    """Return True if a call can be compared; its loss may not be hashable."""
    try:
        hash(call.key)
    except TypeError:
        return False
    return call.key is not None


def together(
    works: Sequence[Callable[[], Result]], size: int, where_it_pays: bool = False
) -> list[Result]:
    """Run the work of several clients, in cohorts of at most ``size``.

    Parameters
    ----------
    works : sequence of callable
        Each seeds torch's generator before it draws.
    size : int
        Most clients that train together. Each has its own model meanwhile, unless it
        makes all calls alone.
    where_it_pays : bool, default False
        Make calls one by one if there are too few clients to gain from batching.

    Returns
    -------
    list
        The results, in the order of ``works``.
    """
    results: list[Result] = []
    for start in range(0, len(works), size):
        results += _cohort(works[start : start + size], where_it_pays)
    return results


def _cohort(works: Sequence[Callable[[], Any]], where_it_pays: bool) -> list[Any]:
    clients = [
        ClientCoroutine(work, number, where_it_pays)
        for number, work in enumerate(works)
    ]
    results: dict[ClientCoroutine, Any] = {}
    pending: dict[ClientCoroutine, Any] = {
        client: client.resume() for client in clients
    }
    while pending:
        for client in [client for client in pending if client.dead]:
            results[client] = pending.pop(client)
        groups: dict[Hashable, list[ClientCoroutine]] = {}
        for client, call in pending.items():
            groups.setdefault(call.key, []).append(client)
        answers: dict[ClientCoroutine, Any] = {}
        for members in groups.values():
            calls = [pending[client] for client in members]
            # `make` has returned early for calls that never gain from batching.
            fewest = calls[0].fewest or 2 if where_it_pays else 2
            answers |= zip(members, _answers(calls, members, fewest), strict=True)
        pending = {client: client.resume((a,)) for client, a in answers.items()}
    return [results[client] for client in clients]


def _answers(
    calls: Sequence[Call], clients: Sequence[ClientCoroutine], fewest: int
) -> list[Any]:
    """Return the results of calls with the same key, or exceptions in their place."""
    key, refused = calls[0].key, run_object(RefusedKeys)
    streams = [client.stream for client in clients]
    reason = ""
    if len(calls) >= fewest and key not in refused:
        states = [stream.state for stream in streams]
        try:
            return calls[0].together(calls, streams)
        # torch raises exceptions of many types for what it cannot batch.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
        # Not in the handler, whose traceback holds the stacked models in memory.
        for stream, state in zip(streams, states, strict=True):
            stream.state = state
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
