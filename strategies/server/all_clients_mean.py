"""A strategy that shares the mean of all clients' own models, sampled or not."""

from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common import log

from flwr_frl.strategies.server.client_state_mean import ClientStateMean
from flwr_frl.strategies.server.replies import is_finite, rounded_to, to_record
from flwr_frl.task.settings import require


class AllClientsMean(ClientStateMean):
    """x̄ ← x̄ + |S|/N mean Δx_i, where N clients have trained so far.

    A client that trains for the first time begins at x̄. So x̄ stays the plain mean of
    the models that the N clients keep, of which the server sees the changes only. A
    client that leaves for good is still one of the N: its last model stays in the mean.
    So does what a client had that has lost it, and begins at x̄ anew: x̄ is then off the
    mean by 1/N of the distance between the two, for good, as nobody knows the lost
    model. The log says who.

    Where it forgets (`ClientStateMean`), Δx_i is x_i less x̄.
    """

    supports_client_dp = True

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        allowed = "uniform, as the mean is that of all clients"
        require(self.weighting == "uniform", "weighting", self.weighting, allowed)

    def begin_anew(self, name: str) -> None:
        """Let N be 0: the next replies are whole models again, less x̄."""
        self.in_mean.clear()
        log(WARNING, "the mean begins anew: it had an older model of client %s", name)

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Add the clients' share of the mean change to x̄."""
        changes = self.mean(replies)
        if changes is None:
            return None
        trained = self.in_mean | set(self.pending.names(replies))
        counted = self.counted(replies)
        share = len(counted) / len(trained.union(counted))
        new = {}
        for name, change in changes.items():
            old = self._sent[name].numpy()
            step = np.multiply(change, share, dtype=np.float64)
            new[name] = rounded_to(old.dtype, old + step)
        if not is_finite(new):
            return None
        self.in_mean = trained
        return to_record(new)
