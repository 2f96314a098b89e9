"""Messages that are built from others, compared with those of Flower's constructor."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from flwr_frl.messages import message_like, reply_with

VARYING = {"_created_at", "_ttl"}


@pytest.fixture(autouse=True)
def run():
    # As `InlineGrid` does: Flower cannot build a Message outside of a run.
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0


def fields(message: Message) -> dict[str, object]:
    """Return the metadata, except for the times."""
    metadata = vars(message.metadata)
    return {n: value for n, value in metadata.items() if n not in VARYING}


def test_copied_message_equals_a_new_one_with_its_own_metadata_and_content():
    first = Message(RecordDict(), 3, "train", group_id="7")
    content = RecordDict({"config": ConfigRecord({"a": 1})})
    copied = message_like(first, content, dst_node_id=4)
    assert fields(copied) == fields(Message(content, 4, "train", group_id="7"))
    assert copied.content is content
    assert not copied.has_error()
    assert first.metadata.dst_node_id == 3
    assert len(first.content) == 0


def test_reply_equals_that_of_flowers_constructor():
    asked = Message(RecordDict(), 3, "train", group_id="7")
    asked.metadata.__dict__["_message_id"] = "12"
    expected = Message(RecordDict(), reply_to=asked)
    reply = reply_with(RecordDict(), asked)
    assert fields(reply) == fields(expected)
    assert reply.metadata.reply_to_message_id == "12"
    about = reply.metadata
    ends = asked.metadata.created_at + asked.metadata.ttl
    assert about.created_at + about.ttl == pytest.approx(ends)
