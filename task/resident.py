"""Cache of clients' examples on the device of this process, limited in size."""

from flwr_frl.common.run_cache import run_object
from flwr_frl.task.base import Task
from flwr_frl.task.devices import CPU, current, memory
from flwr_frl.task.examples import ExampleSet

# The cache takes at most 1/PART of the device's memory, as several Ray workers, each
# with a cache, may share the device.
PART = 8


class ResidentExamples:
    """Examples of the latest task, on this process's device as long as they fit."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.sets: dict[tuple[str, int], ExampleSet] = {}
        self.room = 0

    def get(self, task: Task, part: str, client: int) -> ExampleSet:
        """Return a client's examples, on the device if they fit."""
        if self.task is not task:
            self.task, self.sets, self.room = task, {}, memory() // PART
        key = part, client
        if key not in self.sets:
            read = task.train_examples if part == "train" else task.test_examples
            examples = read(client)
            if examples.num_bytes > self.room:
                return examples.on(current())
            self.room -= examples.num_bytes
            self.sets[key] = examples.moved(current())
        return self.sets[key]


def train_examples(task: Task, client: int) -> ExampleSet:
    """Return a client's training examples, on the device if they fit.

    Examples that exceed the limit stay where they are, and their batches are moved one
    by one.
    """
    if current() == CPU:
        return task.train_examples(client)
    return run_object(ResidentExamples).get(task, "train", client)


def test_examples(task: Task, client: int) -> ExampleSet:
    """Return a client's test examples; see `train_examples`."""
    if current() == CPU:
        return task.test_examples(client)
    return run_object(ResidentExamples).get(task, "test", client)
