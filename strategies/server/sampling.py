"""Who trains in a round."""

from dataclasses import dataclass

import numpy as np

from flwr_frl.task.settings import SettingsError


@dataclass(frozen=True)
class Sampler:
    """Seeded sampling without replacement.

    Parameters
    ----------
    fraction : float
        Share of the nodes, in (0, 1]; rounded down.
    least : int
        The least number of nodes.
    seed : int
        Who is sampled follows from the seed, the round and the nodes' order alone.
    """

    fraction: float
    least: int
    seed: int

    def check(self, num_nodes: int) -> None:
        """Raise `SettingsError` if of so many nodes nobody is sampled."""
        if self._share(num_nodes) == 0 and self.least <= 1 and num_nodes:
            raise SettingsError(
                f"fraction-train is {self.fraction}: of {num_nodes} clients it samples "
                f"nobody; it must be at least {1 / num_nodes:.4g}"
            )

    def _share(self, num_nodes: int) -> int:
        return int(self.fraction * num_nodes + 1e-9)

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes that train in a round (from 1), in their given order.

        ``others`` take part, but can not be asked now: they count for the share.
        """
        share = self._share(len(nodes) + others)
        count = min(max(share, self.least), len(nodes))
        rng = np.random.default_rng([self.seed, 0x5A3B, server_round])
        chosen = sorted(rng.choice(len(nodes), count, replace=False))
        return [nodes[i] for i in chosen]
