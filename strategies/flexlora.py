"""FlexLoRA (Bai et al., NeurIPS 2024): the mean of products, decomposed again."""

import numpy as np

from flwr_frl.common.low_rank import Adapter
from flwr_frl.strategies.base import Arrays, Round
from flwr_frl.strategies.server.ranks import RankStrategy


class FlexLoRA(RankStrategy, client="flwr_frl.clients.flexlora:FlexLoRAClient"):
    """Average the products B_i A_i, and send each client the best part of its rank.

    The mean product of a layer has the singular value decomposition U Σ Vᵀ (section
    3.2). A client of rank r receives B = U Σ and A = Vᵀ of the r largest singular
    values. The paper leaves open which factor contains Σ. Other arrays, such as the
    head, are averaged.
    """

    def combined(self, round: Round, mean: Arrays, adapter: Adapter) -> Arrays:
        """Return factors of the mean product."""
        _, a, b = adapter
        left, right = self.stacked(round, adapter)
        # The complete decomposition: where Σ is 0, A is not, so that both factors of
        # this rank can still be trained.
        u, sigma, v = np.linalg.svd(left @ right, full_matrices=False)
        rank = len(mean[a])
        new_b, new_a = u[:, :rank] * sigma[:rank], v[:rank]
        return {a: new_a.reshape(mean[a].shape), b: new_b.reshape(mean[b].shape)}
