"""Examples and messages of several nodes of one process, processed together."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from flwr.app import Context
from torch import Tensor

from flwr_frl.clients.device.setup import partition_id
from flwr_frl.clients.gossip.base import Node
from flwr_frl.task.base import Task
from flwr_frl.task.resident import train_examples
from flwr_frl.task.training.stacked_batches import PooledExamples


class NodesData:
    """The examples of several nodes.

    Parameters
    ----------
    task : Task
        Their task.
    indices : list of int
        Their partitions.
    device : torch.device
        Device of the batches.
    """

    def __init__(self, task: Task, indices: list[int], device: torch.device) -> None:
        self.task, self.indices, self.device = task, indices, device
        self.examples = [train_examples(task, i).on(device) for i in indices]
        self.sizes = [len(each) for each in self.examples]
        self.lengths = torch.tensor(self.sizes)
        self._groups: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
        # Only plain examples are drawn together.
        self.is_plain = min(self.sizes) > 0 and not any(
            e.augment or e.unlabelled is not None for e in self.examples
        )

    @cached_property
    def pool(self) -> PooledExamples:
        """The examples of all nodes, from which batches are taken together."""
        return PooledExamples(self.examples)

    def groups(self, batch_size: int, most: int) -> list[tuple[int, list[int]]]:
        """Return groups of at most ``most`` nodes with batches of the same size.

        Nodes with few examples have smaller batches than ``batch_size``.
        """
        if (batch_size, most) not in self._groups:
            by_size: dict[tuple[int, int], list[int]] = {}
            for i, count in enumerate(self.sizes):
                by_size.setdefault((min(batch_size, count), i // most), []).append(i)
            pairs = [(size, members) for (size, _), members in by_size.items()]
            self._groups[batch_size, most] = pairs
        return self._groups[batch_size, most]


class DataCache:
    """The examples of the last round's nodes, most of which train again in the next."""

    def __init__(self) -> None:
        self._data: NodesData | None = None

    def get(
        self, task: Task, contexts: Sequence[Context], device: torch.device
    ) -> NodesData:
        """Return the examples of nodes."""
        indices = [partition_id(context.node_config) for context in contexts]
        data = self._data
        if data is None or not (
            data.task is task and data.device == device and data.indices == indices
        ):
            data = self._data = NodesData(task, indices, device)
        return data


class DecodedMessages(dict[bytes, int | None]):
    """Index of each message's decoded vector; None for malformed messages.

    Parameters
    ----------
    client : Node
        Decodes messages, each once.
    known : mapping of bytes to Tensor
        Vectors of messages that have been decoded before.

    Attributes
    ----------
    vectors : list of Tensor
        The decoded vectors.
    errors : dict of bytes to ValueError
        Errors of malformed messages, by message.
    """

    def __init__(self, client: Node, known: Mapping[bytes, Tensor]) -> None:
        super().__init__()
        self.vectors: list[Tensor] = []
        self.errors: dict[bytes, ValueError] = {}
        self._client, self._known = client, known

    def __missing__(self, data: bytes) -> int | None:
        """Decode a message."""
        self[data] = None
        try:
            vector = self._known.get(data)
            self.vectors.append(self._client.decode(data) if vector is None else vector)
            self[data] = len(self.vectors) - 1
        except ValueError as error:
            self.errors[data] = error
        return self[data]
