"""Replies and rounds as an algorithm sees them, made from messages."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Message

from flwr_frl.strategies.server.replies import Arrays, reply_metrics
from flwr_frl.strategies.server.round import Reply, Round


def seen(message: Message) -> Reply:
    """Return a reply whose client is named by its node."""
    records = message.content.array_records.items()
    decoded = {k: {n: a.numpy() for n, a in record.items()} for k, record in records}
    about = 0, reply_metrics(message), decoded
    name = str(message.metadata.src_node_id)
    return Reply(name, message, *about, lambda reply: reply.decoded["arrays"])


def round_of(
    messages: list[Message],
    sent: ArrayRecord | None = None,
    combine: Callable[[list[Reply]], Arrays | None] = lambda replies: None,
) -> Round:
    """Return the second round, with replies to the arrays that were sent."""
    nodes = [message.metadata.src_node_id for message in messages]
    round = Round(2, sent or ArrayRecord(), nodes=nodes, combine=combine)
    round.replies = list(map(seen, messages))
    return round
