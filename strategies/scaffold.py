"""SCAFFOLD (Karimireddy et al., ICML 2020)."""

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.base import BaseStrategy
from strategies.server.replies import to_record
from task.messages import CONTROL
from task.settings import Range, validate


class SCAFFOLD(BaseStrategy):
    """Algorithm 1: x ← x + η_g mean Δy_i and c ← c + |S|/N mean Δc_i.

    The server's control variate c travels with the model x, under ``control.``. N is
    the number of clients that have been seen so far.

    Parameters
    ----------
    global_learning_rate : float, default 1
        The server's step size η_g.
    **base
        As for `BaseStrategy`.
    """

    client = "clients.scaffold:SCAFFOLDClient"

    def __init__(
        self,
        *,
        global_learning_rate: Annotated[float, Range("(0, inf)")] = 1.0,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.global_learning_rate = global_learning_rate
        validate(self)
        self._sent = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send x and c to the sampled clients."""
        self._sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Add the mean changes Δy_i and Δc_i to x and c."""
        changes = self.mean(replies)
        if changes is None:
            return None
        known = {participant.name for participant in self.participants.known.values()}
        total = len(known | self.standing.acknowledged.keys())
        new = {}
        for name, change in changes.items():
            old = self._sent[name].numpy()
            control = name.startswith(CONTROL)
            step = len(replies) / total if control else self.global_learning_rate
            moved = old + np.multiply(change, step, dtype=np.float64)
            whole = np.issubdtype(old.dtype, np.integer)
            new[name] = (np.rint(moved) if whole else moved).astype(old.dtype)
        return to_record(new)
