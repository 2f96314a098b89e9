"""FedRep with server momentum for the representation."""

import numpy as np

from flwr_frl.strategies import Round, Strategy
from flwr_frl.task import setting


class Guest(Strategy, client="guest.client:GuestClient"):
    """Server momentum: m ← β m + (mean φ_i − φ);  φ ← φ + m.

    Parameters
    ----------
    roll : float, default 0.5
        β, the server's momentum.
    **base
        The settings of `Strategy`.
    """

    roll: float = setting(0.5, ge=0, lt=1)

    def __init__(self, **base):
        super().__init__(**base)
        # Saved in checkpoints.
        self.velocity = self.state.setdefault("velocity", {})

    def aggregate(self, round: Round):
        """Return the updated φ."""
        old, mean = round.arrays, round.mean()
        for name, array in mean.items():
            velocity = self.velocity.get(name, np.zeros_like(array))
            self.velocity[name] = self.roll * velocity + (array - old[name])
        return {n: old[n] + self.velocity[n].astype("f4") for n in mean}
