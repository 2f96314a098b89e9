"""A grid that survives unreadable replies and outages of the SuperLink."""

import math
import time
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any, NamedTuple, TypeVar

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid

from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies.grids.downloads import Downloads

# Seconds for which a request to an unavailable SuperLink is repeated, and the pauses in
# between, which double from the first to the longest.
OUTAGE_LIMIT = 600.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# Code of the error reply that replaces an unreadable one.
UNREADABLE = 2

T = TypeVar("T")


def delegate(attribute: str, name: str) -> Any:
    """Return a property that reads ``name`` from the object in ``attribute``."""
    return property(lambda self: getattr(getattr(self, attribute), name))


class GridDecorator(Grid):
    """A grid that passes all calls on to another grid, unless a subclass handles them.

    Parameters
    ----------
    grid : Grid
        The decorated grid.
    """

    grid: Grid

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    # `Grid` defines these, so that `__getattr__` is not called for them.
    set_run = delegate("grid", "set_run")
    run = delegate("grid", "run")
    create_message = delegate("grid", "create_message")
    get_node_ids = delegate("grid", "get_node_ids")
    get_nodes = delegate("grid", "get_nodes")
    push_messages = delegate("grid", "push_messages")
    pull_messages = delegate("grid", "pull_messages")
    send_and_receive = delegate("grid", "send_and_receive")

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["grid"], name)


class _Open(NamedTuple):
    """A message without its content, and the size limit of its reply in bytes."""

    message: Message
    most: float


class PatientGrid(GridDecorator):
    """Waits out outages of the SuperLink, and pulls every reply separately.

    Flower decodes replies while it pulls them and does not catch exceptions: one
    client's reply can raise any exception, and all replies of the same pull are lost.
    So replies are pulled one by one, and an unreadable one becomes an error reply of
    its node. If the SuperLink cannot be reached or answers with a server error, as
    while its database is locked, a pull stops there, and other requests are repeated
    for `OUTAGE_LIMIT`. A message that is pushed again is delivered once: its id is a
    digest of its content, and the SuperLink stores one message per id.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    largest_reply : callable
        Returns the size limit in bytes of replies to a kind of message when it is
        pushed. Larger replies are not downloaded.
    """

    def __init__(
        self, grid: Grid, largest_reply: Callable[[str], float] = lambda kind: math.inf
    ) -> None:
        super().__init__(grid)
        self._largest_reply = largest_reply
        self._downloads = Downloads(grid)
        # Messages that await replies.
        self._open: dict[str, _Open] = {}
        # Messages at which a pull has stopped, not checked since.
        self._stopped: set[str] = set()

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes, once the SuperLink is available."""
        return self._insist(lambda: list(self.grid.get_node_ids()))

    def get_nodes(self) -> Iterable[Any]:
        """Return information about the nodes, once the SuperLink is available."""
        nodes: Callable[[], Iterable[Any]] = getattr(self.grid, "get_nodes", list)
        return self._insist(lambda: list(nodes()))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, once the SuperLink is available; an id is empty if refused."""
        messages, now = list(messages), time.time()
        # Expired messages get no reply.
        self._open = {i: o for i, o in self._open.items() if _ends(o.message) > now}
        kinds = {message.metadata.message_type for message in messages}
        most = {kind: self._largest_reply(kind) for kind in kinds}
        # Flower refuses a request without messages.
        ids = self._insist(lambda: list(self.grid.push_messages(messages)))
        for message_id, message in zip(ids, messages, strict=False):
            if message_id:
                about = message.metadata
                to = about.dst_node_id, about.message_type
                stub = Message(RecordDict(), *to, ttl=about.ttl)
                stub.metadata.__dict__["_message_id"] = message_id
                self._open[message_id] = _Open(stub, most[about.message_type])
        return ids

    def _insist(self, call: Callable[[], T]) -> T:
        deadline, pause = time.monotonic() + OUTAGE_LIMIT, FIRST_PAUSE
        while True:
            try:
                return call()
            except httpx.HTTPError as error:
                if not _is_outage(error):
                    raise
                if time.monotonic() + pause > deadline:
                    raise SettingsError(
                        f"the SuperLink could not be used for {OUTAGE_LIMIT:g} s: "
                        f"{_one_line(error)}"
                    ) from None
                text = "the SuperLink cannot serve; asked again in %g s: %s"
                log(WARNING, text, pause, _one_line(error))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, at most one per message.

        At an outage the pull stops, and the first of consecutive outages is logged.
        """
        self._stopped &= self._open.keys()
        replies = []
        # Messages that stopped a pull come last, so that they do not block others.
        for message_id in sorted(message_ids, key=self._stopped.__contains__):
            # Messages that are not open have been answered.
            if message_id not in self._open:
                continue
            try:
                reply = self._pull(message_id)
            except httpx.HTTPError as error:
                if not _is_outage(error):
                    raise
                if not self._stopped:
                    log(WARNING, "the SuperLink gives no replies: %s", _one_line(error))
                self._stopped.add(message_id)
                break
            self._stopped.discard(message_id)
            if reply:
                replies.append(reply)
                del self._open[message_id]
        return replies

    def _pull(self, message_id: str) -> Message | None:
        """Return the reply to a message, or an error reply if it is unusable."""
        message, most = self._open[message_id]
        try:
            for reply in self._downloads.pull(message_id, most):
                self._check(reply, message)
                return reply
        except httpx.HTTPError:
            raise
        except Exception as error:
            reason = f"the reply cannot be read: {_one_line(error)}"
            return Message(Error(UNREADABLE, reason), reply_to=message)
        return None

    def _check(self, reply: Message, message: Message) -> None:
        """Raise unless a reply answers a message, from its node or the SuperLink.

        The client writes the envelope, so it may be forged.
        """
        about, asked = reply.metadata, message.metadata
        if about.reply_to_message_id != asked.message_id:
            raise ValueError("it says that it answers another message")
        of_superlink = about.src_node_id == SUPERLINK_NODE_ID and reply.has_error()
        if about.src_node_id != asked.dst_node_id and not of_superlink:
            raise ValueError(f"it says that it is of node {about.src_node_id}")


def _ends(message: Message) -> float:
    return float(message.metadata.created_at + message.metadata.ttl)


def _is_outage(error: httpx.HTTPError) -> bool:
    """Return whether the server rather than the request is at fault."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
