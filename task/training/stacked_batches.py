"""Batches of several clients, stacked for one step of all their models."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flwr_frl.task.devices import RngContext
from flwr_frl.task.examples import Batch, ExampleSet

# Pooled inputs are copied if they have at most this many bytes.
POOLED_BYTES = 2**26


class StackedBatch(NamedTuple):
    """One batch of each of several clients.

    Parameters
    ----------
    inputs, targets : Tensor, shape (members, batch, ...)
        The examples.
    members : Tensor or None
        Indices of the clients, int64 on the CPU; None for all.
    weights : Tensor, shape (members, batch), or None
        1 for examples and 0 for padding; None without padding.
    """

    inputs: Tensor
    targets: Tensor
    members: Tensor | None
    weights: Tensor | None = None

    @property
    def counts(self) -> Tensor | int:
        """Number of each client's examples."""
        size: int = self.targets.shape[1]
        return size if self.weights is None else self.weights.sum(1)


class SeparateBatches:
    """Stacked batches without padding, for models whose examples affect each other.

    Clients whose last batches differ in size make the last step separately.

    Parameters
    ----------
    examples : sequence of ExampleSet
        The examples of each client.
    batch_size : int
        Examples per batch.
    streams : sequence of RngContext
        The clients' random numbers.
    """

    def __init__(
        self,
        examples: Sequence[ExampleSet],
        batch_size: int,
        streams: Sequence[RngContext],
    ) -> None:
        self.examples = examples
        self.batch_size = batch_size
        self.streams = streams

    def epoch(self) -> Iterator[StackedBatch]:
        """Yield all examples once, each client's in its own order."""
        for chunks in self._chunks():
            yield from self._side_by_side(chunks)

    def _chunks(self) -> Iterator[dict[int, Batch]]:
        """Yield the next chunk of each client that has one left, by its index."""
        parts = [e.chunks(self.batch_size, shuffle=True) for e in self.examples]
        while True:
            chunks: dict[int, Batch] = {}
            for i, (part, stream) in enumerate(zip(parts, self.streams, strict=True)):
                with stream:
                    chunk = next(part, None)
                if chunk is not None:
                    chunks[i] = chunk
            if not chunks:
                return
            yield chunks

    def _side_by_side(self, chunks: dict[int, Batch]) -> Iterator[StackedBatch]:
        batch_size, count = self.batch_size, len(self.examples)
        lengths = {i: len(targets) for i, (_, targets) in chunks.items()}
        if len(chunks) == count and len(set(lengths.values())) == 1:
            inputs = torch.stack([x for x, _ in chunks.values()])
            targets = torch.stack([y for _, y in chunks.values()])
            for start in range(0, inputs.shape[1], batch_size):
                place = slice(start, start + batch_size)
                yield StackedBatch(inputs[:, place], targets[:, place], None)
            return
        for start in range(0, max(lengths.values()), batch_size):
            sizes: dict[int, list[int]] = {}
            for i, length in lengths.items():
                if length > start:
                    sizes.setdefault(min(batch_size, length - start), []).append(i)
            for size, members in sizes.items():
                place = slice(start, start + size)
                yield StackedBatch(
                    torch.stack([chunks[i][0][place] for i in members]),
                    torch.stack([chunks[i][1][place] for i in members]),
                    None if len(members) == count else torch.tensor(members),
                )


class PaddedBatches(SeparateBatches):
    """Stacked batches in which a smaller last batch is padded with zeros.

    Where clients differ in size, training is up to 2.9 times as fast as with
    `SeparateBatches`, which yields one batch for each size of the last batches.
    """

    def __init__(
        self,
        examples: Sequence[ExampleSet],
        batch_size: int,
        streams: Sequence[RngContext],
    ) -> None:
        super().__init__(examples, batch_size, streams)
        # If nothing is transformed, all examples are stacked once and only their order
        # is drawn in each epoch.
        self._stacked: Batch | None = None
        if all(e.is_plain and len(e) <= e.chunk(batch_size) for e in examples):
            sets = {i: (e.inputs, e.targets) for i, e in enumerate(examples)}
            self._stacked = self._padded(sets)

    def epoch(self) -> Iterator[StackedBatch]:
        """Yield all examples once, each client's in its own order."""
        if self._stacked is None:
            for chunks in self._chunks():
                counts = [0] * len(self.examples)
                for i, (_, targets) in chunks.items():
                    counts[i] = len(targets)
                yield from self._cut(*self._padded(chunks), counts)
            return
        counts = [len(examples) for examples in self.examples]
        order = torch.zeros(self._stacked[1].shape[:2], dtype=torch.int64)
        for i, stream in enumerate(self.streams):
            with stream:
                order[i, : counts[i]] = torch.randperm(counts[i])
        order = order.to(self._stacked[0].device)
        clients = torch.arange(len(order), device=order.device)[:, None]
        inputs, targets = (tensor[clients, order] for tensor in self._stacked)
        yield from self._cut(inputs, targets, counts)

    def _padded(self, chunks: dict[int, Batch]) -> Batch:
        """Return all clients' inputs and targets, padded to the same length."""
        x, y = next(iter(chunks.values()))
        longest = max(len(targets) for _, targets in chunks.values())
        size = -(-longest // self.batch_size) * self.batch_size
        inputs = x.new_zeros((len(self.examples), size, *x.shape[1:]))
        targets = y.new_zeros((len(self.examples), size, *y.shape[1:]))
        for i, chunk in chunks.items():
            place = slice(len(chunk[1]))
            inputs[i, place], targets[i, place] = chunk
        return inputs, targets

    def _cut(
        self, inputs: Tensor, targets: Tensor, counts: list[int]
    ) -> Iterator[StackedBatch]:
        # Lengths stay on the CPU, so that no step waits for a GPU.
        lengths, size = torch.tensor(counts), inputs.shape[1]
        weights = (torch.arange(size) < lengths[:, None]).float().to(inputs.device)
        for start in range(0, size, self.batch_size):
            place = slice(start, start + self.batch_size)
            tensors = inputs[:, place], targets[:, place], weights[:, place]
            if (lengths > start).all():
                yield StackedBatch(*tensors[:2], None, tensors[2])
                continue
            members = (lengths > start).nonzero().flatten()
            there = members.to(inputs.device)
            x, y, w = (tensor[there] for tensor in tensors)
            yield StackedBatch(x, y, members, w)


class PooledExamples:
    """Examples of several clients, from which rows of all are taken at once.

    Parameters
    ----------
    sets : sequence of ExampleSet
        The clients' examples, of one shape and normalised alike, without augmentation.
    """

    def __init__(self, sets: Sequence[ExampleSet]) -> None:
        self.sets = sets
        self.sizes = [len(each) for each in sets]
        counts = torch.tensor(self.sizes)
        self._starts = counts.cumsum(0) - counts
        self._targets = torch.cat([each.targets for each in sets])
        self._inputs: Tensor | None = None
        if sum(each.num_bytes for each in sets) <= POOLED_BYTES:
            rows = [slice(None) if each.rows is None else each.rows for each in sets]
            pairs = zip(sets, rows, strict=True)
            self._inputs = torch.cat([each.inputs[r] for each, r in pairs])

    def batches(
        self, clients: Sequence[int], rows: Tensor, batch_size: int
    ) -> list[Batch]:
        """Return batches of some clients, each stacked: (clients, batch, ...).

        Parameters
        ----------
        clients : sequence of int
            Their places among the sets.
        rows : Tensor, shape (clients, batches * batch_size)
            The examples of each client's batches, int64.
        batch_size : int
            Examples of a client in a batch.
        """
        first = self.sets[0]
        places = (rows + self._starts[list(clients), None]).flatten()
        if self._inputs is None:
            chosen = [
                each.inputs[r if each.rows is None else each.rows[r]]
                for each, r in zip((self.sets[i] for i in clients), rows, strict=True)
            ]
            inputs = torch.cat(chosen)
        else:
            inputs = self._inputs[places]
        x = first.normalised(inputs.to(first.place))
        y = self._targets[places].to(first.place)
        shape = len(clients), -1, batch_size
        stacks = [torch.unflatten(t, 0, shape).unbind(1) for t in (x, y)]
        return list(zip(*stacks, strict=True))
