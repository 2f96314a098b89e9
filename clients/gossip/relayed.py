"""What the server hands on from a node's neighbours, one exchange after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from flwr_frl.clients.base import Config
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.task.messages import ACKNOWLEDGED_ROUND, EXCHANGED_ROUND
from flwr_frl.task.settings import SettingsError

# Rounds that a node makes up for: far more than any server lets it miss.
LONGEST_ABSENCE = 100_000


class LostStateError(RuntimeError):
    """A node's estimates are no longer those that its neighbours have of it."""


def check_state(state: PersonalState, config: Config) -> None:
    """Raise `LostStateError` unless a loaded state is of the ``acknowledged-round``."""
    acknowledged = int(config.get(ACKNOWLEDGED_ROUND, 0))
    if state.round < acknowledged:
        raise LostStateError(
            f"this node has its state of round {state.round} and not that of round "
            f"{acknowledged}, on which its neighbours rely"
        )


@dataclass(frozen=True)
class Relayed:
    """A neighbour's message as the server hands it on.

    Parameters
    ----------
    sender : str
        The neighbour's name.
    weight : float
        Entry w_ij of the mixing matrix.
    data : bytes
        What the neighbour sent.
    """

    sender: str
    weight: float
    data: bytes


def exchanges(config: Config, last_round: int) -> Iterator[tuple[int, list[Relayed]]]:
    """Yield what the neighbours sent, one exchange after the other.

    Each is a round and its messages; the first round is ``last_round``, that of this
    node's state. `flwr_frl.strategies.gossip.base.Gossip.content` writes the config.
    """
    lists: dict[str, list[Any]] = cast(dict[str, list[Any]], config)
    by_round: dict[int, list[Relayed]] = {}
    names = ("relayed-rounds", "relayed-senders", "relayed-weights", "relayed-data")
    columns = [lists.get(name, []) for name in names]
    for round_, *message in zip(*columns, strict=True):
        by_round.setdefault(round_, []).append(Relayed(*message))
    newest = int(config[EXCHANGED_ROUND])
    if newest - last_round > LONGEST_ABSENCE:
        raise SettingsError(
            f"the server's {EXCHANGED_ROUND} is {newest}, and this node's state is of "
            f"round {last_round}; that must be at most {LONGEST_ABSENCE:,} rounds"
        )
    for round_ in range(last_round, newest + 1):
        yield round_, by_round.get(round_, [])
