"""Requests to the SuperLink: repeated during outages, and safe from bad replies."""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from logging import WARNING
from typing import Any, TypeVar

import httpx
from flwr.app import Error, Message
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from flwr_frl.common.settings import SettingsError, error_line

# Seconds for which a request to an unavailable SuperLink is repeated, and the pauses in
# between, which double from the first to the longest.
OUTAGE_LIMIT = 600.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# Code of the error reply that replaces an unreadable one.
UNREADABLE = 2

T = TypeVar("T")


class ReplyTooLargeError(ValueError):
    """A reply is larger than its limit."""


class SuperLink:
    """Requests of a grid to the SuperLink.

    Flower decodes replies while it pulls them and does not catch exceptions: one
    client's reply can raise any exception, and all replies of the same pull are lost.
    So replies are pulled one by one, and an unreadable one becomes an error reply of
    its node.

    Flower downloads all objects of a reply in one call. No manifest contains their
    sizes, but each HTTP response has a content length, and httpx calls its event hooks
    before it reads the body.

    Parameters
    ----------
    grid : Grid
        Flower's grid. Without HTTP the size of replies has no limit.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        # The reply that is being pulled: the bytes that it may still have, its id, and
        # the ids of its objects.
        self._left, self._reply, self._objects = math.inf, "", set[str]()
        self._lock = threading.Lock()
        # Flower has no public access to its connection.
        self._runtime: Any = getattr(grid, "_runtime_client", None)
        if self._runtime is not None:
            self._runtime._client.event_hooks["response"].append(self._check_size)

    def request(self, call: Callable[[], T]) -> T:
        """Return the result of a call, repeated for `OUTAGE_LIMIT` during an outage.

        A message that is pushed again is delivered once: its id is a digest of its
        content, and the SuperLink stores one message per id.
        """
        deadline, pause = time.monotonic() + OUTAGE_LIMIT, FIRST_PAUSE
        while True:
            try:
                return call()
            except httpx.HTTPError as error:
                if not is_outage(error):
                    raise
                if time.monotonic() + pause > deadline:
                    raise SettingsError(
                        f"the SuperLink could not be used for {OUTAGE_LIMIT:g} s: "
                        f"{error_line(error)}"
                    ) from None
                text = "the SuperLink cannot serve; asked again in %g s: %s"
                log(WARNING, text, pause, error_line(error))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def pull(self, message: Message, largest: float) -> Message | None:
        """Return the reply to a message if it has arrived.

        Parameters
        ----------
        message : Message
            The message; its content is not used.
        largest : float
            Limit of the reply in bytes.

        Returns
        -------
        Message or None
            The reply; an error reply if it is too large, unreadable or forged.

        Raises
        ------
        httpx.HTTPError
            If the SuperLink is unavailable (`is_outage`), or refuses the request.
        """
        self._left = largest
        try:
            for reply in self._grid.pull_messages([message.metadata.message_id]):
                _check_envelope(reply, message)
                return reply
        except httpx.HTTPError:
            raise
        except ReplyTooLargeError:
            self._drop()
            reason = f"it has more than {largest:,.0f} bytes"
        except Exception as error:
            reason = error_line(error)
        else:
            return None
        finally:
            self._left = math.inf
        unreadable = Error(UNREADABLE, f"the reply cannot be read: {reason}")
        return Message(unreadable, reply_to=message)

    def _check_size(self, response: httpx.Response) -> None:
        """Raise `ReplyTooLargeError` before a body beyond the limit is read."""
        path, size = response.url.path, int(response.headers.get("content-length", 0))
        if path.endswith("/pull-messages"):
            self._reply = ""
            if size > self._left:
                raise ReplyTooLargeError
            response.read()
            pulled = PullAppMessagesResponse.FromString(response.content)
            trees = map(iterate_object_tree, pulled.message_object_trees)
            with self._lock:
                self._objects = {node.object_id for tree in trees for node in tree}
            for message in pulled.messages_list:
                self._reply = message.metadata.message_id
        elif path.endswith("/pull-object"):
            wanted = PullObjectRequest.FromString(response.request.content).object_id
            with self._lock:
                # Flower's threads continue for a moment with a refused reply.
                if wanted not in self._objects:
                    raise ReplyTooLargeError
                self._left -= size
                if self._left < 0:
                    self._objects = set()
                    raise ReplyTooLargeError

    def _drop(self) -> None:
        """Let the SuperLink drop the reply, which it keeps until the run ends."""
        if self._reply:
            request = ConfirmMessageReceivedRequest(
                node=self._grid.node,  # type: ignore[attr-defined]
                run_id=self._grid.run.run_id,
                message_object_id=self._reply,
            )
            with contextlib.suppress(httpx.HTTPError):
                self._runtime.ConfirmMessageReceived(request)


def _check_envelope(reply: Message, message: Message) -> None:
    """Raise unless a reply answers a message, from its node or the SuperLink.

    The client writes the envelope, so it may be forged.
    """
    about, asked = reply.metadata, message.metadata
    if about.reply_to_message_id != asked.message_id:
        raise ValueError("it says that it answers another message")
    of_superlink = about.src_node_id == SUPERLINK_NODE_ID and reply.has_error()
    if about.src_node_id != asked.dst_node_id and not of_superlink:
        raise ValueError(f"it says that it is of node {about.src_node_id}")


def is_outage(error: httpx.HTTPError) -> bool:
    """Return whether the server rather than the request is at fault."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)
