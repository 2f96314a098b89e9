"""FedAMP (Huang et al., AAAI 2021): federated attentive message passing."""

from typing import Literal

import numpy as np

from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy, stored
from flwr_frl.strategies.server.aggregation import inner_products
from flwr_frl.strategies.server.replies import Floats, mean


class FedAMP(Strategy, client="flwr_frl.clients.fedamp:FedAMPClient"):
    """Algorithm 1: client i trains near u_i, a mean of the models most similar to w_i.

    The server keeps the last model w_i of every client that has trained. It sends
    client i the mean u_i = Σ_j ξ_ij w_j (equation 5), and the client returns a new w_i
    (equation 6). With the attention

    - ``exponential``, FedAMP: ξ_ij = α A'(‖w_i − w_j‖²) for j ≠ i with
      A(x) = 1 − exp(−x/σ), that is ξ_ij = (α/σ) exp(−‖w_i − w_j‖²/σ), and
      ξ_ii = 1 − Σ_{j≠i} ξ_ij;
    - ``cosine``, HeurFedAMP (section "Heuristic Improvement of FedAMP on Deep Neural
      Networks"): ξ_ij = (1 − ξ_ii) softmax_{j≠i}(σ cos(w_i, w_j)), with ξ_ii a setting.

    Differences from the paper. α is constant. If Σ_{j≠i} ξ_ij exceeds 1, these weights
    are scaled to the sum 1 and ξ_ii is 0; otherwise u_i would be no convex combination
    (PFLlib allows a negative ξ_ii). The cosine is that of the changes w_i − w⁰ since
    the common initial model w⁰: the models themselves start equal here, so their
    cosines stay near 1 and all weights near 1/m. In the paper all clients take part in
    every round; here a client that is not sampled keeps its last model, which the
    others continue to attend to. PFLlib's server attends to the last round's models
    only. The defaults of α, λ and ``fedamp-scale`` are those of FLGo, whose ξ_ii is
    1/m.

    A client that has not trained yet, also one that joins later, receives the mean of
    the last round's models. One that joins after training trains near it. Other
    clients are tested with their w_i, which the server sends them; a checkpoint holds
    all models, so memory is one model for each client that has trained.

    Parameters
    ----------
    fedamp_attention : {"cosine", "exponential"}, default "cosine"
        The weights ξ_ij; ``cosine`` is the paper's choice for deep networks.
    fedamp_alpha : float, default 10000
        Step size α_k (equation 3); the clients' proximal weight is λ/α_k.
    fedamp_sigma : float, default 1
        σ of A, in squared distances of models (``exponential``); the weights of the
        others are at most α/σ each.
    fedamp_scale : float, default 25
        σ of ``cosine``: larger values concentrate the weights on the nearest models.
    fedamp_self_weight : float, default 0.1
        ξ_ii of ``cosine``.
    **base
        Arguments of `Strategy`. ``aggregation`` applies only to the mean for
        clients that have not trained yet.
    """

    fedamp_attention: Literal["cosine", "exponential"] = setting("cosine")
    fedamp_alpha: float = setting(1e4, gt=0)
    fedamp_sigma: float = setting(1.0, gt=0)
    fedamp_scale: float = setting(25.0, ge=0)
    fedamp_self_weight: float = setting(0.1, ge=0, le=1)

    # Under this key `flwr_frl.predict` finds each client's model.
    models: dict[str, Arrays] = stored("heads")
    # w⁰
    start_model: Arrays = stored("start")
    # u_i of the round's clients that have trained
    _near: dict[str, Arrays]

    def begin(self, round: Round) -> None:
        """Compute the u_i of the clients that have trained."""
        if not self.start_model:
            self.start_model.update({n: a.copy() for n, a in round.arrays.items()})
        self._near = self.messages_for(round.clients) if self.models else {}

    def per_client(self, client: str) -> Arrays:
        """Return u_i; nothing for a client that has not trained."""
        return self._near[client] if client in self.models else {}

    def for_evaluation(self, client: str) -> Arrays:
        """Return w_i; nothing for a client that has not trained."""
        return self.models.get(client, {})

    def messages_for(self, clients: list[str]) -> dict[str, Arrays]:
        """Return u_i of each of these clients that has trained, by name."""
        names = sorted(self.models)
        models = [self.models[name] for name in names]
        # All distances and cosines follow from the inner products.
        products = inner_products(models, self.start_model)
        sent = {}
        for client in self.models.keys() & clients:
            weights = self.attention(products, names.index(client))
            sent[client] = mean(zip(weights.tolist(), models, strict=True)) or {}
        return sent

    def attention(self, products: Floats, i: int) -> Floats:
        """Return ξ_i1 … ξ_im, which sum to 1.

        Parameters
        ----------
        products : ndarray, shape (m, m)
            Inner products of the changes w_i − w⁰.
        i : int
            The client whose weights are returned.
        """
        squares = products.diagonal()
        others = np.arange(len(products)) != i
        weights: Floats
        if self.fedamp_attention == "cosine":
            lengths = np.sqrt(np.maximum(squares[i] * squares, np.finfo(float).tiny))
            scores = np.exp(self.fedamp_scale * (products[i] / lengths - 1)) * others
            weights = scores * (1 - self.fedamp_self_weight) / (scores.sum() or 1.0)
        else:
            distances = np.maximum(squares[i] + squares - 2 * products[i], 0)
            sigma = self.fedamp_sigma
            weights = self.fedamp_alpha / sigma * np.exp(-distances / sigma) * others
            weights /= max(1.0, weights.sum())
        weights[i] = max(0.0, 1 - weights.sum())
        return weights

    def aggregate(self, round: Round) -> Arrays:
        """Keep the clients' models, and return their mean."""
        combined = round.mean()
        for reply in round.replies:
            self.models[reply.client] = dict(reply.arrays)
        return combined
