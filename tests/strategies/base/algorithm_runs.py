"""Small runs of any algorithm, with absent clients, invalid replies and kills.

The ServerApp's `run` executes each of them in this process. Its `Outcome` holds all
final values of the server and the clients, so that two runs can be compared.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from safetensors.numpy import load_file

from flwr_frl.clients.algorithms import complete, owners
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.state import PREFIX
from flwr_frl.common.checkpoint import FILE, read
from flwr_frl.common.settings import declared, defaults, resolve
from flwr_frl.common.text import short_name
from flwr_frl.strategies.algorithms import simulation_defaults
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server_app import serve

N, ROUNDS = 5, 3
# Three of five clients train in a round. With their 9, 9, 4, 13 and 9 examples the last
# batch is smaller, and often a single example, for which a batch norm raises an error.
TINY = {
    "task": "cohort_tasks:normed",
    "num-clients": N,
    "num-server-rounds": ROUNDS,
    "fraction-train": 0.6,
    "batch-size": 8,
    "learning-rate": 0.05,
    "representation-epochs": 1,
    "head-epochs": 1,
    "finetune-epochs": 1,
    "evaluate-every": 0,
    "evaluate-last": 1,
    "checkpoint-every": 1,
    "cohort": "off",
    "initial-nodes": 2,
    "rounds-per-stage": "1",
    "num-sources": 3,
    "source-epochs": 1,
    "consensus-step": 0.2,
    "compressor-k": 3.0,
    "lora-rank": 2,
}
# Algorithms that need another task, or whose defaults do not suit so few steps.
UNUSUAL: dict[str, dict[str, Any]] = {
    "multi-task": {"saddle-step": 0.05},
    # These two require a model without buffers.
    "feddyn": {"task": "cohort_tasks:dense"},
    "pfedhn": {"task": "cohort_tasks:dense"},
    # Three of five clients train at the same time.
    "fedbuff": {"concurrency": 3, "buffer-size": 2},
    "fedasync": {"concurrency": 3},
    "guest.algorithm:Guest": {"task": "guest.task:sensors"},
    "choco-sgd": {"compressor": "top-k"},
    "squarm-sgd": {"local-steps": 3, "momentum": 0.9},
    # Its steps are stable for learning rates below 2/λ.
    "pfedme": {"pfedme-lambda": 2.0},
}
# Metrics that differ between equal runs
TIMES = ("seconds", "seconds-simulated")
Arrays = dict[str, np.ndarray]
Change = Callable[[Message], None]


def settings_of(algorithm: str, **more: Any) -> dict[str, Any]:
    """Return all settings of a simulated run; ``_`` in a name stands for ``-``."""
    chosen = {"algorithm": algorithm}
    chosen |= {name.replace("_", "-"): value for name, value in more.items()}
    chosen = {**simulation_defaults({**defaults(), **chosen}), **chosen}
    return complete(resolve(chosen, owners))


def tiny_settings(algorithm: str, **more: Any) -> dict[str, Any]:
    """Return the settings of an algorithm's smallest run."""
    base = str(more.get("srpfl_base", algorithm))
    chosen = {**TINY, **UNUSUAL.get(base.removesuffix("-ft"), {})}
    chosen |= {name.replace("_", "-"): value for name, value in more.items()}
    named = {**defaults(), "algorithm": algorithm, **chosen}
    names = {n for maker in owners(named) for n in declared(maker)} | {*defaults()}
    return settings_of(algorithm, **{n: v for n, v in chosen.items() if n in names})


class KilledError(BaseException):
    """Ends a run like a killed process: nothing is written afterwards."""


class DisturbedGrid(InlineGrid):
    """A grid that records messages, and simulates absences, bad replies and kills.

    Parameters
    ----------
    settings : dict
        Settings of the run.
    away : collection of (int, int)
        Pairs of a client, from 0, and a round in which it is not connected.
    changes : mapping of (int, int) to callable or None
        Function that changes a client's reply to the training of a round, by client and
        round. With None the message itself is lost, so that the client does not train.
    killed_in : int, default 0
        Round in which the process is killed, after the clients have replied; 0 for
        none.
    copy : Path, optional
        Folder to which the run's files are copied at that time.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        away: Collection[tuple[int, int]] = (),
        changes: Mapping[tuple[int, int], Change | None] | None = None,
        killed_in: int = 0,
        copy: Path | None = None,
    ) -> None:
        super().__init__(make_app(settings), int(settings["num-clients"]))
        self.folder = Path(settings["output"])
        self.away, self.changes = away, changes or {}
        self.killed_in, self.copy = killed_in, copy
        self.round = 0
        self.trained: dict[int, list[int]] = {}
        self.exchanged: list[tuple[Message, Message]] = []
        # Arrays that each client has in memory, by round and client.
        self.kept: dict[int, list[Arrays]] = {0: [{} for _ in self.contexts]}

    def get_node_ids(self) -> list[int]:
        return [n for n in self.contexts if (n - 1, self.round + 1) not in self.away]

    def pull_messages(self, message_ids, *, timeout=None):
        sent = [self._pending[i] for i in message_ids if i in self._pending]
        if not sent or sent[0].metadata.message_type != MessageType.TRAIN:
            return super().pull_messages([m.metadata.message_id for m in sent])
        self.round = int(sent[0].metadata.group_id)
        sent = [m for m in sent if self._change_of(m) is not None]
        replies = list(super().pull_messages([m.metadata.message_id for m in sent]))
        self.exchanged += zip(sent, replies, strict=True)
        clients = [m.metadata.dst_node_id - 1 for m in sent]
        self.trained.setdefault(self.round, []).extend(clients)
        self.kept[self.round] = [newest(c.state) for c in self.contexts.values()]
        if self.round == self.killed_in:
            assert self.copy is not None
            shutil.copytree(self.folder, self.copy)
            raise KilledError
        for message, reply in zip(sent, replies, strict=True):
            if change := self._change_of(message):
                change(reply)
        return replies

    def _change_of(self, message: Message) -> Change | None:
        client = message.metadata.dst_node_id - 1
        return self.changes.get((client, self.round), lambda reply: None)


def newest(state: RecordDict) -> Arrays:
    """Return the latest arrays that a client has in memory, by name."""
    rounds = [int(n.removeprefix(PREFIX)) for n in state if n.startswith(PREFIX)]
    if not rounds:
        return {}
    record = state[f"{PREFIX}{max(rounds)}"]
    return {name: array.numpy() for name, array in record.items()}


@dataclass
class Outcome:
    """Final values of a run, without those that differ between equal runs.

    Parameters
    ----------
    rows : list of dict
        The rounds' metrics, without times.
    arrays : dict of str to ndarray
        All arrays in the checkpoint, and those of each client: its file of the last
        round in which its reply counted.
    values : dict
        Everything else in the checkpoint, and each client's metrics.
    """

    grid: Any
    rows: list[dict[str, Any]]
    arrays: Arrays = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def run_tiny(
    algorithm: str,
    folder: Path | None = None,
    grid: Callable[[dict[str, Any]], Any] = DisturbedGrid,
    **more: Any,
) -> Outcome:
    """Run an algorithm with its smallest settings, changed by ``more``."""
    with tempfile.TemporaryDirectory() as temporary:
        output = folder or Path(temporary)
        settings = tiny_settings(algorithm, output=str(output), **more)
        used = grid(settings)
        serve(used, settings)
        return read_outcome(output / short_name(algorithm), used)


def read_outcome(folder: Path, grid: Any) -> Outcome:
    """Return the outcome of the run in a folder."""
    outcome = Outcome(grid, rows_of(folder))
    outcome.arrays = {f"server/{n}": a for n, a in load_file(folder / FILE).items()}
    values = read(folder / FILE).about["values"]
    outcome.values = {name: value for name, value in values.items() if name != "run"}
    for client, counted in values["acknowledged"].items():
        for path in (folder / "clients" / client).glob(f"*-{counted:08d}.safetensors"):
            outcome.arrays |= {f"{client}/{n}": a for n, a in load_file(path).items()}
    outcome.values["clients"] = json.loads((folder / "clients.json").read_text())
    return outcome


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's rounds, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{n: v for n, v in row.items() if n not in TIMES} for row in rows]


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Assert that two runs have bit-identical outcomes."""
    assert_near(found, expected, 0)
    assert found.values == expected.values


def assert_near(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Assert that the arrays of two runs differ by at most a tolerance.

    Unless it is 0, the bytes of compressed messages may differ.
    """
    assert found.arrays.keys() == expected.arrays.keys()
    for name, value in expected.arrays.items():
        actual = found.arrays[name]
        assert (actual.dtype, actual.shape) == (value.dtype, value.shape), name
        if tolerance and value.dtype == np.uint8:
            continue
        np.testing.assert_allclose(actual, value, tolerance, tolerance, err_msg=name)
