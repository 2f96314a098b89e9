"""The base class of all strategies."""

import math
import time
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
from flwr.serverapp.strategy import Result

from flwr_frl.common.flower_messages import fill, message_like
from flwr_frl.common.messages import EXAMPLES, HEAD, SERVER_ROUND, SHARED_BYTES
from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies.grids.arrivals import with_retries
from flwr_frl.strategies.server.averaging import Averaging
from flwr_frl.strategies.server.checkpoint import State, restore_tree, snapshot_of
from flwr_frl.strategies.server.pending_round import PendingRound
from flwr_frl.strategies.server.privacy import check_compatible, check_no_counters
from flwr_frl.strategies.server.queries import common_initial_arrays
from flwr_frl.strategies.server.replies import Arrays, largest_reply, to_record
from flwr_frl.strategies.server.round import Round


class Strategy(Averaging):
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
        ``heads/CLIENT`` are loaded by `flwr_frl.predict`. Arrays must be
        replaced rather than changed in place.
    clients : ClientManager
        The clients of the run, by node.
    ledger : RoundLedger
        The last round in which each client's reply counted.
    round : Round
        The last round of training.
    pending : PendingRound
        The last messages of any kind, with their replies.
    evaluation : Evaluation
        Each client's test metrics.
    participation : Participation
        Samples clients, and decides how many replies close a round.
    privacy : ClientPrivacy or None
        The mechanism of client-level differential privacy, with ``server-dp-noise``.
    """

    # True while messages of an evaluation are made.
    _evaluates = False

    @property
    def unused_settings(self) -> dict[str, str]:
        """Settings without effect here, by name, with the reason."""
        unused, used = self.settings.unused, self.participation.uses
        return {name: why for name, why in unused.items() if name not in used}

    # Start of a run.

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run as Flower's ``Strategy.start``.

        Raises
        ------
        SettingsError
            If no client's reply counted in any round or, with noise, the initial
            arrays have integers.
        """
        given = args[0] if args else ArrayRecord()
        if self.privacy:
            arrays = kwargs.get("initial_arrays", given)
            check_no_counters(arrays, self.settings.server_dp_noise)
        longest = float(kwargs.get("timeout", math.inf))
        self.clients.foreign_app = True
        grid = self.adapt_grid(reliable_grid(self, grid, longest))
        grid = self.participation.adapt_grid(grid, self.clients.label_of)
        before = self.ledger.counted
        result = super().start(grid, *args, **kwargs)
        if self.ledger.counted == before and result.train_metrics_clientapp:
            why = self.round.pending.failure or self.clients.failure or "there are none"
            raise SettingsError(f"in no round did a client's reply count: {why}")
        return result

    def adapt_grid(self, grid: Grid) -> Grid:
        """Return the grid for the run; a subclass may return a decorated one.

        If the given grid is an `ArrivalGrid`, the returned one must be one as well.
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
        arrays = common_initial_arrays(self.clients, grid, nodes)
        if self.privacy:
            check_no_counters(arrays, self.settings.server_dp_noise)
        return arrays

    # Participants.

    def identify(self, grid: Grid) -> list[int]:
        """Return the nodes that can take part, in the order of their clients' names."""
        nodes = self.clients.identify(grid, self.ledger.run_token)
        if self.privacy and nodes:
            # All clients have the same structure.
            about = self.clients.known[nodes[0]].properties
            check_compatible(about, self.settings.server_dp_noise)
        # Only a resumed server can be behind its clients.
        for node in nodes if self.ledger.resumed is not None else ():
            client = self.clients.known[node]
            if self.ledger.is_rolled_back(client.name, client.properties):
                self.roll_back(client.name)
        return nodes

    def roll_back(self, name: str) -> None:
        """Let a client continue that has seen a later checkpoint than the server has.

        This happens after the server was restored from a backup. By default the client
        continues from the newest round that both have, or else from its own newest.
        """
        self.ledger.continue_from(name)

    def _connected_nodes(self, grid: Grid, trains: bool = False) -> list[int]:
        """Return the nodes that can take part; wait for one up to ``round-timeout``.

        If ``trains`` is True, they are those that can be sampled to train.

        The wait ends as soon as no earlier participant is missing, since only missing
        ones may return. With in-process grids there is no wait.
        """
        until = time.monotonic() + self.clients.round_timeout
        while not (nodes := self._usable(self.identify(grid), trains)):
            away = self._expected_clients() - self.clients.connected_names()
            over = time.monotonic() >= until
            if over or not away or getattr(grid, "in_process", False):
                break
            self.clients.wait_for_others(grid, until)
        return nodes

    def _expected_clients(self) -> set[str]:
        """Return the names of earlier participants that may return."""
        return set(self.ledger.acknowledged)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return those of the nodes that train in a round, in the same order."""
        others = len(self.clients.busy_nodes())
        return self.participation.sample(server_round, nodes, others)

    def _usable(self, nodes: list[int], trains: bool) -> list[int]:
        """Return the nodes, without those that have nothing to train on."""
        untrained = self.clients.untrained if trains else ()
        return [n for n in nodes if n not in untrained] if untrained else nodes

    # Messages.

    def begin(self, round: Round) -> None:
        """Prepare a training round before its messages are made.

        An override may add to ``round.config`` and set ``round.expected``.
        """

    def per_client(self, client: str) -> Arrays:
        """Return the arrays that only this client receives, to train or to join late.

        An array with the name of a shared array replaces it. The client returns all
        other arrays as well. By default there are none.
        """
        return {}

    def for_evaluation(self, client: str) -> Arrays:
        """Return the same for an evaluation, by default as `per_client`."""
        return self.per_client(client)

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
        name, client = self.clients.name_of(node), self.clients.known.get(node)
        examples = client.properties.get(EXAMPLES) if client else None
        run = self.ledger.config(name, server_round, saves, examples)
        registered = self.clients.registered.config(node)
        record = fill(ConfigRecord(), {**registered, **run, **config})
        records = {self.arrayrecord_key: arrays, self.configrecord_key: record}
        own = self.for_evaluation(name) if self._evaluates else self.per_client(name)
        if same := {n: own[n] for n in own if n in arrays}:
            replaced = {**arrays, **to_record(same)}
            records[self.arrayrecord_key] = ArrayRecord(replaced)
        if more := {n: own[n] for n in own if n not in arrays}:
            records[HEAD] = record_of_own = to_record(more)
            self.pending.expect(HEAD, record_of_own)
        return fill(RecordDict(), records)

    def open_round(
        self,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        kind: str,
    ) -> list[Message]:
        """Return a message of this kind for each node, and expect replies to them."""
        config[SERVER_ROUND] = server_round
        trains, self._evaluates = (
            kind == MessageType.TRAIN,
            kind == MessageType.EVALUATE,
        )
        if not trains:
            nodes = self.clients.answering(nodes)
        sent = self._as_transported(arrays)
        self.pending = PendingRound(
            server_round, self.clients.name_of, arrays, self.clients.label
        )
        self.pending.config = config
        self.pending.expect(self.arrayrecord_key, sent)
        if trains:
            names = list(map(self.clients.name_of, nodes))
            self.round = Round(
                server_round, names, arrays, config, self._mean, self.pending
            )
            self.begin(self.round)
            if self.round.expected is not None:
                like = to_record(self.round.expected)
                # Arrays that are also sent return in the precision of ``transport``.
                both = {name: sent.get(name, like[name]) for name in like}
                self.pending.expect(self.arrayrecord_key, ArrayRecord(both))
        messages: list[Message] = []
        for node in nodes:
            first = messages[0] if messages else None
            messages.append(self._message(node, sent, config, kind, first))
        self._evaluates = False
        if not trains:
            # Replies to an evaluation hold metrics only.
            self.pending.expected = {}
        return self.pending.ask(messages)

    def _message(
        self,
        node: int,
        sent: ArrayRecord,
        config: ConfigRecord,
        kind: str,
        like: Message | None = None,
    ) -> Message:
        """Return a node's message; ``like`` is a message of the same round and kind."""
        content = self.content(node, sent, config)
        # A subclass may send each client different arrays.
        record = content.get(self.arrayrecord_key)
        if record is not sent and isinstance(record, ArrayRecord):
            content[self.arrayrecord_key] = self._as_transported(record)
        if like is not None:
            return message_like(like, content, dst_node_id=node)
        return Message(content, node, kind, group_id=str(config[SERVER_ROUND]))

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and send them the shared arrays, in the order of names."""
        sampled = self.sample(server_round, self._connected_nodes(grid, trains=True))
        # A subclass may return NumPy's integers, which messages do not take.
        nodes, kind = [int(node) for node in sampled], MessageType.TRAIN
        messages = self.open_round(nodes, arrays, config, server_round, kind)
        self.participation.open(server_round, messages, grid, self._is_valid)
        return messages

    # Evaluation.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the shared arrays to all clients, or ``fraction-evaluate`` of them."""
        nodes = self._connected_nodes(grid)
        if self.evaluation.fraction < 1 and (busy := self.clients.busy_nodes()):
            # The earlier metrics of busy clients count, if they are sampled.
            nodes = sorted({*nodes, *busy}, key=lambda n: (self.clients.name_of(n), n))
        nodes = self.evaluation.sample(server_round, nodes)
        kind = MessageType.EVALUATE
        return self.open_round(nodes, arrays, config, server_round, kind)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Return the mean of every metric, as `Evaluation.aggregate`.

        The metrics of ``evaluate_metrics_aggr_fn`` are added.
        """
        pending, clients = self.pending, self.clients
        metrics = self.evaluation.aggregate(server_round, pending, replies, clients)
        self.ledger.note_unused(pending.unused)
        metrics.update(self._evaluate_metrics(self.evaluation.replies))
        return metrics

    # State.

    def snapshot(self) -> Callable[[], State]:
        """Return a function that returns, at any later time, the state as it is now."""
        values = {**self.ledger.state_dict(), **self.clients.state_dict()}
        if self.evaluation.fraction < 1 or self.clients.busy:
            # Else all clients are in every evaluation.
            values |= self.evaluation.state_dict()
        return snapshot_of(self.state, values)

    def restore(self, state: State) -> None:
        """Return to a saved state, as `snapshot` gives it."""
        self.ledger.load_state_dict(state.values)
        self.clients.load_state_dict(state.values)
        self.evaluation.load_state_dict(state.values)
        restore_tree(self.state, state)

    def summary(self) -> None:
        """Log the configuration."""
        settings = self.settings
        sampled = settings.fraction_train, settings.min_train_nodes, settings.seed
        log(INFO, "\t├──> %s", type(self).__name__)
        log(INFO, "\t├──> Sampling: %.3g, at least %d nodes, seed %d", *sampled)
        log(INFO, "\t└──> Mean: %s", settings.weighting)


def reliable_grid(strategy: Strategy, grid: Grid, longest: float) -> Grid:
    """Return a grid that survives outages and limits the size of replies.

    No wait takes longer than ``longest`` seconds. The limit follows from the arrays
    that a reply should have: those of the pending round, those that most clients share
    if a query asks for arrays, and none for other queries.
    """

    def largest(kind: str) -> float:
        category, _, action = kind.partition(".")
        if category != MessageType.QUERY:
            return strategy.pending.largest_reply
        most = strategy.clients.usual_bytes(SHARED_BYTES, math.inf) if action else 0
        return largest_reply(most)

    return with_retries(grid, strategy.clients.label_of, longest, largest)
