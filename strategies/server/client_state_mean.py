"""Strategies whose shared arrays are the mean of state that all clients keep."""

from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.arrays import is_finite
from flwr_frl.common.messages import IN_MEAN
from flwr_frl.strategies.base import Strategy, stored
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Round


class ClientStateMean(Strategy, replies_are_changes=True, uses_mean="only"):
    """Add clients' changes, so that the sum stays the mean of what clients keep.

    Clipping or noise would change the mean but no client's state, and the difference
    would stay in the mean for good. So all clients have the same weight, and the plain
    mean is the only ``aggregation``, without ``server-dp-noise``.

    If a client has lost its state, the old one would remain in the mean permanently.
    The same holds for one whose state is newer than the mean, because the server was
    restored from a backup. The mean begins anew then.
    """

    _only = ("weighting", "uniform"), ("aggregation", "mean"), ("server_dp_noise", 0)
    _because = "the mean is that of what all clients keep"

    # Names of the clients whose state is in the mean.
    in_mean: dict[str, bool] = stored("in_mean")
    # Names of all clients seen so far.
    seen: list[str] = stored("seen", list)

    def _identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part; their clients count as seen."""
        nodes = super()._identify(grid)
        names = {self._run.clients.known[node].name for node in nodes}
        self.seen = sorted(names.union(self.seen))
        return nodes

    def lost(self, round: Round) -> str:
        """Return the client for whose state the mean begins anew; empty for none."""
        return min(self.in_mean.keys() & round.unused, default="")

    def moved(
        self, round: Round, changes: Arrays, lost: bool
    ) -> tuple[Arrays, dict[str, Any]]:
        """Return the new arrays, and new entries of ``state``.

        Parameters
        ----------
        round : Round
            The round.
        changes : dict of str to ndarray
            Mean of the clients' changes.
        lost : bool
            Whether the mean begins anew.
        """
        raise NotImplementedError

    def aggregate(self, round: Round) -> Arrays | None:
        """Move the arrays by the mean change; keep them if they would not be finite."""
        lost = self.lost(round)
        new, state = self.moved(round, round.mean(), bool(lost))
        if not is_finite(*new.values()):
            return None
        self.state |= state
        self.in_mean.update({reply.client: True for reply in round.replies})
        if lost:
            text = "the mean begins anew: client %s lacks the state that is in it"
            log(WARNING, text, self._run.clients.label(lost))
            self.in_mean.clear()
        return new

    def _config(self, node: int, config: ConfigRecord) -> dict[str, Any]:
        """Add whether the client's state is in the mean."""
        in_mean = self._run.clients.name_of(node) in self.in_mean
        return {**super()._config(node, config), IN_MEAN: in_mean}


class AllClientsMean(ClientStateMean):
    """x̄ ← x̄ + |S|/N mean Δx_i, where N clients have trained so far.

    A client that trains for the first time begins at x̄, so x̄ stays the plain mean of
    the models that the N clients keep, although the server sees their changes only. A
    client that leaves for good is still one of the N: its last model stays in the mean.
    A client that has lost its model begins at x̄ again, but the lost model, which the
    server cannot subtract, stays in the mean: x̄ is then off by 1/N of the distance
    between the two. The same holds for all clients if the server was restored from a
    backup, as they continue from newer models. The log names the clients.
    """

    def lost(self, round: Round) -> str:
        """Return "": the mean never begins anew."""
        return ""

    def moved(
        self, round: Round, changes: Arrays, lost: bool
    ) -> tuple[Arrays, dict[str, Any]]:
        """Add the clients' share of the mean change to x̄."""
        trained = self.in_mean.keys() | {reply.client for reply in round.replies}
        share = len(round.replies) / len(trained)
        steps = {n: np.multiply(c, share, dtype=np.float64) for n, c in changes.items()}
        return {name: round.arrays[name] + step for name, step in steps.items()}, {}
