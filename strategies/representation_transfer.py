"""Representation transfer (Singh, UCLA 2024, ch. 5) from sources to targets."""

from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_frl.common.errors import require
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Strategy, stored
from flwr_frl.strategies.fedrep import REPRESENTATION_WEIGHT
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Round
from flwr_frl.task.transfer import basis, unit_columns


class RepresentationTransfer(
    Strategy,
    client="flwr_frl.clients.representation_transfer:FeatureTransferClient",
    # The targets receive arrays of another shape.
    uses_mean="never",
    evaluate_last_round_only=True,
    # Targets already are newcomers.
    takes_newcomers=False,
):
    """Collect the sources' trained representations once, and send them to all targets.

    The first round trains the sources; it is repeated until at least one source has
    answered. Every later round sends the combined representations to the targets
    without a model, so a target that joins late receives them in the next round.
    Sources that join late are not trained. Targets return only their example count and
    loss. Targets with a model are evaluated after the last round. There is no sampling:
    ``fraction-train`` is unused.

    This class supports any split model: targets receive the sources' state dicts, with
    each array stacked along a new first axis. The theory covers only linear regression
    (`RepresentationTransferLinear`).

    Parameters
    ----------
    num_sources : int, default 10
        Number of source clients. They are the first clients, unless a node config sets
        ``role``; each client reports its role.
    rank_tolerance : float, default 0.01
        In (0, 1). Singular values below this fraction of the largest do not count
        towards the rank of a basis.
    **base
        The settings of `Strategy`.
    """

    num_sources: int = setting(10, ge=1)
    rank_tolerance: float = setting(0.01, gt=0, lt=1)
    _only = (("fraction_evaluate", 1.0),)
    _because = "all targets are tested"

    # True once the shared arrays are the combined representations
    built: bool = stored("built", bool)

    def _check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless there are both sources and targets.

        Known clients have reported their roles, which then count instead of
        ``num_sources``.
        """
        known = list(self._run.clients.known)
        if not known:
            allowed = f"below {num_clients}, so that one of the clients is a target"
            valid = self.num_sources < num_clients
            require(valid, "num-sources", self.num_sources, allowed)
        for role in ("source", "target") if known else ():
            allowed = f"one client or more with the role {role!r} in its node config"
            count = len(self._with_role(known, role))
            require(count > 0, "role", count, allowed)

    def _with_role(self, nodes: list[int], role: str) -> list[int]:
        known = self._run.clients.known
        return [n for n in nodes if known[n].properties.get("role") == role]

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return the sources or, once they have answered, targets without a model."""
        if not self.built:
            return self._with_role(nodes, "source")
        done, targets = self._run.clients.acknowledged, self._with_role(nodes, "target")
        return [n for n in targets if self._run.clients.name_of(n) not in done]

    def begin(self, round: Round) -> None:
        """Expect no arrays of targets."""
        if self.built:
            round.expected = {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add ``asked``, the number of clients addressed."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            metrics["asked"] = len(self._run.round.asked)
        # A round is valid even if all targets have a model already.
        done = self.built and not self._run.round.asked
        return (self._run.round.record if done else arrays), metrics

    def aggregate(self, round: Round) -> Arrays | None:
        """Combine the sources' arrays; replies of targets change nothing."""
        if self.built:
            return round.arrays
        combined = self.combine([reply.read() for reply in round.replies])
        self.built = combined is not None
        return combined

    def combine(self, sources: list[Arrays]) -> Arrays | None:
        """Return the arrays of m sources, in the order of names, stacked to (m, …).

        None asks the sources again in the next round.
        """
        return {name: np.stack([s[name] for s in sources]) for name in sources[0]}

    def _connected_nodes(self, grid: Grid, trains: bool = False) -> list[int]:
        """Return the nodes that can train, or the targets that have a model."""
        nodes, clients = super()._connected_nodes(grid, trains), self._run.clients
        if trains:
            return nodes
        targets = self._with_role(nodes, "target")
        return [n for n in targets if clients.name_of(n) in clients.acknowledged]


class RepresentationTransferLinear(
    RepresentationTransfer,
    client="flwr_frl.clients.representation_transfer:RepresentationTransferClient",
):
    """Linear regression (section 5.3): targets receive the orthonormal basis Vᵀ."""

    def combine(self, sources: list[Arrays]) -> Arrays | None:
        """Return Vᵀ, shape (q, d), an orthonormal basis of the columns of all B_i.

        Sources send ``representation.weight``, B_iᵀ of shape (k, d). Returns None if
        all B_i are 0.
        """
        weights = [s[REPRESENTATION_WEIGHT].astype(np.float64) for s in sources]
        columns = [unit_columns(weight.T) for weight in weights]
        if not any(map(np.size, columns)):
            return None
        return {REPRESENTATION_WEIGHT: basis(columns, self.rank_tolerance).T}
