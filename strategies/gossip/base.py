"""Base of gossip strategies: the server relays messages and averages no models."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from logging import INFO, WARNING
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_frl.common.flower_messages import fill
from flwr_frl.common.messages import EXCHANGED_ROUND
from flwr_frl.common.settings import SettingsError, setting, validate
from flwr_frl.strategies.gossip.graph_strategy import GraphStrategy
from flwr_frl.strategies.gossip.graphs import Graph
from flwr_frl.strategies.gossip.mixing import (
    ALLOWED,
    ConsensusStep,
    consensus_distance,
)
from flwr_frl.strategies.server.checkpoint import State
from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Reply, Round

# Key of the graph's edges in a checkpoint; shape (edges, 2).
EDGES = "graph-edges"
# Values of the mailboxes in a checkpoint.
BOXES = ("names", "pending", "lost")
# Error of a client whose state differs from the one its neighbours rely on.
LOST_STATE = "LostStateError"
# Sketches with larger entries are invalid.
LARGEST_SKETCHED = 1e9


class Gossip(GraphStrategy, uses_mean="never", takes_newcomers=False):
    """Relay each node's message to its neighbours on a graph.

    Messages are queued until their receiver has answered, so a node that was offline
    receives the messages it missed.

    Parameters
    ----------
    consensus_step : float or str, default "auto"
        γ, in (0, 1]. ``auto`` derives it from the fraction of a Gaussian vector that a
        message conveys; ``theory`` (Theorem 2) and ``theorem-1`` from the worst case,
        which gives a small γ. With RandK of 1 %, the nodes did not converge for any
        step that was tried.
    **base
        As for `GraphStrategy`.

    Raises
    ------
    SettingsError
        If a value is out of range.
    """

    uses_consensus_step: ClassVar[bool] = True
    # Client properties that contain the possible lengths of a message.
    length_properties: ClassVar[tuple[str, ...]] = ("message-bytes",)

    @property
    def unused_settings(self) -> dict[str, str]:
        """Add the settings of sampling and averaging."""
        names = "fraction-train", "min-train-nodes", "weighting", "largest-share"
        return super().unused_settings | dict.fromkeys(names, "all nodes take part")

    def __init__(
        self,
        *,
        consensus_step: Annotated[
            float | str, setting(form=ALLOWED, safe=True)
        ] = "auto",
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.step = ConsensusStep(consensus_step)
        validate(self)
        self._exchanged_round = 0
        self._message_lengths: frozenset[int] = frozenset()

    def identify(self, grid: Grid) -> list[int]:
        """Return the connected nodes of the graph; learn their message format once."""
        nodes = super().identify(grid)
        if nodes and not self._message_lengths:
            self._set_message_format(nodes)
        return nodes

    def _set_message_format(self, nodes: list[int]) -> None:
        """Adopt the message lengths and ω that most clients report."""
        known, names = self.clients.known, self.length_properties
        reports = [message_format(known[node].properties, names) for node in nodes]
        valid = Counter(report for report in reports if report is not None)
        if not valid:
            raise SettingsError(
                f"no client reports {' and '.join(names)}; gossip strategies need "
                "gossip clients"
            )
        (self._message_lengths, omega, typical_omega), _ = valid.most_common(1)[0]
        if self.uses_consensus_step:
            self.step.derive(self.boxes.weights, omega, typical_omega)

    # The relay.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send every node its neighbours' messages up to the previous round."""
        self._exchanged_round = server_round - 1
        self.lose_absent(server_round)
        messages = super().configure_train(server_round, arrays, config, grid)
        self.round.attached_bytes = max(self._message_lengths, default=0)
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send every node its neighbours' messages up to this round."""
        self._exchanged_round = server_round
        return super().configure_evaluate(server_round, arrays, config, grid)

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add the neighbours' messages to the config.

        Its entries are ``exchanged-round``, the last round whose messages are relayed;
        ``consensus-step``; ``neighbour-weight``, Σ_j w_ij over the neighbours; and the
        lists of `Mailboxes.lists_for`.
        """
        content = super().content(node, arrays, config)
        entries = cast(ConfigRecord, content[self.configrecord_key])
        name = self.clients.name_of(node)
        i = self.boxes.number[name]
        about: dict[str, Any] = {
            EXCHANGED_ROUND: self._exchanged_round,
            "consensus-step": self.step.value,
            "neighbour-weight": float(1 - self.boxes.weights[i, i]),
        }
        fill(entries, about | self.boxes.lists_for(name))
        return content

    def check(self, reply: Reply) -> None:
        """Raise `InvalidReplyError` unless the message has a valid length."""
        reply.metric("refused")
        data = reply.attachment("message")
        if not isinstance(data, bytes):
            raise InvalidReplyError("has no message to the neighbours")
        if data and len(data) not in self._message_lengths:
            allowed = " or ".join(f"{n:,}" for n in sorted(self._message_lengths))
            raise InvalidReplyError(
                f"has a message of {len(data):,} bytes, not {allowed}"
            )

    def aggregate(self, round: Round) -> Arrays:
        """Queue each message for the sender's neighbours; average nothing."""
        sent = {reply.client: message_of(reply) for reply in round.replies}
        self.boxes.collect(round.number, sent, self.relays)
        return {}

    def relays(self, receiver_took_part: bool) -> bool:
        """Return whether a neighbour receives a message, given whether it took part.

        Here it always does: differences to public estimates must all arrive.
        """
        return True

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Relay the valid replies' messages; give up nodes that lost their state."""
        result = super().aggregate_train(server_round, replies)
        for name, reason in self.round.rejections:
            present = name in self.boxes.number and name not in self.boxes.lost
            if LOST_STATE in reason and present:
                self.lose(name, "its state is not the one its neighbours rely on")
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
            "lost": len(self.boxes.lost),
        }

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord:
        """Add ``consensus-distance``, (1/n) Σ_i ‖x_i − x̄‖², and ``consensus-step``.

        The distance is estimated from sketches (standard error at most 9 %), since the
        server receives no models.
        """
        metrics = super().aggregate_evaluate(server_round, replies)
        sketches = [s for s in map(sketch_of, self.evaluation.replies) if s is not None]
        if not sketches:
            return metrics
        distance = consensus_distance(sketches)
        metrics["consensus-distance"] = distance
        if self.uses_consensus_step:
            metrics["consensus-step"] = self.step.value
            self.step.watch(server_round, distance)
        return metrics

    # State.

    def snapshot(self) -> Callable[[], State]:
        """Return the state; messages are listed on demand, as there may be many."""
        base, boxes, edges = super().snapshot(), self.boxes.copy(), self._edges

        def state() -> State:
            (arrays, values), (messages, entries) = base(), boxes.state_dict()
            return State({**arrays, **messages, EDGES: edges}, {**values, **entries})

        return state

    def restore(self, state: State) -> None:
        """Restore a saved state, including the graph and the mailboxes.

        The saved graph is used even if the setting now yields another one, because the
        nodes' estimates belong to it.
        """
        arrays, values = state
        relayed = {n for n in arrays if n == EDGES or n.startswith("pending-")}
        others = {n: a for n, a in arrays.items() if n not in relayed}
        super().restore(
            State(others, {n: v for n, v in values.items() if n not in BOXES})
        )
        names = [str(name) for name in values["names"]]
        if names:
            saved = Graph(len(names), tuple(map(tuple, arrays[EDGES].tolist())))
            current = None
            with suppress(SettingsError):
                current = self.build_graph(len(names))
            if saved != current:
                text = "resume: graph %r has changed; the run keeps its saved graph"
                log(WARNING, text, self.graph)
            self._set_graph(names, saved)
        self.boxes.load_state_dict(arrays, values)

    def summary(self) -> None:
        """Log the configuration."""
        super().summary()
        log(INFO, "\t└──> Graph: %s, %s weights", self.graph, self.mixing)


def message_format(
    properties: Mapping[str, Any], length_properties: tuple[str, ...]
) -> tuple[frozenset[int], float, float] | None:
    """Return the message lengths, ω and typical ω that a client reports.

    Returns None if one of them is missing or out of range.
    """
    lengths = [properties.get(name) for name in length_properties]
    if not all(isinstance(n, int) and n >= 1 for n in lengths):
        return None
    omegas = [properties.get(name) for name in ("omega", "typical-omega")]
    if not all(isinstance(omega, float) and 0 < omega <= 1 for omega in omegas):
        return None
    omega, typical_omega = cast(list[float], omegas)
    return frozenset(cast(list[int], lengths)), omega, typical_omega


def message_of(reply: Reply) -> bytes:
    """Return the message to the neighbours in a valid training reply."""
    data = reply.attachment("message")
    assert isinstance(data, bytes)
    return data


def sketch_of(reply: Reply) -> NDArray[np.float32] | None:
    """Return the sketch in an evaluation reply, or None if there is no valid one."""
    data = reply.attachment("sketch")
    if not isinstance(data, bytes) or len(data) % 4 or not data:
        return None
    values = np.frombuffer(data, "<f4")
    # The comparison is False for NaN.
    return values if np.abs(values).max() <= LARGEST_SKETCHED else None
