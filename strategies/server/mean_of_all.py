"""A strategy that shares the mean of all clients' own models, sampled or not."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.base import BaseStrategy
from strategies.server.replies import rounded_to, to_record
from task.settings import require


class MeanOfAll(BaseStrategy):
    """x̄ ← x̄ + |S|/N mean Δx_i, where N clients have trained so far.

    A client that trains for the first time begins at x̄. So x̄, unless ``aggregation``
    is another than the mean, stays the plain mean of the models that the N clients
    keep, of which the server sees the changes only. A client that leaves for good is
    still one of the N: its last model stays in the mean. So does what a client had that
    has lost it, and begins at x̄ anew: x̄ is then off the mean by 1/N of the distance
    between the two, for good, as nobody knows the lost model. The log says who.
    """

    only_means = True
    replies_are_changes = True

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        allowed = "uniform, as the mean is that of all clients"
        require(self.weighting == "uniform", "weighting", self.weighting, allowed)
        self._sent = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send x̄ to the sampled clients."""
        self._sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Add the clients' share of the mean change to x̄."""
        changes = self.mean(replies)
        if changes is None:
            return None
        trained = {*self.standing.acknowledged, *self.exchange.names(replies)}
        share = len(self.counted(replies)) / len(trained)
        new = {}
        for name, change in changes.items():
            old = self._sent[name].numpy()
            step = np.multiply(change, share, dtype=np.float64)
            new[name] = rounded_to(old.dtype, old + step)
        return to_record(new)
