"""Runs whose clients drop out, or change their replies, in a step of a round."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Message

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.checkpoint import FILE, read
from flwr_frl.common.secure.messages import SECURE
from flwr_frl.common.settings import Resolved
from flwr_frl.results.results import METRICS, read_rows
from flwr_frl.running import check
from flwr_frl.strategies import server_app
from flwr_frl.strategies.grids.simulation import InlineGrid

N = 5
FAST = {
    "model": "mlp-2",
    "num-clients": N,
    "fraction-train": 1.0,
    "num-server-rounds": 2,
    "head-epochs": 1,
    "cohort": "off",
    "evaluate-every": 1,
    "max-empty-rounds": 0,
}
SECURED = {"secure-aggregation": True, "secure-bits": 64}
# Returns a client's reply, or None if it is silent, from the round (from 1), the step
# ("train" for plain messages), the node and a function that returns the honest reply.
Change = Callable[[int, str, int, Callable[[], Message]], Message | None]


def step_of(message: Message) -> str:
    record = message.content.get(SECURE)
    return message.metadata.message_type if record is None else str(record["step"])


class Faulty(InlineGrid):
    """A grid in one process whose clients may fail."""

    change: Change = staticmethod(lambda round, step, node, reply: reply())

    def _answers(self, messages, timeout):
        for message in messages:
            about = message.metadata
            replied = self.change(
                int(about.group_id or 0),
                step_of(message),
                about.dst_node_id,
                lambda message=message: next(
                    iter(super(Faulty, self)._answers([message], timeout))
                ),
            )
            if replied is not None:
                yield replied


def lost(*lost: tuple[int, str, int]) -> Change:
    """Let nodes be silent, each in a step of a round."""

    def change(round, step, node, reply):
        return None if (round, step, node) in lost else reply()

    return change


class Found:
    """Rows and shared arrays of a run."""

    def __init__(self, folder: Path) -> None:
        self.rows = read_rows(folder / METRICS)
        self.arrays = read(folder / FILE).arrays
        flat = [array.ravel() for array in self.arrays.values()]
        self.vector = np.concatenate(flat).astype(np.float64)

    def values(self, *names: str) -> list:
        return [row.get(name) for row in self.rows for name in names]


def run(
    output: Path, algorithm="fedrep", change: Change | None = None, **more
) -> Found:
    """Run an algorithm with settings whose names have underscores."""
    given = {**FAST, **{name.replace("_", "-"): value for name, value in more.items()}}
    settings = check([algorithm], {**given, "output": str(output)}, "inline")
    choice = Resolved({**settings, "algorithm": algorithm})
    grid = Faulty(make_app(choice), int(choice["num-clients"]))
    if change:
        grid.change = change
    server_app.serve(grid, choice)
    return Found(output / algorithm)


def assert_same(one: Found, other: Found) -> None:
    """Check that arrays and results are equal to the last bit."""
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert np.array_equal(array, other.arrays[name]), name
    names = "train-loss", "accuracy", "loss", "clients"
    assert one.values(*names) == other.values(*names)
