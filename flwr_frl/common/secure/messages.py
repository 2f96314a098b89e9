"""Messages of secure aggregation: the record of a step beside the usual ones.

*keys*, *shares* and *unmask* are messages of type `SHORT`. *masked* is the usual
training message, whose reply has words in place of arrays.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord

from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import entries_of, values_of
from flwr_frl.common.secure.protocol import Texts, demand

Arrays = dict[str, npt.NDArray[Any]]
# Key of the record, of the words in a reply, and the type of short messages.
SECURE, WORDS, SHORT = "secure", "secure-words", "train.secure"
KEYS, SHARES, MASKED, UNMASK = "keys", "shares", "masked", "unmask"
# Types of a record's values.
TYPES = {"step": str, "session": bytes, "nodes": list, "texts": list, "plan": str}
# Entries of a message's config that differ between clients.
OF_A_CLIENT = (
    *(keys.ACKNOWLEDGED_ROUND, keys.CHECKPOINT_ROUND, keys.EXAMPLES),
    *(keys.REGISTERED_NAME, keys.IN_MEAN),
)


def record_of(
    step: str, session: bytes, texts: Texts | None = None, plan: str = ""
) -> ConfigRecord:
    """Return the record of a step."""
    pairs = texts or {}
    values: dict[str, Any] = {"nodes": [*pairs], "texts": [*pairs.values()]}
    return ConfigRecord({"step": step, "session": session, "plan": plan, **values})


def texts_in(record: Any, step: str, session: bytes) -> dict[int, bytes]:
    """Return what an untrusted record has for each node.

    Raises `RefusedError` if it is invalid, or of another step or session.
    """
    values: dict[str, Any] = dict(record) if isinstance(record, ConfigRecord) else {}
    valid = all(type(values.get(name)) is kind for name, kind in TYPES.items())
    demand(valid, "the record of secure aggregation is missing or invalid")
    same = (values["step"], values["session"]) == (step, session)
    demand(same, f"the record is not of step {step!r} of this session")
    nodes, texts = values["nodes"], values["texts"]
    valid = all(type(n) is int and 0 <= n < 2**64 for n in nodes)
    valid = valid and all(type(text) is bytes for text in texts)
    demand(valid and len({*nodes}) == len(nodes) == len(texts), "its nodes are invalid")
    return dict(zip(nodes, texts, strict=True))


def arrays_in(content: Any) -> Arrays:
    """Return the shared arrays of a message or a reply."""
    record = entries_of(entries_of(content)[keys.ARRAYS])
    return {name: values_of(array) for name, array in record.items()}


def digest(content: Any) -> bytes:
    """Return what identifies the arrays and the config that all clients receive."""
    config = entries_of(entries_of(content)[keys.CONFIG])
    common = {n: v for n, v in sorted(config.items()) if n not in OF_A_CLIENT}
    sha256 = hashlib.sha256(repr(common).encode())
    for name, array in sorted(arrays_in(content).items()):
        sha256.update(repr((name, str(array.dtype), array.shape)).encode())
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.digest()


def changes_from(arrays: Arrays, are_changes: bool) -> Mapping[str, npt.NDArray[Any]]:
    """Return the arrays from which replies differ by the changes that are summed."""
    return {n: np.zeros_like(a) for n, a in arrays.items()} if are_changes else arrays
