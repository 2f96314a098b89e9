"""Who takes part: clients are asked once who they are, then known by name."""

import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.server.checks import (
    InvalidReplyError,
    check_name,
    check_properties,
    one_line,
    several,
)
from flwr_frl.strategies.server.client_info import ClientInfo, difference, vote
from flwr_frl.strategies.server.replies import reply_arrays
from flwr_frl.task.messages import (
    ARRAYS,
    CLASSES_DIGEST,
    CLIENT,
    CONFIG,
    OWN_NAME,
    PROPERTIES,
    REFUSAL,
    RUN,
    SHARED_BYTES,
    STATISTICS,
    STRUCTURE,
)
from flwr_frl.task.settings import SettingsError

QUERY_TIMEOUT = 600.0
POLL_INTERVAL = 0.5
# Seconds after which it is said again that nodes are waited for.
WAITING_INTERVAL = 60.0
# How many clients are asked for the initial model.
ASKED = 5
# How often at most a refused node is passed over before it is asked again.
LONGEST_REST = 7
# What Flower says for an app that answers no queries, as its templates do not.
ANSWERS_NO_QUERY = "No query function registered"


class ClientManager:
    """The clients of a run by node; Flower's node ids are random.

    Parameters
    ----------
    min_available_nodes : int, default 1
        Wait until so many are there before the run begins.

    Attributes
    ----------
    known : dict of int to Participant
        By node.
    here : frozenset of int
        The nodes that were there the last time.
    busy : frozenset of int
        The nodes that were connected then and left alone, as an answer of theirs is
        still to come.
    silent : frozenset of int
        The nodes that were left alone then with anything but training, as they had not
        answered.
    refusals : dict of int to str
        Why a node takes no part, as it was last logged.
    labels : dict of str to str
        What simulated clients' folders are called, by the clients' names.
    settled : dict of str to object
        What the run's clients say of their model, all of which must say it alike, once
        any has trained.
    keyed : bool
        Whether a name belongs to the key that first used it; False unless set.
    keys : dict of str to str
        To which key, by the name.
    round_timeout : float
        Seconds for what takes clients as long as training: a run's ``round-timeout``.
    failure : str
        Why a client could not be asked, the last time.
    """

    def __init__(self, min_available_nodes: int = 1) -> None:
        self.min_available_nodes = min_available_nodes
        self.known: dict[int, ClientInfo] = {}
        self.here: frozenset[int] = frozenset()
        self.busy: frozenset[int] = frozenset()
        self.silent: frozenset[int] = frozenset()
        self.refusals: dict[int, str] = {}
        self.labels: dict[str, str] = {}
        self._taken: set[str] = set()
        self._names: set[str] = set()
        # What nodes call themselves, whether they take part or not.
        self._called: dict[int, str] = {}
        # What most clients that were there said of their model; then the run's.
        self._usual: dict[str, Any] = {}
        self.settled: dict[str, Any] = {}
        # How often nodes were refused, and how often they are still passed over.
        self._refused: Counter[int] = Counter()
        self._resting: dict[int, int] = {}
        # Nodes with the name of another one, and which.
        self._doubles: dict[int, int] = {}
        self.keyed = False
        self.keys: dict[str, str] = {}
        self.round_timeout = QUERY_TIMEOUT
        self.failure = ""

    def identify(self, grid: Grid, run_token: str = "") -> list[int]:
        """Ask every node that is not known yet who it is; each is asked once.

        With the run's name, it also says what it has kept of the run.

        A node that does not answer is asked again the next time, and one that cannot
        take part after a while. A client whose shared arrays have another structure
        than most clients' (or the run's, once it has begun) cannot take part. Returns
        the nodes that can, in the order of their clients' names.
        """
        # Once the run has begun, nodes that leave for good must not hold it up.
        nodes = self._wait(grid, 1 if self.known else self.min_available_nodes)
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
        told = []
        for node in sorted(known.keys() - fits):
            reason = difference(known[node].properties, usual)
            if self._refuse(node, known[node].name, reason):
                content = RecordDict({CONFIG: ConfigRecord({REFUSAL: reason})})
                told.append(Message(content, node, MessageType.QUERY))
        if told:
            grid.send_and_receive(told, timeout=QUERY_TIMEOUT)
        for node in fits:
            self.refusals.pop(node, None)
        return self._sorted([n for n in fits if not known[n].is_newcomer])

    def settle(self) -> None:
        """Hold the run to what most clients last said of their model, once for all."""
        self.settled = self.settled or self._usual

    @property
    def classes(self) -> str:
        """The digest of the classes' names that the clients have."""
        return str((self.settled or self._usual).get(CLASSES_DIGEST, ""))

    def _rests(self, node: int) -> bool:
        """Return whether a refused node is passed over once more."""
        # Its client has come back, and the node that it was has gone by now.
        if self._doubles.get(node, node) not in self.here:
            del self._doubles[node]
            self._resting.pop(node, None)
        left = self._resting.get(node, 0)
        self._resting[node] = max(0, left - 1)
        return left > 0

    def busy_clients(self) -> list[ClientInfo]:
        """Return who takes part, but is left alone now, in the order of their names."""
        nodes = (self.busy & self.known.keys()) - self.refusals.keys()
        found = [self.known[node] for node in nodes]
        return sorted((p for p in found if not p.is_newcomer), key=lambda p: p.name)

    def answering(self, nodes: list[int]) -> list[int]:
        """Return those of some nodes to which more than training is sent; log who not.

        The grid would not send it to the others, who have not been asked then.
        """
        if left := [node for node in nodes if node in self.silent]:
            names = several([self.name_of(node) for node in left])
            log(INFO, "not asked, as answers are still to come: %s", names)
        return [node for node in nodes if node not in self.silent]

    def newcomers(self) -> list[int]:
        """Return the nodes that come after the training, ordered by their names."""
        return self._sorted([n for n, p in self.known.items() if p.is_newcomer])

    def _sorted(self, nodes: list[int]) -> list[int]:
        return sorted(nodes, key=lambda node: (self.known[node].name, node))

    def _wait(self, grid: Grid, awaited: int) -> list[int]:
        """Return the nodes once so many are there; the log says who is waited for."""
        said, at = -1, 0.0
        while len(nodes := sorted(grid.get_node_ids())) < awaited:
            if len(nodes) != said or time.monotonic() - at >= WAITING_INTERVAL:
                said, at = len(nodes), time.monotonic()
                text = "waiting for clients: %d of %d nodes are here%s"
                names = several([self.name_of(node) for node in nodes])
                log(INFO, text, said, awaited, f": {names}" if names else "")
            time.sleep(POLL_INTERVAL)
        return nodes

    def away(self, names: Collection[str]) -> set[str]:
        """Return those of some names by which no node that is here is called."""
        return set(names) - {self._called.get(node, "") for node in self.here}

    def wait_for_others(self, grid: Grid, until: float) -> None:
        """Wait a minute for other nodes than those here, of which none takes part.

        ``until``, by `time.monotonic`, ends it sooner. Who was silent before is asked
        again, as there is nobody else, and so is who was refused.
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

    def _ask(self, nodes: list[int], grid: Grid, run_token: str) -> None:
        about = {CONFIG: ConfigRecord({RUN: run_token})} if run_token else {}
        messages = [Message(RecordDict({**about}), n, MessageType.QUERY) for n in nodes]
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
            said: Mapping[str, Any] = {}
            if reply.has_content():
                said = reply.content.config_records.get(PROPERTIES, {})
            try:
                properties = check_properties(said)
            except InvalidReplyError as error:
                self._refuse(node, str(node), f"it {error}")
                continue
            name = self._called[node] = properties.get(CLIENT, str(node))
            if node in keys and self.keys.setdefault(name, keys[node]) != keys[node]:
                reason = f"it calls itself {name!r}, which is the name of another key"
                self._refuse(node, str(node), reason)
                continue
            if taken.setdefault(name, node) != node:
                # The client has come back as another node, or two share a name.
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

    def _label(self, name: str, label: object) -> None:
        """Call a client by a name in what is written, unless another is called so."""
        with contextlib.suppress(InvalidReplyError):
            if check_name(label) not in self._taken:
                self.labels[name] = str(label)
                self._taken.add(str(label))

    def label(self, name: str) -> str:
        """Return what a client is called in what is written: its name, or its folder's.

        Nobody takes another's name by calling its folder so.
        """
        label = self.labels.get(name, name)
        return name if label in self._names else label

    def client_labels(self) -> dict[str, str]:
        """Return the labels that are nobody else's name."""
        return {
            name: own for name, own in self.labels.items() if self.label(name) == own
        }

    def _refuse(self, node: int, name: str, reason: str) -> bool:
        """Log once why a client takes no part; return whether this is new."""
        self._refused[node] += 1
        self._resting[node] = min(2 ** self._refused[node] - 1, LONGEST_REST)
        if self.refusals.get(node) == reason:
            return False
        self.refusals[node] = reason
        self.failure = f"client {name}: {reason}"
        log(WARNING, "client %s takes no part: %s", name, reason)
        return True

    def name_of(self, node: int) -> str:
        """Return the name of a node's client; its id as text for an unknown node."""
        known = self.known.get(node)
        return known.name if known else str(node)

    def shared_bytes(self) -> float:
        """Return how many bytes most clients say the shared arrays have; else inf."""
        said = [p.properties.get(SHARED_BYTES) for p in self.known.values()]
        usual = Counter(n for n in said if isinstance(n, int)).most_common(1)
        return usual[0][0] if usual else math.inf

    def query_arrays(
        self, grid: Grid, nodes: list[int], action: str
    ) -> list[tuple[str, ArrayRecord]]:
        """Ask clients for arrays; return names and answers, in the order of the names.

        ``action`` of the query is ``arrays``, or ``statistics`` of `Client.statistics`,
        for which there is as much time as for a round. The log says who does not
        answer.
        """
        kind = f"{MessageType.QUERY}.{action}"
        timeout = self.round_timeout if action == STATISTICS else QUERY_TIMEOUT
        names = several([self.name_of(node) for node in nodes])
        log(INFO, "waiting for %s to send their %s", names, action)
        messages = [Message(RecordDict(), n, kind) for n in nodes]
        answers, silent = [], set(nodes)
        for reply in grid.send_and_receive(messages, timeout=timeout):
            silent.discard(reply.metadata.src_node_id)
            name = self.name_of(reply.metadata.src_node_id)
            try:
                if reply.has_error():
                    raise InvalidReplyError(f"is an error: {reply.error.reason}")
                answers.append((name, reply_arrays(reply, ARRAYS)))
            except InvalidReplyError as error:
                reason = one_line(error)
                self.failure = f"client {name}: its reply {reason}"
                log(WARNING, "client %s sent no arrays: its reply %s", name, reason)
        if silent:
            names = several(sorted(map(self.name_of, silent)))
            log(WARNING, "no %s of %s", action, names)
            self.failure = f"no answer of {names}"
        return sorted(answers, key=lambda answer: answer[0])

    def common_initial_arrays(
        self, grid: Grid, nodes: list[int], action: str
    ) -> ArrayRecord:
        """Return the arrays on which most of some clients agree to the last bit.

        A few are asked, from all over the list of names; where more than half of them
        do not agree, the others as well. If nobody agrees, the first name's are taken.
        Raises `SettingsError` if there are none.
        """
        few = nodes[:: max(1, len(nodes) // ASKED)][:ASKED]
        answers = self.query_arrays(grid, few, action)
        votes = Counter(_digest(record) for _, record in answers)
        if not votes or 2 * max(votes.values()) <= len(answers):
            others = [node for node in nodes if node not in few]
            answers = sorted(
                [*answers, *self.query_arrays(grid, others, action)], key=lambda a: a[0]
            )
            votes = Counter(_digest(record) for _, record in answers)
        if not votes:
            raise self.nothing_sent(action)
        # The first of equals is that of the first name.
        agreed = max(votes, key=lambda digest: votes[digest])
        for name, record in answers:
            if _digest(record) != agreed:
                text = "client %s begins with other arrays than most: they are not used"
                log(WARNING, text, name)
        return next(record for _, record in answers if _digest(record) == agreed)

    def nothing_sent(self, what: str) -> SettingsError:
        """Return the error that no client has sent something, with the last reason."""
        reason = self.failure or "none, as there are no clients"
        return SettingsError(
            f"no client has sent its {what}; the last to fail was {reason}"
        )


def _counted(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes != 1)}"


def _keys_of(grid: Grid) -> dict[int, str]:
    """Return digests of the nodes' public keys, as far as the grid knows them."""
    known = getattr(grid, "get_nodes", None)
    return {
        node.node_id: hashlib.sha256(node.public_key).hexdigest()
        for node in (known() if known else [])
        if node.public_key
    }


def _digest(record: ArrayRecord) -> str:
    """Return what arrays that are equal to the last bit have in common."""
    digest = hashlib.sha256()
    for name, array in record.items():
        digest.update(repr((name, array.dtype, tuple(array.shape))).encode())
        digest.update(array.data)
    return digest.hexdigest()


def _answers_no_query(error: Error) -> bool:
    return ANSWERS_NO_QUERY in str(error.reason)
