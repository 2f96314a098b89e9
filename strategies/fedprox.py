"""FedProx (Li et al., MLSys 2020)."""

from collections.abc import Iterable
from typing import Annotated, Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.task.messages import PROXIMAL_WEIGHT
from flwr_frl.task.settings import Range, validate


class FedProx(BaseStrategy, client="flwr_frl.clients.fedprox:FedProxClient"):
    """Average models that were trained with a proximal term.

    Parameters
    ----------
    proximal_mu : float, default 0.01
        μ of the proximal term μ/2 ‖w − wᵗ‖² (algorithm 2); 0 is FedAvg. Clients receive
        it with each training message, under the key of Flower's FedProx.
    **base
        Arguments of `BaseStrategy`.
    """

    def __init__(
        self, *, proximal_mu: Annotated[float, Range("[0, inf)")] = 0.01, **base: Any
    ) -> None:
        super().__init__(**base)
        self.proximal_mu = proximal_mu
        validate(self)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send μ in the config as well."""
        config[PROXIMAL_WEIGHT] = self.proximal_mu
        return super().configure_train(server_round, arrays, config, grid)
