"""Participation: who trains in a round, and how many replies close it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Round


@dataclass
class Participation:
    """Sample clients without replacement, and wait for all of them.

    The sample follows from the seed, the round and the nodes' order alone.

    Parameters
    ----------
    fraction : float
        Fraction of the nodes, in (0, 1]; rounded down.
    least : int
        Minimum number of nodes.
    seed : int
        Seed of the sampling.
    """

    fraction: float
    least: int
    seed: int

    # True if a round waits for the replies of all sampled clients.
    waits_for_all = True
    # Settings that have an effect here although the strategy does not use them.
    uses = frozenset[str]()

    def check(self, num_clients: int, sample: Callable[[], list[int]]) -> None:
        """Raise `SettingsError` if no client would be sampled.

        Parameters
        ----------
        num_clients : int
            Number of clients when the run begins.
        sample : callable
            Returns the clients that the strategy samples in the first round.
        """
        nobody = int(self.fraction * num_clients + 1e-9) == 0
        if nobody and self.least <= 1 and num_clients:
            raise SettingsError(
                f"fraction-train is {self.fraction}: of {num_clients} clients it "
                f"samples nobody; expected at least {1 / num_clients:.4g}"
            )

    def _target(self, num_clients: int) -> int:
        """Return how many of some clients train in a round if all can be asked."""
        share = int(self.fraction * num_clients + 1e-9)
        return min(max(share, self.least), num_clients)

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes that train in a round (from 1), in their given order.

        ``others`` is the number of participants that cannot be asked now; they count
        towards the fraction.
        """
        count = min(self._target(len(nodes) + others), len(nodes))
        rng = np.random.default_rng([self.seed, 0x5A3B, server_round])
        chosen = sorted(rng.choice(len(nodes), count, replace=False))
        return [nodes[i] for i in chosen]

    def open(self, round: Round, messages: list[Message], grid: Grid) -> None:
        """Prepare the grid for a round of training.

        Parameters
        ----------
        round : Round
            The round.
        messages : list of Message
            Messages that are about to be sent.
        grid : Grid
            The grid that will send them.
        """

    def note(self, names: list[str], sent: ArrayRecord, arrays: ArrayRecord) -> None:
        """Record whose replies counted, the sent arrays and the new ones."""

    @property
    def updates(self) -> dict[str, int] | None:
        """Number of each client's replies that counted, by name, if it is recorded."""
        return None

    def byzantine_share(self, fraction: float, count: int) -> float:
        """Return the assumed Byzantine share of ``count`` replies.

        ``fraction`` is that of the clients.
        """
        return fraction

    def rebased(self, node: int, arrays: Arrays) -> Arrays:
        """Return a reply's shared arrays relative to the current version."""
        return arrays

    def close(self) -> dict[str, float | list[int]]:
        """Close a round after its replies were combined, and return its metrics."""
        return {}
