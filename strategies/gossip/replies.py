"""Contents of gossip clients' replies: message formats, messages and sketches."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from flwr_frl.strategies.server.replies import attached

# Sketches of models have no larger entries.
LARGEST_SKETCHED = 1e9


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


def message_of(reply: Message) -> bytes:
    """Return the message to the neighbours in a valid training reply."""
    data = attached(reply, "message")
    assert isinstance(data, bytes)
    return data


def sketch_of(reply: Message) -> NDArray[np.float32] | None:
    """Return the sketch in an evaluation reply, or None if there is no valid one."""
    data = attached(reply, "sketch")
    if not isinstance(data, bytes) or len(data) % 4 or not data:
        return None
    values = np.frombuffer(data, "<f4")
    # The comparison is False for NaN.
    return values if np.abs(values).max() <= LARGEST_SKETCHED else None
