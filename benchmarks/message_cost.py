"""CPU time of a small client's messages and of its arithmetic, in one process.

The benchmark measures the CPU time per client (or node) and round. All clients take
part in every round, and there is no evaluation. The arithmetic is training, mixing with
neighbours and computing messages. The rest is the cost of the messages themselves:
creating, checking, answering and aggregating them.
"""

import argparse
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common import markdown, write
from benchmarks.runs import Rounds
from flwr_frl.clients import Client, Node
from flwr_frl.clients.gossip.together import Nodes
from flwr_frl.common.settings import Setting, Settings, resolve
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.training.local_training import TrainCall

OFF: dict[str, Setting] = {"cohort": "off"}
# 100 clients with 50 examples each
SOFTMAX: dict[str, Setting] = {
    "algorithm": "fedavg",
    "task": "benchmarks.message_cost:noise",
    "num-clients": 100,
    "batch-size": 10,
    "representation-epochs": 1,
    "momentum": 0.0,
    "weight-decay": 0.0,
}
CHOCO: dict[str, Setting] = {
    "algorithm": "choco-sgd",
    "compressor": "top-k",
    "compressor-k": 0.1,
}
SQUARM: dict[str, Setting] = {
    "algorithm": "squarm-sgd",
    "compressor": "sign-top-k",
    "compressor-k": 0.1,
    "local-steps": 5,
}
# 100 clients with 10 examples each, and a network of four layers of 8 units
SMALL: dict[str, Setting] = SOFTMAX | {
    "task": "benchmarks.message_cost:small",
    "batch-size": 5,
    "head-epochs": 1,
}
# A network of 40 layers, without training
DEEP: dict[str, Setting] = SOFTMAX | {
    "task": "benchmarks.message_cost:deep",
    "num-clients": 50,
    "representation-epochs": 0,
}
CASES: dict[str, dict[str, Setting]] = {
    "softmax, together": SOFTMAX,
    "softmax, one by one": SOFTMAX | OFF,
    "FedRep, 1 + 1 epochs": SMALL | {"algorithm": "fedrep"},
    "FedPer": SMALL | {"algorithm": "fedper"},
    "Ditto": SMALL | {"algorithm": "ditto"},
    "SCAFFOLD": SMALL | {"algorithm": "scaffold"},
    "40 arrays, together": DEEP,
    "40 arrays, one by one": DEEP | OFF,
    "D-PSGD, ring": {"algorithm": "dpsgd", "graph": "ring"},
    "CHOCO-SGD, ring": CHOCO | {"graph": "ring"},
    "SQuARM-SGD, ring": SQUARM | {"graph": "ring"},
    "D-PSGD, complete graph": {"algorithm": "dpsgd", "graph": "complete"},
    "CHOCO-SGD, complete graph": CHOCO | {"graph": "complete"},
    "SQuARM-SGD, complete graph": SQUARM | {"graph": "complete"},
}
# Aims of the first rows, in µs; the others have none.
OF_EACH = 100, 1100, 100, 80, 150, 150, 60, 250, 60, 110, 190
AIMS = dict(zip(CASES, OF_EACH, strict=False))
# Models of 100 and 500 MB, without training
LARGE = DEEP | {"task": "benchmarks.message_cost:large", "num-clients": 4}
HUGE = LARGE | {"task": "benchmarks.message_cost:huge"}
# Methods that do the arithmetic, of one client and of clients that run together
ALONE: dict[type, list[str]] = {Client: ["train"]}
TOGETHER: dict[type, list[str]] = {
    TrainCall: ["on_rows"],
    Nodes: ["draw"],
    Node: ["exchange", "iterate", "messages"],
}
BLOCKS = 4


class Clock:
    """CPU time spent in some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method to count its time."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began

        return call


def settings_for(case: Settings) -> Settings:
    """Return the settings of a run."""
    common: dict[str, Setting] = {
        "task": "digits",
        "model": "logistic",
        "num-clients": 60,
        "classes-per-client": 10,
        "fraction-train": 1.0,
        "consensus-step": 0.1,
    }
    return resolve(common | dict(case))


def prepare(case: Settings) -> tuple[Rounds, int]:
    """Warm up; return the run and its number of clients."""
    settings = settings_for(case)
    rounds = Rounds(settings)
    rounds.run(3)
    return rounds, int(settings["num-clients"])


def measure(case: Settings, rounds: int) -> tuple[float, float]:
    """Return microseconds per client and round, in total and for the arithmetic.

    The cheapest block counts, because other processes of the machine only add time.
    """
    clock = Clock()
    methods = ALONE if case.get("cohort") == "off" else TOGETHER
    originals = [
        (kind, name, vars(kind)[name])
        for kind, names in methods.items()
        for name in names
    ]
    for kind, name, method in originals:
        timed = clock.timed(getattr(method, "__func__", method))
        is_static = isinstance(method, staticmethod)
        setattr(kind, name, staticmethod(timed) if is_static else timed)
    try:
        warm, clients = prepare(case)
        blocks = []
        for _ in range(BLOCKS):
            clock.seconds, began = 0.0, time.process_time()
            warm.run(rounds)
            total = time.process_time() - began
            blocks.append((total, clock.seconds))
    finally:
        for kind, name, method in originals:
            setattr(kind, name, method)
    total, arithmetic = min(blocks)
    scale = 1e6 / (clients * rounds)
    return total * scale, arithmetic * scale


def plain() -> float:
    """Return the microseconds that a softmax client takes in a plain PyTorch loop."""
    task, clients, began = noise(100), range(100), time.process_time()
    for model, i in ((task.initial_model(), i) for i in clients):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for inputs, targets in task.train_examples(i).batches(10, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return (time.process_time() - began) * 1e6 / len(clients)


def noise(num_clients: int) -> ExampleTask:
    """Return a task of random examples: 50 a client, 64 inputs and 10 classes."""
    rng = np.random.default_rng(0)

    def drawn() -> list[ExampleSet]:
        return [
            ExampleSet(
                torch.from_numpy(rng.random((50, 8, 8, 1), dtype=np.float32)),
                torch.from_numpy(rng.integers(10, size=50)),
            )
            for _ in range(num_clients)
        ]

    def model() -> SplitModel:
        return SplitModel(nn.Flatten(), nn.Linear(64, 10))

    return ExampleTask(model, drawn(), drawn(), classes=tuple("0123456789"))


def layers(count: int, num_clients: int, width: int = 8) -> ExampleTask:
    """Return a task of random examples, 10 a client, and hidden layers of one width."""
    rng = torch.Generator().manual_seed(0)
    examples = [
        ExampleSet(
            torch.randn(10, width, generator=rng),
            torch.randint(2, (10,), generator=rng),
        )
        for _ in range(num_clients)
    ]

    def model() -> SplitModel:
        hidden = [nn.Linear(width, width, bias=False) for _ in range(count)]
        return SplitModel(nn.Sequential(*hidden), nn.Linear(width, 2, bias=False))

    return ExampleTask(model, examples, examples, classes=("0", "1"))


def small(num_clients: int) -> ExampleTask:
    """Return the task of small networks."""
    return layers(3, num_clients)


def deep(num_clients: int) -> ExampleTask:
    """Return the task of deep networks."""
    return layers(39, num_clients)


def large(num_clients: int) -> ExampleTask:
    """Return the task of networks of 100 MB, in layers of 4 MB."""
    return layers(25, num_clients, 1000)


def huge(num_clients: int) -> ExampleTask:
    """Return the task of networks of 500 MB."""
    return layers(125, num_clients, 1000)


def peak() -> float:
    """Return the peak memory of rounds of `huge`, as a multiple of its size.

    The process must be new.
    """

    def used() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before = used()
    prepare(HUGE)
    return (used() - before) / 500e6


def main() -> None:
    """Measure and write ``results/message_cost``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="in each block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = {n: measure(c, arguments.rounds) for n, c in CASES.items()}
    loop = min(plain() for _ in range(BLOCKS + 1))
    rows = [
        (name, AIMS.get(name, ""), f"{whole:.0f}", f"{own:.0f}", f"{whole / loop:.2f}")
        for name, (whole, own) in measured.items()
    ]
    per_mb = measure(LARGE, 2)[0] / 1000 / 100
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        models = pool.submit(peak).result()
    body = (
        "CPU time in µs of a client and round (request and reply): the cheapest of "
        f"{BLOCKS} blocks of {arguments.rounds} rounds. Softmax: 100 clients of 50 "
        "examples, 64 inputs, 10 classes, batches of 10, one epoch. FedRep, FedPer, "
        "Ditto and SCAFFOLD: 100 clients of 10 examples, four layers of 8 units, "
        "batches of 5, one epoch (FedRep: and one of the head). 40 arrays: 50 clients, "
        "no training. The others: 60 nodes, logistic regression on digits, one "
        "iteration a round (SQuARM-SGD: five). Clients run together unless the row "
        "says one by one. *Arithmetic* is the time in the methods that train, mix and "
        "compress, including the draw of the examples. *Ratio* is *all* divided by the "
        f"{loop:.0f} µs of the softmax client in a plain PyTorch loop, measured in the "
        "same run: the speed of a machine varies.\n\n"
        + markdown(("", "aim", "all", "arithmetic", "ratio"), rows)
        + "\nFour clients with a model of 100 MB, in layers of 4 MB and without "
        f"training, take {per_mb:.2f} ms of CPU time a client, round and MB (aim: "
        f"0.45). With 500 MB, the peak memory is that of {models:.1f} models (aim: 6)."
    )
    data = {"microseconds": measured, "milliseconds-per-mb": per_mb, "models": models}
    data["plain"] = loop
    write("message_cost", "Cost of a message", body, data)


if __name__ == "__main__":
    main()
