"""What a run asks of a strategy besides the hooks of Flower's own."""

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_frl.strategies.grids.arrivals import with_retries
from flwr_frl.strategies.server.client_manager import ClientManager
from flwr_frl.strategies.server.pending_round import PendingRound
from flwr_frl.strategies.server.privacy import ClientPrivacy
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round_ledger import RoundLedger
from flwr_frl.task.settings import Setting, Settings, SettingsError, build


class RunHooks(Strategy):
    """What is special about an algorithm, said by its class.

    A run asks for nothing else, so a strategy from outside is run like ours.
    """

    # Import path of the client that belongs to this strategy.
    client: ClassVar[str] = ""
    # Import paths of the strategies for tasks, by name, that are a case of their own.
    # Subclasses do not inherit them.
    task_overrides: ClassVar[Mapping[str, str]] = {}
    # Whether only the last round is evaluated, whatever the settings say.
    evaluate_last_round_only: ClassVar[bool] = False
    # Whether there is a trained model for clients that come after the training.
    takes_newcomers: ClassVar[bool] = True
    # Whether a round waits for all that are asked.
    waits_for_all: ClassVar[bool] = True
    # What settings are in simulation unless they are given.
    simulation_defaults: ClassVar[Mapping[str, Setting]] = {}

    # Settings that this strategy has under SRPFL; None where nobody is sampled in it.
    srpfl_settings: ClassVar[Mapping[str, Setting] | None] = {}

    @classmethod
    def in_simulation(cls, settings: Settings) -> Mapping[str, Setting]:
        """Return what settings are in simulation unless they are given."""
        return cls.simulation_defaults

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return the strategy with its declared arguments taken from settings."""
        return build(cls, settings)

    @classmethod
    def client_path(cls, settings: Settings) -> str:
        """Return the import path of the client for these settings."""
        return cls.client

    @classmethod
    def settings_owners(cls, settings: Settings) -> list[type]:
        """Return the classes whose declared settings this strategy reads."""
        return [cls]

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless a run with so many clients is possible.

        Parameters
        ----------
        num_clients : int
            How many there are when the run begins.
        """

    def adapt_grid(self, grid: Grid) -> Grid:
        """Return the grid as this strategy needs it, where replies come by themselves.

        Parameters
        ----------
        grid : Grid
            The grid of a run.

        Returns
        -------
        Grid
            The same; a strategy that closes rounds early decorates it. What is given
            as an `ArrivalGrid` must stay one.
        """
        return grid

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run as Flower's ``Strategy.start``; that nobody ever counted is an error."""
        longest = float(kwargs.get("timeout", math.inf))
        grid = self.adapt_grid(
            with_retries(grid, self.name_of, longest, self.largest_reply)
        )
        # One of Flower's own that SRPFL wraps keeps no account.
        ledger = getattr(self, "ledger", None)
        before = ledger.counted if ledger else 0
        result = super().start(grid, *args, **kwargs)
        if ledger and ledger.counted == before and result.train_metrics_clientapp:
            why = self.training.failure or self.clients.failure or "there are none"
            raise SettingsError(f"in no round did a client's reply count: {why}")
        return result

    # What a strategy of ours has besides, and one that wraps another hands on.

    client_metrics: dict[str, dict[str, float]]
    evaluated_in: dict[str, int]
    # Replies that counted in the last evaluation.
    evaluated: list[Message]
    clients: ClientManager
    ledger: RoundLedger
    # The last exchange, and that of the last training.
    pending: PendingRound
    training: PendingRound
    checkpoint_every: int
    # What makes means private, where the settings ask for it.
    privacy: ClientPrivacy | None = None

    def open_round(
        self,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        kind: str,
    ) -> list[Message]:
        """Return a message for each of some nodes, and note what to expect."""
        raise NotImplementedError

    def name_of(self, node: int) -> str:
        """Return the name of a node's client; its id where it has said none."""
        return str(node)

    def largest_reply(self, kind: str) -> float:
        """Return how many bytes a reply to messages of a kind may have; here any."""
        return math.inf

    def names_of_evaluated(self) -> list[str]:
        """Return the names of the clients that counted in the last evaluation."""
        return [self.name_of(reply.metadata.src_node_id) for reply in self.evaluated]

    def identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part, in the order of their clients' names."""
        raise NotImplementedError

    def connected_nodes(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part; wait for one as long as a round may.

        Those that cannot must not use up the rounds while others, who have taken part
        before, are away. In one process nobody comes.
        """
        until = time.monotonic() + self.clients.round_timeout
        while not (nodes := self.identify(grid)):
            away = self.clients.away(self.expected_clients())
            over = time.monotonic() >= until
            if over or not away or getattr(grid, "in_process", False):
                break
            self.clients.wait_for_others(grid, until)
        return nodes

    def expected_clients(self) -> set[str]:
        """Return the names of those who have taken part and may do so again."""
        return set(self.ledger.acknowledged)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return those of some nodes that train in a round, in the same order."""
        raise NotImplementedError

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the arrays to start from.

        Parameters
        ----------
        grid : Grid
            The grid.

        Returns
        -------
        ArrayRecord
            The shared arrays.

        Raises
        ------
        SettingsError
            If there is nobody to ask for them.
        """
        raise NotImplementedError

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return all that a resumed run needs besides the shared arrays.

        Returns
        -------
        arrays : dict of str to ndarray
            By name.
        values : dict
            What JSON can hold.
        """
        raise NotImplementedError

    def snapshot(self) -> Callable[[], tuple[Arrays, dict[str, Any]]]:
        """Return what makes the `state_dict` of now, whatever changes until then."""
        arrays, values = self.state_dict()
        # Copied faster than Python's objects.
        text = json.dumps(values)
        return lambda: (arrays, json.loads(text))

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state, as `state_dict` returned it."""
        raise NotImplementedError
