"""The clients of a run, identified by names rather than by node ids."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import MessageType
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


@dataclass(frozen=True)
class ClientInfo:
    """A client that has identified itself.

    Parameters
    ----------
    name : str
        The client's name, the same in every run; the node id if it reports none.
    properties : mapping
        All properties that it reported.
    """

    name: str
    properties: Mapping[str, Any]

    @property
    def is_newcomer(self) -> bool:
        """True if the client joins after the training."""
        return self.properties.get(NEWCOMER) is True


@dataclass
class Refusal:
    """Why a node cannot take part, and when it is asked again.

    Parameters
    ----------
    name : str
        Name of its client; the node id unless the client is known.
    reason : str, default ""
        The reason, as last logged.
    times : int, default 0
        How often the node was refused.
    rests : int, default 0
        How often it is still skipped before it is asked again.
    twin : int, optional
        The node that has the same name. Once it has left, this one is asked at once.
    """

    name: str
    reason: str = ""
    times: int = 0
    rests: int = 0
    twin: int | None = None


class ClientManager:
    """The clients of a run by node; Flower's node ids are random.

    Parameters
    ----------
    min_available_nodes : int, default 1
        Number of nodes to wait for before the run begins.

    Attributes
    ----------
    known : dict of int to ClientInfo
        Clients that have identified themselves, by node.
    refusals : dict of int to Refusal
        Nodes that cannot take part.
    here : frozenset of int
        Nodes that were available at the last `identify`.
    busy : frozenset of int
        Nodes that were connected then and still owe a reply.
    silent : frozenset of int
        Nodes that are sent no evaluations for now, as they did not reply.
    untrained : frozenset of int
        Nodes whose clients have no training examples, unless no client has any.
    settled : dict of str to object
        Description of the model that all clients must share, once any has trained.
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
    foreign_app : bool
        True if the ClientApp may be another project's, without a query handler. One
        node is then asked before the others.
    answers_no_query : bool
        True if the ClientApp of ``foreign_app`` has no query handler.
    """

    def __init__(self, min_available_nodes: int = 1) -> None:
        self.min_available_nodes = min_available_nodes
        self.known: dict[int, ClientInfo] = {}
        self.refusals: dict[int, Refusal] = {}
        self.here = self.busy = self.silent = self.untrained = frozenset[int]()
        # Clients without training examples, which have been logged.
        self._logged = set[str]()
        self._former: dict[int, str] = {}
        # Labels that clients report, by name, and a cache of those in use.
        self._reported_labels: dict[str, str] = {}
        self._labels: dict[str, str] | None = None
        # Nodes of the last `identify` with a settled model: all, unknown, taking part.
        self._nodes: list[int] | None = None
        self._unknown, self._taking_part = list[int](), list[int]()
        # Description of the model that most clients report; later `settled`.
        self._usual: dict[str, Any] = {}
        self.settled: dict[str, Any] = {}
        self.keyed, self.round_timeout = False, QUERY_TIMEOUT
        self.keys: dict[str, str] = {}
        self.failure, self.registered = "", RegisteredNames()
        self.refusal_of: Callable[[ClientInfo], str] = lambda client: ""
        self.foreign_app = self.answers_no_query = False

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
        awaited = 1 if self.known else self.min_available_nodes
        nodes = connected_nodes(grid, awaited, self.label_of)
        unchanged = nodes == self._nodes
        if not unchanged:
            self._nodes, self.here = None, frozenset(nodes)
            self._unknown = [node for node in nodes if node not in self.known]
        # Asynchronous grids list nodes that are training.
        available = self.here - getattr(grid, "at_work", frozenset[int]())
        self.busy = getattr(grid, "connected", frozenset[int]()) - available
        silent_for = getattr(grid, "silent_for", None)
        self.silent = silent_for(MessageType.EVALUATE) if silent_for else frozenset()
        if asked := [node for node in self._unknown if not self._rests(node)]:
            self._ask(asked, grid, run_token)
        elif unchanged:
            return list(self._taking_part)
        if not (here := {n: self.known[n] for n in nodes if n in self.known}):
            return []
        usual = self._usual = self.settled or vote(c.properties for c in here.values())
        refused = []
        for node, client in sorted(here.items()):
            own = client.properties
            same = own.get(STRUCTURE, "") == usual[STRUCTURE]
            reason = self.refusal_of(client) if same else difference(own, usual)
            if not reason:
                self.refusals.pop(node, None)
                continue
            del here[node]
            if self._refuse(node, client.name, reason):
                refused.append(self.registered.query(node, {REFUSAL: reason}))
            if self.settled:
                # It is asked again, as other data may change its properties.
                self._former[node] = self.known.pop(node).name
        if refused:
            grid.send_and_receive(refused, timeout=QUERY_TIMEOUT)
        trained = {n: c for n, c in here.items() if not c.is_newcomer}
        self._taking_part = _by_name(trained)
        self._note_untrained(trained)
        # Until the model is settled, votes and a strategy's `refusal_of` may change.
        self._nodes = nodes if self.settled else None
        self._unknown = [node for node in nodes if node not in self.known]
        return list(self._taking_part)

    def _note_untrained(self, clients: Mapping[int, ClientInfo]) -> None:
        """Set `untrained`, and log each client among them once."""

        def has_none(client: ClientInfo) -> bool:
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

    def _rests(self, node: int) -> bool:
        """Return whether a refused node is skipped once more."""
        refusal = self.refusals.get(node)
        if refusal is None:
            return False
        if refusal.twin is not None and refusal.twin not in self.here | self.busy:
            # The twin was the former node of the same client.
            refusal.twin, refusal.rests = None, 0
        refusal.rests -= 1
        return refusal.rests >= 0

    def _ask(self, nodes: list[int], grid: Grid, run_token: str) -> None:
        """Ask nodes for their properties, and store or refuse their clients."""
        taken = {client.name: node for node, client in self.known.items()}
        keys = keys_of(grid) if self.keyed else {}
        text = "waiting for %d node%s to say who they are"
        log(INFO, text, len(nodes), "s" * (len(nodes) != 1))
        reported: dict[int, Mapping[str, Any]] = {}
        # Ask one node first: each node without a query handler would log a traceback.
        first = 1 if self.foreign_app else len(nodes)
        for asked in nodes[:first], nodes[first:]:
            if self.answers_no_query:
                reported |= {node: {} for node in asked}
            elif asked:
                reported |= self._reported_by(asked, grid, run_token)
        refused = list[tuple[int, str, str, int | None]]()
        for node, properties in sorted(reported.items()):
            try:
                valid, key = check_properties(properties), keys.get(node, "")
                refused += self._add(node, valid, taken, key)
            except InvalidReplyError as error:
                refused.append((node, str(node), f"it {error}", None))
        # Labels change with every client that is added.
        for refusal in refused:
            self._refuse(*refusal)

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
                reported[node] = reply_properties(reply)
            elif ANSWERS_NO_QUERY in str(reply.error.reason):
                reported[node] = {}
                if self.foreign_app and not self.answers_no_query:
                    self.answers_no_query = True
                    log(INFO, "the ClientApp has no query handler: names are node ids")
            else:
                # A single error may be due to a lost connection.
                self.refusals.setdefault(node, Refusal(str(node), times=-1))
                self._refuse(node, str(node), f"error: {error_reason(reply)}")
        return reported

    def _add(
        self, node: int, properties: dict[str, Any], taken: dict[str, int], key: str
    ) -> list[tuple[int, str, str, int | None]]:
        """Store a node's client, or return the arguments of `_refuse`.

        ``taken`` maps used names to their nodes.
        """
        name = properties.get(CLIENT, str(node))
        if key and self.keys.setdefault(name, key) != key:
            text = f"calls itself {name!r}, which is the name of another key"
            raise InvalidReplyError(text)
        if (twin := taken.setdefault(name, node)) != node:
            # The client has a new node id, or two clients share a name.
            if twin in self.here | self.busy:
                reason = f"it calls itself {name!r}, as another does"
                return [(node, str(node), reason, twin)]
            self._former[twin] = self.known.pop(twin).name
            taken[name] = node
        self._labels, self._reported_labels[name] = None, ""
        with contextlib.suppress(InvalidReplyError):
            self._reported_labels[name] = check_name(properties.get(OWN_NAME))
        if REFUSAL in properties:
            return [(node, name, one_line(properties[REFUSAL], 1000), None)]
        self.known[node] = ClientInfo(name, properties)
        return []

    def _refuse(
        self, node: int, name: str, reason: str, twin: int | None = None
    ) -> bool:
        """Log once why a client cannot take part; return whether the reason is new."""
        refusal = self.refusals.setdefault(node, Refusal(name))
        refusal.times += 1
        refusal.rests = min(2**refusal.times - 1, LONGEST_REST)
        refusal.name, refusal.twin = name, twin
        if refusal.reason == reason:
            return False
        refusal.reason, label = reason, self.label(name)
        self.failure = f"client {label}: {reason}"
        log(WARNING, "client %s takes no part: %s", label, reason)
        return True

    def settle(self) -> None:
        """Fix the description of the model for the rest of the run."""
        self.settled = self.settled or self._usual

    # Names.

    def name_of(self, node: int) -> str:
        """Return the name of a node's client; its id as text for an unknown node."""
        if client := self.known.get(node):
            return client.name
        refusal = self.refusals.get(node)
        return self._former.get(node, refusal.name if refusal else str(node))

    def label(self, name: str) -> str:
        """Return a client's name in files and logs: its label, or else its name."""
        return self.labels.get(name, name)

    def label_of(self, node: int) -> str:
        """Return the name of a node's client in files and logs."""
        return self.label(self.name_of(node))

    @property
    def labels(self) -> dict[str, str]:
        """Names of simulated clients' data folders, by the clients' names."""
        if self._labels is None:
            self._labels = distinct_labels(self._reported_labels)
        return self._labels

    def newcomers(self) -> list[int]:
        """Return the nodes that join after the training, ordered by their names."""
        return _by_name({n: c for n, c in self.known.items() if c.is_newcomer})

    def busy_nodes(self) -> list[int]:
        """Return the participants that still owe a reply, ordered by their names."""
        if not self.busy:
            return []
        nodes = (self.busy & self.known.keys()) - self.refusals.keys()
        return _by_name({n: c for n in nodes if not (c := self.known[n]).is_newcomer})

    def declared(self, node: int, name: str) -> float:
        """Return a number that a node's client declared at first; inf for none."""
        client = self.known.get(node)
        if client is None and (former := self._former.get(node)):
            # The client has another node since it was asked.
            client = next((c for c in self.known.values() if c.name == former), None)
        return float(client.properties.get(name, math.inf)) if client else math.inf

    def usual_bytes(self, name: str, default: float = 0.0) -> float:
        """Return the number of bytes that most clients report under a name."""
        sizes = [c.properties.get(name) for c in self.known.values()]
        usual = Counter(n for n in sizes if isinstance(n, int)).most_common(1)
        return usual[0][0] if usual else default

    # Waiting.

    def answering(self, nodes: list[int]) -> list[int]:
        """Return the nodes that can be sent an evaluation or query; log the others."""
        unavailable = self.silent | self.busy
        if left := [node for node in nodes if node in unavailable]:
            names = several([self.label_of(node) for node in left])
            log(INFO, "not asked, as answers are still to come: %s", names)
        return [node for node in nodes if node not in unavailable]

    def connected_names(self) -> set[str]:
        """Return the names of the available clients, refused ones included."""
        clients = [self.known.get(n) or self.refusals.get(n) for n in self.here]
        return {client.name for client in clients if client}

    def wait_for_others(self, grid: Grid, until: float) -> None:
        """Wait up to a minute for a change of the available nodes.

        The wait ends at ``until``, by `time.monotonic`, at the latest. Called if none
        of the available nodes can take part; silent and refused ones are asked again.
        """
        names = several([self.label_of(node) for node in sorted(self.here)])
        text = "waiting for clients: of the nodes that are here none takes part: %s"
        log(INFO, text, names)
        if forgive := getattr(grid, "forgive", None):
            forgive()
        for refusal in self.refusals.values():
            refusal.rests = 0
        wait_for_change(grid, self.here, until)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the values for a checkpoint; they must not be changed."""
        classes = str((self.settled or self._usual).get(CLASSES_DIGEST, ""))
        names = {"keys": self.keys, "labels": self.labels}
        return {**names, "classes": classes, "model": self.settled}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Return to a saved state."""
        self.keys = {name: str(key) for name, key in values.get("keys", {}).items()}
        self.settled = dict(values.get("model", {}))


def _by_name(clients: Mapping[int, ClientInfo]) -> list[int]:
    """Return nodes in the order of their clients' names."""
    return sorted(clients, key=lambda node: (clients[node].name, node))
