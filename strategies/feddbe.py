"""FedDBE (Zhang et al., NeurIPS 2023): FedAvg with a domain bias eliminator."""

from functools import partial

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flwr_frl.common.messages import CONSENSUS, NUM_EXAMPLES, STATISTICS
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.server.aggregation import capped
from flwr_frl.strategies.server.replies import Arrays, to_record
from flwr_frl.strategies.server.round import Round

MEAN = f"{CONSENSUS}mean"


class FedDBE(Strategy, client="flwr_frl.clients.feddbe:FedDBEClient"):
    """Algorithm 1: average the models; the consensual mean z̄ of all features is fixed.

    z̄ is the mean of the clients' mean features before the first round, weighted like
    models. It is sent with the model, under ``consensus.``, and is not returned.
    """

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the initial model and z̄."""
        arrays = super().initialize(grid)
        like = arrays[MEAN]
        nodes = self._identify(grid)
        answers = self._run.clients.arrays(grid, nodes, STATISTICS)
        sent = [
            (name, record["mean"].numpy())
            for name, record in answers
            if "mean" in record
            and record["mean"].shape == like.shape
            and record["mean"].dtype == like.dtype
        ]
        if not sent:
            raise self._run.clients.nothing_sent("mean features")
        properties = {p.name: p.properties for p in self._run.clients.known.values()}
        votes = [
            1.0
            if self.settings.weighting == "uniform"
            else float(properties[name].get(NUM_EXAMPLES, 1))
            for name, _ in sent
        ]
        if self.settings.weighting == "examples":
            votes = capped(votes, self.settings.largest_share)
        each = [partial(dict[str, np.ndarray], {MEAN: mean}) for _, mean in sent]
        mean = self._apply_rule(votes, each, {MEAN: like.numpy()})
        return arrays if mean is None else ArrayRecord({**arrays, **to_record(mean)})

    def begin(self, round: Round) -> None:
        """Expect the model without z̄."""
        round.need(MEAN)
        round.expected = {n: a for n, a in round.sent.items() if n != MEAN}

    def aggregate(self, round: Round) -> Arrays | None:
        """Return the mean of the models, and z̄ unchanged."""
        model = round.mean()
        return None if model is None else {**model, MEAN: round.sent[MEAN]}
