"""Clients that exchange messages with their neighbours, which the server relays."""

from collections.abc import Iterator
from logging import WARNING
from typing import Any, NamedTuple, cast

from flwr.common import log
from torch import Tensor

from flwr_frl.clients.base import Client, Config
from flwr_frl.clients.device.conversions import to_numpy
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.flat import SMALLEST_SKETCHED, FlatParameters, sketch
from flwr_frl.common.messages import ACKNOWLEDGED_ROUND, EXCHANGED_ROUND
from flwr_frl.common.settings import require
from flwr_frl.task.base import Task
from flwr_frl.task.compression import CompressionSettings, Compressor, Identity
from flwr_frl.task.compression import from_settings as compressor_of

# Maximum number of exchanges that a node replays; ``max-missed-rounds`` is 1,000 by
# default.
LONGEST_ABSENCE = 100_000
# Larger entries do not occur in successful training, and one of 1e30 would ruin the
# neighbours' models.
LARGEST_ENTRY = 1e6


class LostStateError(RuntimeError):
    """A node has lost the state on which its neighbours' estimates rely."""


class Relayed(NamedTuple):
    """A neighbour's message: its name, the weight w_ij, and the encoded vector."""

    sender: str
    weight: float
    data: bytes


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
    allowed = f"at most {LONGEST_ABSENCE:,} rounds after this node's {last_round}"
    valid = newest - last_round <= LONGEST_ABSENCE
    require(valid, f"the server's {EXCHANGED_ROUND}", newest, allowed)
    for round_ in range(last_round, newest + 1):
        yield round_, by_round.get(round_, [])


class GraphClient(Client):
    """A node of a graph, which exchanges compressed vectors with its neighbours.

    Attributes
    ----------
    flat : FlatParameters
        The parameters of the model.
    compressor : Compressor
        The operator C.
    refused : int
        Number of malformed messages received.
    """

    shared = ()

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        self.flat = FlatParameters.of(self.model)
        self.compressor: Compressor = Identity()
        if isinstance(settings, CompressionSettings):
            self.compressor = compressor_of(settings, self.message_sizes)
        self.refused = 0

    @property
    def message_sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter that a message contains."""
        return self.flat.sizes

    @property
    def dimension(self) -> int:
        """Number of entries d of a message."""
        return sum(self.message_sizes)

    def _structure(self) -> list[object]:
        """Return parameters, classes and C, which must be the same for all nodes."""
        named = self.model.named_parameters()
        shapes: list[object] = [(name, tuple(p.shape)) for name, p in named]
        return [*shapes, self.task.classes, self.dimension, repr(self.compressor)]

    def get_properties(self, config: Config) -> Config:
        """Add ``message-bytes``, the length of a message, and C's ω."""
        compressor, dimension = self.compressor, self.dimension
        return {
            **super().get_properties(config),
            "message-bytes": compressor.num_bytes(dimension),
            "omega": compressor.omega(dimension),
            "typical-omega": compressor.typical_omega(dimension),
        }

    def check_state(self, config: Config) -> None:
        """Raise `LostStateError` if the state precedes the ``acknowledged-round``."""
        acknowledged = int(config.get(ACKNOWLEDGED_ROUND, 0))
        if self._state.round < acknowledged:
            raise LostStateError(
                f"this node has its state of round {self._state.round}, not that of "
                f"round {acknowledged}, on which its neighbours rely"
            )

    def decode(self, data: bytes, compressor: Compressor | None = None) -> Tensor:
        """Return a message's vector, on the CPU; `ValueError` for invalid ones.

        Vectors with an entry above `LARGEST_ENTRY` are invalid. By default, the message
        is decoded by this node's compressor.
        """
        vector = (compressor or self.compressor).decompress(data, self.dimension)
        largest = vector.abs().max().item()
        if not largest <= LARGEST_ENTRY:
            raise ValueError(
                f"it has an entry of {largest:.3g}, above {LARGEST_ENTRY:g}"
            )
        return vector

    def refuse(self, sender: str, error: ValueError) -> None:
        """Count and log an invalid message."""
        log(WARNING, "message of neighbour %s refused: %s", sender, error)
        self.refused += 1

    def attach_sketch(self) -> None:
        """Attach ``sketch`` to the reply: float32 numbers that represent the model.

        From them, the server estimates the distance between the nodes' models. A device
        with private data omits it for small models, which it would reveal.
        """
        vector = to_numpy(self.flat.vector)
        if not self._own_data or len(vector) >= SMALLEST_SKETCHED:
            self._attachments["sketch"] = sketch(vector).tobytes()
