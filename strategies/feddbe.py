"""FedDBE (Zhang et al., NeurIPS 2023): FedAvg with a domain bias eliminator."""

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flwr_frl.common.messages import CONSENSUS
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.fedrep import mean_statistic
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
        mean = mean_statistic(self, grid, "mean")
        return ArrayRecord({**arrays, **to_record({MEAN: mean})})

    def begin(self, round: Round) -> None:
        """Expect the model without z̄."""
        round.need(MEAN)
        round.expected = {n: a for n, a in round.arrays.items() if n != MEAN}

    def aggregate(self, round: Round) -> Arrays | None:
        """Return the mean of the models, and z̄ unchanged."""
        model = round.mean()
        return None if model is None else {**model, MEAN: round.arrays[MEAN]}
