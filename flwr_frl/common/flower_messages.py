"""Flower's messages and records, made and read without the checks of each entry."""

import time
from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import Message, Metadata, RecordDict

Record = TypeVar("Record")


def fill(record: Record, entries: Mapping[str, Any]) -> Record:
    """Add entries to one of Flower's records, and return it.

    The entries must be of allowed types. Flower checks each of them, which takes
    longer than all other work on the small messages of a simulation.
    """
    record.__dict__["_data"].update(entries)
    return record


def entries_of(record: Any) -> dict[str, Any]:
    """Return the dictionary inside one of Flower's records. Do not modify it."""
    entries: dict[str, Any] = record.__dict__["_data"]
    return entries


def message_like(message: Message, content: RecordDict, **fields: Any) -> Message:
    """Return a message with other content, and with some fields of metadata replaced.

    Parameters
    ----------
    message : Message
        A valid message, which is not changed.
    content : RecordDict
        The content.
    **fields
        Fields of `Metadata`, of valid types.
    """
    metadata = Metadata.__new__(Metadata)
    metadata.__dict__.update(message.metadata.__dict__)
    metadata.__dict__.update({f"_{name}": value for name, value in fields.items()})
    copied = Message.__new__(Message)
    copied.__dict__.update(_metadata=metadata, _content=content, _error=None)
    return copied


def reply_with(content: RecordDict, message: Message) -> Message:
    """Return a reply to a message, equal to ``Message(content, reply_to=message)``."""
    asked, now = message.metadata, time.time()
    return message_like(
        message,
        content,
        message_id="",
        reply_to_message_id=asked.message_id,
        src_node_id=asked.dst_node_id,
        dst_node_id=asked.src_node_id,
        src_task_id=asked.dst_task_id,
        dst_task_id=asked.src_task_id,
        delivered_at="",
        created_at=now,
        ttl=asked.created_at + asked.ttl - now,
    )
