"""Local training only: nothing is shared, so there is nothing to average."""

from flwr.app import ArrayRecord, Message

from flwr_frl.strategies.base import BaseStrategy


class Local(BaseStrategy, client="flwr_frl.clients.local:LocalClient", averages=False):
    """Let the sampled clients train without sharing; messages contain no arrays."""

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Return no arrays."""
        return ArrayRecord()
