"""Batches of several clients side by side."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.layers import none_counts

Batch = tuple[Tensor, Tensor, Tensor | None]
FilledBatch = tuple[Tensor, Tensor, Tensor, Tensor | None]


def batches(
    examples: Sequence[ExampleSet],
    batch_size: int,
    streams: Sequence[Any] = (),
) -> Iterator[Batch]:
    """Yield batches of several clients side by side, each client's in its own order.

    ``streams`` are the clients' contexts for what is drawn at random; without them
    nothing is shuffled. A batch is inputs (clients, batch, ...), targets, and which
    clients these are, int64 on the CPU, None for all: clients whose last batch is a
    smaller one make batches of their own.
    """
    contexts = streams or [ExitStack() for _ in examples]
    parts = [e.chunks(batch_size, shuffle=bool(streams)) for e in examples]
    # Next to each other while every client has some left.
    left = dict(enumerate(parts))
    while left:
        chunks: dict[int, tuple[Tensor, Tensor]] = {}
        for i, part in list(left.items()):
            with contexts[i]:
                chunk = next(part, None)
            if chunk is None:
                del left[i]
            else:
                chunks[i] = chunk
        if chunks:
            yield from _side_by_side(chunks, batch_size, len(examples))


def counting(parts: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Yield batches of ``count`` clients without those that have no target in them.

    Theirs are all ones that cross-entropy ignores.
    """
    for inputs, targets, members in parts:
        left = ~none_counts(targets).cpu()
        if left.all():
            yield inputs, targets, members
        elif left.any():
            own = torch.arange(count) if members is None else members
            place = left.to(targets.device)
            yield inputs[place], targets[place], own[left]


class FilledBatches:
    """Shuffled batches of all clients side by side, filled up to the same size.

    A batch is inputs (clients, batch_size, ...), targets, weights (clients,
    batch_size): 1 for a client's own examples, 0 for what fills its batch up; and who
    has any, bool (clients,), None for all.

    Parameters
    ----------
    examples : sequence of ExampleSet
        Of each client.
    batch_size : int
        Examples a batch.
    streams : sequence of context managers
        The clients' contexts, for what is drawn at random.
    """

    def __init__(
        self, examples: Sequence[ExampleSet], batch_size: int, streams: Sequence[Any]
    ) -> None:
        self.examples = examples
        self.batch_size = batch_size
        self.streams = streams
        # As they are, and next to each other but once: only their order is drawn.
        self._held: tuple[Tensor, Tensor] | None = None
        if all(e.is_plain and len(e) <= e.chunk(batch_size) for e in examples):
            self._held = self._filled([(e.inputs, e.targets) for e in examples])
            self._lengths = torch.tensor([len(e) for e in examples])

    def epoch(self) -> Iterator[FilledBatch]:
        """Yield all examples once."""
        if self._held is not None:
            order = torch.zeros(self._held[1].shape[:2], dtype=torch.int64)
            for i, (own, stream) in enumerate(
                zip(self.examples, self.streams, strict=True)
            ):
                with stream:
                    order[i, : len(own)] = torch.randperm(len(own))
            order = order.to(self._held[0].device)
            clients = torch.arange(len(order), device=order.device)[:, None]
            inputs, targets = (held[clients, order] for held in self._held)
            yield from self._cut(inputs, targets, self._lengths)
            return
        parts = [e.chunks(self.batch_size, shuffle=True) for e in self.examples]
        while True:
            chunks: list[tuple[Tensor, Tensor] | None] = []
            for part, stream in zip(parts, self.streams, strict=True):
                with stream:
                    chunks.append(next(part, None))
            if not any(chunks):
                return
            lengths = torch.tensor([len(c[1]) if c else 0 for c in chunks])
            yield from self._cut(*self._filled(chunks), lengths)

    def _filled(
        self, parts: Sequence[tuple[Tensor, Tensor] | None]
    ) -> tuple[Tensor, Tensor]:
        """Return clients' inputs and targets, with 0 behind the shorter ones'."""
        x, y = next(part for part in parts if part is not None)
        longest = max(len(part[1]) for part in parts if part is not None)
        size = -(-longest // self.batch_size) * self.batch_size
        inputs = x.new_zeros((len(parts), size, *x.shape[1:]))
        targets = y.new_zeros((len(parts), size, *y.shape[1:]))
        for i, part in enumerate(parts):
            if part is not None:
                own = slice(len(part[1]))
                inputs[i, own], targets[i, own] = part
        return inputs, targets

    def _cut(
        self, inputs: Tensor, targets: Tensor, lengths: Tensor
    ) -> Iterator[FilledBatch]:
        size = inputs.shape[1]
        weights = (torch.arange(size) < lengths[:, None]).float().to(inputs.device)
        for start in range(0, size, self.batch_size):
            place = slice(start, start + self.batch_size)
            # Of lengths that are on the CPU: a GPU would be waited for in each step.
            left = lengths > start
            active = None if bool(left.all()) else left.to(inputs.device)
            yield inputs[:, place], targets[:, place], weights[:, place], active


def _side_by_side(
    chunks: dict[int, tuple[Tensor, Tensor]], batch_size: int, count: int
) -> Iterator[Batch]:
    lengths = {i: len(targets) for i, (_, targets) in chunks.items()}
    if len(chunks) == count and len(set(lengths.values())) == 1:
        inputs = torch.stack([x for x, _ in chunks.values()])
        targets = torch.stack([y for _, y in chunks.values()])
        for start in range(0, inputs.shape[1], batch_size):
            place = slice(start, start + batch_size)
            yield inputs[:, place], targets[:, place], None
        return
    for start in range(0, max(lengths.values()), batch_size):
        sizes: dict[int, list[int]] = {}
        for i, length in lengths.items():
            if length > start:
                sizes.setdefault(min(batch_size, length - start), []).append(i)
        for size, members in sizes.items():
            place = slice(start, start + size)
            yield (
                torch.stack([chunks[i][0][place] for i in members]),
                torch.stack([chunks[i][1][place] for i in members]),
                None if len(members) == count else torch.tensor(members),
            )
