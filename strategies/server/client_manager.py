"""Identify clients: each is asked once, then known by its name."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.server.checks import (
    InvalidReplyError,
    check_properties,
    one_line,
    several,
)
from flwr_frl.strategies.server.client_info import (
    POLL_INTERVAL,
    QUERY_TIMEOUT,
    WAITING_INTERVAL,
    ClientInfo,
    KnownClients,
    difference,
    vote,
)
from flwr_frl.task.messages import (
    CLASSES_DIGEST,
    CLIENT,
    CONFIG,
    OWN_NAME,
    PROPERTIES,
    REFUSAL,
    RUN,
    STRUCTURE,
)

# Largest number of times that a refused node is skipped before it is asked again.
LONGEST_REST = 7
# Flower's error for an app without a query handler, such as its templates.
ANSWERS_NO_QUERY = "No query function registered"


class ClientManager(KnownClients):
    """The clients of a run by node; Flower's node ids are random.

    Parameters
    ----------
    min_available_nodes : int, default 1
        Number of nodes to wait for before the run begins.

    Attributes
    ----------
    here : frozenset of int
        Nodes that were available the last time.
    busy : frozenset of int
        Nodes that were connected then but still owed a reply.
    silent : frozenset of int
        Nodes that are sent only training messages, as they did not reply.
    refusals : dict of int to str
        Why a node cannot take part, as last logged.
    settled : dict of str to object
        Description of the model that all clients must share, once any has trained.
    keyed : bool
        True if a name belongs to the public key that first used it.
    keys : dict of str to str
        Digests of these keys, by name.
    """

    def __init__(self, min_available_nodes: int = 1) -> None:
        super().__init__()
        self.min_available_nodes = min_available_nodes
        self.here: frozenset[int] = frozenset()
        self.busy: frozenset[int] = frozenset()
        self.silent: frozenset[int] = frozenset()
        self.refusals: dict[int, str] = {}
        # Names of all nodes that answered, whether they can take part or not.
        self._called: dict[int, str] = {}
        # Description of the model by most clients; then `settled`.
        self._usual: dict[str, Any] = {}
        self.settled: dict[str, Any] = {}
        # How often nodes were refused, and how often they are still skipped.
        self._refused: Counter[int] = Counter()
        self._resting: dict[int, int] = {}
        # Nodes that use the name of another one, and that node.
        self._doubles: dict[int, int] = {}
        self.keyed = False
        self.keys: dict[str, str] = {}

    def identify(self, grid: Grid, run_token: str = "") -> list[int]:
        """Ask unknown nodes for their properties; return the nodes that can take part.

        With the run's token, clients also report which state of the run they have. A
        node that does not answer is asked again the next time, and a refused one after
        a while. A client is refused if the structure of its shared arrays differs from
        most clients' (or the run's, once it has begun). The nodes are in the order of
        their clients' names.
        """
        # Once the run has begun, nodes that leave must not block it.
        nodes = self.wait_for_nodes(grid, 1 if self.known else self.min_available_nodes)
        self.here = frozenset(nodes)
        self.busy = getattr(grid, "connected", self.here) - self.here
        silent_for = getattr(grid, "silent_for", None)
        self.silent = silent_for(MessageType.EVALUATE) if silent_for else frozenset()
        unknown = [n for n in nodes if n not in self.known and not self._rests(n)]
        if unknown:
            self._ask(unknown, grid, run_token)
        known = {n: self.known[n] for n in nodes if n in self.known}
        if not known:
            return []
        usual = self._usual = self.settled or vote(known.values())
        fits = [n for n, p in known.items() if p.structure == usual[STRUCTURE]]
        refusals = []
        for node in sorted(known.keys() - fits):
            reason = difference(known[node].properties, usual)
            if self._refuse(node, known[node].name, reason):
                content = RecordDict({CONFIG: ConfigRecord({REFUSAL: reason})})
                refusals.append(Message(content, node, MessageType.QUERY))
        if refusals:
            grid.send_and_receive(refusals, timeout=QUERY_TIMEOUT)
        for node in fits:
            self.refusals.pop(node, None)
        return self._sorted([n for n in fits if not known[n].is_newcomer])

    def settle(self) -> None:
        """Fix the description of the model for the rest of the run."""
        self.settled = self.settled or self._usual

    @property
    def classes(self) -> str:
        """Digest of the names of the clients' classes."""
        return str((self.settled or self._usual).get(CLASSES_DIGEST, ""))

    def _rests(self, node: int) -> bool:
        """Return whether a refused node is skipped once more."""
        # The other node with this name, its client's former one, is gone.
        if self._doubles.get(node, node) not in self.here:
            del self._doubles[node]
            self._resting.pop(node, None)
        left = self._resting.get(node, 0)
        self._resting[node] = max(0, left - 1)
        return left > 0

    def busy_clients(self) -> list[ClientInfo]:
        """Return the participants that still owe a reply, ordered by name."""
        nodes = (self.busy & self.known.keys()) - self.refusals.keys()
        clients = [self.known[node] for node in nodes]
        return sorted((p for p in clients if not p.is_newcomer), key=lambda p: p.name)

    def answering(self, nodes: list[int]) -> list[int]:
        """Return the nodes that can be sent an evaluation or query; log the others.

        The grid would not send it to the others.
        """
        if left := [node for node in nodes if node in self.silent]:
            names = several([self.name_of(node) for node in left])
            log(INFO, "not asked, as answers are still to come: %s", names)
        return [node for node in nodes if node not in self.silent]

    def away(self, names: Collection[str]) -> set[str]:
        """Return the names that no connected node has."""
        return set(names) - {self._called.get(node, "") for node in self.here}

    def wait_for_others(self, grid: Grid, until: float) -> None:
        """Wait up to a minute for a change of the connected nodes.

        ``until``, by `time.monotonic`, may end it sooner. None of the connected nodes
        can take part; silent and refused ones are asked again.
        """
        names = several([self.name_of(node) for node in sorted(self.here)])
        text = "waiting for clients: of the nodes that are here none takes part: %s"
        log(INFO, text, names)
        if forgive := getattr(grid, "forgive", None):
            forgive()
        self._resting.clear()
        until = min(until, time.monotonic() + WAITING_INTERVAL)
        while self.here == frozenset(grid.get_node_ids()):
            if time.monotonic() >= until:
                break
            time.sleep(POLL_INTERVAL)

    def wait_for_any(
        self,
        grid: Grid,
        identify: Callable[[], list[int]],
        expected: Callable[[], set[str]],
    ) -> list[int]:
        """Return the nodes that can take part; wait for one up to ``round_timeout``.

        If no eligible client is connected but expected ones may return, wait.
        In-process grids return at once.
        """
        until = time.monotonic() + self.round_timeout
        while not (nodes := identify()):
            away = self.away(expected())
            over = time.monotonic() >= until
            if over or not away or getattr(grid, "in_process", False):
                break
            self.wait_for_others(grid, until)
        return nodes

    def state_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps."""
        return {
            "keys": self.keys,
            "labels": self.client_labels(),
            "classes": self.classes,
            "model": self.settled,
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Return to a saved state."""
        self.keys = {name: str(key) for name, key in values.get("keys", {}).items()}
        self.settled = dict(values.get("model", {}))

    def _ask(self, nodes: list[int], grid: Grid, run_token: str) -> None:
        token = {CONFIG: ConfigRecord({RUN: run_token})} if run_token else {}
        messages = [Message(RecordDict({**token}), n, MessageType.QUERY) for n in nodes]
        taken = {p.name: node for node, p in self.known.items()}
        keys = _keys_of(grid) if self.keyed else {}
        log(INFO, "waiting for %s to say who they are", _counted(len(nodes)))
        replies = grid.send_and_receive(messages, timeout=QUERY_TIMEOUT)
        for reply in sorted(replies, key=lambda r: r.metadata.src_node_id):
            node = reply.metadata.src_node_id
            if reply.has_error() and not _answers_no_query(reply.error):
                reason = one_line(reply.error.reason)
                self.failure = f"node {node}: {reason}"
                log(WARNING, "node %d says nothing: %s", node, reason)
                continue
            reported: Mapping[str, Any] = {}
            if reply.has_content():
                reported = reply.content.config_records.get(PROPERTIES, {})
            try:
                properties = check_properties(reported)
            except InvalidReplyError as error:
                self._refuse(node, str(node), f"it {error}")
                continue
            name = self._called[node] = properties.get(CLIENT, str(node))
            if node in keys and self.keys.setdefault(name, keys[node]) != keys[node]:
                reason = f"it calls itself {name!r}, which is the name of another key"
                self._refuse(node, str(node), reason)
                continue
            if taken.setdefault(name, node) != node:
                # The client has a new node id, or two clients share a name.
                if taken[name] in self.here:
                    reason = f"it calls itself {name!r}, as another does"
                    self._refuse(node, str(node), reason)
                    self._doubles[node] = taken[name]
                    continue
                self.known.pop(taken[name], None)
                taken[name] = node
            if REFUSAL in properties:
                self._refuse(node, name, one_line(properties[REFUSAL], 1000))
                continue
            structure = properties.get(STRUCTURE, "")
            self.known[node] = ClientInfo(name, structure, properties)
            self._names.add(name)
            self._label(name, properties.get(OWN_NAME))

    def _refuse(self, node: int, name: str, reason: str) -> bool:
        """Log once why a client cannot take part; return whether the reason is new."""
        self._refused[node] += 1
        self._resting[node] = min(2 ** self._refused[node] - 1, LONGEST_REST)
        if self.refusals.get(node) == reason:
            return False
        self.refusals[node] = reason
        self.failure = f"client {name}: {reason}"
        log(WARNING, "client %s takes no part: %s", name, reason)
        return True


def _counted(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes != 1)}"


def _keys_of(grid: Grid) -> dict[int, str]:
    """Return digests of the public keys that the grid knows, by node."""
    get_nodes = getattr(grid, "get_nodes", None)
    return {
        node.node_id: hashlib.sha256(node.public_key).hexdigest()
        for node in (get_nodes() if get_nodes else [])
        if node.public_key
    }


def _answers_no_query(error: Error) -> bool:
    return ANSWERS_NO_QUERY in str(error.reason)
