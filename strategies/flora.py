"""FedEx-LoRA (Singhal et al., ACL 2025) and FLoRA (Wang et al., NeurIPS 2024).

Both add matrices to the frozen weights, so that the average of products is exact.
"""

from flwr_frl.common.low_rank import Adapter, adapters_in
from flwr_frl.common.messages import MERGED
from flwr_frl.strategies.base import Arrays, Round
from flwr_frl.strategies.server.ranks import RankStrategy, matrices


class FedExLoRA(RankStrategy, client="flwr_frl.clients.flora:FedExLoRAClient"):
    """Average A and B, and add what the product of the means lacks to the weights.

    The clients' weights W move by Σ p_i B_i A_i − B̄ Ā (section 3), where B̄ and Ā are
    the means, so that W + B̄ Ā moves by the mean of the products. All clients have the
    same rank.

    The paper sends the factors of a round's residual. Here a client may have missed
    rounds, so it receives, for each layer, the sum of all residuals, with as many
    entries as the layer's weights.
    """

    def begin(self, round: Round) -> None:
        """Expect all arrays but the sums of residuals."""
        super().begin(round)
        round.keep(*(MERGED + each.layer for each in adapters_in(round.arrays)))

    def combined(self, round: Round, mean: Arrays, adapter: Adapter) -> Arrays:
        """Add the residual."""
        left, right = self.stacked(round, adapter)
        mean_b, mean_a = matrices(mean, adapter)
        name, residual = MERGED + adapter.layer, left @ right - mean_b @ mean_a
        return {name: round.arrays[name] + residual}


class FLoRA(FedExLoRA, client="flwr_frl.clients.flora:FLoRAClient"):
    """Stack the clients' matrices, and add the product to the weights of all clients.

    [B_1 … B_n] [p_1 A_1; …; p_n A_n] is the mean product Σ p_i B_i A_i for any ranks
    (section 3.2). Clients then begin with new adapters. The paper sends the stacked
    matrices; here clients receive the sum of all products, as with `FedExLoRA`.
    """

    def sent_rank(self, client: str) -> int:
        """Return 0, as clients begin with new adapters."""
        return 0

    def combined(self, round: Round, mean: Arrays, adapter: Adapter) -> Arrays:
        """Add the product; the shared A and B, of which nobody receives any, stay."""
        left, right = self.stacked(round, adapter)
        name, old = MERGED + adapter.layer, round.arrays
        unchanged = {adapter.a: old[adapter.a], adapter.b: old[adapter.b]}
        return {name: old[name] + left @ right, **unchanged}
