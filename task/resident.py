"""Cache of clients' examples on the device of this process, limited in size."""

from collections import OrderedDict
from typing import Any

from flwr_frl.common.run_cache import run_object
from flwr_frl.task.base import Task
from flwr_frl.task.devices import CPU, current, memory
from flwr_frl.task.examples import ExampleSet

# The cache takes at most 1/PART of the device's memory, as several Ray workers, each
# with a cache, may share the device.
PART = 8


class ResidentExamples:
    """Examples of the latest task on the latest device, least recently used first."""

    def __init__(self) -> None:
        self.owner: tuple[Any, Any] | None = None
        self.sets: OrderedDict[tuple[str, int], ExampleSet] = OrderedDict()

    def get(self, task: Task, part: str, client: int) -> ExampleSet:
        """Return a client's examples, on the device if they fit."""
        read = task.train_examples if part == "train" else task.test_examples
        device = current()
        if device == CPU:
            return read(client)
        if self.owner is None or self.owner[0] is not task or self.owner[1] != device:
            self.owner = task, device
            self.sets.clear()
        key = part, client
        if key in self.sets:
            self.sets.move_to_end(key)
            return self.sets[key]
        examples, limit = read(client), memory() // PART
        if examples.num_bytes > limit:
            return examples.on(device)
        used = sum(examples.num_bytes for examples in self.sets.values())
        while used + examples.num_bytes > limit:
            _, oldest = self.sets.popitem(last=False)
            used -= oldest.num_bytes
        self.sets[key] = examples.moved(device)
        return self.sets[key]


def train_examples(task: Task, client: int) -> ExampleSet:
    """Return a client's training examples, on the device if they fit.

    Examples that exceed the limit stay where they are, and their batches are moved one
    by one.
    """
    return run_object(ResidentExamples).get(task, "train", client)


def test_examples(task: Task, client: int) -> ExampleSet:
    """Return a client's test examples; see `train_examples`."""
    return run_object(ResidentExamples).get(task, "test", client)
