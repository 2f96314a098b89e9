"""L2GD (Hanzely & Richtárik, 2020)."""

from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_frl.strategies.server.all_clients_mean import AllClientsMean
from flwr_frl.task.messages import COINS


class L2GD(AllClientsMean):
    """Algorithm 1: share the mean x̄ of the local models, and throw the coins.

    All clients of a round throw the same ones: what they are drawn from follows from
    the seed and the round.
    """

    client = "flwr_frl.clients.l2gd:L2GDClient"

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send also the seed of the round's coins."""
        rng = np.random.default_rng([self.seed, server_round, 0xC019])
        config[COINS] = int(rng.integers(10**8))
        return super().configure_train(server_round, arrays, config, grid)
