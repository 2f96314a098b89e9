"""Checks of everything that a server sends."""

import math
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ConfigRecord
from torch import Tensor

from flwr_frl.clients.base import Config
from flwr_frl.clients.device.arrays import from_array
from flwr_frl.task.messages import (
    ACKNOWLEDGED_ROUND,
    CHECKPOINT_ROUND,
    COINS,
    EXCHANGED_ROUND,
    PROXIMAL_WEIGHT,
    REFUSAL,
    RUN,
    SERVER_ROUND,
)
from flwr_frl.task.settings import SettingsError

# File names contain the round with eight digits.
LAST_ROUND = 99_999_999
# File and directory names contain the name of the run.
TOKEN = re.compile(r"[0-9A-Za-z_]{1,64}")


def _is_round(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LAST_ROUND


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0 and math.isfinite(value)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) and TOKEN.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(is_entry: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_entry, value))


Rule = tuple[Callable[[Any], bool], str]
ROUND: Rule = _is_round, f"an integer from 0 to {LAST_ROUND:,}"
SHARE: Rule = _is_share, "a number in [0, 1]"
TEXTS: Rule = _list_of(_is_text), "a list of texts"
ROUNDS: Rule = _list_of(_is_round), "a list of integers, at least 0"
# Values that our servers send; other servers may send more.
RULES: dict[str, Rule] = {
    SERVER_ROUND: ROUND,
    ACKNOWLEDGED_ROUND: ROUND,
    CHECKPOINT_ROUND: ROUND,
    RUN: (_is_token, "1 to 64 letters, digits and _"),
    REFUSAL: (_is_text, "a text"),
    PROXIMAL_WEIGHT: (_is_weight, "a finite number, at least 0"),
    EXCHANGED_ROUND: ROUND,
    COINS: ROUND,
    "consensus-step": SHARE,
    "neighbour-weight": SHARE,
    "node": ROUND,
    "neighbours": TEXTS,
    "neighbour-nodes": ROUNDS,
    "relayed-rounds": ROUNDS,
    "relayed-senders": TEXTS,
    "relayed-weights": (_list_of(_is_share), "a list of numbers in [0, 1]"),
    "relayed-data": (_list_of(lambda v: isinstance(v, bytes)), "a list of bytes"),
}
ANYTHING: Rule = (lambda value: True), "anything"
SAME_LENGTH = (
    ("neighbours", "neighbour-nodes"),
    ("relayed-rounds", "relayed-senders", "relayed-weights", "relayed-data"),
)


class ServerConfig(dict[str, Any]):
    """A message's config; a missing key raises a one-line error."""

    def __missing__(self, name: str) -> Any:
        """Raise `SettingsError`."""
        raise SettingsError(f"the server's config has no {name!r}")


def check_config(record: ConfigRecord) -> Config:
    """Return a message's config; raise `SettingsError` if a value is invalid."""
    config = dict(record)
    for name, value in config.items():
        permits, allowed = RULES.get(name, ANYTHING)
        if not permits(value):
            shown = repr(value)[:100]
            raise SettingsError(f"the server's {name} is {shown}; expected {allowed}")
    for names in SAME_LENGTH:
        lengths = [len(cast(list[Any], config[n])) for n in names if n in config]
        if lengths and (len(set(lengths)) > 1 or len(lengths) < len(names)):
            raise SettingsError(
                f"the server's {', '.join(names)} are not of the same length"
            )
    exchanged, now = config.get(EXCHANGED_ROUND, 0), config.get(SERVER_ROUND)
    if now is not None and cast(int, exchanged) > cast(int, now):
        raise SettingsError(
            f"the server's {EXCHANGED_ROUND} is {exchanged!r}; expected at most its "
            f"{SERVER_ROUND}, {now!r}"
        )
    return ServerConfig(config)


def read_array(
    name: str, array: Array, like: Tensor, same_shape: bool
) -> npt.NDArray[Any]:
    """Return an array of a message.

    Raises `SettingsError` if it cannot be read, is not finite, or differs from ``like``
    in its kind of dtype or, with ``same_shape``, in its shape.
    """
    try:
        values = from_array(array)
    # The bytes are untrusted, so any exception is possible.
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise SettingsError(
            f"array {name!r} of the message cannot be read: {reason}"
        ) from None
    wanted = str(like.dtype).removeprefix("torch.")
    if values.dtype.kind != np.dtype(wanted).kind or not values.dtype.isnative:
        raise SettingsError(
            f"array {name!r} of the message is of {values.dtype}, not {wanted}"
        )
    if same_shape and values.shape != tuple(like.shape):
        raise SettingsError(
            f"array {name!r} of the message is of shape {values.shape}; this client's "
            f"model has {tuple(like.shape)}"
        )
    if not np.isfinite(values).all():
        raise SettingsError(f"array {name!r} of the message is not finite")
    return values
