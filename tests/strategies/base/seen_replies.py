"""Replies and rounds as an algorithm sees them, made from messages."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Message

from flwr_frl.strategies import Strategy
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Reply, Round


def seen(message: Message) -> Reply:
    """Return a reply whose client is named by its node."""
    records = message.content.array_records.items()
    node = message.metadata.src_node_id
    reply = Reply(Strategy(), str(node), node, message, 0)
    for record in message.content.metric_records.values():
        reply.metrics = dict(record)
    reply.decoded = {
        key: {name: array.numpy() for name, array in record.items()}
        for key, record in records
    }
    return reply


def round_of(
    messages: list[Message],
    sent: ArrayRecord | None = None,
    combine: Callable[[list[Reply]], Arrays | None] = lambda replies: None,
) -> Round:
    """Return the second round, with replies to the arrays that were sent."""
    nodes = [message.metadata.src_node_id for message in messages]
    strategy = Strategy()
    round = Round(strategy, 2, sent or ArrayRecord(), nodes=nodes, asked=set(nodes))
    round.replies = list(map(seen, messages))
    vars(round)["mean"] = lambda: combine(round.replies)
    return round
