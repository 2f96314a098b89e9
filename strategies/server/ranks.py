"""The base of strategies whose clients train LoRA matrices of their own ranks."""

from typing import Any

import numpy as np
from flwr.serverapp import Grid

from flwr_frl.common import messages as keys
from flwr_frl.common.low_rank import Adapter, adapters_in, first_ranks, padded
from flwr_frl.strategies.base import Arrays, Reply, Round, Strategy
from flwr_frl.strategies.server.replies import Floats

# Rank of clients that have declared none, those of another app.
LARGEST = 2**31


class RankStrategy(Strategy, uses_mean="also"):
    """Send each client, and expect of it, LoRA matrices of its own rank.

    The shared arrays have matrices of ``lora-rank``, the largest rank. A client of rank
    r exchanges the first r rows of A and columns of B; the server fills up its replies
    with zeros. All adapters are multiplied by the same factor α/``lora-rank``, as in
    the code of FLoRA's authors, where α is twice the rank of each client.
    """

    _only = (("aggregation", "mean"),)
    _because = "products of LoRA matrices have no other rule"

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        # Ranks that clients have declared, by name.
        self._declared: dict[str, int] = {}

    def _identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part, and note the ranks of all clients."""
        nodes, clients = super()._identify(grid), self._run.clients
        for node, client in clients.known.items():
            rank = min(LARGEST, clients.declared(node, keys.RANK))
            self._declared[client.name] = max(1, int(rank))
        return nodes

    def rank(self, client: str) -> int:
        """Return a client's rank, or more than that of the shared arrays."""
        return self._declared.get(client, LARGEST)

    def sent_rank(self, client: str) -> int:
        """Return the rank of the matrices that a client receives."""
        return self.rank(client)

    def per_client(self, client: str) -> Arrays:
        """Return the client's part of the matrices, to train."""
        return first_ranks(self._run.round.arrays, self.sent_rank(client))

    def for_evaluation(self, client: str) -> Arrays:
        """Return the client's part of the matrices, to test."""
        return first_ranks(self._run.evaluation.round.arrays, self.sent_rank(client))

    def begin(self, round: Round) -> None:
        """Expect matrices of each client's rank."""
        adapters = adapters_in(round.arrays)
        round.need(*(each.b for each in adapters), *([] if adapters else ["lora_A"]))
        for node in round.nodes:
            rank = self.rank(self._run.clients.name_of(node))
            parts = first_ranks(round.arrays, rank).items()
            round.shapes[node] = {name: part.shape for name, part in parts}

    def check_reply(self, reply: Reply) -> None:
        """Fill up the matrices with zeros to the largest rank."""
        shared, arrays = self._run.round.arrays, reply.decoded[keys.ARRAYS].items()
        filled = {name: padded(array, shared[name].shape) for name, array in arrays}
        reply.decoded[keys.ARRAYS] = filled

    def aggregate(self, round: Round) -> Arrays:
        """Return the mean, with other arrays for the layers that have adapters."""
        new = round.mean()
        for adapter in adapters_in(round.arrays):
            new |= self.combined(round, new, adapter)
        return new

    def combined(self, round: Round, mean: Arrays, adapter: Adapter) -> Arrays:
        """Return the new arrays of a layer, by name.

        Parameters
        ----------
        round : Round
            The round.
        mean : dict of str to ndarray
            Mean of the replies, whose matrices were filled up with zeros.
        adapter : Adapter
            The names of the layer and its matrices.
        """
        raise NotImplementedError

    def stacked(self, round: Round, adapter: Adapter) -> tuple[Floats, Floats]:
        """Return matrices whose product is the mean of the clients' B_i A_i.

        Parameters
        ----------
        round : Round
            The round.
        adapter : Adapter
            The names of the matrices.

        Returns
        -------
        b : ndarray, shape (outputs, Σ r)
            [B_1 … B_n].
        a : ndarray, shape (Σ r, inputs)
            [p_1 A_1; …; p_n A_n], where p_i are the weights of ``weighting``.
        """
        weights = np.array(self.weights(round.replies), np.float64)
        factors = [matrices(reply.shared(), adapter) for reply in round.replies]
        b = np.concatenate([b for b, _ in factors], axis=1)
        scaled = zip(weights / weights.sum(), factors, strict=True)
        return b, np.concatenate([weight * a for weight, (_, a) in scaled])


def matrices(arrays: Arrays, adapter: Adapter) -> tuple[Floats, Floats]:
    """Return B and A of a layer; of a convolution, A has a row for each kernel."""
    a, b = (np.asarray(arrays[n], np.float64) for n in (adapter.a, adapter.b))
    return b.reshape(b.shape[:2]), a.reshape(len(a), -1)
