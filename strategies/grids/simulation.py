"""Grids for simulation: Flower's Grid in one process, or over all cores with Ray.

Flower's own simulation engine (``flwr run .``) polls all nodes for messages ten times a
second and sends the app with each message, which takes most of the time with 1,000
clients. These grids call the ClientApp directly; a message takes well under 1 ms.
"""

import itertools
import time
import traceback
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from logging import ERROR, WARNING
from types import SimpleNamespace
from typing import Any, cast

from flwr.app import Context, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.arrays import Request, enter_run, error_reply, plain, request_of
from flwr_frl.common.errors import (
    ResourceError,
    SettingsError,
    TrainingDivergedError,
    need,
)
from flwr_frl.common.messages import ANSWERS_NO_QUERY
from flwr_frl.strategies.grids.ray_workers import resources_of_a_worker, start_ray

# Exceptions whose message is one line for the user.
EXPECTED = (SettingsError, TrainingDivergedError)
# Seconds to wait for replies if there is no timeout.
FOREVER = 1e9
# Seconds within which a Ray worker must start.
STARTS_WITHIN = 300.0
# Chunks of a large batch for each Ray worker, enough to balance the load.
CHUNKS_A_WORKER = 4


class Contexts(UserDict[int, Context]):
    """The contexts of virtual nodes, created on demand.

    Parameters
    ----------
    num_clients : int
        Number of nodes; node i + 1 has the partition id i.
    run_config : UserConfig
        The clients' run config.

    Attributes
    ----------
    data : dict of int to Context or None
        Each node's context; None until it has a state or has been requested.
    """

    def __init__(self, num_clients: int, run_config: UserConfig) -> None:
        self._num_clients, self._run_config = num_clients, run_config
        self.data: dict[int, Any] = dict.fromkeys(range(1, num_clients + 1))

    def __getitem__(self, node: int) -> Context:
        self.data[node] = context = self.at(node)
        return context

    def at(self, node: int) -> Context:
        """Return a node's context; a new one is not stored."""
        if self.data[node] is not None:
            return cast(Context, self.data[node])
        about = {"partition-id": node - 1, "num-partitions": self._num_clients}
        return Context(1, node, {**about}, RecordDict(), self._run_config)


def answer(
    app: ClientApp,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    tracebacks: dict[str, str],
) -> Iterator[Message]:
    """Yield the replies to messages, as nodes do: an exception becomes an error reply.

    ``contexts``, one for each message's node, are changed in place. ``tracebacks``
    receives the traceback of each exception by its reason, except for `EXPECTED` ones
    and an app without a query handler. A `ResourceError` ends the run.
    """

    def reply(message: Message, context: Context) -> Message:
        try:
            return app(message, context)
        except ResourceError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if not isinstance(error, EXPECTED) and ANSWERS_NO_QUERY not in reason:
                tracebacks[reason] = traceback.format_exc()
            return error_reply(reason, message)

    # flwr-frl's app can train clients together. Others receive Flower's own messages.
    together = getattr(app, "together", None)
    sent = messages if together else plain(messages)
    works = [partial(reply, *pair) for pair in zip(sent, contexts, strict=True)]
    if together:
        return iter(together(works, messages, contexts))
    return (work() for work in works)


@dataclass(eq=False, repr=False)
class InlineGrid(Grid):
    """Flower's Grid in one process: a message is a call of the ClientApp.

    Parameters
    ----------
    client_app : ClientApp
        Answers the messages.
    num_clients : int
        Number of virtual nodes; node i + 1 has the partition id i.
    run_config : UserConfig, optional
        The clients' run config.
    """

    client_app: ClientApp
    num_clients: int
    run_config: UserConfig | None = None

    # on_demand: clients train while their replies are iterated over. in_process: no
    # outages, and no clients that connect later.
    on_demand, in_process = False, True
    run = SimpleNamespace(run_id=1)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Create the nodes."""
        enter_run()
        self.contexts = Contexts(self.num_clients, self.run_config or {})
        self._pending: dict[str, Request] = {}
        self._numbers = itertools.count(1)
        # Reasons of exceptions whose tracebacks have been logged.
        self._shown: set[str] = set()

    def _show(self, tracebacks: dict[str, str]) -> None:
        """Log each exception of clients once, as they have no separate log."""
        for reason, text in tracebacks.items():
            if reason not in self._shown:
                self._shown.add(reason)
                log(ERROR, "a client failed: %s\n%s", reason, text.rstrip())

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self.run = run

    def create_message(self, *arguments: Any, **keywords: Any) -> Message:
        """Raise: Flower replaced this method by the constructor of `Message`."""
        raise NotImplementedError("use Message(content, dst_node_id, message_type)")

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, from 1."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages and return their ids; pulling answers them."""
        requests = [request_of(message) for message in messages]
        for request in requests:
            request.message_id = str(next(self._numbers))
            self._pending[request.message_id] = request
        return [request.message_id for request in requests]

    def pull_messages(
        self, message_ids: Iterable[str], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Answer messages; in one process, the timeout is ignored."""
        taken = [self._pending.pop(i) for i in message_ids if i in self._pending]
        replies = self._answers(taken, timeout)
        return replies if self.on_demand else list(replies)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and answer them."""
        return self.pull_messages(self.push_messages(messages), timeout=timeout)

    def _answers(
        self, messages: list[Request], timeout: float | None
    ) -> Iterable[Message]:
        contexts = [self.contexts.at(message.node) for message in messages]
        tracebacks: dict[str, str] = {}
        replies = answer(self.client_app, messages, contexts, tracebacks)
        for context in contexts:
            reply = next(replies)
            if context.state:
                self.contexts[context.node_id] = context
            if tracebacks:
                self._show(tracebacks)
            yield reply

    def contexts_with_state(self) -> list[Context]:
        """Return the contexts whose state is not empty, in the order of the nodes."""
        return [c for c in self.contexts.data.values() if c and c.state]


class RayGrid(InlineGrid):
    """Flower's Grid over Ray workers; same numbers as `InlineGrid`, up to rounding.

    Nodes' contexts stay in this process and are sent with the messages. A chunk of
    messages is a Ray task, in which shared objects are serialised once. Ray queues the
    tasks, starts the processes that run them, and replaces those that die.
    """

    def __post_init__(self) -> None:
        """Start the workers."""
        super().__post_init__()
        need("ray", "simulation", "backend 'ray' (not 'inline')")
        import ray

        self._ray: Any = ray
        start_ray()
        device = str(getattr(self.client_app, "device", "cpu"))
        self._workers, reserved = resources_of_a_worker(device, ray.cluster_resources())  # type: ignore[no-untyped-call]
        # A worker keeps its GPU and its caches for the next task (max_calls=0).
        options: dict[str, Any] = {"max_retries": 0, "max_calls": 0, **reserved}
        self._task: Any = ray.remote(**options)
        self._app_of_workers = ray.put(self.client_app)
        self._together = int(getattr(self.client_app, "size", 1))
        try:
            ready = self._task(_ready).remote(self._app_of_workers)
            ray.get(ready, timeout=STARTS_WITHIN)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise SettingsError(f"no Ray worker starts: {reason}") from None

    def _answers(
        self, messages: list[Request], timeout: float | None
    ) -> Iterable[Message]:
        """Return the replies that arrive in time, in the order of the messages."""
        until = time.monotonic() + (FOREVER if timeout is None else timeout)
        replies, lost = self._run(split(messages, self._workers, self._together), until)
        # One message may have killed the worker of its chunk, which must not affect the
        # other clients. So each is repeated separately.
        again, lost = self._run([[message] for message, _ in lost], until)
        failed = [error_reply(reason, message) for message, reason in lost]
        by_id = {r.metadata.reply_to_message_id: r for r in [*replies, *again, *failed]}
        order = (message.metadata.message_id for message in messages)
        return [by_id[i] for i in order if i in by_id]

    def _run(
        self, chunks: list[list[Request]], until: float
    ) -> tuple[list[Message], list[tuple[Request, str]]]:
        """Return replies, and the messages of dead workers with the reason."""
        replies: list[Message] = []
        lost: list[tuple[Request, str]] = []
        task = self._task(_answer_chunk)
        running = {}
        for chunk in chunks:
            contexts = [self.contexts.at(message.node) for message in chunk]
            running[task.remote(self._app_of_workers, chunk, contexts)] = chunk
        try:
            while running and (left := until - time.monotonic()) > 0:
                done, _ = self._ray.wait([*running], timeout=left)
                for handle in done:
                    chunk = running.pop(handle)
                    try:
                        new, contexts, tracebacks = self._ray.get(handle)
                    except self._ray.exceptions.RayError as error:
                        if isinstance(getattr(error, "cause", None), ResourceError):
                            raise error.cause from None
                        reason = f"Ray worker failed: {str(error).splitlines()[0]}"
                        log(WARNING, reason)
                        lost += [(message, reason) for message in chunk]
                        continue
                    replies += new
                    self._show(tracebacks)
                    # The nodes' new states
                    self.contexts |= {each.node_id: each for each in contexts}
        finally:
            # After a timeout or an interruption, nobody awaits these.
            for handle in running:
                self._ray.cancel(handle, force=True)
        return replies, lost


def split(
    messages: Sequence[Request], workers: int, together: int
) -> list[list[Request]]:
    """Return messages in chunks of nearly equal size, equally many for each worker.

    Only clients of the same chunk can train together, so a chunk has ``together``
    messages if that leaves no worker idle.
    """
    each = min(CHUNKS_A_WORKER, -(-len(messages) // (workers * together)))
    chunks = min(len(messages), workers * each)
    size, larger = divmod(len(messages), max(chunks, 1))
    ends = [size * i + min(i, larger) for i in range(chunks + 1)]
    return [list(messages[begin:end]) for begin, end in itertools.pairwise(ends)]


def _ready(app: ClientApp) -> None:
    """Do nothing: a Ray worker has started, and can load the app."""


def _answer_chunk(
    app: ClientApp, messages: list[Message], contexts: list[Context]
) -> tuple[list[Message], list[Context], dict[str, str]]:
    """Return the replies, the contexts with a state, and tracebacks of exceptions."""
    tracebacks: dict[str, str] = {}
    replies = list(answer(app, messages, contexts, tracebacks))
    return replies, [context for context in contexts if context.state], tracebacks
