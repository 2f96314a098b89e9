"""Measure the speed-up on a GPU, and compare its results with the CPU's.

The data is random with CIFAR-10's shapes, so nothing is downloaded. The benchmark runs
FedRep with 100 clients of 500 images each, ten per round, trained together, one by one
and on the CPU, and gossip of ResNet-20 on a ring of eight nodes. It also reports how
close the device's results are to the CPU's, and whether the same seed gives the same
results twice. To try the script on a CPU, where it only prints the results, use
``--device cpu --clients 10 --examples 20 --nodes 2 --rounds 2``.
"""

import argparse
import platform
import time
from copy import deepcopy
from functools import lru_cache, partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import markdown, write
from benchmarks.runs import Rounds
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.task import ExampleSet, ExampleTask, devices
from flwr_frl.task.models import build_model
from flwr_frl.task.tasks.image import RGB

SHAPE, CLASSES = (32, 32, 3), 10
COHORT, NODES = 10, 8


def noise(model: str, num_clients: int, examples: int) -> ExampleTask:
    """Return a task of random images, as bytes, with augmentation."""
    rng = np.random.default_rng(0)
    mean, std = (torch.tensor(values) * 255 for values in RGB)

    def drawn(n: int, augment: bool) -> ExampleSet:
        pixels = torch.from_numpy(rng.integers(256, size=(n, *SHAPE), dtype=np.uint8))
        targets = torch.from_numpy(rng.integers(CLASSES, size=n))
        return ExampleSet(pixels, targets, mean, std, augment)

    train = [drawn(examples, True) for _ in range(num_clients)]
    test = [drawn(max(1, examples // 5), False) for _ in range(num_clients)]
    shape = (SHAPE[2], *SHAPE[:2])
    make = partial(build_model, model, shape, CLASSES)
    return ExampleTask(make, train, test, classes=tuple("abcdefghij"))


# Set from `main`'s arguments, because tasks that settings can name have none.
sizes = {"examples": 500}


@lru_cache(maxsize=1)
def cnn(num_clients: int) -> ExampleTask:
    """Return `noise` for FedRep's CNN."""
    return noise("cifar10-cnn", num_clients, sizes["examples"])


@lru_cache(maxsize=1)
def resnet20(num_clients: int) -> ExampleTask:
    """Return `noise` for ResNet-20."""
    return noise("resnet20", num_clients, sizes["examples"])


class Run(Rounds):
    """A run whose rounds are timed.

    Parameters
    ----------
    device, cohort : str
        Settings of the run.
    clients : int
        Number of clients.
    **more : Setting
        Further settings.
    """

    def __init__(self, device: str, cohort: str, clients: int, **more: Setting) -> None:
        own = {"device": device, "cohort": cohort, "num-clients": clients}
        super().__init__(resolve({**more, **own}))

    def round(self) -> float:
        """Run a round and return the seconds until the device has finished."""
        began = time.perf_counter()
        self.run()
        for client, reason in self.strategy._run.round.rejections:
            raise RuntimeError(f"client {client}: {reason}")
        return time.perf_counter() - began

    def numbers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all arrays of the server and the clients."""
        found = {f"server/{name}": a.numpy() for name, a in self.arrays.items()}
        for node, context in self.grid.contexts.items():
            for key, record in deepcopy(context.state).items():
                found |= {f"{node}/{key}/{n}": a.numpy() for n, a in record.items()}
        return found


def difference(run: Run, other: Run) -> float:
    """Return the largest difference between the arrays of two runs.

    It is relative to the largest entry of each array.
    """
    mine, theirs = run.numbers(), other.numbers()
    if not mine or mine.keys() != theirs.keys():
        raise RuntimeError("the runs have not kept the same arrays")

    def of(name: str) -> float:
        largest = np.abs(theirs[name]).max()
        return float(np.abs(mine[name] - theirs[name]).max() / (largest or 1))

    return max(map(of, mine))


def seconds(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Return each run's median seconds per round, alternating, without the first."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            taken = run.round()
            if number:
                times[name].append(taken)
    return {name: median(values) for name, values in times.items()}


def compared(task: str, clients: int, size: int, device: str, rounds: int, **own: Any):
    """Return the seconds per round of all variants, and their differences."""
    settings = {"task": f"{__name__}:{task}", **own}
    kinds = {"one by one": "off", "together": str(size)}
    make = {n: partial(Run, device, c, clients, **settings) for n, c in kinds.items()}
    runs = {name: start() for name, start in make.items()}
    runs["again"] = make["one by one"]()
    runs["together again"] = make["together"]()
    taken = seconds(runs, rounds)
    runs["on the CPU"] = Run("cpu", "off", clients, **settings)
    taken["on the CPU"] = [runs["on the CPU"].round() for _ in range(rounds + 1)][-1]
    far = {
        "the same seed twice": difference(runs["one by one"], runs["again"]),
        "the same seed twice, together": difference(
            runs["together"], runs["together again"]
        ),
        "together and one by one": difference(runs["together"], runs["one by one"]),
        "device and CPU": difference(runs["one by one"], runs["on the CPU"]),
    }
    return taken, far


def main() -> None:
    """Measure and write ``results/gpu``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--examples", type=int, default=500, help="per client")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes["examples"] = arguments.examples
    device = devices.find(arguments.device)
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    fraction = min(1.0, COHORT / arguments.clients)
    fedrep = {"algorithm": "fedrep", "head-epochs": 1, "fraction-train": fraction}
    gossip = {"algorithm": "dpsgd", "graph": "ring", "batch-size": 32}
    found = {
        "FedRep, CIFAR-10's CNN": compared(
            "cnn", arguments.clients, COHORT, str(device), arguments.rounds, **fedrep
        ),
        "D-PSGD, ResNet-20": compared(
            "resnet20",
            arguments.nodes,
            arguments.nodes,
            str(device),
            arguments.rounds,
            **gossip,
        ),
    }
    rows = [
        (
            what,
            *(f"{taken[n]:.3f}" for n in ("on the CPU", "one by one", "together")),
            f"{taken['one by one'] / taken['together']:.2f}",
            *(f"{value:.1e}" for value in far.values()),
        )
        for what, (taken, far) in found.items()
    ]
    columns = ["", "CPU", "one by one", "together", "gain"]
    columns += list(next(iter(found.values()))[1])
    body = (
        f"On {str(device)!r} ({name}). FedRep: {arguments.clients} clients with "
        f"{arguments.examples} images each, {COHORT} a round, one epoch of the head "
        f"and one of the representation, batches of 10; gossip: {arguments.nodes} "
        "nodes on a ring, one batch of 32 a round. Seconds of a round, median of "
        f"{arguments.rounds} in turn after the first (the CPU's: of the last "
        "one); then the largest difference in any array of a client or the server "
        f"after {arguments.rounds + 1} rounds, in units of its largest entry.\n\n"
        + markdown(columns, rows)
    )
    data = {what: {**taken, **far} for what, (taken, far) in found.items()}
    if device.type == "cpu":
        print(body)
    else:
        write("gpu", "On a GPU", body, data)


if __name__ == "__main__":
    main()
