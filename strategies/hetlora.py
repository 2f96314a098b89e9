"""HetLoRA (Cho et al., EMNLP 2024): zero-padded LoRA matrices, weighted by norms."""

import numpy as np

from flwr_frl.common.low_rank import Adapter
from flwr_frl.common.messages import RANK
from flwr_frl.strategies.base import Arrays, Round, stored
from flwr_frl.strategies.server.ranks import LARGEST, RankStrategy, matrices
from flwr_frl.strategies.server.replies import mean as weighted


class HetLoRA(RankStrategy, client="flwr_frl.clients.hetlora:HetLoRAClient"):
    """Average A and B after filling them up with zeros; clients may reduce their ranks.

    In each layer, the matrices of client i have the weight ‖B_i A_i‖ / Σ_j ‖B_j A_j‖
    with Frobenius norms (sparsity-weighted aggregation), or that of other arrays if all
    products are 0. A client receives the first rows of A and columns of B. If no client
    of a round has the largest rank, the paper's mean loses the last rows and columns
    for good, as both factors are 0; here they keep their values.
    """

    # Ranks of clients that have pruned their adapters, by name
    ranks: dict[str, int] = stored("ranks")

    def rank(self, client: str) -> int:
        """Return a client's rank after its prunings."""
        return min(super().rank(client), self.ranks.get(client, LARGEST))

    def aggregate(self, round: Round) -> Arrays:
        """Return the weighted mean, and note the clients' new ranks."""
        new = super().aggregate(round)
        for reply in round.replies:
            self.ranks[reply.client] = max(1, int(reply.metrics.get(RANK, LARGEST)))
        return new

    def combined(self, round: Round, mean: Arrays, adapter: Adapter) -> Arrays:
        """Return the weighted mean of the ranks that clients of the round have."""
        _, a, b = adapter
        replies = [reply.shared() for reply in round.replies]
        factors = [matrices(arrays, adapter) for arrays in replies]
        norms = [float(np.linalg.norm(b_i @ a_i)) for b_i, a_i in factors]
        parts = [{a: arrays[a], b: arrays[b]} for arrays in replies]
        new = weighted(zip(norms, parts, strict=True)) or mean
        most, old = max(self.rank(r.client) for r in round.replies), round.arrays
        return {
            a: np.concatenate([new[a][:most], old[a][most:]]),
            b: np.concatenate([new[b][:, :most], old[b][:, most:]], axis=1),
        }
