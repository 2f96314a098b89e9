"""Messages built from others equal those that Flower's constructor builds."""

import pickle

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from flwr_frl.common.arrays import (
    Matrix,
    ReplyRows,
    Request,
    RowArrays,
    RowReply,
    layout_of,
    memory_record,
    message_like,
    reply_with,
    request_of,
)
from flwr_frl.strategies.server.replies import is_valid_row


def test_an_unread_request_and_its_reply_equal_plain_messages() -> None:
    records = {"arrays": memory_record({"w": np.arange(3.0)})}
    template = Message(RecordDict(), 0, "train", group_id="3")
    content = RecordDict({**records, "config": ConfigRecord({"server-round": 3})})
    plain = message_like(template, content, dst_node_id=7, message_id="5")
    request = Request(template, 7, records, {}, {"server-round": 3}, "5")
    assert request_of(request) is request
    read = request_of(plain)
    assert (read.node, read.records, read.config) == (7, records, {"server-round": 3})
    matrix = Matrix(np.ones((2, 3), np.float32), layout_of(("w",), ((3,),)))
    rows = ReplyRows(matrix, {"num-examples": [4, 5]})
    reply = RowReply(7, RowArrays(rows, 1), request)
    assert reply.is_unread
    assert reply.content == RecordDict(
        {
            "arrays": memory_record({"w": np.ones(3, np.float32)}),
            "metrics": MetricRecord({"num-examples": 5}),
        }
    )
    assert reply.metadata.reply_to_message_id == "5"
    assert reply.metadata.src_node_id == 7
    assert request.metadata.__dict__ == plain.metadata.__dict__
    assert request.content == content


@pytest.mark.parametrize("part", ["content", "metadata"])
def test_a_request_that_was_read_counts_as_changed(part) -> None:
    request = Request(Message(RecordDict(), 0, "train"), 7, {}, {"lr": 0.1})
    getattr(request, part)
    request.content["config"]["lr"] = 0.2
    assert request_of(request).config == {"lr": 0.2}
    copy = pickle.loads(pickle.dumps(request))
    assert type(copy) is Message
    assert copy.content == request.content


def test_a_reply_equals_flower_s():
    request = Message(RecordDict(), 7, "train", group_id="3")
    metadata = {"_message_id": "a", "_run_id": 5, "_delivered_at": "2026-01-01"}
    request.metadata.__dict__.update(metadata)
    expected = Message(RecordDict(), reply_to=request)
    reply = reply_with(RecordDict(), request)
    built, flower_s = reply.metadata.__dict__, expected.metadata.__dict__
    times = "_created_at", "_ttl"
    assert built.keys() == flower_s.keys()
    assert {**built, **{n: flower_s[n] for n in times}} == flower_s
    assert built["_created_at"] + built["_ttl"] == (
        request.metadata.created_at + request.metadata.ttl
    )


def test_a_message_like_another_differs_only_in_given_fields():
    first = Message(RecordDict(), 7, "train", group_id="3")
    other = message_like(first, RecordDict(), dst_node_id=8)
    expected = {**first.metadata.__dict__, "_dst_node_id": 8}
    assert other.metadata.__dict__ == expected
    assert first.metadata.dst_node_id == 7


def test_a_valid_row_is_finite_and_has_the_layout_of_its_round():
    layout, other = (layout_of((name,), ((2,),)) for name in "wv")
    values = np.array([[1, 2], [3, np.nan]], np.float32)
    rows = ReplyRows(Matrix(values, layout), {"num-examples": [4, 5]})
    template = Message(RecordDict(), 0, "train")
    replies = [RowReply(i, RowArrays(rows, i), template) for i in range(2)]
    assert [is_valid_row(reply, layout) for reply in replies] == [True, False]
    # A reply may be checked for an earlier round and again for the current one.
    assert not is_valid_row(replies[0], other)
    assert not is_valid_row(replies[0], None)
    assert replies[0].content["arrays"]["w"].numpy().tolist() == [1, 2]
    # It may have been changed since it was read.
    assert not is_valid_row(replies[0], layout)
