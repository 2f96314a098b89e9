"""Check the size of a reply before it is downloaded."""

import contextlib
import math
import threading
from collections.abc import Iterable
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
)
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree


class ReplyTooLargeError(ValueError):
    """A reply is larger than its limit."""


class Downloads:
    """Pulls replies from the SuperLink, up to a size limit.

    Flower downloads and decodes all objects of a reply in one call. No manifest
    contains their sizes, but each HTTP response has a content length, and httpx calls
    its event hooks before it reads the body.

    Parameters
    ----------
    grid : Grid
        Flower's grid. Without HTTP there is no limit.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._most = math.inf
        self._reply = ""
        # Sizes of the objects of the reply that is being pulled; 0 if unknown.
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        # Flower has no public access to its connection.
        self._runtime: Any = getattr(grid, "_runtime_client", None)
        if self._runtime is not None:
            self._runtime._client.event_hooks["response"].append(self._check)

    def pull(self, message_id: str, most: float) -> Iterable[Message]:
        """Return the reply to a message if it has arrived.

        Raises `ReplyTooLargeError` if it has more than ``most`` bytes; the SuperLink
        then drops it.
        """
        self._most = most
        try:
            return list(self._grid.pull_messages([message_id]))
        except ReplyTooLargeError:
            self._drop()
            raise
        finally:
            self._most = math.inf

    def _check(self, response: httpx.Response) -> None:
        """Raise `ReplyTooLargeError` before a body beyond the limit is read."""
        path, size = response.url.path, int(response.headers.get("content-length", 0))
        if path.endswith("/pull-messages"):
            self._reply = ""
            if size > self._most:
                self._refuse()
            response.read()
            pulled = PullAppMessagesResponse.FromString(response.content)
            with self._lock:
                self._sizes = {
                    node.object_id: 0
                    for tree in pulled.message_object_trees
                    for node in iterate_object_tree(tree)
                }
            for message in pulled.messages_list:
                self._reply = message.metadata.message_id
        elif path.endswith("/pull-object"):
            wanted = PullObjectRequest.FromString(response.request.content).object_id
            with self._lock:
                # Flower's threads continue for a moment with a refused reply.
                if wanted not in self._sizes:
                    self._refuse()
                self._sizes[wanted] = size
                if sum(self._sizes.values()) > self._most:
                    self._sizes = {}
                    self._refuse()

    def _refuse(self) -> None:
        raise ReplyTooLargeError(f"it has more than {self._most:,.0f} bytes")

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
