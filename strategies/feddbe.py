"""FedDBE (Zhang et al., NeurIPS 2023): FedAvg with a domain bias eliminator."""

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flwr_frl.common.messages import CONSENSUS
from flwr_frl.strategies.base import Round, Strategy
from flwr_frl.strategies.fedrep import mean_statistic
from flwr_frl.strategies.server.replies import to_record

MEAN = f"{CONSENSUS}mean"


class FedDBE(Strategy, client="flwr_frl.clients.feddbe:FedDBEClient", uses_mean="also"):
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
        round.keep(MEAN)
