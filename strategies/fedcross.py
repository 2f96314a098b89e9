"""FedCross (Hu et al., ICDE 2024): multi-model cross-aggregation."""

from typing import Any, Literal

import numpy as np

from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy, stored
from flwr_frl.strategies.server.aggregation import cosines
from flwr_frl.strategies.server.replies import mean

# Distinguishes the assignments of models from other draws of the same seed.
ORDER = 0xC405


class FedCross(
    Strategy, client="flwr_frl.clients.fedavg:FedAvgClient", uses_mean="never"
):
    """Train K middleware models, each on another client, and mix each with another one.

    K is the number of clients in the first round. Each round assigns the models w_k to
    the clients at random, which follows from the seed and the round. The trained models
    v_k are mixed in pairs: w_k ← α v_k + (1 − α) v_j (cross-aggregation). The partner j
    is the model with the lowest or the highest cosine similarity to v_k, or the next
    ones in turn, j = k + 1 + (t mod (K − 1)) mod K in round t (from 0). The deployed
    model is the mean of all w_k.

    If more than K clients take part, some train the same model, of which the mean is
    used. A model without a reply stays as it is, and is mixed. The paper's propeller
    models and dynamic α, which speed up the first rounds, are left out. A checkpoint
    holds all models.

    In PFLlib the similarity is a sum of cosines over growing parts of the model, and
    the offset of ``in-order`` is the same in every round.

    Parameters
    ----------
    fedcross_alpha : float, default 0.99
        Weight α of a model itself. The paper recommends 0.99. With 0.5 and two clients
        a round, this is FedAvg.
    fedcross_partner : {"lowest", "highest", "in-order"}, default "lowest"
        Choice of partners; ``lowest`` similarity is the paper's best.
    **base
        Arguments of `Strategy`.
    """

    fedcross_alpha: float = setting(0.99, ge=0.5, lt=1)
    fedcross_partner: Literal["lowest", "highest", "in-order"] = setting("lowest")

    models: dict[str, Arrays] = stored("models")

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        # Middleware model of each client that is asked, by name.
        self._assigned: dict[str, str] = {}

    def begin(self, round: Round) -> None:
        """Assign the models to clients; all are the initial model at first."""
        if not self.models:
            self.models.update(
                {str(k): round.arrays for k in range(len(round.clients))}
            )
        rng = np.random.default_rng([self.settings.seed, ORDER, round.number])
        order = rng.permutation(len(self.models)).tolist()
        self._assigned = {
            client: str(order[place % len(order)])
            for place, client in enumerate(round.clients)
        }

    def per_client(self, client: str) -> Arrays:
        """Return the client's middleware model; nothing for one that joins later."""
        return self.models.get(self._assigned.get(client, ""), {})

    def for_evaluation(self, client: str) -> Arrays:
        """Return nothing: clients are tested with the mean of all models."""
        return {}

    def aggregate(self, round: Round) -> Arrays | None:
        """Mix the trained models, and return their mean."""
        trained = []
        for k in range(len(self.models)):
            replies = [r for r in round.replies if self._assigned[r.client] == str(k)]
            result = mean((1.0, reply.read()) for reply in replies)
            trained.append(result or self.models[str(k)])
        alpha = self.fedcross_alpha
        for k, j in enumerate(self.partners(trained, round.number - 1)):
            mixed = mean([(alpha, trained[k]), (1 - alpha, trained[j])])
            self.models[str(k)] = mixed or {}
        return mean((1.0, model) for model in self.models.values())

    def partners(self, models: list[Arrays], turn: int) -> list[int]:
        """Return the position of each model's partner; a single one is its own."""
        count = len(models)
        if self.fedcross_partner == "in-order":
            return [(k + 1 + turn % max(count - 1, 1)) % count for k in range(count)]
        zeros = {name: np.zeros_like(array) for name, array in models[0].items()}
        similarities = cosines(models, zeros)
        if self.fedcross_partner == "highest":
            similarities = -similarities
        np.fill_diagonal(similarities, np.inf)
        return [int(j) for j in similarities.argmin(1)]
