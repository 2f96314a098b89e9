"""Representation transfer (Singh, UCLA 2024, ch. 5): sources teach targets."""

from collections.abc import Iterable
from logging import WARNING
from typing import Annotated, Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.fedrep import REPRESENTATION_WEIGHT
from flwr_frl.strategies.server.replies import Arrays, to_record
from flwr_frl.task.settings import Range, SettingsError, require, validate
from flwr_frl.task.transfer import basis, unit_columns


class RepresentationTransfer(BaseStrategy):
    """Sources send their trained representations once; targets get all of them.

    The first round asks the sources, and again until one has answered. Every later
    round sends what the sources gave to the targets that have no model yet, so a target
    that joins later gets it in the next round, and a source that comes later is not
    asked. Targets send nothing back but their counts and loss. Only the last round is
    evaluated, by the targets that have a model. ``fraction-train`` does not apply:
    everyone who is due is asked.

    This class serves any split model: what the targets get is the sources' state dicts,
    each array stacked along a new first axis. The theory covers linear regression only,
    which is `RepresentationTransferLinear`.

    Parameters
    ----------
    num_sources : int, default 10
        The clients 0 to ``num_sources`` − 1 are sources; they say so themselves.
    rank_tolerance : float, default 0.01
        In (0, 1); where the rank of a basis ends, relative to the largest singular
        value.
    **base
        Those of `BaseStrategy`; ``transport`` must be float32.
    """

    client = "flwr_frl.clients.representation_transfer:FeatureTransferClient"
    task_overrides: ClassVar = {
        "transfer": "flwr_frl.strategies.representation_transfer:"
        "RepresentationTransferLinear"
    }
    evaluate_last_round_only = True
    averages = False
    # The sources' arrays become one of another shape.
    fixed_shapes = False
    # Its targets are such clients.
    takes_newcomers = False
    srpfl_settings = None

    def __init__(
        self,
        *,
        num_sources: Annotated[int, Range("[1, inf)")] = 10,
        rank_tolerance: Annotated[float, Range("(0, 1)")] = 0.01,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        allowed = "float32 for representation-transfer"
        require(self.transport == "float32", "transport", self.transport, allowed)
        self.num_sources = num_sources
        self.rank_tolerance = rank_tolerance
        validate(self)
        # Whether the shared arrays are what the sources gave.
        self.built = False
        self._sent = ArrayRecord()

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless one client is a target.

        Once the clients are known, they have said themselves what they are.
        """
        if self.clients.known:
            return
        allowed = f"from 1 to {num_clients - 1}, so that one of {num_clients} clients "
        allowed += "is a target"
        valid = self.num_sources < num_clients
        require(valid, "num-sources", self.num_sources, allowed)

    def _with_role(self, nodes: list[int], role: str) -> list[int]:
        known = self.clients.known
        return [n for n in nodes if known[n].properties.get("role") == role]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the sources; once they have answered, the targets without a model."""
        nodes = self.identify(grid)
        self._sent = arrays
        if self.built:
            targets = self._with_role(nodes, "target")
            acknowledged = self.ledger.acknowledged
            nodes = [n for n in targets if self.name_of(n) not in acknowledged]
        else:
            nodes = self._with_role(nodes, "source")
        kind = MessageType.TRAIN
        messages = self.open_round(nodes, arrays, config, server_round, kind)
        if self.built:
            # A target sends no arrays.
            self.pending.expect(self.arrayrecord_key, ArrayRecord())
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return also the metric ``asked``: how many clients were."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            metrics["asked"] = len(self.pending.asked)
        # That nobody is left to be asked is no failure.
        nobody_left = self.built and not self.pending.asked
        return (self._sent if nobody_left else arrays), metrics

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Return `combine` of the sources' arrays; targets' replies change nothing."""
        if self.built:
            return self._sent
        try:
            combined = to_record(self.combine([self.arrays(r) for r in replies]))
        except SettingsError as error:
            if not (self.pending.silent or self.pending.rejections):
                raise
            # Those that have not answered may have more.
            log(WARNING, "round %d: %s; they are asked again", server_round, error)
            return None
        self.built = True
        return combined

    def combine(self, sources: list[Arrays]) -> Arrays:
        """Return the sources' arrays, stacked.

        There are m sources, in the order of their names; the arrays are (m, …).
        """
        log(WARNING, "the theory of representation transfer covers linear models only")
        return {name: np.stack([s[name] for s in sources]) for name in sources[0]}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the targets that have a model to test it."""
        targets = self._with_role(self.identify(grid), "target")
        nodes = [n for n in targets if self.name_of(n) in self.ledger.acknowledged]
        kind = MessageType.EVALUATE
        return self.open_round(nodes, arrays, config, server_round, kind)

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return also whether the sources have answered."""
        arrays, values = super().state_dict()
        return arrays, {**values, "built": self.built}

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state."""
        super().load_state_dict(arrays, values)
        self.built = bool(values["built"])


class RepresentationTransferLinear(RepresentationTransfer):
    """Linear regression, section 5.3: the targets get the orthonormal basis Vᵀ."""

    client = "flwr_frl.clients.representation_transfer:RepresentationTransferClient"

    def combine(self, sources: list[Arrays]) -> Arrays:
        """Return Vᵀ of shape (q, d), an orthonormal basis of the columns of all B_i.

        They come as ``representation.weight``, B_iᵀ of shape (k, d). Raises
        `SettingsError` if they span nothing.
        """
        weights = [s[REPRESENTATION_WEIGHT].astype(np.float64) for s in sources]
        columns = [unit_columns(weight.T) for weight in weights]
        return {REPRESENTATION_WEIGHT: basis(columns, self.rank_tolerance).T}
