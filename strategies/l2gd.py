"""L2GD (Hanzely & Richtárik, 2020)."""

from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_frl.strategies.server.client_state_mean import AllClientsMean
from flwr_frl.task.messages import COINS


class L2GD(AllClientsMean, client="flwr_frl.clients.l2gd:L2GDClient"):
    """Algorithm 1: share the mean x̄ of the local models, and draw the coins.

    All clients of a round have the same coins, which follow from the seed and the
    round.
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the seed of the round's coins as well."""
        rng = np.random.default_rng([self.settings.seed, server_round, 0xC019])
        config[COINS] = int(rng.integers(10**8))
        return super().configure_train(server_round, arrays, config, grid)
