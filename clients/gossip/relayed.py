"""Messages of a node's neighbours, as relayed by the server."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor

from flwr_frl.clients.base import Client, Config
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.messages import ACKNOWLEDGED_ROUND, EXCHANGED_ROUND
from flwr_frl.common.settings import SettingsError
from flwr_frl.task.compression.compressor import Compressor

# Maximum number of exchanges that a node replays; ``max-missed-rounds`` is 1,000 by
# default.
LONGEST_ABSENCE = 100_000
# Larger entries do not occur in successful training, and one of 1e30 would ruin the
# neighbours' models.
LARGEST_ENTRY = 1e6
# For compressors that draw no random numbers.
NO_RANDOMNESS = np.random.default_rng(0)


class LostStateError(RuntimeError):
    """A node has lost the state on which its neighbours' estimates rely."""


def check_state(state: PersonalState, config: Config) -> None:
    """Raise `LostStateError` if a loaded state precedes the ``acknowledged-round``."""
    acknowledged = int(config.get(ACKNOWLEDGED_ROUND, 0))
    if state.round < acknowledged:
        raise LostStateError(
            f"this node has its state of round {state.round}, not that of round "
            f"{acknowledged}, on which its neighbours rely"
        )


def message_properties(compressor: Compressor, dimension: int) -> Config:
    """Return ``message-bytes``, the length of a message, and the compressor's ω."""
    return {
        "message-bytes": compressor.num_bytes(dimension),
        "omega": compressor.omega(dimension),
        "typical-omega": compressor.typical_omega(dimension),
    }


@dataclass(frozen=True)
class Relayed:
    """A neighbour's message.

    Parameters
    ----------
    sender : str
        The neighbour's name.
    weight : float
        Entry w_ij of the mixing matrix.
    data : bytes
        The encoded message.
    """

    sender: str
    weight: float
    data: bytes


@dataclass(frozen=True)
class Exchange:
    """The valid messages of one round at a node, or at several nodes, a row for each.

    Parameters
    ----------
    weighted_sum : Tensor, shape (d,) or (nodes, d)
        Σ_j w_ij q_j over the senders of valid messages q_j.
    weight : float or Tensor of shape (nodes, 1)
        Σ_j w_ij over the same senders.
    neighbour_weight : float or Tensor of shape (nodes, 1)
        Σ_j w_ij over all neighbours.
    consensus_step : float
        γ.
    """

    weighted_sum: Tensor
    weight: float | Tensor
    neighbour_weight: float | Tensor
    consensus_step: float


def exchanges(config: Config, last_round: int) -> Iterator[tuple[int, list[Relayed]]]:
    """Yield the neighbours' messages by round, in order and without gaps.

    Parameters
    ----------
    config : dict
        The server's config, written by
        `flwr_frl.strategies.gossip.base.Gossip.content`.
    last_round : int
        The round of this node's state, which is the first one yielded.

    Yields
    ------
    round : int
        A round.
    messages : list of Relayed
        Its messages.
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
            f"the server's {EXCHANGED_ROUND} is {newest}; expected at most "
            f"{LONGEST_ABSENCE:,} rounds after this node's state of round {last_round}"
        )
    for round_ in range(last_round, newest + 1):
        yield round_, by_round.get(round_, [])


def sender_label(client: Client, sender: str) -> str:
    """Return a neighbour's name in logs: in simulation that of its data."""
    names = getattr(client.task, "client_names", ())
    simulated = not client._own_data and sender.isdecimal()
    return str(names[int(sender)]) if simulated and int(sender) < len(names) else sender


def randomness(seed: int) -> np.random.Generator:
    """Return a NumPy generator for a seed that depends on run, client and round."""
    return np.random.default_rng([seed, 0x60551])
