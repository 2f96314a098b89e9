"""FedKD (Wu et al., Nature Communications 2022)."""

import numpy as np

from flwr_frl.common.low_rank import low_rank
from flwr_frl.common.messages import ENERGY
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy


class FedKD(
    Strategy,
    client="flwr_frl.clients.fedkd:FedKDClient",
    uses_mean="only",
    replies_are_changes=True,
):
    """Add the mean change of the mentees, of lower rank; mentors stay personal.

    The rank of each matrix keeps the share T(t) of the energy, the sum of its squared
    singular values. T grows from ``fedkd-energy-start`` in the first round to
    ``fedkd-energy-end`` in the last one. Clients reduce their changes, and the server
    reduces the mean (`low_rank`). Clients receive the whole mentee, as they may have
    missed rounds.

    Parameters
    ----------
    fedkd_energy_start : float, default 0.95
        T in the first round; 1 keeps the rank. Both defaults are the paper's.
    fedkd_energy_end : float, default 0.98
        T in the last round.
    num_server_rounds : int, default 30
        Number of rounds.
    """

    fedkd_energy_start: float = setting(0.95, ge=0, le=1)
    fedkd_energy_end: float = setting(0.98, ge=0, le=1)
    num_server_rounds: int = setting(30, ge=1, may_differ="on resume")

    def begin(self, round: Round) -> None:
        """Send T(t)."""
        round.config[ENERGY] = self.energy(round.number)

    def energy(self, number: int) -> float:
        """Return T(t) in a round, from 1."""
        start, rounds = self.fedkd_energy_start, self.num_server_rounds
        share = min(1.0, (number - 1) / max(1, rounds - 1))
        return start + share * (self.fedkd_energy_end - start)

    def aggregate(self, round: Round) -> Arrays:
        """Add the mean change, of lower rank, to the mentee."""
        energy, changes = self.energy(round.number), round.mean()
        return {
            name: old + low_rank(changes[name], energy).astype(np.float64)
            for name, old in round.arrays.items()
        }
