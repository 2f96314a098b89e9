"""The table of a run's clients, which are identified by names rather than by nodes."""

import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import values_of
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.sealed import digest
from flwr_frl.common.settings import version
from flwr_frl.common.text import one_line, several
from flwr_frl.strategies.server.replies import (
    InvalidReplyError,
    check_name,
    check_values,
    error_reason,
    reply_arrays,
    reply_properties,
)

# Seconds to wait for the answer to a query.
QUERY_TIMEOUT = 600.0
# Seconds between two checks of the connected nodes.
POLL_INTERVAL = 0.5
# Number of times that a refused node is skipped before it is asked again.
RESTS = 3
# Number of clients that are asked for the initial model at first.
ASKED = 5
# Properties that describe the model, and their names in messages. Clients with the same
# `STRUCTURE`, a digest, have the same model; the others explain a difference.
COMPARED = {
    **{name: f"inputs ({name})" for name in keys.INPUTS},
    keys.NUM_CLASSES: "number of classes",
    keys.CLASSES_DIGEST: "names of the classes, or their order",
    keys.FROZEN_DIGEST: "frozen part: buffers, parameters without gradient",
    keys.STRUCTURE: "shared arrays, or the initial model",
}


@dataclass
class ClientInfo:
    """A row of the table: a node's client, and why it cannot take part, if so.

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
    rests : int
        How often it is still skipped before it is asked again.
    problem : str
        Why its last message did not count, if so.
    left : float or None
        When its node was last seen, if it was connected and has left.
    is_newcomer : bool
        True if the client joins after the training.
    """

    name: str
    properties: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = field(default="", init=False)
    rests: int = field(default=0, init=False)
    problem: str = field(default="", init=False)
    left: float | None = field(default=None, init=False)
    is_newcomer: bool = field(default=False, init=False)


class Clients:
    """The clients of a run: a row for each node, and all else by client name.

    Parameters
    ----------
    min_available_nodes : int, default 1
        Number of nodes to wait for before the run begins.

    Attributes
    ----------
    known : dict of int to ClientInfo
        Clients that have identified themselves, by node.
    here : frozenset of int
        Nodes that were available at the last `identify`.
    busy : frozenset of int
        Nodes that were connected then and still owe a reply.
    connected : frozenset of int
        The nodes of `here` and of `busy`.
    untrained : frozenset of int
        Nodes whose clients have no training examples, unless no client has any.
    foreign : set of int
        Nodes whose ClientApp is of another app, by their properties.
    keyed : bool
        True if a name belongs to the public key that first used it.
    keys : dict of str to str
        Digests of these keys, by name.
    registered : dict of int to str
        Names with which SuperNodes were registered (``flwr supernode register
        --name``). Each message contains its node's, for clients without another name.
    round_timeout : float
        Seconds to wait for participants, and for queries that take as long as training.
    failure : str
        Why the last client was refused or did not answer a query.
    refusal_of : callable
        Returns why a strategy cannot use a client; empty if it can. Once the model is
        settled, it is called only after a change of the connected nodes.
    run_token : str
        Identifies the run to the clients; saved in checkpoints.
    columns : list of float
        Statistics of the columns of all devices' tables; empty if there are none.
    acknowledged : dict of str to int
        Last round in which each client's reply counted.
    counted : int
        Number of replies that have counted so far.
    checkpoints : bool
        True if the run writes checkpoints before it ends.
    checkpointed : int
        Round of the last checkpoint that was written.
    """

    def __init__(self, min_available_nodes: int = 1) -> None:
        self._min_available_nodes = min_available_nodes
        # All nodes, former nodes of clients among them.
        self._rows: dict[int, ClientInfo] = {}
        self.known: dict[int, ClientInfo] = {}
        self.here = self.busy = self.connected = self.untrained = frozenset[int]()
        self.foreign = set[int]()
        self.keyed = self.checkpoints = False
        self.keys: dict[str, str] = {}
        self.round_timeout = QUERY_TIMEOUT
        self.failure = ""
        self.registered: dict[int, str] = {}
        self.refusal_of: Callable[[ClientInfo], str] = lambda client: ""
        # Description of the model that most clients have. Once any client has trained,
        # it is settled, and all must have it.
        self._model: dict[str, Any] = {}
        self._settled = False
        # Names of simulated clients' data folders: labels in use, and all that clients
        # report, empty for none.
        self._labels: dict[str, str] = {}
        self._reported: dict[str, str] = {}
        # Nodes of the last `identify`: all, and those taking part if known.
        self._last: tuple[list[int], list[int] | None] = [], None
        self.run_token = ""
        self.acknowledged: dict[str, int] = {}
        self.counted = self.checkpointed = 0
        # Statistics of the columns of all devices' tables, if devices report them.
        self.columns: list[float] = []
        # `acknowledged` in the last checkpoint.
        self._saved: dict[str, int] = {}
        # Clients whose delayed reply of a round up to this checkpoint counted after it.
        self._delayed = set[str]()

    # Identification.

    def identify(self, grid: Grid) -> list[int]:
        """Ask unknown nodes for their properties; return the nodes that can take part.

        A node that does not answer is asked again at the next call, and a refused one
        after a number of calls. A client is refused if the structure of its shared
        arrays differs from most clients' (once one has trained, from the run's). The
        nodes are in the order of their clients' names.
        """
        # Once the run has begun, nodes that leave must not block it.
        awaited = 1 if self.known else self._min_available_nodes
        logged = -1
        while len(nodes := sorted(grid.get_node_ids())) < awaited:
            if len(nodes) != logged:
                logged = len(nodes)
                text = "waiting for clients: %d of %d nodes are here: %s"
                log(INFO, text, logged, awaited, self.several(nodes))
            time.sleep(POLL_INTERVAL)
        former, taking_part = self._last
        if nodes != former:
            self.here, taking_part = frozenset(nodes), None
        # Asynchronous grids list nodes that are training.
        available = self.here - getattr(grid, "at_work", frozenset[int]())
        self.busy = getattr(grid, "connected", frozenset[int]()) - available
        self.connected = self.here | self.busy
        asked = []
        for node in (node for node in nodes if node not in self.known):
            row = self._rows.setdefault(node, ClientInfo(str(node)))
            if row.rests == 0:
                asked.append(node)
            else:
                row.rests -= 1
        if asked:
            self._ask(asked, grid)
        if asked or taking_part is None:
            taking_part = self._admitted(grid, nodes)
            every = [self.known[node].properties for node in taking_part]
            reported = [each[keys.COLUMNS] for each in every if keys.COLUMNS in each]
            if reported and not self.columns:
                self.columns = pooled(reported)
            # Until the model is settled, votes and `refusal_of` may change.
            self._last = nodes, taking_part if self._settled else None
        return list(taking_part)

    def _admitted(self, grid: Grid, nodes: list[int]) -> list[int]:
        """Return those of the nodes that can take part, and refuse the others."""
        here = {node: self.known[node] for node in nodes if node in self.known}
        if not here:
            return []
        if not self._settled:
            self._model = vote([client.properties for client in here.values()])
        refused = []
        for node, client in sorted(here.items()):
            reason = self.refusal_of(client)
            if client.properties.get(keys.STRUCTURE, "") != self._model[keys.STRUCTURE]:
                reason = difference(client.properties, self._model)
            if not reason:
                client.refusal, client.rests = "", 0
                continue
            del here[node]
            if self._refuse(node, reason):
                refused.append(self._query(node, {keys.REFUSAL: reason}))
            if self._settled:
                # It is asked again, as other data may change its properties.
                del self.known[node]
        if refused:
            list(grid.send_and_receive(refused, timeout=QUERY_TIMEOUT))
        trained = {n: c for n, c in here.items() if not c.is_newcomer}
        number = {n: c.properties.get(keys.NUM_EXAMPLES) for n, c in self.known.items()}
        # Tasks without example sets (synthetic problems) report 0 on all clients.
        any_has = any(count != 0 for count in number.values())
        none = frozenset(n for n in trained if number[n] == 0 and any_has)
        if new := none - self.untrained:
            text = "without training examples: %s; they are tested, but do not train"
            log(WARNING, text, self.several(new))
        self.untrained = none
        rows = self._rows.items()
        self.foreign = {n for n, row in rows if keys.STRUCTURE not in row.properties}
        return self.in_order(trained)

    def _ask(self, nodes: list[int], grid: Grid) -> None:
        """Ask nodes for their properties, and store or refuse their clients."""
        text = "waiting for %d node%s to say who they are"
        log(INFO, text, len(nodes), "s" * (len(nodes) != 1))
        about = list(grid.get_nodes())
        # Nodes that are not connected keep their names.
        self.registered |= {info.node_id: info.name for info in about if info.name}
        digests: dict[int, str] = {}
        if self.keyed:
            pairs = ((info.node_id, info.public_key) for info in about)
            digests = {n: hashlib.sha256(key).hexdigest() for n, key in pairs if key}
        of_run = {keys.RUN: self.run_token, keys.VERSION: version()}
        config = of_run if self.run_token else {}
        messages = [self._query(node, config) for node in nodes]
        replies = list(grid.send_and_receive(messages, timeout=QUERY_TIMEOUT))
        taken = {client.name: node for node, client in self.known.items()}
        for reply in sorted(replies, key=lambda r: r.metadata.src_node_id):
            node = reply.metadata.src_node_id
            try:
                if reply.has_content():
                    properties = dict(check_values(reply_properties(reply)))
                elif keys.ANSWERS_NO_QUERY in str(reply.error.reason):
                    properties = {}
                else:
                    raise InvalidReplyError(f"error: {error_reason(reply)}")
                self._add(node, properties, taken, digests.get(node, ""))
            except InvalidReplyError as error:
                self._refuse(node, str(error))
        # A label is used if no other client has it as a label or as its name.
        number = Counter([*self._reported.values(), *self._reported])
        labels = self._reported.items()
        self._labels = {n: each for n, each in labels if each and number[each] == 1}

    def _add(
        self, node: int, properties: dict[str, Any], taken: dict[str, int], digest: str
    ) -> None:
        """Store a node's client; raise `InvalidReplyError` if it is refused.

        ``taken`` maps used names to their nodes; ``digest`` is that of the node's key.
        """
        name = check_name(properties.get(keys.CLIENT, str(node)))
        if digest and self.keys.setdefault(name, digest) != digest:
            raise InvalidReplyError(
                f"calls itself {name!r}, which is the name of another key; restore the "
                "device's former key, choose another name, or begin a run without "
                "resume"
            )
        if (twin := taken.setdefault(name, node)) != node:
            # The client has a new node id, or two clients share a name.
            if twin in self.connected:
                raise InvalidReplyError(
                    f"calls itself {name!r}, as another does; choose another name, or "
                    "wait until the other is offline"
                )
            del self.known[twin]
            taken[name] = node
        self._reported[name] = ""
        with contextlib.suppress(InvalidReplyError):
            self._reported[name] = check_name(properties.get(keys.OWN_NAME))
        row = self._rows.setdefault(node, ClientInfo(name))
        row.name, row.properties = name, properties
        row.is_newcomer = properties.get(keys.NEWCOMER) is True
        if keys.REFUSAL in properties:
            raise InvalidReplyError(one_line(properties[keys.REFUSAL], 1000))
        self.known[node] = row

    def _refuse(self, node: int, reason: str) -> bool:
        """Refuse a node for some calls of `identify`; return if the reason is new."""
        row = self._rows.setdefault(node, ClientInfo(str(node)))
        # A single error may be due to a lost connection.
        row.rests = RESTS if row.refusal else 0
        is_new, row.refusal = reason != row.refusal, reason
        if is_new:
            self.failure = f"client {self.label(row.name)}: {reason}"
            log(WARNING, "client %s takes no part: %s", self.label(row.name), reason)
        return is_new

    def _query(
        self, node: int, config: Mapping[str, Any], kind: str = MessageType.QUERY
    ) -> Message:
        """Return a query to a node; empty values of the config are left out."""
        about = {**config, keys.REGISTERED_NAME: self.registered.get(node, "")}
        record = ConfigRecord({name: value for name, value in about.items() if value})
        return Message(RecordDict({keys.CONFIG: record} if record else {}), node, kind)

    # Names.

    def name_of(self, node: int) -> str:
        """Return the name of a node's client; its id as text for an unknown node."""
        return row.name if (row := self._rows.get(node)) else str(node)

    def label(self, name: str) -> str:
        """Return a client's name in files and logs: its label, or else its name."""
        return self._labels.get(name, name)

    def label_of(self, node: int) -> str:
        """Return the name of a node's client in files and logs."""
        return self.label(self.name_of(node))

    def several(self, nodes: Iterable[int]) -> str:
        """Return the names of nodes' clients as part of a line in the log."""
        return several(sorted(map(self.label_of, nodes)))

    def by_name(self) -> dict[str, tuple[int, ClientInfo]]:
        """Return each client's node, a connected one if there is any, and its row."""
        nodes = sorted(self._rows, key=self.connected.__contains__)
        return {self._rows[node].name: (node, self._rows[node]) for node in nodes}

    def in_order(self, nodes: Iterable[int]) -> list[int]:
        """Return nodes in the order of their clients' names."""
        return sorted(nodes, key=lambda node: (self.name_of(node), node))

    def newcomers(self) -> list[int]:
        """Return the nodes that join after the training, ordered by their names."""
        return self.in_order(n for n, c in self.known.items() if c.is_newcomer)

    def busy_nodes(self) -> list[int]:
        """Return the participants that still owe a reply, ordered by their names."""
        rows = {node: self.known[node] for node in self.busy & self.known.keys()}
        left_out = {n for n, row in rows.items() if row.refusal or row.is_newcomer}
        return self.in_order(rows.keys() - left_out)

    def declared(self, node: int, name: str) -> float:
        """Return a number that a node's client declared at first; inf for none."""
        # The client may have another node since it was asked; rows stay.
        row = self._rows.get(node, ClientInfo(""))
        return float(row.properties.get(name, math.inf))

    # Arrays that clients send before the training.

    def arrays(
        self,
        grid: Grid,
        nodes: list[int],
        action: str,
        received: ArrayRecord | None = None,
    ) -> list[tuple[str, ArrayRecord]]:
        """Ask clients for arrays; return names and arrays, in the order of the names.

        The query's ``action`` is ``arrays``, or ``statistics`` (which a client may
        define) with the time limit of a round. Clients get the ``received`` arrays with
        it. Clients that do not answer are logged.
        """
        kind = f"{MessageType.QUERY}.{action}"
        timeout = self.round_timeout if action == keys.STATISTICS else QUERY_TIMEOUT
        log(INFO, "waiting for %s to send their %s", self.several(nodes), action)
        config = {keys.COLUMNS: self.columns}
        messages = [self._query(node, config, kind) for node in nodes]
        if received:
            for message in messages:
                message.content[keys.ARRAYS] = received
        answers, silent = [], set(nodes)
        for reply in grid.send_and_receive(messages, timeout=timeout):
            node = reply.metadata.src_node_id
            silent.discard(node)
            try:
                if reply.has_error():
                    raise InvalidReplyError(f"is an error: {error_reason(reply)}")
                answers.append((self.name_of(node), reply_arrays(reply)))
            except InvalidReplyError as error:
                about = self.label_of(node), f"its reply {one_line(error)}"
                self.failure = "client {}: {}".format(*about)
                log(WARNING, "client %s sent no arrays: %s", *about)
        if silent:
            names = self.several(silent)
            self.failure = f"no answer of {names}"
            log(WARNING, "no %s of %s", action, names)
        return sorted(answers, key=lambda answer: answer[0])

    def initial_arrays(self, grid: Grid, nodes: list[int]) -> ArrayRecord:
        """Return the initial arrays on which most of a few clients agree, bit for bit.

        If none of these answers, the others are asked. Ties go to the first name.
        Raises `SettingsError` without any arrays.
        """
        few = nodes[:: max(1, len(nodes) // ASKED)][:ASKED]
        answers = self.arrays(grid, few, keys.INITIAL_ARRAYS)
        if others := [n for n in nodes if n not in few and not answers]:
            answers = self.arrays(grid, others, keys.INITIAL_ARRAYS)
        if not answers:
            raise self.nothing_sent(keys.INITIAL_ARRAYS)
        contents = [
            digest({name: values_of(array) for name, array in record.items()}, {})
            for _, record in answers
        ]
        agreed = Counter(contents).most_common(1)[0][0]
        for (name, _), content in zip(answers, contents, strict=True):
            if content != agreed:
                text = "client %s begins with other arrays than most: they are not used"
                log(WARNING, text, self.label(name))
        return answers[contents.index(agreed)][1]

    def nothing_sent(self, what: str) -> SettingsError:
        """Return the error for the case that no client has sent its arrays."""
        reason = self.failure or "none, as there are no clients"
        return SettingsError(
            f"no client has sent its {what}; the last to fail was {reason}"
        )

    # Rounds that have counted.

    def config(self, node: int, server_round: int) -> dict[str, Any]:
        """Return the entries about a node's client in the config of its messages.

        They are the client's last round that has counted, the round to which a resume
        would return, and the node's registered name.
        """
        name, checkpointed = self.name_of(node), self.checkpointed
        # Without checkpoints, clients need only the state of the previous round.
        if not self.checkpoints and not checkpointed:
            checkpointed = server_round - 1
        # If a delayed reply counted after a later round's checkpoint was written, this
        # checkpoint relies on an earlier state of this client.
        if name in self._delayed:
            checkpointed = self._saved.get(name, 0)
        config: dict[str, Any] = {
            keys.ACKNOWLEDGED_ROUND: self.acknowledged.get(name, 0),
            keys.CHECKPOINT_ROUND: checkpointed,
        }
        if node in self.registered:
            config[keys.REGISTERED_NAME] = self.registered[node]
        return config

    def acknowledge(self, rounds: Mapping[str, int], server_round: int) -> None:
        """Record that the replies of some clients have counted; settle the model.

        Parameters
        ----------
        rounds : mapping of str to int
            Round of each client's reply, by the client's name. A delayed reply is of an
            earlier round, under which the client has saved its state.
        server_round : int
            The round in which they count.
        """
        for name, made_in in rounds.items():
            # A delayed reply must not replace a newer one that has counted.
            if made_in == server_round or made_in > self.acknowledged.get(name, 0):
                self.acknowledged[name] = made_in
                if made_in <= self.checkpointed:
                    self._delayed.add(name)
        self.counted += len(rounds)
        self._settled = bool(self._model)

    def note_checkpoint(self, server_round: int) -> None:
        """Record that the checkpoint of a round has been written or restored."""
        self.checkpointed = server_round
        self._saved = dict(self.acknowledged)
        self._delayed.clear()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the values for a checkpoint; they must not be changed."""
        return {
            "acknowledged": self.acknowledged,
            "run": self.run_token,
            "keys": self.keys,
            "labels": self._labels,
            "columns": self.columns,
            "classes": str(self._model.get(keys.CLASSES_DIGEST, "")),
            "model": self._model if self._settled else {},
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Return to a saved state."""
        self.acknowledged = {n: int(r) for n, r in values["acknowledged"].items()}
        self.run_token = str(values["run"])
        self.keys = {name: str(key) for name, key in values.get("keys", {}).items()}
        self.columns = list(values.get("columns", []))
        self._model = dict(values.get("model", {}))
        self._settled = bool(self._model)


def pooled(reported: list[Any]) -> list[float]:
    """Return numbers, means and deviations of the columns of all devices.

    These are exact up to rounding. Lists of an unusual length are left out.
    """
    valid = [r for r in reported if isinstance(r, list) and len(r) % 3 == 0]
    valid = [r for r in valid if set(map(type, r)) == {float}]
    if not valid:
        return []
    usual = Counter(map(len, valid)).most_common(1)[0][0]
    parts = np.array([r for r in valid if len(r) == usual]).reshape(-1, 3, usual // 3)
    count, mean, std = parts.swapaxes(0, 1)
    count, std = np.maximum(count, 0), np.maximum(std, 0)
    weight = count / np.maximum(count.sum(0), 1)
    of_all = (weight * mean).sum(0)
    spread = (weight * (std**2 + (mean - of_all) ** 2)).sum(0)
    return [*count.sum(0).tolist(), *of_all.tolist(), *np.sqrt(spread).tolist()]


def vote(reported: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the description of the model that most clients report."""
    votes = Counter(properties.get(keys.STRUCTURE, "") for properties in reported)
    # Ties go to the smaller digest, so that a restart decides the same.
    usual = min(votes, key=lambda structure: (-votes[structure], structure))
    last = [p for p in reported if p.get(keys.STRUCTURE, "") == usual][-1]
    described = {name: last[name] for name in COMPARED if name in last}
    return {**described, keys.STRUCTURE: usual}


def difference(its: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return why a client is refused whose model differs from the usual one."""
    name = next(name for name in COMPARED if its.get(name) != usual.get(name))
    values = f" ({its.get(name)} instead of {usual.get(name)})"
    shown = values if name in (*keys.INPUTS, keys.NUM_CLASSES) else ""
    return f"its model differs from that of most clients: {COMPARED[name]}{shown}"
