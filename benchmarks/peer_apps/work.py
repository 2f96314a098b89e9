"""The work that all libraries do, and the notes that are taken while they do it.

Nothing of flwr-frl is needed here, as other libraries live in other interpreters.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

CLIENTS = 100
LEARNING_RATE = 0.01
BATCH = 10
# Inputs of the softmax regression.
WIDTH = 64
TICKS = os.sysconf("SC_CLK_TCK")


class CNN(nn.Module):
    """Two convolutions and two linear layers for images of 32 x 32; the head is fc."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(1600, 512)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of a batch of shape (n, 3, 32, 32)."""
        for convolution in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(nn.functional.relu(convolution(x)), 2)
        outputs: Tensor = self.fc(nn.functional.relu(self.fc1(x.flatten(1))))
        return outputs


class Softmax(nn.Module):
    """Softmax regression: one linear layer, the head fc."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of a batch of shape (n, 64)."""
        outputs: Tensor = self.fc(x)
        return outputs


MODELS: dict[str, type[CNN | Softmax]] = {"cnn": CNN, "softmax": Softmax}


def initial_model(name: str) -> CNN | Softmax:
    """Return the initial model of all libraries, as PFLlib's seed draws it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def read_client(folder: str | Path, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's normalised images and classes, in the form PFLlib reads."""
    path = Path(folder) / f"{client}.npz"
    data = np.load(path, allow_pickle=True)["data"].item()
    return torch.from_numpy(data["x"]), torch.from_numpy(data["y"])


@dataclass(kw_only=True)
class Job:
    """What a driver is to do.

    Parameters
    ----------
    folder : str
        Clients' training examples, for `read_client`.
    data_dir : str
        The image folder from which they are.
    notes, model : str
        Where a line a round is added, and where the final model is kept.
    root : int
        The process that started all others.
    head_epochs, epochs : int
        Of a client in a round; without head epochs it is FedAvg.
    sampled : list of list of int
        The clients of each round, for those that can be told.
    model_name : str, default "cnn"
        A key of ``MODELS``.
    every : int, default 1
        Number of rounds per note.
    rounds : int, default 0
        Rounds that are over.
    """

    folder: str
    data_dir: str
    notes: str
    model: str
    root: int
    head_epochs: int
    epochs: int
    sampled: list[list[int]]
    model_name: str = "cnn"
    every: int = 1
    rounds: int = 0

    @classmethod
    def read(cls) -> Self:
        """Return the job that ``PEERS_JOB`` names, with one thread to do it."""
        torch.set_num_threads(1)
        return cls(**json.loads(Path(os.environ["PEERS_JOB"]).read_text()))

    def write(self, path: Path) -> None:
        """Write what `read` reads."""
        path.write_text(json.dumps(asdict(self)))

    def initial_model(self) -> CNN | Softmax:
        """Return the initial model."""
        return initial_model(self.model_name)

    def note(self, steps: int) -> None:
        """Note that a round is over, with all steps up to now."""
        self.rounds += 1
        if self.rounds % self.every:
            return
        line = {
            "time": time.monotonic(),
            "cpu": cpu_seconds(self.root),
            "steps": steps,
        }
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Keep the final shared model: its parameters, in their order."""
        torch.save([p.detach().clone() for p in parameters], self.model)


def cpu_seconds(root: int) -> float:
    """Return the CPU time of all that a process has started, without its own.

    Linux counts that of other processes in hundredths of a second; that of the calling
    process is exact.
    """
    every = dict(_processes())
    own = os.times()
    total = sum(every[root][3:]) if root in every else 0
    new = [root]
    while new:
        new = [pid for pid, (parent, *_) in every.items() if parent in new]
        total += sum(sum(every[pid][1:]) for pid in new)
    return total / TICKS - own.user - own.system + time.process_time()


def _processes() -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield id and parent, own user and system ticks, and those of ended children."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(path.parent.name), tuple(int(fields[i]) for i in (1, 11, 12, 13, 14))


class Counter:
    """How many steps torch's optimizers have made in this process."""

    def __init__(self) -> None:
        self.steps = 0

    def watch(self) -> Self:
        """Begin to count."""
        register_optimizer_step_post_hook(self.add)
        return self

    def add(self, *_: Any) -> None:
        """Count one more."""
        self.steps += 1
