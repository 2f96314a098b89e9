"""A reply that is too large is rejected by its size, before it is downloaded."""

import math
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from flwr_frl.strategies.grids.inbox import SuperLink as Requests

RUN, NODE = 7, 11
MODEL = {"w": np.arange(1000, dtype=np.float32)}
LARGE = 4_000_000


def without_content(message: Message):
    bare = Message(RecordDict(), reply_to=message)
    bare.metadata.__dict__.update(message.metadata.__dict__)
    return message_to_proto(bare)


class SuperLink(BaseHTTPRequestHandler):
    """The part of a SuperLink that hands replies to a ServerApp."""

    replies: ClassVar[dict[str, Message]] = {}
    objects: ClassVar[dict[str, bytes]] = {}
    sent: ClassVar[list[int]] = []

    def setup(self) -> None:
        # Without a limit, the kernel buffers a large response before the client can
        # reject it, and the response would count as sent.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        super().setup()

    def log_message(self, *arguments: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        action = self.path.rsplit("/", 1)[1]
        answer = {
            "pull-messages": self.pull_messages,
            "pull-object": self.pull_object,
            "confirm-message-received": self.confirm,
        }[action](body).SerializeToString()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        for start in range(0, len(answer), 2**16):
            try:
                self.wfile.write(answer[start : start + 2**16])
            except OSError:
                return
        self.sent.append(len(answer))

    def pull_messages(self, body: bytes) -> PullAppMessagesResponse:
        asked = PullAppMessagesRequest.FromString(body).message_ids
        replies = [self.replies[i] for i in asked if i in self.replies]
        return PullAppMessagesResponse(
            messages_list=[without_content(r) for r in replies],
            message_object_trees=[get_object_tree(r) for r in replies],
        )

    def pull_object(self, body: bytes) -> PullObjectResponse:
        content = self.objects[PullObjectRequest.FromString(body).object_id]
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=content
        )

    def confirm(self, body: bytes) -> ConfirmMessageReceivedResponse:
        return ConfirmMessageReceivedResponse()


@pytest.fixture
def link() -> Iterator[HttpGrid]:
    for kept in (SuperLink.replies, SuperLink.objects):
        kept.clear()
    SuperLink.sent.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), SuperLink)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    grid = HttpGrid(f"127.0.0.1:{server.server_port}", insecure=True, token="t")
    grid.set_run(Run.create_empty(RUN))
    try:
        yield grid
    finally:
        grid.close()
        server.shutdown()
        server.server_close()
        thread.join()


def reply_with(change: Callable[[RecordDict], object]) -> Message:
    """Store a client's reply in the SuperLink, and return the message it replies to."""
    message = Message(RecordDict(), NODE, "train")
    message.metadata.__dict__.update(_message_id="f" * 64, _run_id=RUN)
    record = ArrayRecord({n: Array(a) for n, a in MODEL.items()})
    reply = Message(RecordDict({"arrays": record}), reply_to=message)
    change(reply.content)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    SuperLink.replies["f" * 64] = reply
    for name, each in get_all_nested_objects(reply).items():
        SuperLink.objects[name] = each.deflate()
    return message


def pull(grid: HttpGrid, message: Message, most: float) -> Message:
    reply = Requests(grid).pull(message, most)
    assert reply is not None
    return reply


def one_record(content: RecordDict) -> None:
    content["extra"] = ConfigRecord({"data": bytes(LARGE)})


def many_pieces(content: RecordDict) -> None:
    # Each record is small enough.
    for i in range(20):
        values = np.full(LARGE // 80, i, np.float32)
        content[f"extra-{i}"] = ArrayRecord({"x": Array(values)})


def test_valid_reply_is_received(link: HttpGrid) -> None:
    reply = pull(link, reply_with(lambda content: None), 10_000)
    np.testing.assert_array_equal(reply.content["arrays"]["w"].numpy(), MODEL["w"])


@pytest.mark.parametrize("attack", [one_record, many_pieces])
def test_large_reply_is_an_error_of_its_node_and_is_not_downloaded(
    link: HttpGrid, attack: Callable[[RecordDict], None]
) -> None:
    # Precondition: without a limit, the whole reply is downloaded.
    reply = pull(link, reply_with(attack), math.inf)
    assert not reply.has_error()
    assert sum(SuperLink.sent) > LARGE
    SuperLink.sent.clear()
    reply = pull(link, reply_with(attack), LARGE / 4)
    assert reply.metadata.src_node_id == NODE
    assert "it has more than 1,000,000 bytes" in reply.error.reason
    # Each of Flower's threads may finish the object that it is downloading.
    assert sum(SuperLink.sent) < LARGE / 2


def test_rejected_reply_does_not_affect_later_replies(link: HttpGrid) -> None:
    requests = Requests(link)
    for change in (many_pieces, lambda content: None) * 3:
        reply = requests.pull(reply_with(change), 100_000)
        assert reply.has_error() == (change is many_pieces)
