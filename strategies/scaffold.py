"""SCAFFOLD (Karimireddy et al., ICML 2020)."""

from collections.abc import Iterable
from logging import WARNING
from typing import Annotated, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from strategies.base import BaseStrategy
from strategies.server.replies import Arrays, is_finite, rounded_to, to_record
from task.messages import CONTROL, CONTROL_SINCE, NUM_EXAMPLES
from task.settings import Range, require, validate


class SCAFFOLD(BaseStrategy):
    """Algorithm 1: x ← x + η_g mean Δy_i and c ← c + |S|/N mean Δc_i.

    The server's control variate c travels with the model x, under ``control.``, and
    stays the mean of the c_i of all clients that have been seen so far, N of them. With
    weights it is the weighted mean, and |S|/N the share that S has of all weights.
    Statistics of batch norms are averaged: they are no parameters, and have no η_g.

    A client that has lost its c_i would leave the old one in c for ever. After its next
    reply c and all c_i are 0 again, as in round 1, which the log says.

    Parameters
    ----------
    global_learning_rate : float, default 1
        The server's step size η_g.
    **base
        Those of `BaseStrategy`.
    """

    client = "clients.scaffold:SCAFFOLDClient"
    only_means = True
    replies_are_changes = True

    def __init__(
        self,
        *,
        global_learning_rate: Annotated[float, Range("(0, inf)")] = 1.0,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.global_learning_rate = global_learning_rate
        validate(self)
        # A cap depends on who else is in a round, and c needs weights that stay.
        valid = self.weighting == "uniform" or self.largest_share == 1
        allowed = "1 with weighting='examples': c is the mean by weights that stay"
        require(valid, "largest-share", self.largest_share, allowed)
        self._sent = ArrayRecord()
        # Weights of all clients that have been seen, by name, and their last sum.
        self.client_weights: dict[str, float] = {}
        self._total = 0.0
        # The round from which c and the c_i have begun anew.
        self._since = 1

    def identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part; their clients count from now on."""
        nodes = super().identify(grid)
        for node in nodes:
            client = self.participants.known[node]
            examples = client.properties.get(NUM_EXAMPLES, 1)
            weight = 1.0 if self.weighting == "uniform" else float(examples)
            self.client_weights.setdefault(client.name, weight)
        return nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send x and c to the sampled clients."""
        self._sent = arrays
        config[CONTROL_SINCE] = self._since
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Add the mean changes Δy_i and Δc_i to x and c."""
        changes = self.mean(replies)
        if changes is None:
            return None
        weights = self.weights(replies)
        said = dict(zip(self.exchange.names(replies), weights, strict=True))
        known = self.client_weights | said
        total = sum(known.values())
        counted = sum(known[name] for name in self.counted(replies))
        # c is 0 for newcomers.
        before = self._total or total
        acknowledged = self.standing.acknowledged
        lost = sorted(name for name in self.exchange.unused if name in acknowledged)
        new = {}
        for name, change in changes.items():
            old, kept, step = self._sent[name].numpy(), 1.0, 1.0
            if name.startswith(CONTROL):
                kept, step = before / total, counted / total
                if lost:
                    kept = step = 0.0
            elif CONTROL + name in changes:
                step = self.global_learning_rate
            moved = np.multiply(old, kept, dtype=np.float64)
            moved += np.multiply(change, step, dtype=np.float64)
            new[name] = rounded_to(old.dtype, moved)
        if not is_finite(new):
            return None
        self.client_weights, self._total = known, total
        if lost:
            self._since = server_round + 1
            text = "the control variates begin anew: client %s has lost its own"
            log(WARNING, text, lost[0])
        return to_record(new)

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the state with all clients' weights."""
        arrays, values = super().state_dict()
        return arrays, {
            **values,
            "client_weights": self.client_weights,
            "total": self._total,
            "since": self._since,
        }

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state."""
        super().load_state_dict(arrays, values)
        self.client_weights = {n: float(w) for n, w in values["client_weights"].items()}
        self._total = float(values["total"])
        self._since = int(values.get("since", 1))
