"""Gossip over a graph: the server relays messages and averages no models."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from logging import INFO, WARNING
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.gossip.consensus import ALLOWED, ConsensusStep
from flwr_frl.strategies.gossip.graphs import DRAWN, GRAPHS, Graph, build_graph
from flwr_frl.strategies.gossip.mailboxes import Mailboxes
from flwr_frl.strategies.gossip.mixing import metropolis_weights, uniform_weights
from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.replies import Arrays, attached, check_metrics
from flwr_frl.task.messages import EXCHANGED_ROUND
from flwr_frl.task.settings import Choice, Free, Range, SettingsError, validate

MIXING = {"metropolis": metropolis_weights, "uniform": uniform_weights}
# The largest entry of a sketch that can be a model's; NaN is not below it either.
LARGEST_SKETCHED = 1e9
# Of the checkpoint's arrays: the graph's, (edges, 2).
EDGES = "graph-edges"
# What a client raises whose state is not the one that its neighbours rely on.
LOST_STATE = "LostStateError"


class Gossip(BaseStrategy):
    """Relay each node's message to its neighbours on a graph, and to nobody else.

    All nodes take part in each round. What a node has not answered for stays in its
    place until it does, so a node that was away makes up for what it missed.

    Parameters
    ----------
    graph : str, default "ring"
        ``ring``, ``torus``, ``complete``, ``star``, one that the seed draws
        (``erdos-renyi``, ``k-regular``, ``small-world``), or a file with an edge a
        line: two numbers of nodes. Its node i is the i-th of the clients' names, of
        those that are there in the beginning.
    edge_probability : float, default 0.5
        Of ``erdos-renyi``.
    graph_degree : int, default 4
        Neighbours of each node of ``k-regular``, and on average of ``small-world``
        (Watts and Strogatz 1998), where it is even.
    rewiring_probability : float, default 0.1
        With which an edge of ``small-world``'s ring gets another end.
    mixing : {"metropolis", "uniform"}, default "metropolis"
        The weights w_ij.
    consensus_step : float or str, default "auto"
        γ, in (0, 1]. ``auto`` follows from the share of a Gaussian vector that one
        message brings across, ``theory`` from that of the worst one and is small. With
        RandK of 1 % no step that was tried brings nodes together.
    max_missed_rounds : int, default 1000
        A node that has been away for longer is lost: what it missed is given up.
    **base
        As for `BaseStrategy`.

    Raises
    ------
    SettingsError
        If a value is out of its range.
    """

    averages = False
    takes_newcomers = False
    srpfl_settings = None
    uses_consensus_step: ClassVar[bool] = True
    # Names of the properties in which a client tells how long its messages may be.
    length_properties: ClassVar[tuple[str, ...]] = ("message-bytes",)

    @property
    def unused_settings(self) -> dict[str, str]:
        """Add those of who is sampled, and of a mean over them."""
        names = "fraction-train", "min-train-nodes", "weighting", "largest-share"
        return super().unused_settings | dict.fromkeys(names, "all nodes take part")

    def __init__(
        self,
        *,
        graph: Annotated[
            str, Free(f"{', '.join([*GRAPHS, *DRAWN])} or a file of edges")
        ] = "ring",
        edge_probability: Annotated[float, Range("(0, 1]")] = 0.5,
        graph_degree: Annotated[int, Range("[2, inf)")] = 4,
        rewiring_probability: Annotated[float, Range("[0, 1]")] = 0.1,
        mixing: Annotated[str, Choice(*MIXING)] = "metropolis",
        consensus_step: Annotated[float | str, Free(ALLOWED)] = "auto",
        max_missed_rounds: Annotated[int, Range("[1, inf)")] = 1000,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.graph = graph
        self.edge_probability = edge_probability
        self.graph_degree = graph_degree
        self.rewiring_probability = rewiring_probability
        self.mixing = mixing
        self.step = ConsensusStep(consensus_step)
        self.max_missed_rounds = max_missed_rounds
        validate(self)
        # Of the graph's nodes, once it is known who they are.
        self.boxes = Mailboxes([], np.zeros((0, 0)), [])
        self._edges = np.zeros((0, 2), np.int64)
        self._strangers: set[str] = set()
        # Who is ahead of the server: found just now, and ever.
        self._ahead: list[str] = []
        self._were_ahead: set[str] = set()
        self._exchanged = 0
        self._message_bytes: frozenset[int] = frozenset()

    # The graph.

    def check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless there is such a graph of so many nodes."""
        self.build_graph(num_clients)

    def build_graph(self, n: int) -> Graph:
        """Return the graph of n nodes."""
        return build_graph(
            self.graph,
            n,
            self.edge_probability,
            self.seed,
            self.graph_degree,
            self.rewiring_probability,
        )

    def identify(self, grid: Grid) -> list[int]:
        """Return the nodes of the graph that are there.

        The first call lays the graph over the clients that are there; one that comes
        later under another name has no place in it.
        """
        nodes = super().identify(grid)
        if not nodes:
            return []
        if not self.boxes.names:
            self._lay([self.name_of(n) for n in nodes], self.build_graph(len(nodes)))
        if not self._message_bytes:
            self._take_format(nodes)
        for name in {self.name_of(node) for node in nodes} - self.boxes.number.keys():
            if name not in self._strangers:
                log(WARNING, "client %s came late: it has no place in the graph", name)
                self._strangers.add(name)
        ahead, self._ahead = self._ahead, []
        self._part_from([name for name in ahead if name in self.boxes.number])
        present = self.boxes.number.keys() - self.boxes.lost
        return [node for node in nodes if self.name_of(node) in present]

    def expected_clients(self) -> set[str]:
        """Leave out the lost: nobody goes on with them."""
        return super().expected_clients() - self.boxes.lost

    def roll_back(self, name: str) -> None:
        """Note it: `identify` decides, once the graph's nodes have been asked."""
        self._ahead.append(name)

    def _part_from(self, ahead: list[str]) -> None:
        """Lose nodes that are ahead of the server; `SettingsError` if most are.

        No node can go back, as its neighbours' estimates are of its newest round. One
        node's word ends no run, though.
        """
        self._were_ahead.update(ahead)
        most = 2 * len(self._were_ahead) > len(self.boxes.names)
        for name in ahead:
            said = (
                f"has seen a checkpoint of round {self.ledger.seen[name]}, later "
                f"than this one of round {self.ledger.resumed}"
            )
            if most:
                raise SettingsError(
                    f"resume: client {name}, like most, {said}; gossip goes on from "
                    "its newest checkpoint only"
                )
            if name not in self.boxes.lost:
                self.lose(name, f"it {said}")

    def _lay(self, names: list[str], graph: Graph) -> None:
        self._edges = np.array(graph.edges, np.int64)
        neighbours = [graph.neighbours(i) for i in range(len(names))]
        self.boxes = Mailboxes(names, MIXING[self.mixing](graph), neighbours)

    def _take_format(self, nodes: list[int]) -> None:
        """Take what most nodes say: a message's lengths, and what γ follows from."""
        known = self.clients.known
        names = self.length_properties
        said = [_message_format(known[node].properties, names) for node in nodes]
        usable = Counter(format_ for format_ in said if format_ is not None)
        if not usable:
            raise SettingsError(
                "no client says how long its messages are; gossip strategies need "
                "gossip clients"
            )
        (self._message_bytes, omega, typical), _ = usable.most_common(1)[0]
        if self.uses_consensus_step:
            self.step.follow(self.boxes.weights, omega, typical)

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return all nodes: everybody takes part in each round."""
        return nodes

    # The relay.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send every node what its neighbours sent up to the round before."""
        self._exchanged = server_round - 1
        self._give_up(server_round)
        messages = super().configure_train(server_round, arrays, config, grid)
        self.pending.attached_bytes = max(self._message_bytes, default=0)
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send every node what its neighbours sent up to this round."""
        self._exchanged = server_round
        return super().configure_evaluate(server_round, arrays, config, grid)

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what one node is sent: its neighbours' messages and no others'.

        The config has ``exchanged-round``, up to which messages are relayed;
        ``consensus-step``; ``neighbour-weight``, Σ_j w_ij over the neighbours; and the
        lists of `Mailboxes.lists_for`.
        """
        content = super().content(node, arrays, config)
        own = cast(ConfigRecord, content[self.configrecord_key])
        name = self.name_of(node)
        i = self.boxes.number[name]
        own[EXCHANGED_ROUND] = self._exchanged
        own["consensus-step"] = self.step.value
        own["neighbour-weight"] = float(1 - self.boxes.weights[i, i])
        own.update(self.boxes.lists_for(name))
        return content

    def check_train_reply(self, reply: Message) -> None:
        """Raise `InvalidReplyError` unless a message of the right length came."""
        super().check_train_reply(reply)
        check_metrics(reply, ("refused",))
        data = attached(reply, "message")
        if not isinstance(data, bytes):
            raise InvalidReplyError("has no message to the neighbours")
        if data and len(data) not in self._message_bytes:
            allowed = " or ".join(f"{n:,}" for n in sorted(self._message_bytes))
            raise InvalidReplyError(
                f"has a message of {len(data):,} bytes, not {allowed}"
            )

    def aggregate(self, server_round: int, replies: list[Message]) -> ArrayRecord:
        """Put each message where its neighbours will get it; nothing is averaged."""
        names = self.pending.names(replies)
        sent = dict(zip(names, map(_message, replies), strict=True))
        self.boxes.collect(server_round, sent, self.relays)
        return ArrayRecord()

    def relays(self, receiver_took_part: bool) -> bool:
        """Return whether a neighbour that did, or did not, take part gets a message.

        It always does: differences to public estimates must all arrive.
        """
        return True

    def _give_up(self, server_round: int) -> None:
        for name in self.boxes.names:
            missed = server_round - 1 - self.ledger.acknowledged.get(name, 0)
            if name not in self.boxes.lost and missed > self.max_missed_rounds:
                self.lose(name, f"it has been away for {missed} rounds")

    def lose(self, name: str, reason: str) -> None:
        """Go on without a node for good, as `Mailboxes.lose`."""
        self.boxes.lose(name, reason)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Relay the valid replies' messages; who has lost its state is lost."""
        result = super().aggregate_train(server_round, replies)
        for name, reason in self.pending.rejections:
            known = name in self.boxes.number and name not in self.boxes.lost
            if LOST_STATE in reason and known:
                self.lose(name, "its state is not the one that its neighbours rely on")
        return result

    # Metrics.

    def train_metrics(self, replies: list[Message]) -> dict[str, float]:
        """Return also ``sent``, ``bits``, ``refused`` and ``lost``.

        That is how many nodes sent a message; the bits of these messages, each counted
        once, however many neighbours get it; how many messages their receivers found
        malformed; and how many nodes have been given up.
        """
        lengths = [len(_message(reply)) for reply in replies]
        return {
            **super().train_metrics(replies),
            "sent": sum(length > 0 for length in lengths),
            "bits": 8 * sum(lengths),
            "refused": sum(int(check_metrics(r)["refused"]) for r in replies),
            "lost": len(self.boxes.lost),
        }

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Return also ``consensus-distance``, 1/n Σ_i ‖x_i − x̄‖², and γ.

        The distance is estimated from the nodes' sketches (standard error at most 9 %),
        since no whole model is averaged here.
        """
        metrics = super().aggregate_evaluate(server_round, replies)
        sketches = [s for s in map(_sketch, self.evaluated) if s is not None]
        if not sketches:
            return metrics
        usual = Counter(map(len, sketches)).most_common(1)[0][0]
        stacked = np.stack([s for s in sketches if len(s) == usual])
        deviations = stacked - stacked.mean(axis=0, dtype=np.float64)
        distance = float(np.square(deviations).sum(1).mean())
        metrics["consensus-distance"] = distance
        if self.uses_consensus_step:
            metrics["consensus-step"] = self.step.value
            self.step.watch(server_round, distance)
        return metrics

    # State.

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return also the mailboxes', and the graph."""
        return self._with(self.boxes, super().state_dict())

    def _with(
        self, boxes: Mailboxes, state: tuple[Arrays, dict[str, Any]]
    ) -> tuple[Arrays, dict[str, Any]]:
        (arrays, values), (own, named) = state, boxes.state_dict()
        return {**arrays, **own, EDGES: self._edges}, {**values, **named}

    def snapshot(self) -> Callable[[], tuple[Arrays, dict[str, Any]]]:
        """List the messages only when asked: on a dense graph they are very many."""
        if type(self).state_dict is not Gossip.state_dict:
            # Somebody's subclass keeps more.
            return super().snapshot()
        (arrays, values), boxes = super().state_dict(), self.boxes.copy()
        text = json.dumps(values)
        return lambda: self._with(boxes, (arrays, json.loads(text)))

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state, graph and mailboxes included.

        What nodes have kept of their neighbours is of the run's graph: it stays, also
        where a file or a new version of what draws it says another one by now.
        """
        super().load_state_dict(arrays, values)
        names = [str(name) for name in values["names"]]
        if EDGES not in arrays:
            # Of a version that did not keep it.
            self._lay(names, self.build_graph(len(names)))
        elif names:
            kept = Graph(len(names), tuple(map(tuple, arrays[EDGES].tolist())))
            now = None
            with suppress(SettingsError):
                now = self.build_graph(len(names))
            if kept != now:
                text = "resume: graph %r is another one by now; the run keeps its own"
                log(WARNING, text, self.graph)
            self._lay(names, kept)
        self.boxes.load_state_dict(arrays, values)

    def summary(self) -> None:
        """Log what will run."""
        super().summary()
        log(INFO, "\t└──> Graph: %s, %s weights", self.graph, self.mixing)


def _message_format(
    properties: Mapping[str, Any], length_properties: tuple[str, ...]
) -> tuple[frozenset[int], float, float] | None:
    """Return what a client says of its messages: lengths, ω and typical ω.

    None if it makes no sense.
    """
    lengths = [properties.get(name) for name in length_properties]
    if not all(isinstance(n, int) and n >= 1 for n in lengths):
        return None
    omegas = [properties.get(name) for name in ("omega", "typical-omega")]
    if not all(isinstance(omega, float) and 0 < omega <= 1 for omega in omegas):
        return None
    omega, typical = cast(list[float], omegas)
    return frozenset(cast(list[int], lengths)), omega, typical


def _message(reply: Message) -> bytes:
    data = attached(reply, "message")
    assert isinstance(data, bytes)
    return data


def _sketch(reply: Message) -> "np.typing.NDArray[np.float32] | None":
    """Return a reply's sketch if its numbers can be those of a model."""
    data = attached(reply, "sketch")
    if not isinstance(data, bytes) or len(data) % 4 or not data:
        return None
    values = np.frombuffer(data, "<f4")
    return values if np.abs(values).max() <= LARGEST_SKETCHED else None
