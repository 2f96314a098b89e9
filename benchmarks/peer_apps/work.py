"""The work that all libraries carry out, and the notes on its progress.

The module does not import flwr-frl, because other libraries run in other interpreters.
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
# Number of inputs of the softmax regression
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
    """Return the initial model of all libraries, drawn with PFLlib's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def read_client(folder: str | Path, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's normalised images and classes, stored in PFLlib's format."""
    path = Path(folder) / f"{client}.npz"
    data = np.load(path, allow_pickle=True)["data"].item()
    return torch.from_numpy(data["x"]), torch.from_numpy(data["y"])


@dataclass(kw_only=True)
class Job:
    """The job of a driver.

    Parameters
    ----------
    folder : str
        Folder of the clients' training examples, for `read_client`.
    data_dir : str
        Image folder from which they were written.
    notes, model : str
        Files of the notes, with a line each, and of the final model.
    root : int
        Id of the process that started all others.
    head_epochs, epochs : int
        Epochs of a client in a round; without head epochs, the algorithm is FedAvg.
    sampled : list of list of int
        Clients of each round, for libraries whose sampling can be replaced.
    model_name : str, default "cnn"
        A key of ``MODELS``.
    every : int, default 1
        Number of rounds per note.
    rounds : int, default 0
        Number of finished rounds.
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
        """Return the job in the file ``PEERS_JOB``, and limit torch to one thread."""
        torch.set_num_threads(1)
        return cls(**json.loads(Path(os.environ["PEERS_JOB"]).read_text()))

    def write(self, path: Path) -> None:
        """Write a file for `read`."""
        path.write_text(json.dumps(asdict(self)))

    def initial_model(self) -> CNN | Softmax:
        """Return the initial model."""
        return initial_model(self.model_name)

    def note(self, steps: int) -> None:
        """Record the end of a round, with the number of steps so far."""
        self.rounds += 1
        if self.rounds % self.every:
            return
        line = {"time": time.monotonic(), "cpu": cpu_seconds(self.root), "steps": steps}
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Save the final shared model: its parameters, in order."""
        torch.save([p.detach().clone() for p in parameters], self.model)


def cpu_seconds(root: int) -> float:
    """Return the CPU time of all processes started by a process, without its own.

    Linux reports the time of other processes in hundredths of a second, while that of
    the calling process is exact.
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
    """Yield id, parent, user and system ticks, and those of ended children."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(path.parent.name), tuple(int(fields[i]) for i in (1, 11, 12, 13, 14))


class Counter:
    """Counts the steps of torch's optimizers in this process."""

    def __init__(self) -> None:
        self.steps = 0

    def watch(self) -> Self:
        """Start counting."""
        register_optimizer_step_post_hook(self.add)
        return self

    def add(self, *_: Any) -> None:
        """Count one step."""
        self.steps += 1
