"""Ask the clients of a run for arrays: their initial ones, or their statistics."""

import hashlib
from collections import Counter
from logging import INFO, WARNING

from flwr.app import ArrayRecord, MessageType
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.memory_array import MemoryArray
from flwr_frl.common.messages import (
    ARRAYS,
    FROZEN_BYTES,
    INITIAL_ARRAYS,
    SHARED_BYTES,
    STATISTICS,
)
from flwr_frl.common.npy import header, raw
from flwr_frl.common.settings import SettingsError
from flwr_frl.common.text import one_line, several
from flwr_frl.strategies.server.checks import InvalidReplyError, error_reason
from flwr_frl.strategies.server.clients import QUERY_TIMEOUT, Clients
from flwr_frl.strategies.server.replies import reply_arrays

# Number of clients that are asked for the initial model at first.
ASKED = 5


def query_arrays(
    clients: Clients, grid: Grid, nodes: list[int], action: str
) -> list[tuple[str, ArrayRecord]]:
    """Ask clients for arrays; return names and arrays, in the order of the names.

    The query's ``action`` is ``arrays``, or ``statistics`` (`Client.statistics`) with
    the time limit of a round. Clients that do not answer are logged.
    """
    kind = f"{MessageType.QUERY}.{action}"
    timeout = clients.round_timeout if action == STATISTICS else QUERY_TIMEOUT
    names = several([clients.label_of(node) for node in nodes])
    log(INFO, "waiting for %s to send their %s", names, action)
    messages = [clients.registered.query(node, {}, kind) for node in nodes]
    answers, silent = [], set(nodes)
    for reply in grid.send_and_receive(messages, timeout=timeout):
        silent.discard(reply.metadata.src_node_id)
        name = clients.name_of(reply.metadata.src_node_id)
        try:
            if reply.has_error():
                raise InvalidReplyError(f"is an error: {error_reason(reply)}")
            answers.append((name, reply_arrays(reply, ARRAYS)))
        except InvalidReplyError as error:
            reason = one_line(error)
            label = clients.label(name)
            clients.failure = f"client {label}: its reply {reason}"
            log(WARNING, "client %s sent no arrays: its reply %s", label, reason)
    if silent:
        names = several(sorted(map(clients.label_of, silent)))
        log(WARNING, "no %s of %s", action, names)
        clients.failure = f"no answer of {names}"
    return sorted(answers, key=lambda answer: answer[0])


def common_initial_arrays(
    clients: Clients, grid: Grid, nodes: list[int]
) -> ArrayRecord:
    """Return the initial arrays on which most clients agree, bit for bit.

    A few clients are asked; if no more than half of them agree, the others are asked as
    well. Ties go to the first name. Raises `SettingsError` without any arrays.
    """
    few = nodes[:: max(1, len(nodes) // ASKED)][:ASKED]
    answers, votes = [], Counter[str]()
    for asked in few, [node for node in nodes if node not in few]:
        if not asked:
            break
        answers += query_arrays(clients, grid, asked, INITIAL_ARRAYS)
        answers.sort(key=lambda answer: answer[0])
        votes = Counter(_digest(record) for _, record in answers)
        if votes and 2 * max(votes.values()) > len(answers):
            break
    if not votes:
        raise nothing_sent(clients, INITIAL_ARRAYS)
    # Of equal counts, `max` returns the first, which belongs to the first name.
    agreed = max(votes, key=lambda digest: votes[digest])
    if frozen := clients.usual_bytes(FROZEN_BYTES):
        sent = clients.usual_bytes(SHARED_BYTES)
        text = "%.3g of %.3g MB are sent; the frozen part stays on the clients"
        log(INFO, text, sent / 1e6, (sent + frozen) / 1e6)
    for name, record in answers:
        if _digest(record) != agreed:
            text = "client %s begins with other arrays than most: they are not used"
            log(WARNING, text, clients.label(name))
    return next(record for _, record in answers if _digest(record) == agreed)


def nothing_sent(clients: Clients, what: str) -> SettingsError:
    """Return the error for the case that no client has sent its arrays."""
    reason = clients.failure or "none, as there are no clients"
    return SettingsError(
        f"no client has sent its {what}; the last to fail was {reason}"
    )


def _digest(record: ArrayRecord) -> str:
    """Return a digest of the arrays' names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in record.items():
        digest.update(repr((name, array.dtype, tuple(array.shape))).encode())
        if isinstance(array, MemoryArray):
            # The bytes of `array.data`, without serialising the array.
            values = array.values
            digest.update(header(values.shape, values.dtype))
            digest.update(raw(values))
        else:
            digest.update(array.data)
    return digest.hexdigest()
