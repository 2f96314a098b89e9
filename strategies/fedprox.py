"""FedProx (Li et al., MLSys 2020)."""

from typing import Annotated, Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from strategies.base import BaseStrategy
from task.messages import PROXIMAL_WEIGHT
from task.settings import Range, validate


class FedProx(BaseStrategy):
    """Average models whose training was held near the global one.

    Parameters
    ----------
    proximal_mu : float, default 0.01
        μ of the proximal term μ/2 ‖w − wᵗ‖² (algorithm 2); 0 is FedAvg. The clients get
        it with each message, under the key that Flower's FedProx uses.
    **base
        As for `BaseStrategy`.
    """

    client = "clients.fedprox:FedProxClient"

    def __init__(
        self, *, proximal_mu: Annotated[float, Range("[0, inf)")] = 0.01, **base: Any
    ) -> None:
        super().__init__(**base)
        self.proximal_mu = proximal_mu
        validate(self)

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return also μ, in the config."""
        content = super().content(node, arrays, config)
        content.config_records[self.configrecord_key][PROXIMAL_WEIGHT] = (
            self.proximal_mu
        )
        return content
