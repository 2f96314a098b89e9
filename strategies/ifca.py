"""IFCA (Ghosh et al., NeurIPS 2020): iterative federated clustering."""

import numpy as np

from flwr_frl.common.messages import CLUSTER, CLUSTERS
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Reply, Round, Strategy
from flwr_frl.strategies.server.replies import InvalidReplyError


class IFCA(Strategy, client="flwr_frl.clients.ifca:IFCAClient"):
    """Algorithm 1, option II: average the models of the clients that chose a cluster.

    The server sends all k models. Client i chooses ĵ = argmin_j F_i(θ_j), trains θ_ĵ
    and returns it with ĵ; then θ_j is the mean of the models of the clients with
    ĵ = j (option II is this averaging of models). A cluster that no client has chosen
    keeps its model.

    The models start from different random values, as in the authors' code for MNIST;
    the first one is the task's initial model, so one cluster is FedAvg. The code for
    CIFAR-10 draws them again until each model is chosen by enough clients (a tenth with
    four clusters). That for FEMNIST first trains each on a random part of the clients,
    and weighs clients by their examples, as ``weighting="examples"`` does here. Starts
    determine
    which clusters form: if two groups choose the same model in the first rounds, they
    may share it for the whole run (the paper restarts from several random starts).
    Restarts are not built in; run with ``--seeds``. Sharing the first layers between
    clusters, as for the paper's FEMNIST, is not implemented.

    All clients choose anew in each evaluation, including clients that join later. No
    state besides the k models is kept on either side, so a resumed run needs nothing
    else. A message to a client contains k models.

    Parameters
    ----------
    num_clusters : int, default 4
        Number k of clusters. In the paper's experiments from 2 to 4.
    **base
        Arguments of `Strategy`. ``aggregation`` and ``weighting`` apply within
        each cluster.
    """

    num_clusters: int = setting(4, ge=1)

    def begin(self, round: Round) -> None:
        """Expect one of the models."""
        round.expected = self.model(round, 0)

    def model(self, round: Round, j: int) -> Arrays:
        """Return θ_j as it was sent."""
        sent = round.arrays.items()
        return {n.removeprefix(CLUSTERS): np.asarray(stack[j]) for n, stack in sent}

    def check_reply(self, reply: Reply) -> None:
        """Reject replies without a valid cluster."""
        chosen = reply.metric(CLUSTER)
        if chosen not in range(self.num_clusters):
            text = (
                f"names cluster {chosen:g}, not one from 0 to {self.num_clusters - 1}"
            )
            raise InvalidReplyError(text)

    def aggregate(self, round: Round) -> Arrays:
        """Return the models, each the mean of the replies that name its cluster."""
        models = [self.model(round, j) for j in range(self.num_clusters)]
        for j, before in enumerate(models):
            members = [r for r in round.replies if r.metrics[CLUSTER] == j]
            models[j] = self._mean_of(members, before)
        return {CLUSTERS + n: np.stack([m[n] for m in models]) for n in models[0]}

    def metrics(self, round: Round) -> dict[str, float]:
        """Return ``clusters`` as well, the number of clusters that were chosen."""
        chosen = {reply.metrics[CLUSTER] for reply in round.replies}
        return {**super().metrics(round), "clusters": len(chosen)}
