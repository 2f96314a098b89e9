"""Messages of secure aggregation: the record of a step beside the usual ones.

*keys*, *shares* and *unmask* are messages of type `SHORT`. *masked* is the usual
training message, whose reply has words in place of arrays.
"""

from typing import Any

import numpy.typing as npt
from flwr.app import ConfigRecord

from flwr_frl.common import messages as keys
from flwr_frl.common import sealed
from flwr_frl.common.arrays import entries_of, values_of
from flwr_frl.common.secure.protocol import Texts, demand

Arrays = dict[str, npt.NDArray[Any]]
# Key of the record, of the words in a reply, and the type of short messages.
SECURE, WORDS, SHORT = "secure", "secure-words", "train.secure"
KEYS, SHARES, MASKED, UNMASK = "keys", "shares", "masked", "unmask"
# Digits of a node, so that records of all nodes have the same size.
DIGITS = 20


def record_of(step: str, session: bytes, texts: Texts) -> ConfigRecord:
    """Return the record of a step, with a text for each of some nodes."""
    by_name = {f"{node:0{DIGITS}}": text for node, text in texts.items()}
    return ConfigRecord({"step": step, "session": session, **by_name})


def texts_in(record: Any, step: str, session: object) -> dict[int, bytes]:
    """Return what an untrusted record has for each node.

    Raises `RefusedError` if it is invalid, or of another step or session.
    """
    values: dict[str, Any] = dict(record) if isinstance(record, ConfigRecord) else {}
    same = (values.pop("step", ""), values.pop("session", b"")) == (step, session)
    demand(same, f"there is no record of step {step!r} of this session")
    for name, text in values.items():
        valid = name.isdecimal() and len(name) == DIGITS and type(text) is bytes
        demand(valid, f"the record of step {step!r} is invalid")
    return {int(name): text for name, text in values.items()}


def arrays_in(content: Any) -> Arrays:
    """Return the shared arrays of a message or a reply."""
    record = entries_of(entries_of(content)[keys.ARRAYS])
    return {name: values_of(array) for name, array in record.items()}


def digest(content: Any) -> str:
    """Return what identifies the arrays and the config that all clients receive."""
    config = entries_of(entries_of(content)[keys.CONFIG])
    common = {name: v for name, v in config.items() if name not in keys.OF_A_CLIENT}
    return sealed.digest(arrays_in(content), common)
