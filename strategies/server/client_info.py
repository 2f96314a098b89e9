"""The clients of a run that have identified themselves, and queries to them."""

import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.strategies.server.checks import (
    InvalidReplyError,
    check_name,
    one_line,
    several,
)
from flwr_frl.strategies.server.replies import reply_arrays
from flwr_frl.task.messages import (
    ARRAYS,
    CLASSES_DIGEST,
    INPUTS,
    NEWCOMER,
    NUM_CLASSES,
    SHARED_BYTES,
    STATISTICS,
    STRUCTURE,
)
from flwr_frl.task.settings import SettingsError

# Seconds to wait for the answer to a query.
QUERY_TIMEOUT = 600.0
POLL_INTERVAL = 0.5
# Seconds between two log lines about clients that are awaited.
WAITING_INTERVAL = 60.0
# Number of clients that are asked for the initial model.
ASKED = 5
# Properties that describe the model; only the digest is compared.
COMPARED = (*INPUTS, CLASSES_DIGEST, NUM_CLASSES, STRUCTURE)


@dataclass(frozen=True)
class ClientInfo:
    """A client that has identified itself.

    Parameters
    ----------
    name : str
        The same in every run; the node id for a client that answers no queries.
    structure : str
        Digest of its shared arrays' names, shapes and dtypes.
    properties : mapping
        All properties that it reported.
    """

    name: str
    structure: str
    properties: Mapping[str, Any]

    @property
    def is_newcomer(self) -> bool:
        """True if the client joins after the training."""
        return self.properties.get(NEWCOMER) is True


def vote(clients: Collection[ClientInfo]) -> dict[str, Any]:
    """Return the description of the model by most clients."""
    by_structure = {p.structure: p.properties for p in clients}
    votes = Counter(p.structure for p in clients)
    # Ties go to the smaller digest, so that a restart decides the same.
    usual = min(votes, key=lambda structure: (-votes[structure], structure))
    properties = by_structure[usual]
    described = {name: properties[name] for name in COMPARED if name in properties}
    return {**described, STRUCTURE: usual}


def difference(its: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return why a client with another structure than most cannot take part."""

    def inputs(properties: Mapping[str, Any]) -> str:
        return " x ".join(str(properties.get(name, "?")) for name in INPUTS)

    if inputs(its) != inputs(usual):
        return (
            f"its inputs are {inputs(its)} and those of the other clients are "
            f"{inputs(usual)} ({', '.join(INPUTS)})"
        )
    if its.get(CLASSES_DIGEST) != usual.get(CLASSES_DIGEST):
        return (
            f"its {its.get(NUM_CLASSES, '?')} classes are not those of the other "
            f"clients, who have {usual.get(NUM_CLASSES, '?')}: names and their order "
            "must be the same"
        )
    return (
        "its shared arrays are not of the names and shapes that the other clients "
        "have, or the model that it begins with is another one"
    )


class KnownClients:
    """Clients that have identified themselves, and queries to them.

    Attributes
    ----------
    known : dict of int to ClientInfo
        By node.
    labels : dict of str to str
        Folder names of simulated clients, by the clients' names.
    round_timeout : float
        Seconds for queries that take clients as long as training.
    failure : str
        Why the last query failed.
    """

    def __init__(self) -> None:
        self.known: dict[int, ClientInfo] = {}
        self.labels: dict[str, str] = {}
        self.round_timeout = QUERY_TIMEOUT
        self.failure = ""
        self._taken: set[str] = set()
        self._names: set[str] = set()

    def name_of(self, node: int) -> str:
        """Return the name of a node's client; its id as text for an unknown node."""
        known = self.known.get(node)
        return known.name if known else str(node)

    def _label(self, name: str, label: object) -> None:
        """Use a label for a client in files and logs, unless another client has it."""
        with contextlib.suppress(InvalidReplyError):
            if check_name(label) not in self._taken:
                self.labels[name] = str(label)
                self._taken.add(str(label))

    def label(self, name: str) -> str:
        """Return a client's name in files and logs: its folder's, or its own.

        A folder's name is not used if it is the name of another client.
        """
        label = self.labels.get(name, name)
        return name if label in self._names else label

    def client_labels(self) -> dict[str, str]:
        """Return the labels that are in use, by the clients' names."""
        return {
            name: label
            for name, label in self.labels.items()
            if self.label(name) == label
        }

    def newcomers(self) -> list[int]:
        """Return the nodes that join after the training, ordered by their names."""
        return self._sorted([n for n, p in self.known.items() if p.is_newcomer])

    def _sorted(self, nodes: list[int]) -> list[int]:
        return sorted(nodes, key=lambda node: (self.known[node].name, node))

    def wait_for_nodes(self, grid: Grid, awaited: int) -> list[int]:
        """Return the connected nodes once their number is as awaited."""
        said, at = -1, 0.0
        while len(nodes := sorted(grid.get_node_ids())) < awaited:
            if len(nodes) != said or time.monotonic() - at >= WAITING_INTERVAL:
                said, at = len(nodes), time.monotonic()
                text = "waiting for clients: %d of %d nodes are here%s"
                names = several([self.name_of(node) for node in nodes])
                log(INFO, text, said, awaited, f": {names}" if names else "")
            time.sleep(POLL_INTERVAL)
        return nodes

    def shared_bytes(self) -> float:
        """Return the size of the shared arrays that most clients report; else inf."""
        sizes = [p.properties.get(SHARED_BYTES) for p in self.known.values()]
        usual = Counter(n for n in sizes if isinstance(n, int)).most_common(1)
        return usual[0][0] if usual else math.inf

    def declared(self, reply: Message, name: str) -> float:
        """Return a number that a reply's client declared at first; inf for none."""
        known = self.known.get(reply.metadata.src_node_id)
        return float(known.properties.get(name, math.inf)) if known else math.inf

    def query_arrays(
        self, grid: Grid, nodes: list[int], action: str
    ) -> list[tuple[str, ArrayRecord]]:
        """Ask clients for arrays; return names and arrays, in the order of the names.

        The query's ``action`` is ``arrays``, or ``statistics`` (`Client.statistics`)
        with the time limit of a round. Clients that do not answer are logged.
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
        """Return the arrays on which most clients agree, bit for bit.

        A few clients are asked; if no more than half of them agree, the others are
        asked as well. Ties go to the first name. Raises `SettingsError` without any
        arrays.
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
        # `max` returns the first of equals, that of the first name.
        agreed = max(votes, key=lambda digest: votes[digest])
        for name, record in answers:
            if _digest(record) != agreed:
                text = "client %s begins with other arrays than most: they are not used"
                log(WARNING, text, name)
        return next(record for _, record in answers if _digest(record) == agreed)

    def nothing_sent(self, what: str) -> SettingsError:
        """Return the error that no client has sent its arrays, with the last reason."""
        reason = self.failure or "none, as there are no clients"
        return SettingsError(
            f"no client has sent its {what}; the last to fail was {reason}"
        )


def _digest(record: ArrayRecord) -> str:
    """Return a digest of the arrays' names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in record.items():
        digest.update(repr((name, array.dtype, tuple(array.shape))).encode())
        digest.update(array.data)
    return digest.hexdigest()
