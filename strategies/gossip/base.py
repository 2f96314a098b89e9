"""Gossip over a graph: the server relays messages and holds nobody's model."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, ClassVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from strategies.base import BaseStrategy
from strategies.gossip.graphs import Graph, build_graph
from strategies.gossip.mixing import (
    Weights,
    consensus_step,
    metropolis_weights,
    uniform_weights,
)
from strategies.server.replies import Arrays, InvalidReplyError, check_metrics
from task.settings import SettingsError, require, unknown

MIXING = {"metropolis": metropolis_weights, "uniform": uniform_weights}
# Of a sketch's entries; also false for what is no number.
LARGEST = 1e9
# What a client raises whose state is not the one that its neighbours rely on.
LOST_STATE = "LostStateError"
# Where a reply has what is no number.
BYTES = "bytes"


@dataclass(frozen=True)
class Pending:
    """A message that a node has not yet answered for.

    Parameters
    ----------
    round : int
        In which it was sent.
    sender : str
        Name of the neighbour that sent it.
    data : bytes
        The message itself.
    """

    round: int
    sender: str
    data: bytes


class Gossip(BaseStrategy):
    """Relay each node's message to its neighbours on a graph, and to nobody else.

    All nodes take part in each round. What a node has not answered for stays in its
    place until it does, so a node that was away makes up for what it missed.

    Parameters
    ----------
    graph : str, default "ring"
        A key of `strategies.gossip.graphs.GRAPHS`, ``erdos-renyi``, or a file of edges.
        Its node i is the i-th of the clients' names, of those that are there in the
        beginning.
    edge_probability : float, default 0.5
        Of ``erdos-renyi``.
    mixing : {"metropolis", "uniform"}, default "metropolis"
        The weights w_ij.
    consensus_step : float, default 0
        γ, in (0, 1]; 0 takes that of the theory, which is small.
    max_missed_rounds : int, default 1000
        A node that has been away for longer is lost: what it missed is given up.
    **base
        As for `BaseStrategy`.

    Raises
    ------
    SettingsError
        If a value is out of its range.
    """

    uses_consensus_step: ClassVar[bool] = True
    # Names of the properties in which a client tells how long its messages may be.
    lengths: ClassVar[tuple[str, ...]] = ("message-bytes",)

    def __init__(
        self,
        *,
        graph: str = "ring",
        edge_probability: float = 0.5,
        mixing: str = "metropolis",
        consensus_step: float = 0.0,
        max_missed_rounds: int = 1000,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        if mixing not in MIXING:
            raise unknown("mixing", mixing, MIXING)
        valid = 0 <= consensus_step <= 1
        require(valid, "consensus-step", consensus_step, "in [0, 1]")
        valid = max_missed_rounds >= 1
        require(valid, "max-missed-rounds", max_missed_rounds, "at least 1")
        self.graph = graph
        self.edge_probability = edge_probability
        self.mixing = mixing
        self.consensus_step = consensus_step
        self.max_missed_rounds = max_missed_rounds
        # Names of the graph's nodes, and W.
        self.names: list[str] = []
        self.weights: Weights = np.zeros((0, 0))
        # Each name's place, and each node's neighbours.
        self.number: dict[str, int] = {}
        self.neighbours: list[tuple[int, ...]] = []
        self.pending: dict[str, list[Pending]] = {}
        self.lost: set[str] = set()
        self._strangers: set[str] = set()
        self._exchanged = 0
        self._message_bytes: frozenset[int] = frozenset()

    # The graph.

    def identify(self, grid: Grid) -> list[int]:
        """Return the nodes of the graph that are there.

        The first call lays the graph over the clients that are there; one that comes
        later under another name has no place in it.

        Parameters
        ----------
        grid : Grid
            The grid.

        Returns
        -------
        list of int
            In the order of the clients' names.
        """
        nodes = super().identify(grid)
        if not self.names and nodes:
            self._form([self.name_of(node) for node in nodes])
        if nodes and not self._message_bytes:
            self._adopt(nodes)
        for name in {self.name_of(node) for node in nodes} - set(self.names):
            if name not in self._strangers:
                log(WARNING, "client %s came late: it has no place in the graph", name)
                self._strangers.add(name)
        present = set(self.names) - self.lost
        return [node for node in nodes if self.name_of(node) in present]

    def build_graph(self, n: int) -> Graph:
        """Build the graph of so many nodes.

        Parameters
        ----------
        n : int
            Number of nodes.

        Returns
        -------
        Graph
            The graph.

        Raises
        ------
        SettingsError
            If there is no such graph.
        """
        return build_graph(self.graph, n, self.edge_probability, self.seed)

    def _form(self, names: list[str]) -> None:
        graph = self.build_graph(len(names))
        self.weights = MIXING[self.mixing](graph)
        self.names = names
        self.number = {name: i for i, name in enumerate(names)}
        self.neighbours = [graph.neighbours(i) for i in range(len(names))]
        self.pending = {name: [] for name in names}

    def _adopt(self, nodes: list[int]) -> None:
        """Take over what most nodes say: a message's lengths, and γ of the theory."""
        told = [self._format(self.participants[node].properties) for node in nodes]
        usable = Counter(format_ for format_ in told if format_ is not None)
        if not usable:
            raise SettingsError(
                "no client tells the length of its messages; gossip strategies need "
                "gossip clients"
            )
        (self._message_bytes, omega), _ = usable.most_common(1)[0]
        if self.consensus_step == 0 and self.uses_consensus_step:
            self.consensus_step = consensus_step(self.weights, omega)
            log(INFO, "consensus step of the theory: %.3g", self.consensus_step)

    def _format(
        self, properties: Mapping[str, Any]
    ) -> tuple[frozenset[int], float] | None:
        lengths = [properties.get(name) for name in self.lengths]
        omega = properties.get("omega")
        if not all(isinstance(n, int) and n >= 1 for n in lengths):
            return None
        if not isinstance(omega, float) or not 0 < omega <= 1:
            return None
        return frozenset(cast(list[int], lengths)), omega

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return all nodes: everybody takes part in each round.

        Parameters
        ----------
        server_round : int
            Ignored.
        nodes : list of int
            The nodes.

        Returns
        -------
        list of int
            The same.
        """
        return nodes

    # The relay.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send every node what its neighbours sent up to the round before.

        Parameters
        ----------
        server_round, arrays, config, grid
            As for `BaseStrategy`; there are no arrays.

        Returns
        -------
        list of Message
            One for each node.
        """
        self._exchanged = server_round - 1
        self._give_up(server_round)
        return super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send every node what its neighbours sent up to this round.

        Parameters
        ----------
        server_round, arrays, config, grid
            As for `BaseStrategy`; there are no arrays.

        Returns
        -------
        list of Message
            One for each node.
        """
        self._exchanged = server_round
        return super().configure_evaluate(server_round, arrays, config, grid)

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what one node is sent: its neighbours' messages and no others'.

        Parameters
        ----------
        node : int
            The node.
        arrays : ArrayRecord
            Empty.
        config : ConfigRecord
            As for `BaseStrategy`.

        Returns
        -------
        RecordDict
            The config has ``exchanged-round``, up to which messages are relayed;
            ``consensus-step``; ``neighbour-weight``, Σ_j w_ij over the neighbours; and,
            where there are messages, the lists ``relayed-rounds``,
            ``relayed-senders``, ``relayed-weights`` and ``relayed-data``.
        """
        content = super().content(node, arrays, config)
        own = content.config_records[self.configrecord_key]
        name = self.name_of(node)
        i = self.number[name]
        own["exchanged-round"] = self._exchanged
        own["consensus-step"] = self.consensus_step
        own["neighbour-weight"] = float(1 - self.weights[i, i])
        pending = self.pending[name]
        if pending:
            places = [self.number[message.sender] for message in pending]
            own["relayed-rounds"] = [message.round for message in pending]
            own["relayed-senders"] = [message.sender for message in pending]
            own["relayed-weights"] = [float(self.weights[i, j]) for j in places]
            own["relayed-data"] = [message.data for message in pending]
        return content

    def check_train_reply(self, reply: Message) -> None:
        """Raise `InvalidReplyError` unless a reply has one message of the right length.

        Parameters
        ----------
        reply : Message
            A reply with content.
        """
        super().check_train_reply(reply)
        check_metrics(reply, ("refused",))
        data = reply.content.config_records.get(BYTES, ConfigRecord()).get("message")
        if not isinstance(data, bytes):
            raise InvalidReplyError("has no message to the neighbours")
        if data and len(data) not in self._message_bytes:
            allowed = " or ".join(f"{n:,}" for n in sorted(self._message_bytes))
            raise InvalidReplyError(
                f"has a message of {len(data):,} bytes, not {allowed}"
            )

    def aggregate(self, server_round: int, replies: list[Message]) -> ArrayRecord:
        """Put each message where its neighbours will get it; nothing is averaged.

        Parameters
        ----------
        server_round : int
            The round.
        replies : list of Message
            Checked replies.

        Returns
        -------
        ArrayRecord
            Empty.
        """
        sent = {self.name_of(r.metadata.src_node_id): _message(r) for r in replies}
        for name in sent:
            # It has answered for all that it was sent.
            self.pending[name] = []
        for name, data in sent.items():
            if not data:
                continue
            for j in self.neighbours[self.number[name]]:
                neighbour = self.names[j]
                if neighbour not in self.lost and self.relays(neighbour in sent):
                    self.pending[neighbour].append(Pending(server_round, name, data))
        return ArrayRecord()

    def relays(self, receiver_took_part: bool) -> bool:
        """Return whether a message of this round goes to a neighbour.

        Parameters
        ----------
        receiver_took_part : bool
            Whether the neighbour's own reply counted in this round.

        Returns
        -------
        bool
            Always: differences to public estimates must all arrive.
        """
        return True

    def _give_up(self, server_round: int) -> None:
        for name in self.names:
            missed = server_round - 1 - self.acknowledged.get(name, 0)
            if name not in self.lost and missed > self.max_missed_rounds:
                self.lose(name, f"it has been away for {missed} rounds")

    def lose(self, name: str, reason: str) -> None:
        """Go on without a node for good.

        Parameters
        ----------
        name : str
            The node.
        reason : str
            Why, for the log.
        """
        log(
            WARNING,
            "client %s is lost, as %s; its neighbours go on with what it sent last",
            name,
            reason,
        )
        self.lost.add(name)
        self.pending[name] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Relay the valid replies' messages; who has lost its state is lost.

        Parameters
        ----------
        server_round, replies
            As for `BaseStrategy`.

        Returns
        -------
        tuple
            As for `BaseStrategy`.
        """
        result = super().aggregate_train(server_round, replies)
        for name, reason in self.rejections:
            if LOST_STATE in reason and name in self.number and name not in self.lost:
                self.lose(name, "its state is not the one that its neighbours rely on")
        return result

    # Metrics.

    def train_metrics(self, replies: list[Message]) -> dict[str, float]:
        """Return a round's metrics from the valid replies.

        Parameters
        ----------
        replies : list of Message
            At least one.

        Returns
        -------
        dict of str to float
            ``train-loss``; ``sent``, how many nodes sent a message; ``bits`` of these
            messages, each counted once, however many neighbours get it; ``refused``,
            how many messages their receivers found malformed; ``lost``, how many nodes
            have been given up.
        """
        lengths = [len(_message(reply)) for reply in replies]
        return {
            **super().train_metrics(replies),
            "sent": sum(length > 0 for length in lengths),
            "bits": 8 * sum(lengths),
            "refused": sum(int(check_metrics(r, ())["refused"]) for r in replies),
            "lost": len(self.lost),
        }

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of every metric, and how far the nodes are from each other.

        Parameters
        ----------
        server_round : int
            The round.
        replies : iterable of Message
            What came back.

        Returns
        -------
        MetricRecord or None
            As for `BaseStrategy`, and ``consensus-distance``: 1/n Σ_i ‖x_i − x̄‖²,
            estimated from the nodes' sketches (standard error at most 9 %), since
            nobody's model comes here.
        """
        metrics = super().aggregate_evaluate(server_round, replies)
        sketches = [s for s in map(_sketch, self.evaluated) if s is not None]
        if metrics is None or not sketches:
            return metrics
        usual = Counter(map(len, sketches)).most_common(1)[0][0]
        stacked = np.stack([s for s in sketches if len(s) == usual])
        deviations = stacked - stacked.mean(axis=0, dtype=np.float64)
        metrics["consensus-distance"] = float(np.square(deviations).sum(1).mean())
        return metrics

    # State.

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the graph's nodes, what is pending, and who is lost.

        Returns
        -------
        tuple
            As `BaseStrategy.state_dict`.
        """
        arrays, values = super().state_dict()
        entries: list[list[Any]] = []
        for name, messages in self.pending.items():
            for message in messages:
                key = f"pending-{len(entries)}"
                arrays[key] = np.frombuffer(message.data, np.uint8)
                entries.append([key, name, message.round, message.sender])
        own = {"names": self.names, "pending": entries, "lost": sorted(self.lost)}
        return arrays, {**values, **own}

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state.

        Parameters
        ----------
        arrays, values
            As `state_dict` returned them.
        """
        super().load_state_dict(arrays, values)
        self._form([str(name) for name in values["names"]])
        self.lost = {str(name) for name in values["lost"]}
        for key, name, server_round, sender in values["pending"]:
            message = Pending(int(server_round), sender, arrays[key].tobytes())
            self.pending[name].append(message)

    def summary(self) -> None:
        """Log what will run."""
        super().summary()
        log(INFO, "\t└──> Graph: %s, %s weights", self.graph, self.mixing)


def _message(reply: Message) -> bytes:
    data = reply.content.config_records[BYTES]["message"]
    assert isinstance(data, bytes)
    return data


def _sketch(reply: Message) -> "np.typing.NDArray[np.float32] | None":
    """Return a reply's sketch if its numbers can be those of a model."""
    data = reply.content.config_records.get(BYTES, ConfigRecord()).get("sketch")
    if not isinstance(data, bytes) or len(data) % 4 or not data:
        return None
    values = np.frombuffer(data, "<f4")
    return values if np.abs(values).max() <= LARGEST else None
