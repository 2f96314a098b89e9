"""Third-party strategies, for the setting ``algorithm=outsiders:Class``."""

from typing import ClassVar

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import setting
from flwr_frl.strategies import Strategy
from flwr_frl.strategies.grids.inbox import GridDecorator


class Plain(Strategy, client="flwr_frl.clients.fedrep:FedRepClient"):
    """Averages the representations, like FedRep."""


class Passing(GridDecorator):
    """A grid that records the messages it passes on."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.passed: list[Message] = []

    def send_and_receive(self, messages, *, timeout=None):
        self.passed += messages
        return list(self.grid.send_and_receive(messages, timeout=timeout))


class Fewest(Strategy, client="flwr_frl.clients.fedavg:FedAvgClient"):
    """Declares a setting.

    Parameters
    ----------
    fewest : int, default 2
        Minimum number of clients.
    """

    fewest: int = setting(2, ge=1, le=99)


class Hooked(Fewest, evaluate_last_round_only=True):
    """Overrides traits and hooks, and waits for no client."""

    grids: ClassVar[list[Passing]] = []
    waits = False

    def __init__(self, **base):
        super().__init__(**base)
        self._run.participation.waits_for_all = self.waits

    def _check_clients(self, num_clients):
        super()._check_clients(num_clients)
        if num_clients < self.fewest:
            raise SettingsError(f"fewest is {self.fewest}; {num_clients} are too few")

    def _adapt_grid(self, grid):
        self.grids.append(Passing(grid))
        return self.grids[-1]


class Unhooked(Hooked, evaluate_last_round_only=False):
    """Reverses what `Hooked` declares."""

    waits = True

    def _adapt_grid(self, grid):
        return grid


class WithoutClient(Strategy):
    """Does not declare its client."""


class LostClient(Strategy, client="outsiders:NobodyIsHere"):
    pass


class StrangeClient(Strategy, client="outsiders:Plain"):
    pass


class Homeless:
    """Not a strategy."""


class fedrep(Plain):  # noqa: N801
    """Has the name of a built-in algorithm."""


class Elsewhere:
    class Plain(Plain):
        """Has the same name as the class at module level."""
