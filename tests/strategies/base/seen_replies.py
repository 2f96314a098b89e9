"""Replies and rounds as an algorithm sees them, made from messages."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Message

from flwr_frl.strategies import Strategy
from flwr_frl.strategies.server.checks import reply_metrics
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Reply, Round


def seen(message: Message) -> Reply:
    """Return a reply whose client is named by its node."""
    records = message.content.array_records.items()
    reply = Reply(Strategy(), message, 0)
    reply.metrics = reply_metrics(message)
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
    vars(strategy)["_mean"] = combine
    round = Round(strategy, 2, sent or ArrayRecord(), nodes=nodes)
    round.replies = list(map(seen, messages))
    return round
