"""Base of gossip strategies: the server relays messages and averages no models."""

import math
from collections import Counter
from collections.abc import Iterable
from logging import WARNING
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import EXCHANGED_ROUND, SERVER_ROUND, SKETCH
from flwr_frl.common.settings import number_or, setting
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.gossip import graphs
from flwr_frl.strategies.server.checkpoint import State
from flwr_frl.strategies.server.clients import ClientInfo
from flwr_frl.strategies.server.replies import Arrays, InvalidReplyError
from flwr_frl.strategies.server.round import Reply, Round

FORMS = f"{', '.join(graphs.GRAPHS)} or a file of edges"
# Error of a client whose state differs from the one its neighbours rely on.
LOST_STATE = "LostStateError"
# Sketches with larger entries are invalid.
LARGEST_SKETCHED = 1e9


class Gossip(Strategy, uses_mean="never", takes_newcomers=False):
    """Relay each node's message to its neighbours on a graph.

    The graph is built from the initial clients, all of which take part in every round.
    Messages are kept until their receivers have answered, so a node that was offline
    receives the messages it missed.

    Parameters
    ----------
    graph : str, default "ring"
        ``ring``, ``torus``, ``complete`` or ``star``; a random graph, ``erdos-renyi``;
        or a file with one edge (two node numbers) per line. Node i is
        the i-th of the sorted names of the initial clients.
    edge_probability : float, default 0.5
        Probability of an edge of ``erdos-renyi``.
    max_missed_rounds : int, default 1000
        Number of consecutive rounds that a node may miss; after more, it is excluded
        permanently.
    consensus_step : float or str, default "auto"
        γ, in (0, 1]. ``auto`` derives it from the fraction of a Gaussian vector that a
        message conveys; ``theory`` (Theorem 2) from the worst case, which gives a small
        γ. With RandK of 1 %, the nodes did not converge for any
        step that was tried.
    **base
        The settings of `Strategy`.

    Attributes
    ----------
    names : list of str
        Names of the nodes 0 to n − 1; empty until the clients are known.
    number : dict of str to int
        Each node's number, by name.
    edges : ndarray, shape (E, 2)
        The edges of the graph.
    mixing_weights : ndarray, shape (n, n)
        The mixing matrix W.
    neighbours : list of list of int
        Each node's neighbours, in increasing order.
    lost : set of str
        Nodes that were given up; they receive no more messages.
    sent : dict of str to dict of int to bytes
        The messages that are still needed, by sender and round.
    """

    graph: str = setting("ring", form=FORMS)
    edge_probability: float = setting(0.5, gt=0, le=1)
    max_missed_rounds: int = setting(1000, ge=1)
    consensus_step: Annotated[
        float | str, number_or(graphs.RULES, lambda step: 0 < step <= 1)
    ] = setting("auto", form=graphs.ALLOWED, safe=True)

    uses_consensus_step: ClassVar[bool] = True
    # Whether a node that missed rounds receives their messages: differences to public
    # estimates must all arrive.
    relays_missed_rounds: ClassVar[bool] = True

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.set_graph([], np.zeros((0, 2), np.int64))
        self.lost: set[str] = set()
        self.step = 0.0
        self._message_lengths: frozenset[int] = frozenset()
        self._run.clients.refusal_of = self._refusal_of

    # The nodes.

    def _check_clients(self, num_clients: int) -> None:
        """Raise `SettingsError` unless the graph can have this many nodes."""
        self.build_graph(num_clients)

    def build_graph(self, n: int) -> graphs.Edges:
        """Return the graph of n nodes."""
        drawn = self.edge_probability, self.settings.seed
        return graphs.build_graph(self.graph, n, *drawn)

    def set_graph(self, names: list[str], edges: graphs.Edges) -> None:
        """Connect the nodes of these names."""
        self.names, self.edges = names, edges
        self.number = {name: i for i, name in enumerate(names)}
        self.mixing_weights = weights = graphs.mixing_matrix(edges)
        others = weights * (1 - np.eye(len(names)))
        self.neighbours = [np.flatnonzero(row).tolist() for row in others]
        self.sent: dict[str, dict[int, bytes]] = {name: {} for name in names}

    def _identify(self, grid: Grid) -> list[int]:
        """Return the connected nodes of the graph, which the first call builds.

        Clients with other names that connect later are refused.
        """
        clients = self._run.clients
        name_of = {node: clients.name_of(node) for node in super()._identify(grid)}
        if not name_of:
            return []
        if not self.names:
            self.set_graph([*name_of.values()], self.build_graph(len(name_of)))
        if not self._message_lengths:
            self._set_message_format([*name_of])
        present = self.number.keys() - self.lost
        return [node for node, name in name_of.items() if name in present]

    def _refusal_of(self, client: ClientInfo) -> str:
        is_outside = self.names and client.name not in self.number
        return "it has no place in the graph" if is_outside else ""

    def _set_message_format(self, nodes: list[int]) -> None:
        """Adopt the message lengths and ω that most clients report."""
        reports: Counter[tuple[Any, ...]] = Counter()
        for node in nodes:
            get = self._run.clients.known[node].properties.get
            lengths, omegas = get("message-bytes"), [get("omega"), get("typical-omega")]
            valid = all(isinstance(omega, float) and 0 < omega <= 1 for omega in omegas)
            if valid and isinstance(lengths, list) and min(lengths, default=0) >= 1:
                reports[(*omegas, *lengths)] += 1
        if not reports:
            raise SettingsError(f"no client reports message-bytes{self._remedy()}")
        ((omega, typical_omega, *lengths), _), *_ = reports.most_common(1)
        self._message_lengths = frozenset(lengths)
        if self.uses_consensus_step:
            rule, weights = str(self.consensus_step), self.mixing_weights
            self.step = graphs.derived_step(rule, weights, omega, typical_omega)

    def _expected_clients(self) -> set[str]:
        """Exclude lost nodes."""
        return super()._expected_clients() - self.lost

    def _usable(self, nodes: list[int]) -> list[int]:
        """Return all nodes; those without examples mix their neighbours' models."""
        return nodes

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return all nodes."""
        return nodes

    def lose(self, name: str, reason: str) -> None:
        """Permanently give up a node, and log the reason."""
        if name in self.number and name not in self.lost:
            text = "client %s is lost: %s; its neighbours continue with its last "
            log(WARNING, text + "message", self._run.clients.label(name), reason)
            self.lost.add(name)

    # The relay.

    def begin(self, round: Round) -> None:
        """Relay messages up to the previous round, and expect a message in replies."""
        round.config.update(self._exchanged(round.number - 1))
        round.attached_bytes = max(self._message_lengths, default=0)

    def _config(self, node: int, config: ConfigRecord) -> dict[str, Any]:
        """Add the neighbours' messages to the config.

        The entries are those of `_exchanged`; ``neighbour-weight``, Σ_j w_ij over the
        neighbours; and, if there are messages, lists of equal length:
        ``relayed-rounds``, ``relayed-senders``, ``relayed-weights`` (w_ij) and
        ``relayed-data``.
        """
        i = self.number[self._run.clients.name_of(node)]
        about = super()._config(node, config)
        if EXCHANGED_ROUND not in config:
            # An evaluation follows the exchange of its round.
            about |= self._exchanged(cast(int, config[SERVER_ROUND]))
        about["neighbour-weight"] = float(1 - self.mixing_weights[i, i])
        if relayed := self.relayed(i):
            rounds, senders, data = map(list, zip(*relayed, strict=True))
            about |= {
                "relayed-rounds": rounds,
                "relayed-senders": [self.names[j] for j in senders],
                "relayed-weights": self.mixing_weights[i, senders].tolist(),
                "relayed-data": data,
            }
        return about

    def _exchanged(self, server_round: int) -> dict[str, Any]:
        """Return the last round whose messages are relayed, and the consensus step."""
        return {EXCHANGED_ROUND: server_round, "consensus-step": self.step}

    def relayed(self, i: int) -> list[tuple[int, int, bytes]]:
        """Return the messages to a node since its last reply that counted.

        Each has its round, the number of its sender and its bytes, in this order.
        """
        since = self._since(i)
        last = math.inf if self.relays_missed_rounds else since
        return sorted(
            (round_, j, data)
            for j in self.neighbours[i]
            for round_, data in self.sent[self.names[j]].items()
            if since <= round_ <= last
        )

    def _since(self, i: int) -> float:
        """Return the first round of which a node lacks messages; ∞ if it is lost."""
        name = self.names[i]
        if name in self.lost:
            return math.inf
        return self._run.clients.acknowledged.get(name, 0)

    def check_reply(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` unless the message has a valid length."""
        reply.metric("refused")
        data, lengths = reply.attachment("message"), self._message_lengths
        if not isinstance(data, bytes) or len(data) not in lengths | {0}:
            allowed = " or ".join(f"{n:,}" for n in sorted(lengths))
            raise InvalidReplyError(f"has no message of {allowed} bytes")

    def aggregate(self, round: Round) -> Arrays:
        """Keep each message for the sender's neighbours; average nothing."""
        for reply in round.replies:
            if message := message_of(reply):
                self.sent[reply.client][round.number] = message
        return {}

    def forget(self) -> None:
        """Delete the messages that have arrived at all neighbours of their senders."""
        since = [*map(self._since, range(len(self.names)))]
        for name, neighbours in zip(self.names, self.neighbours, strict=True):
            first = {since[i] for i in neighbours}
            self.sent[name] = {
                round_: data
                for round_, data in self.sent[name].items()
                if round_ in first
                or (self.relays_missed_rounds and round_ > min(first))
            }

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Relay the valid replies' messages, and give up nodes.

        They have lost their state or missed more than ``max_missed_rounds`` rounds.
        """
        result = super().aggregate_train(server_round, replies)
        failed = [
            (n, why) for n, why in self._run.round.rejections if LOST_STATE in why
        ]
        if 2 * len(failed) > len(self.names):
            # The server was restored from a backup.
            raise SettingsError(
                f"most clients have no state of this checkpoint: {failed[0][1]}; "
                "gossip can only resume from its newest checkpoint"
            )
        for name, _ in failed:
            self.lose(name, "its state is not the one its neighbours rely on")
        for name in self.names:
            missed = server_round - self._run.clients.acknowledged.get(name, 0)
            if missed > self.max_missed_rounds:
                self.lose(name, f"it missed {missed} rounds")
        self.forget()
        return result

    # Metrics.

    def metrics(self, round: Round) -> dict[str, float]:
        """Add ``sent``, ``bits``, ``refused`` and ``lost``.

        These are the number of nodes that sent a message; the bits of these messages,
        each counted once regardless of its receivers; the number of messages that
        receivers refused as malformed; and the number of lost nodes.
        """
        lengths = [len(message_of(reply)) for reply in round.replies]
        return {
            **super().metrics(round),
            "sent": sum(length > 0 for length in lengths),
            "bits": 8 * sum(lengths),
            "refused": sum(int(reply.metrics["refused"]) for reply in round.replies),
            "lost": len(self.lost),
        }

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Add ``consensus-distance``, (1/n) Σ_i ‖x_i − x̄‖², and ``consensus-step``.

        The distance is estimated from sketches (standard error at most 9 %), since the
        server receives no models.
        """
        metrics = super().aggregate_evaluate(server_round, replies)
        read = map(sketch_of, self._run.evaluation.replies)
        if sketches := [sketch for sketch in read if sketch is not None]:
            stacked = np.stack(sketches)
            deviations = stacked - stacked.mean(axis=0, dtype=np.float64)
            metrics["consensus-distance"] = float(np.square(deviations).sum(1).mean())
            if self.uses_consensus_step:
                metrics["consensus-step"] = self.step
        return metrics

    # State.

    def _snapshot(self) -> State:
        """Return the state; the graph and the messages are part of it."""
        self.state["edges"] = self.edges
        self.state["relay"] = {"names": self.names, "lost": sorted(self.lost)}
        self.state["sent"] = {
            name: {str(n): np.frombuffer(data, np.uint8) for n, data in of.items()}
            for name, of in self.sent.items()
        }
        return super()._snapshot()

    def _restore(self, state: State) -> None:
        """Restore a saved state.

        The saved graph is used even if the setting now yields another one, because the
        nodes' estimates belong to it.
        """
        super()._restore(state)
        relay = self.state["relay"]
        if relay["names"]:
            self.set_graph(list(relay["names"]), self.state["edges"])
        self.lost = set(relay["lost"])
        for name, of in self.state["sent"].items():
            self.sent[name] = {int(n): array.tobytes() for n, array in of.items()}


def message_of(reply: Reply) -> bytes:
    """Return the message to the neighbours in a valid training reply."""
    return cast(bytes, reply.attachment("message"))


def sketch_of(reply: Reply) -> NDArray[np.float32] | None:
    """Return the sketch in an evaluation reply, or None if there is no valid one."""
    data = reply.attachment("sketch")
    if not isinstance(data, bytes) or len(data) != 4 * SKETCH:
        return None
    values = np.frombuffer(data, "<f4")
    # The comparison is False for NaN.
    return values if np.abs(values).max() <= LARGEST_SKETCHED else None
