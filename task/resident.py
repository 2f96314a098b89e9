"""Clients' examples on the device of this process: they go there once and stay."""

from collections import OrderedDict
from typing import Any

from flwr_frl.task.base import Task
from flwr_frl.task.devices import CPU, current, memory
from flwr_frl.task.examples import ExampleSet

# At most one part in so many of the device's memory holds examples. Several Ray workers
# may share a device, and each has its own.
PART = 8
# Of the task and the device that were asked for last; what was used last is at the end.
_KEPT: OrderedDict[tuple[str, int], ExampleSet] = OrderedDict()
_OWNER: list[Any] = []


def train_examples(task: Task, client: int) -> ExampleSet:
    """Return a client's training examples, on the device if they fit.

    A client whose examples are more than all that may stay there has them where they
    are, and its batches are put on the device one by one.
    """
    return _resident(task, "train", client)


def test_examples(task: Task, client: int) -> ExampleSet:
    """Return a client's test examples, as `train_examples`."""
    return _resident(task, "test", client)


def _resident(task: Task, part: str, client: int) -> ExampleSet:
    read = task.train_examples if part == "train" else task.test_examples
    device = current()
    if device == CPU:
        return read(client)
    if not _OWNER or _OWNER[0] is not task or _OWNER[1] != device:
        _OWNER[:] = [task, device]
        _KEPT.clear()
    key = part, client
    if key in _KEPT:
        _KEPT.move_to_end(key)
        return _KEPT[key]
    examples, most = read(client), memory() // PART
    if examples.num_bytes > most:
        return examples.on(device)
    used = sum(kept.num_bytes for kept in _KEPT.values())
    while used + examples.num_bytes > most:
        _, oldest = _KEPT.popitem(last=False)
        used -= oldest.num_bytes
    _KEPT[key] = examples.moved(device)
    return _KEPT[key]
