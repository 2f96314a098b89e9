"""FedFomo (Zhang et al., ICLR 2021): clients weigh the models of others."""

import numpy as np

from flwr_frl.common.messages import CANDIDATES, MODEL_WEIGHTS
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy, stored

# Distinguishes the draws of candidates from others of the same seed.
CHOICE = 0xF030


class FedFomo(
    Strategy, client="flwr_frl.clients.fedfomo:FedFomoClient", uses_mean="never"
):
    """Algorithm 1: send each client the models that have helped it most so far.

    The server keeps the last model of every client that has trained, and an affinity
    p_ij of client i for the model of client j, which starts at 0. Client i receives M
    models of other clients and returns its new model with the weight w_j that it gave
    to each, before negative ones are cut off; p_ij grows by w_j. The models are those
    with the largest p_ij, ties in random order; each of the M is drawn at random
    instead with the probability ε (the paper's sampling scheme). All draws follow from
    the seed, the round and the client's name. PFLlib has no random choice, and sends at
    most as many models as clients trained in the last round. The authors' code divides
    the weights that are added by the absolute value of their sum; here, as in the
    paper, p_ij grows by w_j itself. That code also sends only models that were uploaded
    in the last round.

    A client that is not sampled keeps its model, which others may receive. Evaluations
    send no models: clients deploy the model that they keep. A client that joins later
    receives M random models. A checkpoint holds all models and affinities, so a
    resumed run sends the same ones. Nothing is averaged on the server.

    Parameters
    ----------
    fomo_models : int, default 5
        Number M of other clients' models that a client receives. The 5 models of the
        authors' commands include the client's own; those of PFLlib may include it.
    fomo_epsilon : float, default 0.3
        Probability ε of a random model in the first round.
    fomo_epsilon_decay : float, default 0.05
        Decrease of ε from round to round, down to 0 (the authors' commands).
    **base
        Arguments of `Strategy`.
    """

    fomo_models: int = setting(5, ge=0)
    fomo_epsilon: float = setting(0.3, ge=0, le=1)
    fomo_epsilon_decay: float = setting(0.05, ge=0, le=1)

    models: dict[str, Arrays] = stored("models")
    # p_ij by client and other client
    affinity: dict[str, dict[str, float]] = stored("affinity")

    def begin(self, round: Round) -> None:
        """Expect one model, and the weights."""
        round.expected = {
            name.removeprefix(CANDIDATES): np.zeros(array.shape[1:], array.dtype)
            for name, array in round.arrays.items()
        }
        round.expected[MODEL_WEIGHTS] = np.zeros(self.fomo_models, np.float32)

    def per_client(self, client: str) -> Arrays:
        """Return the models for a client, stacked."""
        chosen = self.choose(client, self._run.round.number)
        models = [self.models[other] for other in chosen]
        names = models[0] if models else ()
        return {CANDIDATES + n: np.stack([m[n] for m in models]) for n in names}

    def for_evaluation(self, client: str) -> Arrays:
        """Return no models."""
        return {}

    def choose(self, client: str, server_round: int) -> list[str]:
        """Return the names of the clients whose models a client receives."""
        key = int.from_bytes(client.encode(), "little")
        rng = np.random.default_rng([self.settings.seed, CHOICE, server_round, key])
        others = sorted(self.models.keys() - {client})
        # A random order before the stable sort, for ties.
        others = [others[i] for i in rng.permutation(len(others))]
        affinity = self.affinity.get(client, {})
        others.sort(key=lambda other: -affinity.get(other, 0.0))
        decayed = self.fomo_epsilon - self.fomo_epsilon_decay * (server_round - 1)
        chosen = []
        for _ in range(min(self.fomo_models, len(others))):
            explores = rng.random() < decayed
            chosen.append(others.pop(rng.integers(len(others)) if explores else 0))
        return chosen

    def aggregate(self, round: Round) -> Arrays:
        """Keep the models, and add the weights to the affinities."""
        models = {}
        for reply in round.replies:
            models[reply.client] = model = dict(reply.arrays)
            weights = model.pop(MODEL_WEIGHTS).tolist()
            affinity = dict(self.affinity.get(reply.client, {}))
            chosen = self.choose(reply.client, round.number)
            for other, weight in zip(chosen, weights, strict=False):
                affinity[other] = affinity.get(other, 0.0) + weight
            self.affinity[reply.client] = affinity
        self.models |= models
        return round.arrays
