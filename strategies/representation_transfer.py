"""Representation transfer (Singh, UCLA 2024, ch. 5): sources teach targets."""

from collections.abc import Iterable
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid

from strategies.base import BaseStrategy
from strategies.server.replies import Arrays, check_arrays, to_record
from task.settings import Settings, require
from task.transfer import basis, unit_columns

WEIGHT = "representation.weight"


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
    num_clients : int, default 20
        Number of clients.
    rank_tolerance : float, default 0.01
        In (0, 1); where the rank of a basis ends, relative to the largest singular
        value.
    **base
        As for `BaseStrategy`; ``transport`` must be float32.
    """

    evaluated_once = True

    def __init__(
        self,
        *,
        num_sources: int = 10,
        num_clients: int = 20,
        rank_tolerance: float = 0.01,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        allowed = "float32 for representation-transfer"
        require(self.transport == "float32", "transport", self.transport, allowed)
        allowed = f"from 1 to {num_clients - 1}, so that one of {num_clients} clients "
        allowed += "is a target"
        require(1 <= num_sources < num_clients, "num-sources", num_sources, allowed)
        require(0 < rank_tolerance < 1, "rank-tolerance", rank_tolerance, "in (0, 1)")
        self.rank_tolerance = rank_tolerance
        # Whether the shared arrays are what the sources gave.
        self.built = False
        self._sent = ArrayRecord()

    @classmethod
    def from_settings(cls, settings: Settings) -> "RepresentationTransfer":
        """Return the strategy for the task that the settings name.

        Parameters
        ----------
        settings : mapping
            All settings.

        Returns
        -------
        RepresentationTransfer
            A `RepresentationTransferLinear` for the task ``transfer``.
        """
        if cls is RepresentationTransfer and settings["task"] == "transfer":
            return RepresentationTransferLinear.from_settings(settings)
        return super().from_settings(settings)

    def _with_role(self, nodes: list[int], role: str) -> list[int]:
        return [n for n in nodes if self.participants[n].properties.get("role") == role]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the sources, or else the targets that have no model yet.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        arrays : ArrayRecord
            The common initial representation, or what the sources gave.
        config : ConfigRecord
            Passed on; gets ``server-round``.
        grid : Grid
            The grid.

        Returns
        -------
        list of Message
            None once all targets that are there have a model.
        """
        nodes = self.identify(grid)
        self._sent, expected = arrays, arrays
        if self.built:
            targets = self._with_role(nodes, "target")
            nodes = [n for n in targets if self.name_of(n) not in self.acknowledged]
            # A target's reply has the names that it was sent, and no values.
            expected = to_record(
                {n: np.empty(0, array.dtype) for n, array in arrays.items()}
            )
        else:
            nodes = self._with_role(nodes, "source")
        self._expected = {self.arrayrecord_key: expected}
        return self._messages(nodes, arrays, config, server_round, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Build what the targets get, or note which targets have a model now.

        Parameters
        ----------
        server_round : int
            The round.
        replies : iterable of Message
            What came back.

        Returns
        -------
        arrays : ArrayRecord or None
            What the sources gave; None if no source's reply is valid.
        metrics : MetricRecord
            As `BaseStrategy.aggregate_train`, and ``asked``: how many clients were.
        """
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            metrics["asked"] = len(self._asked)
        # That nobody is left to be asked is no failure.
        return (arrays if self._asked or not self.built else self._sent), metrics

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Combine the sources' representations; targets' replies change nothing.

        Parameters
        ----------
        server_round : int
            The round.
        replies : list of Message
            Checked replies of sources, or of targets.

        Returns
        -------
        ArrayRecord
            What the targets get.

        Raises
        ------
        SettingsError
            If the sources' representations span nothing.
        """
        if self.built:
            return self._sent
        key = self.arrayrecord_key
        sources = [check_arrays(reply, key, self._expected[key]) for reply in replies]
        combined = to_record(self.combine(sources))
        self.built = True
        return combined

    def combine(self, sources: list[Arrays]) -> Arrays:
        """Return the sources' arrays, stacked.

        Parameters
        ----------
        sources : list of dict of str to ndarray
            The representations of m sources, in the order of their names.

        Returns
        -------
        dict of str to ndarray
            Each of shape (m, …).
        """
        log(WARNING, "the theory of representation transfer covers linear models only")
        return {name: np.stack([s[name] for s in sources]) for name in sources[0]}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the targets that have a model to test it.

        Parameters
        ----------
        server_round : int
            The round.
        arrays : ArrayRecord
            What the sources gave.
        config : ConfigRecord
            Passed on; gets ``server-round``.
        grid : Grid
            The grid.

        Returns
        -------
        list of Message
            One for each such target.
        """
        targets = self._with_role(self.identify(grid), "target")
        nodes = [n for n in targets if self.name_of(n) in self.acknowledged]
        return self._messages(nodes, arrays, config, server_round, MessageType.EVALUATE)

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the base's state, and whether the sources have answered.

        Returns
        -------
        arrays, values
            As `BaseStrategy.state_dict`.
        """
        arrays, values = super().state_dict()
        return arrays, {**values, "built": self.built}

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state.

        Parameters
        ----------
        arrays, values
            As `state_dict` returned them.
        """
        super().load_state_dict(arrays, values)
        self.built = bool(values["built"])


class RepresentationTransferLinear(RepresentationTransfer):
    """Linear regression, section 5.3: the targets get the orthonormal basis Vᵀ.

    Parameters
    ----------
    **transfer
        As for `RepresentationTransfer`.
    """

    def combine(self, sources: list[Arrays]) -> Arrays:
        """Return Vᵀ of shape (q, d), a basis of the sources' columns.

        Parameters
        ----------
        sources : list of dict of str to ndarray
            ``representation.weight``: B_iᵀ of shape (k, d).

        Returns
        -------
        dict of str to ndarray
            ``representation.weight``: Vᵀ.
        """
        columns = [unit_columns(s[WEIGHT].astype(np.float64).T) for s in sources]
        return {WEIGHT: basis(columns, self.rank_tolerance).T}
