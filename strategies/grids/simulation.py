"""Grids for simulation: Flower's Grid in one process, or over all cores with Ray.

Flower's own simulation engine (``flwr run .``) polls all nodes for messages ten times a
second and sends the app with each message, which takes most of the time with 1,000
clients. These grids call the ClientApp directly; a message takes well under 1 ms.
"""

import itertools
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from copy import deepcopy
from functools import partial
from logging import ERROR, WARNING
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flwr_frl.common.settings import (
    ResourceError,
    SettingsError,
    TrainingDivergedError,
    need,
)
from flwr_frl.strategies.grids.contexts import Contexts
from flwr_frl.strategies.grids.nodes import ANSWERS_NO_QUERY
from flwr_frl.strategies.grids.ray_workers import RayWorkers

CLIENT_APP_ERROR = 2
# Exceptions whose message is one line for the user.
EXPECTED = (SettingsError, TrainingDivergedError)
# Chunks of a large batch for each Ray worker, enough to balance the load.
CHUNKS_A_WORKER = 4


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
            return Message(Error(CLIENT_APP_ERROR, reason), reply_to=message)

    works = [partial(reply, *pair) for pair in zip(messages, contexts, strict=True)]
    # flwr-frl's app can train clients together.
    together = getattr(app, "together", None)
    if together:
        return iter(together(works, messages, contexts))
    return (work() for work in works)


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

    # on_demand: clients train while their replies are iterated over. in_process: no
    # outages, and no clients that connect later.
    on_demand, in_process = False, True
    run = Run.create_empty(run_id=1)

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: UserConfig | None = None,
    ) -> None:
        self._app = client_app
        # Flower cannot build a Message outside of a run.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0
        self.contexts: MutableMapping[int, Context]
        self.contexts = Contexts(num_clients, run_config or {})
        self._pending: dict[str, Message] = {}
        self._numbers = itertools.count(1)
        # Reasons of exceptions whose tracebacks have been logged.
        self._shown: set[str] = set()

    def _show(self, tracebacks: dict[str, str]) -> None:
        """Log each exception of clients once, as they have no separate log."""
        for reason, text in tracebacks.items():
            if reason not in self._shown:
                self._shown.add(reason)
                log(ERROR, "a client failed: %s\n%s", reason, text.rstrip())

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self.run = run

    def create_message(  # noqa: D102
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, from 1."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages and return their ids; pulling answers them."""
        ids = []
        for message in messages:
            message_id = f"{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = message_id
            self._pending[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer messages in this process."""
        taken = [self._pending.pop(i) for i in message_ids if i in self._pending]
        return self._answers(taken) if self.on_demand else list(self._answers(taken))

    def _answers(self, messages: list[Message]) -> Iterator[Message]:
        contexts = self._contexts_of(messages)
        tracebacks: dict[str, str] = {}
        replies = answer(self._app, messages, contexts, tracebacks)
        for message, context in zip(messages, contexts, strict=True):
            reply = next(replies)
            if context.state:
                self.contexts[message.metadata.dst_node_id] = context
            self._show(tracebacks)
            yield reply

    def contexts_with_state(self) -> list[Context]:
        """Return the contexts whose state is not empty, in the order of the nodes."""
        contexts = self.contexts
        held = contexts.held() if isinstance(contexts, Contexts) else contexts.values()
        return [context for context in held if context.state]

    def _contexts_of(self, messages: Iterable[Message]) -> list[Context]:
        """Return the contexts of the nodes that the messages are for."""
        contexts = self.contexts
        look_up = contexts.__getitem__
        if isinstance(contexts, Contexts):
            look_up = contexts.look_up
        nodes = [message.metadata.dst_node_id for message in messages]
        # Messages to one node share its context.
        by_node = {node: look_up(node) for node in dict.fromkeys(nodes)}
        return [by_node[node] for node in nodes]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Answer messages in this process; the timeout is ignored."""
        return self.pull_messages(self.push_messages(messages))

    def close(self) -> None:
        """Do nothing: there is no unfinished work in one process."""


class RayGrid(InlineGrid):
    """Flower's Grid over Ray workers; same numbers as `InlineGrid`, up to rounding.

    Nodes' contexts stay in this process and are sent with the messages. Messages are
    sent in chunks, in which shared objects are serialised once. If a worker or its
    machine dies, another worker repeats its chunk once.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: UserConfig | None = None,
    ) -> None:
        super().__init__(client_app, num_clients, run_config)
        need("ray", "simulation", "backend 'ray' (not 'inline')")
        import ray

        self._ray: Any = ray
        device = str(getattr(client_app, "device", "cpu"))
        self._workers = RayWorkers(_Worker, device)
        self._shared_app = ray.put(client_app)
        self._together = int(getattr(client_app, "size", 1))
        self._queue: deque[list[Message]] = deque()
        # Worker and messages of each running chunk, by Ray's handle.
        self._running: dict[Any, tuple[Any, list[Message]]] = {}
        self._replies: dict[str, Message] = {}
        # Messages that were queued again as their worker died.
        self._retried: set[str] = set()
        # Messages in progress whose replies are no longer awaited.
        self._given_up: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages for the workers and return their ids."""
        ids = list(super().push_messages(messages))
        waiting = [self._pending.pop(i) for i in ids]
        self._queue.extend(split(waiting, self._workers.count, self._together))
        self._collect(0.0)
        return ids

    def _collect(self, timeout: float | None) -> None:
        """Wait for the first finished chunk, and give idle workers new ones."""
        workers = self._workers
        if self._queue and not self._running and not workers.idle:
            left = workers.patience()
            timeout = left if timeout is None else min(timeout, left)
        if handles := [*self._running, *workers.starting]:
            done, _ = self._ray.wait(handles, timeout=timeout)
            for handle in done:
                if handle in workers.starting:
                    workers.welcome(handle)
                else:
                    self._take(handle, *self._running.pop(handle))
        while self._queue and workers.idle:
            messages, worker = self._queue.popleft(), workers.idle.pop()
            contexts = self._contexts_of(messages)
            call = worker.answer
            handle = call.remote(self._shared_app, messages, contexts)
            self._running[handle] = worker, messages

    def _take(self, handle: Any, worker: Any, messages: list[Message]) -> None:
        try:
            replies, contexts, tracebacks = self._ray.get(handle)
            self._show(tracebacks)
            self._workers.idle.append(worker)
        except self._ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), ResourceError):
                raise cause from None
            reason = f"Ray worker failed: {str(error).splitlines()[0]}"
            log(WARNING, reason)
            self._workers.await_restart(worker)
            if self._again(messages):
                return
            failure = Error(CLIENT_APP_ERROR, reason)
            replies, contexts = [Message(failure, reply_to=m) for m in messages], []
        ids = {message.metadata.message_id for message in messages}
        if ids & self._given_up:
            # A client's old state must not replace a newer one.
            self._given_up -= ids
            return
        for context in contexts:
            self.contexts[context.node_id] = context
        for reply in replies:
            self._replies[reply.metadata.reply_to_message_id] = reply

    def _again(self, messages: list[Message]) -> bool:
        """Queue the messages of a dead worker again, separately and only once.

        One of them may have killed it, which must not affect the other clients.
        """
        ids = {message.metadata.message_id for message in messages}
        if ids & (self._retried | self._given_up):
            return False
        self._retried |= ids
        self._queue.extendleft([message] for message in reversed(messages))
        return True

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        self._collect(0.0)
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Queue messages for the workers; return the replies that arrive in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ids = list(self.push_messages(messages))
        while any(i not in self._replies for i in ids):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._give_up(ids)
                break
            self._collect(left)
        return self.pull_messages(ids)

    def close(self) -> None:
        """Cancel the work of an interrupted run.

        The next run would otherwise wait for it and receive its states.
        """
        self._queue.clear()
        self._workers.end(worker for worker, _ in self._running.values())
        self._running.clear()

    def _give_up(self, ids: list[str]) -> None:
        """Remove messages from the queue, and ignore those in progress."""
        late = {i for i in ids if i not in self._replies}
        queued = [m for m in self._queue if m[0].metadata.message_id not in late]
        self._queue = deque(queued)
        for _, messages in self._running.values():
            self._given_up |= late & {m.metadata.message_id for m in messages}


def split(
    messages: Sequence[Message], workers: int, together: int
) -> list[list[Message]]:
    """Return messages in chunks of nearly equal size, equally many for each worker.

    Only clients of the same chunk can train together, so a chunk has ``together``
    messages if that leaves no worker idle.
    """
    each = min(CHUNKS_A_WORKER, -(-len(messages) // (workers * together)))
    chunks = min(len(messages), workers * each)
    size, larger = divmod(len(messages), max(chunks, 1))
    ends = [size * i + min(i, larger) for i in range(chunks + 1)]
    return [list(messages[begin:end]) for begin, end in itertools.pairwise(ends)]


class _Worker:
    """Answers messages in a Ray worker process."""

    def ready(self) -> None:
        """Return once the worker has started."""

    def answer(
        self, app: ClientApp, messages: list[Message], contexts: list[Context]
    ) -> tuple[list[Message], list[Context], dict[str, str]]:
        tracebacks: dict[str, str] = {}
        former = [_content(context.state) for context in contexts]
        replies = list(answer(app, messages, contexts, tracebacks))
        # Send changed states only: an evaluation changes none.
        pairs = zip(contexts, former, strict=True)
        changed = [c for c, before in pairs if _content(c.state) != before]
        return replies, changed, tracebacks


def _content(state: RecordDict) -> dict[str, dict[str, Any]]:
    """Return a copy of a state for comparison; arrays are never changed in place."""
    entries = {name: dict(record) for name, record in state.items()}
    return {
        name: entry if isinstance(state[name], ArrayRecord) else deepcopy(entry)
        for name, entry in entries.items()
    }
