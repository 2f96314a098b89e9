"""SCAFFOLD (Karimireddy et al., ICML 2020)."""

from logging import WARNING
from typing import Any

import numpy as np
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.messages import CONTROL, NUM_EXAMPLES
from flwr_frl.common.settings import require, setting
from flwr_frl.strategies.server.client_state_mean import ClientStateMean
from flwr_frl.strategies.server.replies import Arrays, is_finite, rounded_to
from flwr_frl.strategies.server.round import Round


class SCAFFOLD(
    ClientStateMean,
    client="flwr_frl.clients.scaffold:SCAFFOLDClient",
    uses_mean="only",
):
    """Algorithm 1: x ← x + η_g mean Δy_i and c ← c + |S|/N mean Δc_i.

    The server's control variate c travels with the model x, under ``control.``, and
    stays the mean of the c_i of all N clients that have been seen so far. With weights
    it is the weighted mean, and |S|/N is the fraction of all weights that S has.
    Statistics of batch norms are not parameters: they are averaged without η_g.

    If a client has lost its c_i, the old one would remain in c permanently. After its
    next reply, c and all c_i are reset to 0, as in round 1, with a warning. The same
    happens if a restored server has an older c. If c is approximate
    (`ClientStateMean`), Δc_i is c_i − c, and no reset is needed.

    Parameters
    ----------
    global_learning_rate : float, default 1
        The server's step size η_g.
    **base
        Arguments of `Strategy`.
    """

    global_learning_rate: float = setting(1.0, gt=0)

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        # A cap depends on the other clients of a round, but c needs constant weights.
        valid = self.settings.weighting == "uniform" or self.settings.largest_share == 1
        allowed = "1 with weighting='examples': c is the mean by weights that stay"
        require(valid, "largest-share", self.settings.largest_share, allowed)
        # Weights of all clients seen so far, by name, and their last sum.
        self.client_weights: dict[str, float]
        self.client_weights = self.state.setdefault("client_weights", {})
        self.state["total"] = 0.0

    def _identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part; from now on their weights count."""
        nodes = super()._identify(grid)
        for node in nodes:
            client = self._run.clients.known[node]
            examples = client.properties.get(NUM_EXAMPLES, 1)
            weighs = self.settings.weighting == "examples" and self.settings.uses_claims
            weight = float(examples) if weighs else 1.0
            self.client_weights.setdefault(client.name, weight)
        return nodes

    def aggregate(self, round: Round) -> Arrays | None:
        """Add the mean changes Δy_i and Δc_i to x and c."""
        changes = round.mean()
        if changes is None:
            return None
        weights = self.weights(round.replies)
        names = [reply.client for reply in round.replies]
        trained = dict(zip(names, weights, strict=True))
        every = self.client_weights | trained
        total = sum(every.values())
        counted = sum(every[name] for name in self.counted(round))
        # Clients without a c_i so far count with 0.
        before = total if self.is_approximate else self.state["total"] or total
        gone = () if self.is_approximate else self.in_mean.keys() & round.unused.keys()
        lost = min(gone, default="")
        anew = bool(lost or self._outdated)
        new = {}
        for name, change in changes.items():
            old, kept, step = round.sent[name], 1.0, 1.0
            if name.startswith(CONTROL):
                kept, step = before / total, counted / total
                if anew:
                    kept = step = 0.0
            elif CONTROL + name in changes:
                step = self.global_learning_rate
            moved = np.multiply(old, kept, dtype=np.float64)
            moved += np.multiply(change, step, dtype=np.float64)
            new[name] = rounded_to(old.dtype, moved)
        if not is_finite(new):
            return None
        self.client_weights.update(every)
        self.state["total"] = total
        self.in_mean.update(dict.fromkeys(trained, True))
        if anew:
            why = "has lost its own" if lost else "has a later one than the server"
            text = "the control variates begin anew: client %s %s"
            log(WARNING, text, self._run.clients.label(lost or self._outdated), why)
            self.in_mean.clear()
            self._outdated = ""
        return new


class SCAFFOLDFT(
    SCAFFOLD,
    client="flwr_frl.clients.scaffold:SCAFFOLDFTClient",
    # Each evaluation fine-tunes anew.
    evaluate_last_round_only=True,
):
    """SCAFFOLD; clients test it with a fine-tuned head."""
