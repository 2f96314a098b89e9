"""IFCA (Ghosh et al., NeurIPS 2020): iterative federated clustering."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.server.aggregation import Reply
from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.replies import Arrays, check_metrics, to_record
from flwr_frl.task.messages import CLUSTER, CLUSTERS
from flwr_frl.task.settings import Range, require, validate


class IFCA(BaseStrategy, client="flwr_frl.clients.ifca:IFCAClient"):
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
        Number k of clusters, at most the number of clients. In the paper's experiments
        from 2 to 4.
    **base
        Arguments of `BaseStrategy`. ``aggregation`` and ``weighting`` apply within
        each cluster.
    """

    def __init__(
        self,
        *,
        num_clusters: Annotated[int, Range("[1, inf)")] = 4,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.num_clusters = num_clusters
        validate(self)

    def check_clients(self, num_clients: int) -> None:
        """Refuse more clusters than clients as well."""
        super().check_clients(num_clients)
        allowed = f"at most {num_clients}, the number of clients"
        valid = self.num_clusters <= num_clients
        require(valid, "num-clusters", self.num_clusters, allowed)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send all models; expect one."""
        messages = super().configure_train(server_round, arrays, config, grid)
        stacked = {
            name.removeprefix(CLUSTERS): array.numpy() for name, array in arrays.items()
        }
        self._models: list[Arrays] = [
            {name: np.asarray(values[j]) for name, values in stacked.items()}
            for j in range(self.num_clusters)
        ]
        self.pending.expect(self.arrayrecord_key, to_record(self._models[0]))
        return messages

    def check_train_reply(self, reply: Message) -> None:
        """Reject replies without a valid cluster as well."""
        super().check_train_reply(reply)
        chosen = check_metrics(reply, [CLUSTER])[CLUSTER]
        if chosen not in range(self.num_clusters):
            text = (
                f"names cluster {chosen:g}, not one from 0 to {self.num_clusters - 1}"
            )
            raise InvalidReplyError(text)

    def aggregate(self, server_round: int, replies: list[Message]) -> ArrayRecord:
        """Return the models, each the mean of the replies that name its cluster."""
        models = list(self._models)
        for j, before in enumerate(models):
            members = [r for r in replies if check_metrics(r)[CLUSTER] == j]
            if members:
                decoded: list[Reply] = [
                    partial(self.arrays, reply) for reply in members
                ]
                models[j] = (
                    self.apply_rule(self.weights(members), decoded, before) or before
                )
        return to_record(
            {CLUSTERS + name: np.stack([m[name] for m in models]) for name in models[0]}
        )

    def train_metrics(self, replies: list[Message]) -> dict[str, float]:
        """Return ``clusters`` as well, the number of clusters that were chosen."""
        chosen = {check_metrics(reply)[CLUSTER] for reply in replies}
        return {**super().train_metrics(replies), "clusters": len(chosen)}
