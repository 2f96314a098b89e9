"""CFL (Sattler et al., IEEE TNNLS 2021): split clusters whose clients disagree."""

import numpy as np
import numpy.typing as npt

from flwr_frl.common.messages import BATCH_NORM
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Reply, Round, Strategy, stored
from flwr_frl.strategies.server.aggregation import cosines, inner_products
from flwr_frl.strategies.server.replies import Floats

# The cluster of all clients. The two halves of a cluster have its name and 0 or 1.
ROOT = "c"


class CFL(Strategy, client="flwr_frl.clients.fedavg:FedAvgClient"):
    """Average within clusters, which are split at stationary points (algorithm 2).

    In a cluster with the model θ and the clients' updates Δ_i = θ_i − θ, the mean
    update Δ is small if θ is stationary for the cluster, and some Δ_i are large if it
    is not for its clients. If ‖Δ‖ < ε₁ and max ‖Δ_i‖ > ε₂, the cluster is split into
    the two parts for which the largest cosine α of two updates of different parts is
    minimal (algorithm 1), unless √((1 − α)/2) ≤ γ. Each part continues with the mean of
    its clients' models. With ε₁ = 0 nothing is split, and this is FedAvg.

    All clients of the paper take part in every round. Here only the clients of a round
    are compared and split. Others of the cluster, and clients that join later, find
    their part as newcomers do in the paper: they train θ, as it was before the split,
    and join the part that has the update with the largest cosine to theirs. Until then
    they are tested with θ. Later rounds may take them further down the tree of splits.

    The shared arrays are the model of the root, which no longer changes after its
    split. After a split, a checkpoint holds the model of each client that has trained,
    and the trained models of the split's round. Statistics of batch norms are averaged,
    but are not part of the updates.

    Compared with the authors' code (commit 0981a20): it splits by complete linkage, and
    not before round 21, clusters of at least three clients, and has no γ.

    Parameters
    ----------
    cfl_eps1 : float, default 0.4
        ε₁; the default is that of the authors' code. Both thresholds depend on model,
        learning rate and local epochs: compare them with ``mean-norm`` and ``max-norm``
        in the metrics.
    cfl_eps2 : float, default 1.6
        ε₂.
    cfl_gamma : float, default 0
        γ, a bound of the updates' relative noise; 0 allows every split.
    **base
        Arguments of `Strategy`. ``aggregation`` and ``weighting`` apply within each
        cluster.
    """

    cfl_eps1: float = setting(0.4, ge=0)
    cfl_eps2: float = setting(1.6, ge=0)
    cfl_gamma: float = setting(0.0, ge=0, le=1)

    # Under this key `flwr_frl.predict` finds each client's model.
    models: dict[str, Arrays] = stored("heads")
    # Names of the clients' clusters, by client
    members: dict[str, str] = stored("members")
    # Models of the clusters below the root, by name
    clusters: dict[str, Arrays] = stored("clusters")
    # Models that clients trained in rounds of splits, by client and new cluster
    splits: dict[str, dict[str, Arrays]] = stored("splits")
    # Largest norms in a round: ‖Δ‖ of the clusters, and ‖Δ_i‖ of the clients
    _norms: dict[str, float]

    def per_client(self, client: str) -> Arrays:
        """Return the model of the client's cluster; nothing for the root's."""
        return self.clusters.get(self.members.get(client, ROOT), {})

    def aggregate(self, round: Round) -> Arrays:
        """Average or split each cluster; return the model of the root."""
        self._norms = {"mean-norm": 0.0, "max-norm": 0.0}
        root, groups = round.arrays, dict[str, list[Reply]]()
        for reply in round.replies:
            cluster = self.members.setdefault(reply.client, ROOT)
            groups.setdefault(cluster, []).append(reply)
        for cluster, replies in groups.items():
            theta = self.clusters.get(cluster, round.arrays)
            if f"{cluster}0" in self.clusters:
                self._descend(cluster, theta, replies)
                continue
            mean = self._mean_of(replies, theta)
            parts = self._parts(replies, theta, mean)
            for part, members in enumerate(parts):
                self._form(f"{cluster}{part}", theta, members)
            if not parts and cluster == ROOT:
                root = mean
            elif not parts:
                self.clusters[cluster] = mean
        if self.clusters:
            for client, cluster in self.members.items():
                self.models[client] = self.clusters.get(cluster, root)
        return root

    def _parts(
        self, replies: list[Reply], theta: Arrays, mean: Arrays
    ) -> list[list[Reply]]:
        """Return the replies of both parts of a cluster; [] if it is not split."""
        norms = [update_norm(reply.read(), theta) for reply in replies]
        of_mean, largest = update_norm(mean, theta), max(norms)
        self._norms["mean-norm"] = max(self._norms["mean-norm"], of_mean)
        self._norms["max-norm"] = max(self._norms["max-norm"], largest)
        stationary = of_mean < self.cfl_eps1 and largest > self.cfl_eps2
        if not stationary or len(replies) == 1:
            return []
        models = [parameters(reply.read()) for reply in replies]
        similarities = cosines(models, parameters(theta))
        parts = bipartition(similarities)
        across = similarities[np.ix_(parts == 0, parts == 1)].max()
        if np.sqrt(max(1 - across, 0) / 2) <= self.cfl_gamma:
            return []
        return [[replies[i] for i in np.flatnonzero(parts == part)] for part in (0, 1)]

    def _form(self, name: str, theta: Arrays, replies: list[Reply]) -> None:
        """Form a cluster, one part of a split."""
        self.clusters[name] = self._mean_of(replies, theta)
        for reply in replies:
            self.splits.setdefault(reply.client, {})[name] = dict(reply.arrays)
            self.members[reply.client] = name

    def _descend(self, cluster: str, theta: Arrays, replies: list[Reply]) -> None:
        """Let clients join the part of a split with the update nearest to theirs."""
        known = [
            (name, model)
            for models in self.splits.values()
            for name, model in models.items()
            if name[:-1] == cluster
        ]
        # All clients of the split's round may have been removed from the checkpoint.
        for reply in replies if known else ():
            models = [reply.read(), *(model for _, model in known)]
            similarities = cosines([*map(parameters, models)], parameters(theta))
            nearest = int(similarities[0, 1:].argmax())
            self.members[reply.client] = known[nearest][0]

    def metrics(self, round: Round) -> dict[str, float]:
        """Return ``clusters``, ``mean-norm`` and ``max-norm`` as well."""
        clusters = 1 + len(self.clusters) // 2
        return {**super().metrics(round), "clusters": clusters, **self._norms}


def parameters(model: Arrays) -> Arrays:
    """Return a model without the statistics of batch norms."""
    return {n: a for n, a in model.items() if not n.endswith(BATCH_NORM)}


def update_norm(model: Arrays, theta: Arrays) -> float:
    """Return the norm of a model's update, that is of its change from θ."""
    return float(np.sqrt(inner_products([parameters(model)], parameters(theta))[0, 0]))


def bipartition(similarities: Floats) -> npt.NDArray[np.int64]:
    """Return the part, 0 or 1, of each client, so that both parts are far apart.

    The largest similarity of two clients in different parts is minimal: the most
    similar pairs are joined, in turn, until two parts are left (single linkage).

    Parameters
    ----------
    similarities : ndarray, shape (n, n)
        Symmetric, with n ≥ 2. The first client is in part 0.
    """
    labels = np.arange(len(similarities))
    rows, columns = np.triu_indices(len(labels), 1)
    left = len(labels)
    for pair in np.argsort(-similarities[rows, columns], kind="stable"):
        one, other = labels[rows[pair]], labels[columns[pair]]
        if left == 2:
            break
        if one != other:
            labels[labels == other] = one
            left -= 1
    return np.asarray(labels != labels[0], np.int64)
