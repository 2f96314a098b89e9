"""The base of all strategies: what every algorithm's server has in common."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from logging import INFO
from typing import Any, cast

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from flwr_frl.strategies.grids.arrivals import with_retries
from flwr_frl.strategies.server.aggregation import CENTERED_CLIP, make_rule
from flwr_frl.strategies.server.averaging import LAST_CHANGE, Averaging
from flwr_frl.strategies.server.checkpoint import State, restore_tree, snapshot_of
from flwr_frl.strategies.server.client_manager import ClientManager
from flwr_frl.strategies.server.evaluation import Evaluation
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.pending_round import PendingRound
from flwr_frl.strategies.server.privacy import check_no_counters, client_privacy
from flwr_frl.strategies.server.replies import (
    largest_reply,
)
from flwr_frl.strategies.server.round_ledger import RoundLedger
from flwr_frl.strategies.traits import StrategySettings, takes
from flwr_frl.task.messages import INITIAL_ARRAYS, SERVER_ROUND
from flwr_frl.task.settings import SettingsError


class BaseStrategy(Averaging, FlowerFedAvg):
    """Sample clients and average the arrays that they share.

    Clients are known by name rather than by node id, sampling is seeded, replies are
    checked, means have a fixed order, bytes are counted, and the state is saved in
    checkpoints. The arguments are the fields of `StrategySettings`, the class keywords
    those of `Traits`.

    Attributes
    ----------
    settings : StrategySettings
        The arguments.
    state : dict
        State that a checkpoint saves and a resumed run restores: a tree of dicts with
        strings as keys, and with arrays and JSON values as leaves. Arrays under
        ``heads/CLIENT`` are loaded by `flwr_frl.clients.predict`. Arrays must be
        replaced rather than changed in place.
    clients : ClientManager
        The clients of the run, by node.
    ledger : RoundLedger
        The last round of each client whose reply has counted.
    pending, training : PendingRound
        The last messages that were sent, and the last ones for training.
    evaluation : Evaluation
        Each client's test metrics.
    participation : Participation
        Rule that samples clients and decides how many replies close a round.
    privacy : ClientPrivacy or None
        The mechanism of client-level differential privacy, with ``server-dp-noise``.
    """

    @takes(StrategySettings)
    def __init__(self, **settings: Any) -> None:
        self.settings = own = StrategySettings(**settings)
        super().__init__(
            fraction_train=own.fraction_train,
            min_train_nodes=own.min_train_nodes,
            min_available_nodes=own.min_available_nodes,
        )
        own.check(self.traits)
        # Where `centered-clip` keeps its last change.
        clips = own.aggregation == CENTERED_CLIP
        self.state: dict[str, Any] = {LAST_CHANGE: {}} if clips else {}
        noise = own.server_dp_noise, own.server_dp_clip, own.server_dp_delta
        self.privacy = client_privacy(*noise)
        self.clients = ClientManager(own.min_available_nodes)
        sampling = own.fraction_train, own.min_train_nodes, own.seed
        self.participation = Participation(*sampling, self.traits.waits_for_all)
        self.ledger = RoundLedger()
        self.pending = self.training = PendingRound()
        self.evaluation = Evaluation()
        byzantine = own.byzantine_fraction * max(1, own.bucket_size)
        self._rule = make_rule(own.aggregation, byzantine, own.clip_norm)
        self._used, self._warned = set(), set()

    @property
    def unused_settings(self) -> dict[str, str]:
        """Settings without effect here, by name, with the reason."""
        return self.settings.unused

    # Start of a run.

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run as Flower's ``Strategy.start``; raise if no reply has ever counted."""
        longest = float(kwargs.get("timeout", math.inf))
        grid = self.adapt_grid(reliable_grid(self, grid, longest))
        grid = self.participation.adapt_grid(grid, self.name_of)
        before = self.ledger.counted
        result = super().start(grid, *args, **kwargs)
        if self.ledger.counted == before and result.train_metrics_clientapp:
            why = self.training.failure or self.clients.failure or "there are none"
            raise SettingsError(f"in no round did a client's reply count: {why}")
        return result

    def adapt_grid(self, grid: Grid) -> Grid:
        """Return the grid that the strategy uses; a decorated one, for example.

        An `ArrivalGrid` must stay one.
        """
        return grid

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless a run can begin with this number of clients."""
        sample = partial(self.sample, 1, list(range(num_clients)))
        self.participation.check(num_clients, sample)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the shared arrays of the initial model on which most clients agree.

        Raises
        ------
        SettingsError
            If no client sends any.
        """
        nodes = self.identify(grid)
        arrays = self.clients.common_initial_arrays(grid, nodes, INITIAL_ARRAYS)
        if self.privacy:
            check_no_counters(arrays, self.settings.server_dp_noise)
        return arrays

    # Participants.

    def identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part, in the order of their clients' names."""
        nodes = self.clients.identify(grid, self.ledger.run_token)
        for node in nodes:
            client = self.clients.known[node]
            if self.ledger.is_rolled_back(client.name, client.properties):
                self.roll_back(client.name)
        return nodes

    def roll_back(self, name: str) -> None:
        """Continue with a client that has seen a later checkpoint than the server has.

        By default it continues from the newest round that both know, or else from the
        client's newest.
        """
        self.ledger.continue_from(name)

    def _connected_nodes(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part; wait for one up to ``round_timeout``.

        If no eligible client is connected but earlier participants may return, wait.
        In-process grids return at once.
        """
        identify = partial(self.identify, grid)
        return self.clients.wait_for_any(grid, identify, self._expected_clients)

    def _expected_clients(self) -> set[str]:
        """Return the names of earlier participants that may return."""
        return set(self.ledger.acknowledged)

    def name_of(self, node: int) -> str:
        """Return the name of a node's client; the id as text for an unknown node."""
        return self.clients.name_of(node)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return the nodes that train in a round, in their given order."""
        others = len(self.clients.busy_clients())
        return self.participation.sample(server_round, nodes, others)

    # Messages.

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return the content of one client's message; subclasses add to it.

        Parameters
        ----------
        node : int
            The client's node.
        arrays : ArrayRecord
            The shared arrays.
        config : ConfigRecord
            The config, with ``server-round``; must not be changed.
        """
        server_round = int(cast(int, config[SERVER_ROUND]))
        saves = self.settings.checkpoint_every > 0
        about = self.ledger.config(self.name_of(node), server_round, saves)
        record = ConfigRecord({**about, **config})
        return RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: record})

    def open_round(
        self,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        kind: str,
    ) -> list[Message]:
        """Return a message of some kind for each node, and expect their replies."""
        config[SERVER_ROUND] = server_round
        trains = kind == MessageType.TRAIN
        if not trains:
            nodes = self.clients.answering(nodes)
        sent = self._as_transported(arrays)
        self.pending = PendingRound(server_round, self.name_of)
        self.pending.sent = arrays
        self.pending.expect(self.arrayrecord_key, sent)
        group, messages = str(server_round), []
        for node in nodes:
            content = self.content(node, sent, config)
            # A subclass may send each client arrays of its own.
            record = content.get(self.arrayrecord_key)
            if isinstance(record, ArrayRecord):
                content[self.arrayrecord_key] = self._as_transported(record)
            messages.append(Message(content, node, kind, group_id=group))
        if not trains:
            # Replies to an evaluation hold metrics only.
            self.pending.expected = {}
        return self.pending.ask(messages)

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and send them the shared arrays, in the order of names."""
        nodes = self.sample(server_round, self._connected_nodes(grid))
        kind = MessageType.TRAIN
        messages = self.open_round(nodes, arrays, config, server_round, kind)
        self.participation.open(server_round, messages, grid, self._is_valid)
        return messages

    # Evaluation.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the shared arrays to all clients, sampled or not."""
        nodes = self._connected_nodes(grid)
        kind = MessageType.EVALUATE
        return self.open_round(nodes, arrays, config, server_round, kind)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Return the mean of every metric, as `Evaluation.aggregate`."""
        pending, clients = self.pending, self.clients
        metrics = self.evaluation.aggregate(server_round, pending, replies, clients)
        self.ledger.note_unused(pending.unused)
        return metrics

    # State.

    def snapshot(self) -> Callable[[], State]:
        """Return a function that returns the current state, whatever changes later."""
        values = {**self.ledger.state_dict(), **self.clients.state_dict()}
        return snapshot_of(self.state, values)

    def restore(self, state: State) -> None:
        """Return to a saved state, as `snapshot` gives it."""
        self.ledger.load_state_dict(state.values)
        self.clients.load_state_dict(state.values)
        others = self.ledger.state_dict() | self.clients.state_dict()
        restore_tree(self.state, state, others.keys())

    def summary(self) -> None:
        """Log the configuration."""
        own = self.settings
        sampled = own.fraction_train, own.min_train_nodes, own.seed
        log(INFO, "\t├──> %s", type(self).__name__)
        log(INFO, "\t├──> Sampling: %.3g, at least %d nodes, seed %d", *sampled)
        log(INFO, "\t└──> Mean: %s", own.weighting)


def reliable_grid(strategy: BaseStrategy, grid: Grid, longest: float) -> Grid:
    """Return a grid that survives outages and limits replies to their expected size.

    No wait takes longer than ``longest`` seconds. A reply to a query may have the bytes
    of most clients' shared arrays, or of none where the query asks for no arrays.
    """

    def most(kind: str) -> float:
        category, _, action = kind.partition(".")
        if category != MessageType.QUERY:
            return strategy.pending.largest_reply
        return largest_reply(strategy.clients.shared_bytes() if action else 0)

    return with_retries(grid, strategy.name_of, longest, most)
