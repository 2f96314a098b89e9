"""The table of a run's clients, which are identified by names rather than by nodes."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.messages import (
    CLASSES_DIGEST,
    CLIENT,
    NEWCOMER,
    NUM_EXAMPLES,
    OWN_NAME,
    REFUSAL,
    RUN,
    STRUCTURE,
)
from flwr_frl.common.text import one_line, several
from flwr_frl.strategies.grids.nodes import (
    ANSWERS_NO_QUERY,
    RegisteredNames,
    connected_nodes,
    keys_of,
    wait_for_change,
    without_query_errors,
)
from flwr_frl.strategies.server.checks import (
    InvalidReplyError,
    check_name,
    check_properties,
    difference,
    distinct_labels,
    error_reason,
    vote,
)
from flwr_frl.strategies.server.replies import reply_properties

# Seconds to wait for the answer to a query.
QUERY_TIMEOUT = 600.0
# Largest number of times that a refused node is skipped before it is asked again.
LONGEST_REST = 7


@dataclass
class Client:
    """A row of the table: a node, its client, and why it cannot take part, if so.

    Parameters
    ----------
    name : str
        The client's name, the same in every run; the node id if it reports none.
    properties : mapping, optional
        All properties that it last reported; empty if it has reported none.

    Attributes
    ----------
    refusal : str
        Why it cannot take part, as last logged; empty if it can.
    times : int
        How often it was refused.
    rests : int
        How often it is still skipped before it is asked again.
    twin : int or None
        The node that has the same name. Once that has left, this one is asked at once.
    """

    name: str
    properties: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = field(default="", init=False)
    times: int = field(default=0, init=False)
    rests: int = field(default=0, init=False)
    twin: int | None = field(default=None, init=False)

    @property
    def is_newcomer(self) -> bool:
        """True if the client joins after the training."""
        return self.properties.get(NEWCOMER) is True

    def admit(self) -> None:
        """Forget earlier refusals."""
        self.refusal, self.times, self.rests, self.twin = "", 0, 0, None

    def refuse(self, reason: str, twin: int | None = None) -> bool:
        """Refuse the client, for longer each time; return whether the reason is new."""
        self.times += 1
        self.rests = min(2**self.times - 1, LONGEST_REST)
        is_new, self.refusal, self.twin = reason != self.refusal, reason, twin
        return is_new

    def is_skipped(self, connected: frozenset[int]) -> bool:
        """Return whether the client is skipped once more; ``connected`` has nodes."""
        if self.twin is not None and self.twin not in connected:
            # The twin was the former node of the same client.
            self.twin, self.rests = None, 0
        self.rests -= 1
        return self.rests >= 0


class Clients:
    """The clients of a run by node; Flower's node ids are random.

    Parameters
    ----------
    min_available_nodes : int, default 1
        Number of nodes to wait for before the run begins.

    Attributes
    ----------
    known : dict of int to Client
        Clients that have identified themselves, by node.
    here : frozenset of int
        Nodes that were available at the last `identify`.
    busy : frozenset of int
        Nodes that were connected then and still owe a reply.
    untrained : frozenset of int
        Nodes whose clients have no training examples, unless no client has any.
    keyed : bool
        True if a name belongs to the public key that first used it.
    keys : dict of str to str
        Digests of these keys, by name.
    registered : RegisteredNames
        Names of nodes in the SuperLink, for clients without a configured name.
    round_timeout : float
        Seconds to wait for participants, and for queries that take as long as training.
    failure : str
        Why the last client was refused or did not answer a query.
    refusal_of : callable
        Returns why a strategy cannot use a client; empty if it can. Once the model is
        settled, it is called only after a change of the connected nodes.
    answers_queries : bool or None
        Whether the ClientApp has a query handler; None if it may be another project's
        and none has answered yet. One node is then asked before the others.
    """

    def __init__(self, min_available_nodes: int = 1) -> None:
        self._min_available_nodes = min_available_nodes
        # The table: all nodes that have answered, former nodes of clients among them.
        self._rows: dict[int, Client] = {}
        self.known: dict[int, Client] = {}
        self.here = self.busy = self.untrained = frozenset[int]()
        self.keyed = False
        self.keys: dict[str, str] = {}
        self.round_timeout = QUERY_TIMEOUT
        self.failure, self.registered = "", RegisteredNames()
        self.refusal_of: Callable[[Client], str] = lambda client: ""
        self.answers_queries: bool | None = True
        # Description of the model that most clients have. Once any client has trained,
        # it is settled, and all must have it.
        self._model: dict[str, Any] = {}
        self._settled = False
        # Names of simulated clients' data folders, by the clients' names: labels in
        # use, and all that clients report, empty for none.
        self._labels: dict[str, str] = {}
        self._reported: dict[str, str] = {}
        # Labels of clients without training examples, which have been logged.
        self._logged = set[str]()
        # Nodes of the last `identify` with a settled model: all, unknown, taking part.
        self._last: tuple[list[int], list[int], list[int]] | None = None

    # Identification.

    def identify(self, grid: Grid, run_token: str = "") -> list[int]:
        """Ask unknown nodes for their properties; return the nodes that can take part.

        With the run's token, clients also report which state of the run they have. A
        node that does not answer is asked again at the next call, and a refused one
        after a number of calls. A client is refused if the structure of its shared
        arrays differs from most clients' (once one has trained, from the run's). The
        nodes are in the order of their clients' names.
        """
        # Once the run has begun, nodes that leave must not block it.
        awaited = 1 if self.known else self._min_available_nodes
        nodes = connected_nodes(grid, awaited, self.label_of)
        if self._last is not None and nodes == self._last[0]:
            _, unknown, taking_part = self._last
        else:
            self._last, self.here = None, frozenset(nodes)
            unknown, taking_part = self._unknown(nodes), []
        self._note_connections(grid)
        connected = self.here | self.busy if unknown else self.here
        if asked := [n for n in unknown if not self._is_skipped(n, connected)]:
            self._ask(asked, grid, run_token)
        elif self._last is not None:
            return list(taking_part)
        if not any(node in self.known for node in nodes):
            return []
        taking_part = self._admitted(grid, nodes)
        # Until the model is settled, votes and a strategy's `refusal_of` may change.
        last = nodes, self._unknown(nodes), taking_part
        self._last = last if self._settled else None
        return list(taking_part)

    def _unknown(self, nodes: list[int]) -> list[int]:
        return [node for node in nodes if node not in self.known]

    def _is_skipped(self, node: int, connected: frozenset[int]) -> bool:
        row = self._rows.get(node)
        return bool(row and row.refusal and row.is_skipped(connected))

    def _note_connections(self, grid: Grid) -> None:
        """Set `busy`."""
        # Asynchronous grids list nodes that are training.
        available = self.here - getattr(grid, "at_work", frozenset[int]())
        self.busy = getattr(grid, "connected", frozenset[int]()) - available

    def _admitted(self, grid: Grid, nodes: list[int]) -> list[int]:
        """Return those of the nodes that can take part, and refuse the others."""
        here = {node: self.known[node] for node in nodes if node in self.known}
        if not self._settled:
            self._model = vote(client.properties for client in here.values())
        refused = []
        for node, client in sorted(here.items()):
            same = client.properties.get(STRUCTURE, "") == self._model[STRUCTURE]
            differs = "" if same else difference(client.properties, self._model)
            if not (reason := differs or self.refusal_of(client)):
                if client.refusal:
                    client.admit()
                continue
            del here[node]
            if self._refuse(node, reason):
                refused.append(self.registered.query(node, {REFUSAL: reason}))
            if self._settled:
                # It is asked again, as other data may change its properties.
                del self.known[node]
        if refused:
            grid.send_and_receive(refused, timeout=QUERY_TIMEOUT)
        trained = {n: c for n, c in here.items() if not c.is_newcomer}
        self._note_untrained(trained)
        return _by_name(trained)

    def _note_untrained(self, clients: Mapping[int, Client]) -> None:
        """Set `untrained`, and log each client among them once."""

        def has_none(client: Client) -> bool:
            # Clients without a query handler report no number.
            return client.properties.get(NUM_EXAMPLES) == 0

        self.untrained = frozenset(n for n, c in clients.items() if has_none(c))
        # Problems that are not given by examples have none on any client.
        if self.untrained and all(map(has_none, self.known.values())):
            self.untrained = frozenset()
        labels = {self.label_of(node) for node in self.untrained}
        if new := sorted(labels - self._logged):
            text = "without training examples: %s; they are tested, but do not train"
            log(WARNING, text, several(new))
            self._logged |= labels

    def _ask(self, nodes: list[int], grid: Grid, run_token: str) -> None:
        """Ask nodes for their properties, and store or refuse their clients."""
        keys = keys_of(grid) if self.keyed else {}
        text = "waiting for %d node%s to say who they are"
        log(INFO, text, len(nodes), "s" * (len(nodes) != 1))
        reported: dict[int, Mapping[str, Any]] = {}
        # Ask one node first: each node without a query handler would log a traceback.
        first = 1 if self.answers_queries is None else len(nodes)
        for asked in nodes[:first], nodes[first:]:
            if self.answers_queries is False:
                reported |= {node: {} for node in asked}
            elif asked:
                reported |= self._reported_by(asked, grid, run_token)
        taken = {client.name: node for node, client in self.known.items()}
        refused = []
        for node, properties in sorted(reported.items()):
            try:
                valid, key = check_properties(properties), keys.get(node, "")
                if refusal := self._add(node, valid, taken, key):
                    refused.append((node, *refusal))
            except InvalidReplyError as error:
                refused.append((node, f"it {error}", None))
        # Labels change with every client that is added.
        self._labels = distinct_labels(self._reported)
        for node, reason, twin in refused:
            self._refuse(node, reason, twin)

    def _reported_by(
        self, nodes: list[int], grid: Grid, run_token: str
    ) -> dict[int, Mapping[str, Any]]:
        """Return the properties that nodes report; none without a query handler."""
        messages = self.registered.queries(grid, nodes, {RUN: run_token})
        reported: dict[int, Mapping[str, Any]] = {}
        with without_query_errors():
            replies = list(grid.send_and_receive(messages, timeout=QUERY_TIMEOUT))
        for reply in sorted(replies, key=lambda r: r.metadata.src_node_id):
            node = reply.metadata.src_node_id
            if reply.has_content():
                self.answers_queries = True
                reported[node] = reply_properties(reply)
            elif ANSWERS_NO_QUERY in str(reply.error.reason):
                reported[node] = {}
                if self.answers_queries is None:
                    self.answers_queries = False
                    log(INFO, "the ClientApp has no query handler: names are node ids")
            else:
                # A single error may be due to a lost connection.
                row = self._rows.setdefault(node, Client(str(node)))
                row.times -= not row.refusal
                self._refuse(node, f"error: {error_reason(reply)}")
        return reported

    def _add(
        self, node: int, properties: dict[str, Any], taken: dict[str, int], key: str
    ) -> tuple[str, int | None] | None:
        """Store a node's client, or return why it is refused, and its twin if any.

        ``taken`` maps used names to their nodes.
        """
        name = properties.get(CLIENT, str(node))
        if key and self.keys.setdefault(name, key) != key:
            text = f"calls itself {name!r}, which is the name of another key"
            raise InvalidReplyError(text)
        if (twin := taken.setdefault(name, node)) != node:
            # The client has a new node id, or two clients share a name.
            if twin in self.here | self.busy:
                return f"it calls itself {name!r}, as another does", twin
            del self.known[twin]
            taken[name] = node
        self._reported[name] = ""
        with contextlib.suppress(InvalidReplyError):
            self._reported[name] = check_name(properties.get(OWN_NAME))
        row = self._rows.setdefault(node, Client(name))
        row.name, row.properties = name, properties
        if REFUSAL in properties:
            return one_line(properties[REFUSAL], 1000), None
        self.known[node] = row
        return None

    def _refuse(self, node: int, reason: str, twin: int | None = None) -> bool:
        """Log once why a client cannot take part; return whether the reason is new."""
        row = self._rows.setdefault(node, Client(str(node)))
        if not row.refuse(reason, twin):
            return False
        self.failure = f"client {self.label(row.name)}: {reason}"
        log(WARNING, "client %s takes no part: %s", self.label(row.name), reason)
        return True

    def settle(self) -> None:
        """Fix the description of the model for the rest of the run."""
        self._settled = bool(self._model)

    # Names.

    def name_of(self, node: int) -> str:
        """Return the name of a node's client; its id as text for an unknown node."""
        row = self._rows.get(node)
        return row.name if row else str(node)

    def label(self, name: str) -> str:
        """Return a client's name in files and logs: its label, or else its name."""
        return self._labels.get(name, name)

    def label_of(self, node: int) -> str:
        """Return the name of a node's client in files and logs."""
        return self.label(self.name_of(node))

    @property
    def refused(self) -> dict[int, Client]:
        """Rows of the nodes that cannot take part."""
        return {node: row for node, row in self._rows.items() if row.refusal}

    def newcomers(self) -> list[int]:
        """Return the nodes that join after the training, ordered by their names."""
        return _by_name({n: c for n, c in self.known.items() if c.is_newcomer})

    def busy_nodes(self) -> list[int]:
        """Return the participants that still owe a reply, ordered by their names."""
        busy = {n: self.known[n] for n in self.busy if n in self.known}
        return _by_name(
            {n: c for n, c in busy.items() if not (c.refusal or c.is_newcomer)}
        )

    def declared(self, node: int, name: str) -> float:
        """Return a number that a node's client declared at first; inf for none."""
        client = self.known.get(node)
        if client is None and (former := self._rows.get(node)):
            # The client may have another node since it was asked.
            same = (c for c in self.known.values() if c.name == former.name)
            client = next(same, None)
        return float(client.properties.get(name, math.inf)) if client else math.inf

    def usual_bytes(self, name: str, default: float = 0.0) -> float:
        """Return the number of bytes that most clients report under a name."""
        sizes = [c.properties.get(name) for c in self.known.values()]
        usual = Counter(n for n in sizes if isinstance(n, int)).most_common(1)
        return usual[0][0] if usual else default

    # Waiting.

    def answering(self, nodes: list[int]) -> list[int]:
        """Return the nodes that can be sent an evaluation or query; log the others."""
        if left := [node for node in nodes if node in self.busy]:
            names = several([self.label_of(node) for node in left])
            log(INFO, "not asked, as answers are still to come: %s", names)
        return [node for node in nodes if node not in self.busy]

    def connected_names(self) -> set[str]:
        """Return the names of the available clients, refused ones included."""
        return {self._rows[node].name for node in self.here if node in self._rows}

    def wait_for_others(self, grid: Grid, until: float) -> None:
        """Wait up to a minute for a change of the available nodes.

        The wait ends at ``until``, by `time.monotonic`, at the latest. Called if none
        of the available nodes can take part; refused ones are asked again.
        """
        names = several([self.label_of(node) for node in sorted(self.here)])
        text = "waiting for clients: of the nodes that are here none takes part: %s"
        log(INFO, text, names)
        for row in self._rows.values():
            row.rests = 0
        wait_for_change(grid, self.here, until)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the values for a checkpoint; they must not be changed."""
        return {
            "keys": self.keys,
            "labels": self._labels,
            "classes": str(self._model.get(CLASSES_DIGEST, "")),
            "model": self._model if self._settled else {},
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Return to a saved state."""
        self.keys = {name: str(key) for name, key in values.get("keys", {}).items()}
        self._model = dict(values.get("model", {}))
        self._settled = bool(self._model)


def _by_name(clients: Mapping[int, Client]) -> list[int]:
    """Return nodes in the order of their clients' names."""
    return sorted(clients, key=lambda node: (clients[node].name, node))
