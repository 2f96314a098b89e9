"""Replies and rounds as an algorithm sees them, made from messages."""

from collections.abc import Callable

from flwr.app import ArrayRecord, ConfigRecord, Message

from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Reply, Round


def seen(message: Message) -> Reply:
    """Return a reply whose client is named by its node."""

    def read() -> Arrays:
        return {n: a.numpy() for n, a in message.content["arrays"].items()}

    return Reply(str(message.metadata.src_node_id), message, read)


def round_of(
    messages: list[Message],
    sent: ArrayRecord | None = None,
    combine: Callable[[list[Reply]], Arrays | None] = lambda replies: None,
) -> Round:
    """Return the second round, with replies to the arrays that were sent."""
    replies = [seen(message) for message in messages]
    record, names = sent or ArrayRecord(), [reply.client for reply in replies]
    return Round(2, names, record, ConfigRecord(), combine, replies=replies)
