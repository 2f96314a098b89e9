"""Mime (Karimireddy et al., NeurIPS 2021)."""

from collections.abc import Iterable
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.messages import CONTROL
from flwr_frl.strategies.base import Round, Strategy
from flwr_frl.strategies.fedrep import mean_statistic
from flwr_frl.strategies.server.replies import to_record

# Names of c, and of a client's gradient.
GRADIENT = "gradient"
C = f"{CONTROL}{GRADIENT}"


class Mime(Strategy, client="flwr_frl.clients.mime:MimeClient", uses_mean="also"):
    """Algorithm 1: average the models, and the clients' values of the new momentum.

    Each round has two exchanges. In the first, a query, the sampled clients send the
    gradients of all their examples at x, whose mean is c; in the second they receive x,
    m and c and train. Metrics do not count the bytes of the first. ``aggregation`` and
    ``weighting`` apply to both. If no client answers the query with a gradient of the
    model's size, c of the last round is used, which is 0 at first.
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Query the gradients at x before the messages are made."""
        nodes = self.sample(server_round, self._connected_nodes(grid, trains=True))
        if nodes:
            try:
                c = mean_statistic(self, grid, GRADIENT, nodes, arrays)
                last = arrays.get(C, c)
                fits = (c.shape, str(c.dtype)) == (tuple(last.shape), str(last.dtype))
                require(fits, GRADIENT, c.shape, f"one of shape {tuple(last.shape)}")
                arrays = ArrayRecord({**arrays, **to_record({C: c})})
            except SettingsError as error:
                log(WARNING, "the last gradient is used again: %s", error)
        return super().configure_train(server_round, arrays, config, grid)

    def begin(self, round: Round) -> None:
        """Expect the model and the momentum."""
        round.keep(C)
