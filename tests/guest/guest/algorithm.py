"""FedRep with server momentum for the representation."""

from typing import Annotated

import numpy as np

from flwr_frl.strategies import BaseStrategy
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.task.settings import Range, validate


class Guest(BaseStrategy, client="guest.client:GuestClient"):
    """Server momentum: m ← β m + (mean φ_i − φ);  φ ← φ + m.

    Parameters
    ----------
    roll : float, default 0.5
        β, the server's momentum.
    **base
        As for `BaseStrategy`.
    """

    def __init__(self, *, roll: Annotated[float, Range("[0, 1)")] = 0.5, **base):
        super().__init__(**base)
        self.roll = roll
        validate(self)
        # Saved in checkpoints.
        self.velocity = self.state.setdefault("velocity", {})
        self.sent = None

    def configure_train(self, server_round, arrays, config, grid):
        """Store φ for `aggregate`."""
        self.sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate(self, server_round, replies):
        """Return the updated φ."""
        mean = self.mean(replies)
        old = {name: array.numpy() for name, array in self.sent.items()}
        for name, array in mean.items():
            velocity = self.velocity.get(name, np.zeros_like(array))
            self.velocity[name] = self.roll * velocity + (array - old[name])
        return to_record({n: old[n] + self.velocity[n].astype("f4") for n in mean})
