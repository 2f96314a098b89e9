"""FedDBE (Zhang et al., NeurIPS 2023): FedAvg with a domain bias eliminator."""

from collections.abc import Iterable
from functools import partial

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.server.aggregation import capped
from flwr_frl.strategies.server.replies import Arrays, to_record
from flwr_frl.task.messages import CONSENSUS, NUM_EXAMPLES, STATISTICS

MEAN = f"{CONSENSUS}mean"


class FedDBE(BaseStrategy):
    """Algorithm 1: average the models; the consensual mean z̄ of all features stays.

    z̄ is the mean of what the clients say before the first round, weighted as models
    are. It travels with the model, under ``consensus.``, and does not come back.
    """

    client = "flwr_frl.clients.feddbe:FedDBEClient"
    # All get z̄ as well.
    supports_client_dp = False

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the initial model and z̄."""
        arrays = super().initialize(grid)
        like = arrays[MEAN]
        nodes = self.identify(grid)
        answers = self.clients.query_arrays(grid, nodes, STATISTICS)
        said = [
            (name, record["mean"].numpy())
            for name, record in answers
            if "mean" in record
            and record["mean"].shape == like.shape
            and record["mean"].dtype == like.dtype
        ]
        if not said:
            raise self.clients.nothing_sent("mean features")
        known = {p.name: p.properties for p in self.clients.known.values()}
        votes = [
            1.0
            if self.weighting == "uniform"
            else float(known[name].get(NUM_EXAMPLES, 1))
            for name, _ in said
        ]
        if self.weighting == "examples":
            votes = capped(votes, self.largest_share)
        each = [partial(dict[str, np.ndarray], {MEAN: mean}) for _, mean in said]
        found = self.rule(votes, each, {MEAN: like.numpy()})
        return arrays if found is None else ArrayRecord({**arrays, **to_record(found)})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model and z̄; expect the model alone."""
        messages = super().configure_train(server_round, arrays, config, grid)
        self._mean: Arrays = {MEAN: arrays[MEAN].numpy()}
        sent = self.pending.expected[self.arrayrecord_key]
        own = ArrayRecord({name: a for name, a in sent.items() if name != MEAN})
        self.pending.expect(self.arrayrecord_key, own)
        return messages

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Return the mean of the models, and z̄ as it was."""
        arrays = self.mean(replies)
        return None if arrays is None else to_record({**arrays, **self._mean})
