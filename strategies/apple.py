"""APPLE (Luo & Wu, IJCAI 2022): clients learn weights of each other's core models."""

import numpy as np

from flwr_frl.common import messages as keys
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy, stored
from flwr_frl.strategies.server.replies import rounded_to

# Distinguishes the draws of core models from others of the same seed.
CHOICE = 0xA991E


class APPLE(Strategy, client="flwr_frl.clients.apple:APPLEClient", uses_mean="never"):
    """Send client i the core models w_j of other clients, and keep w_i and p_i.

    The personal model Σ_j p_ij w_j is over all clients that have connected; w_j is the
    initial model before client j has trained. Client i receives M of the w_j with
    their p_ij, which it trains, and Σ p_ij w_j of the others, so that memory and
    download do not grow with the number of clients; with M ≥ N − 1 this is the paper's
    algorithm. The M are those that i never received, in random order, and then draws
    with odds of b^|p_ij|, where b = max(1.5, r M/N) in round r (the authors' code).
    Draws follow from the seed, the round and the client's name.

    In the paper a client also stores the models of earlier rounds and keeps training
    their p_ij, and the server does not know p_i. p_0 has the clients' shares of the
    examples, which they report; it changes when clients connect. All clients of the
    paper take part in every round; here those that are not sampled keep w_i and p_i.
    Evaluations send Σ_j p_0j w_j only, for clients that have not trained. A checkpoint
    holds all w_i and p_i.

    Parameters
    ----------
    apple_models : int, default 5
        Largest number M of other clients' core models that a client receives.
    **base
        Arguments of `Strategy`.
    """

    apple_models: int = setting(5, ge=0)

    models: dict[str, Arrays] = stored("models")
    # The initial model
    start_model: Arrays = stored("start")
    # p_ij by client and other client, and numbers of examples by client
    relations: dict[str, dict[str, float]] = stored("relations")
    examples: dict[str, float] = stored("examples")

    def begin(self, round: Round) -> None:
        """Expect a core model and weights."""
        if not self.start_model:
            rest = {n: a for n, a in round.arrays.items() if n.startswith(keys.REST)}
            self.start_model.update({n[len(keys.REST) :]: a for n, a in rest.items()})
        for client, count in self._numbers().items():
            self.examples.setdefault(client, count)
        weights = np.zeros(self.apple_models + 1, np.float32)
        round.expected = {**self.start_model, keys.MODEL_WEIGHTS: weights}

    def _numbers(self) -> dict[str, float]:
        """Return the numbers of examples of the clients that take part."""
        known = [c for c in self._run.clients.known.values() if not c.refusal]
        return {c.name: float(c.properties[keys.NUM_EXAMPLES]) for c in known}

    def per_client(self, client: str) -> Arrays:
        """Return M core models, the weighted sum of the others, and p_i with p_0."""
        # One that joins later has no number yet.
        examples = {client: self._numbers()[client], **self.examples}
        start, met = shares(examples), self.relations.get(client, {})
        weights = {**start, **met}
        chosen = self.choose(client, [*examples], self._run.round.number)
        rest = {o: p for o, p in weights.items() if o not in {client, *chosen}}
        models = [self._model(other) for other in chosen]
        names = self.start_model if models else ()
        pairs = [(weights[other], start[other]) for other in (client, *chosen)]
        return {
            **{keys.CANDIDATES + n: np.stack([m[n] for m in models]) for n in names},
            **self._mixture(rest),
            keys.RELATIONS: np.array(pairs, np.float32),
        }

    def for_evaluation(self, client: str) -> Arrays:
        """Return nothing."""
        return {}

    def choose(self, client: str, known: list[str], server_round: int) -> list[str]:
        """Return the names of the clients whose core models a client receives."""
        key = int.from_bytes(client.encode(), "little")
        rng = np.random.default_rng([self.settings.seed, CHOICE, server_round, key])
        met, others = self.relations.get(client, {}), sorted({*known} - {client})
        new = [other for other in others if other not in met]
        chosen: list[str] = rng.permutation(new)[: self.apple_models].tolist()
        rest = [other for other in others if other in met]
        if count := min(self.apple_models - len(chosen), len(rest)):
            base = max(1.5, server_round * self.apple_models / len(known))
            sizes = np.abs([met[other] for other in rest])
            odds = np.exp((sizes - sizes.max()) * np.log(base)) + 1e-9
            drawn = rng.choice(rest, count, replace=False, p=odds / odds.sum())
            chosen += drawn.tolist()
        return chosen

    def _model(self, client: str) -> Arrays:
        return self.models.get(client, self.start_model)

    def _mixture(self, weights: dict[str, float]) -> Arrays:
        """Return a weighted sum of core models; weights may be negative."""
        sums = {n: np.zeros(like.shape) for n, like in self.start_model.items()}
        for client, weight in weights.items():
            for name, value in self._model(client).items():
                sums[name] = sums[name] + weight * value.astype(np.float64)
        like = self.start_model
        return {keys.REST + n: rounded_to(like[n].dtype, a) for n, a in sums.items()}

    def aggregate(self, round: Round) -> Arrays:
        """Keep w_i and p_i; return Σ_j p_0j w_j for clients that have not trained."""
        for reply in round.replies:
            model, i = dict(reply.arrays), reply.client
            weights = model.pop(keys.MODEL_WEIGHTS).tolist()
            chosen = self.choose(i, [*self.examples], round.number)
            learned = dict(zip([i, *chosen], weights, strict=False))
            self.models[i] = model
            self.relations[i] = {**self.relations.get(i, {}), **learned}
        return {**round.arrays, **self._mixture(shares(self.examples))}


def shares(examples: dict[str, float]) -> dict[str, float]:
    """Return the clients' shares of all examples."""
    total = sum(examples.values()) or 1.0
    return {client: count / total for client, count in sorted(examples.items())}
