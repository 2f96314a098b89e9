"""Messages built from others equal those that Flower's constructor builds."""

from flwr.app import Message, RecordDict

from flwr_frl.common.arrays import message_like, reply_with


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
