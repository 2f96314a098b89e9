"""Measure rounds on a GPU: a plain loop, one by one, together, and with captured steps.

The data is random with CIFAR-10's shapes (for BERT: random tokens), so nothing is
downloaded. The plain loop trains client by client with ``torch.optim.SGD``, and the
arithmetic alone is the time of the round's joint steps as graphs, without any data. To
try the script on a CPU, where steps are replayed by a stand-in for graphs and the
results are only printed, use ``--device cpu --clients 4 --examples 20 --nodes 3
--rounds 1 --only CNN``.
"""

import argparse
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import markdown, write
from benchmarks.runs import Rounds
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.task import ExampleSet, ExampleTask, devices
from flwr_frl.task.models import SplitModel, build_model
from flwr_frl.task.tasks.image import RGB
from flwr_frl.task.training import captured
from flwr_frl.task.training.sgd import SGD, freeze
from flwr_frl.task.training.stacked import (
    Objective,
    StackedBatch,
    StackedOptimizer,
    stacked,
)

SHAPE, CLASSES = (32, 32, 3), 10
TOKENS, WORDS = 64, 1000
# Steps in the time of the arithmetic alone.
REPEATS = 20
# Set from `main`'s arguments, because tasks that settings can name have none.
sizes = {"examples": 500}
loss_of = torch.nn.functional.cross_entropy


def noise(model: str, num_clients: int) -> ExampleTask:
    """Return a task of random images, as bytes, with augmentation."""
    rng, count = np.random.default_rng(0), sizes["examples"]
    mean, std = (torch.tensor(values) * 255 for values in RGB)

    def drawn(n: int, augment: bool) -> ExampleSet:
        pixels = torch.from_numpy(rng.integers(256, size=(n, *SHAPE), dtype=np.uint8))
        targets = torch.from_numpy(rng.integers(CLASSES, size=n))
        return ExampleSet(pixels, targets, mean, std, augment)

    train = [drawn(count, True) for _ in range(num_clients)]
    test = [drawn(max(1, count // 5), False) for _ in range(num_clients)]
    shape = (SHAPE[2], *SHAPE[:2])
    make = partial(build_model, model, shape, CLASSES)
    return ExampleTask(make, train, test, classes=tuple("abcdefghij"))


@lru_cache(maxsize=1)
def cnn(num_clients: int) -> ExampleTask:
    """Return `noise` for FedRep's CNN."""
    return noise("cifar10-cnn", num_clients)


@lru_cache(maxsize=1)
def resnet20(num_clients: int) -> ExampleTask:
    """Return `noise` for ResNet-20."""
    return noise("resnet20", num_clients)


@lru_cache(maxsize=1)
def resnet18(num_clients: int) -> ExampleTask:
    """Return `noise` for ResNet-18."""
    return noise("resnet18", num_clients)


def small_bert() -> SplitModel:
    """Return BERT with 6 layers of width 384, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return SplitModel.wrap(BertForSequenceClassification(config), "classifier")


@lru_cache(maxsize=1)
def bert(num_clients: int) -> ExampleTask:
    """Return a task of random tokens for `small_bert`."""
    draw = torch.Generator().manual_seed(0)

    def drawn(n: int) -> ExampleSet:
        tokens = torch.randint(1, WORDS, (n, TOKENS), generator=draw)
        return ExampleSet(tokens, torch.randint(CLASSES, (n,), generator=draw))

    sets = [drawn(sizes["examples"]) for _ in range(num_clients)]
    return ExampleTask(small_bert, sets, sets, classes=tuple("abcdefghij"))


class Row(NamedTuple):
    """A run that is measured.

    Parameters
    ----------
    task : str
        Name of a function of this module.
    settings : dict
        The algorithm and its settings.
    parts : tuple of (str, int)
        What a client trains in a round, and for how many epochs.
    clients : int, default 10
        Clients of a round; 0 for all nodes of gossip.
    batch : int, default 10
        Examples per batch.
    steps : int, optional
        Number of batches if an epoch is not trained whole.
    slow : bool, default False
        Only together and captured, as one by one takes several seconds a round.
    """

    task: str
    settings: dict[str, Setting]
    parts: tuple[tuple[Any, int], ...]
    clients: int = 10
    batch: int = 10
    steps: int | None = None
    slow: bool = False

    @property
    def batches(self) -> int:
        """Number of batches of an epoch."""
        return self.steps or math.ceil(sizes["examples"] / self.batch)


FEDREP = {"algorithm": "fedrep"}
ONCE, BOTH = (("all", 1),), (("head", 1), ("representation", 1))
GOSSIP = {"graph": "ring", "batch-size": 32}
MANY = {"batch-size": 50}
ROWS = {
    "FedRep 1 + 1, CNN": Row("cnn", FEDREP | {"head-epochs": 1}, BOTH),
    "FedRep 10 + 1, CNN": Row(
        "cnn", FEDREP, (("head", 10), ("representation", 1)), slow=True
    ),
    "FLUTE, CNN": Row("cnn", {"algorithm": "flute"}, ONCE, slow=True),
    "Ditto, CNN": Row("cnn", {"algorithm": "ditto"}, ONCE * 2, slow=True),
    "FedRep 1 + 1, CNN, 50 clients": Row(
        "cnn", FEDREP | {"head-epochs": 1}, BOTH, clients=50, slow=True
    ),
    "FedAvg, ResNet-20": Row(
        "resnet20", MANY | {"algorithm": "fedavg"}, ONCE, batch=50, slow=True
    ),
    **{
        f"{name}, ResNet-20": Row(
            "resnet20", GOSSIP | {"algorithm": algorithm}, ONCE, 0, 32, steps
        )
        for name, algorithm, steps in (
            ("D-PSGD", "dpsgd", 1),
            ("CHOCO-SGD", "choco-sgd", 1),
            ("SQuARM-SGD", "squarm-sgd", 5),
        )
    },
    "FedAvg, ResNet-18": Row(
        "resnet18", MANY | {"algorithm": "fedavg"}, ONCE, batch=50
    ),
    "FedAvg, BERT": Row("bert", MANY | {"algorithm": "fedavg"}, ONCE, 4, batch=50),
    "FedAvg, BERT with LoRA": Row(
        "bert", MANY | {"algorithm": "fedavg", "adapters": "lora"}, ONCE, 4, batch=50
    ),
}


@contextmanager
def graphs(device: torch.device, used: bool) -> Iterator[None]:
    """Capture steps within a block, or do not."""
    former = dict(captured.GRAPHS)
    captured.GRAPHS.clear()
    if used:
        captured.GRAPHS.update({device.type: captured.python_graph} | former)
    try:
        yield
    finally:
        captured.GRAPHS.clear()
        captured.GRAPHS.update(former)


def finished(device: torch.device) -> float:
    """Return the time in seconds at which the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Run(Rounds):
    """A run whose rounds are timed.

    Parameters
    ----------
    device : device
        Where it trains.
    settings : dict
        Settings, including ``cohort``.
    uses_graphs : bool
        Whether steps are captured.
    """

    def __init__(
        self, device: torch.device, settings: dict[str, Setting], uses_graphs: bool
    ) -> None:
        super().__init__(resolve({"device": str(device), **settings}))
        self.device, self.uses_graphs = device, uses_graphs
        self.peak = 0

    def round(self) -> float:
        """Run a round and return the seconds until the device has finished."""
        is_gpu, began = self.device.type == "cuda", finished(self.device)
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        with graphs(self.device, self.uses_graphs):
            self.run()
        for client, reason in self.strategy._run.round.rejections:
            raise RuntimeError(f"client {client}: {reason}")
        if is_gpu:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
        return finished(self.device) - began

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


def plain(row: Row, task: ExampleTask, clients: int, device: torch.device) -> float:
    """Return the seconds of a round of a plain loop, client by client."""
    model = task.initial_model().to(device)
    sets = [task.train_examples(i).moved(device) for i in range(clients)]
    state = {name: tensor.clone() for name, tensor in model.tensors.items()}
    began = finished(device)
    for examples in sets:
        model.load(state)
        for part, epochs in row.parts:
            parameters = list(freeze(model, part).parameters())
            optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.5)
            for _ in range(epochs):
                batches = examples.batches(row.batch, shuffle=True)
                for inputs, targets in islice(batches, row.batches):
                    optimizer.zero_grad()
                    loss_of(model(inputs), targets).backward()
                    optimizer.step()
    return finished(device) - began


def arithmetic(
    row: Row, task: ExampleTask, clients: int, device: torch.device
) -> float:
    """Return the seconds of a round's joint steps as graphs, without data."""
    models = [task.initial_model().to(device) for _ in range(clients)]
    x, y = next(task.train_examples(0).on(device).batches(row.batch))
    inputs, targets = (
        each.expand(clients, *each.shape).contiguous() for each in (x, y)
    )
    batch, seconds = StackedBatch((inputs, targets), slice(None)), 0.0
    for part, epochs in row.parts:
        for model in models:
            freeze(model, part)
        state = stacked([model.tensors for model in models])
        training = StackedOptimizer(Objective(models[0], loss_of), state, [], {}, SGD())
        with graphs(device, True):
            replay = captured.GRAPHS[device.type](partial(training.step, batch))
        began = finished(device)
        for _ in range(REPEATS):
            replay()
        seconds += (finished(device) - began) / REPEATS * epochs * row.batches
    return seconds


def tried(function: Callable[..., float], *arguments: Any) -> float | str:
    """Return a function's result, or a dash if torch cannot compute it."""
    try:
        return function(*arguments)
    # torch raises exceptions of many types for what it cannot batch or capture.
    except Exception as error:
        print(f"{function.__name__}: {error}")
        return "-"


def measured(
    row: Row, device: torch.device, clients: int, nodes: int, rounds: int
) -> dict[str, Any]:
    """Return the seconds of a round, the differences and the peak memory of a row."""
    population = clients if row.clients and row.task == "cnn" else row.clients or nodes
    together = min(row.clients or nodes, population)
    settings = {
        "task": f"{__name__}:{row.task}",
        "num-clients": population,
        "fraction-train": together / population,
        "cohort": str(together),
        **row.settings,
    }
    runs = {
        "together": Run(device, settings, False),
        "captured": Run(device, settings, True),
        "captured again": Run(device, settings, True),
    }
    if not row.slow:
        runs["one by one"] = Run(device, settings | {"cohort": "off"}, False)
        runs["one, captured"] = Run(device, settings | {"cohort": "1"}, True)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            taken = run.round()
            if number:
                times[name].append(taken)
    found: dict[str, Any] = {name: median(values) for name, values in times.items()}
    task = globals()[row.task](population)
    if not row.slow:
        found["plain loop"] = plain(row, task, together, device)
    found["arithmetic"] = tried(arithmetic, row, task, together, device)
    pairs = [("captured", "together"), ("captured again", "captured")]
    singly = ("together", "one by one"), ("one, captured", "one by one")
    pairs += [] if row.slow else singly
    for one, other in pairs:
        found[f"{one} and {other}"] = difference(runs[one], runs[other])
    captured.forget()
    return found | {f"{name}, GiB": run.peak / 2**30 for name, run in runs.items()}


def main(given: list[str] | None = None) -> None:
    """Measure and write ``results/gpu``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--examples", type=int, default=500, help="per client")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args(given)
    sizes["examples"] = options.examples
    device = devices.find(options.device)
    devices.use(str(device))
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    has_bert = find_spec("transformers") is not None and find_spec("peft") is not None
    found = {
        what: measured(row, device, options.clients, options.nodes, options.rounds)
        for what, row in ROWS.items()
        if options.only in what and (has_bert or row.task != "bert")
    }
    kinds = ["plain loop", "one by one", "one, captured"]
    kinds += ["together", "captured", "arithmetic"]
    pairs = ["captured and together", "captured again and captured"]
    pairs += ["together and one by one", "one, captured and one by one"]
    memory = ["together, GiB", "captured, GiB"]
    formats = dict.fromkeys(kinds, ".4f") | dict.fromkeys(pairs, ".1e")
    formats |= dict.fromkeys(memory, ".2f")

    def shown(value: float | str, form: str) -> str:
        return value if isinstance(value, str) else format(value, form)

    rows = [
        (what, *(shown(numbers.get(n, "-"), form) for n, form in formats.items()))
        for what, numbers in found.items()
    ]
    body = (
        f"On {str(device)!r} ({name}), {options.examples} random examples a client. "
        f"CNN: 10 of {options.clients} clients a round, batches of 10; FedAvg: 10 "
        "clients (BERT: 4), batches of 50, one epoch; gossip: "
        f"{options.nodes} nodes on a ring, batches of 32, five for SQuARM-SGD. "
        f"Seconds of a round, median of {options.rounds} in turn after the first; "
        "largest difference in any array of a client or the server after "
        f"{options.rounds + 1} rounds, in units of its "
        "largest entry; and largest memory of tensors in a round.\n\n"
        + markdown(["", *formats], rows)
    )
    if device.type == "cpu":
        print(body)
    else:
        write("gpu", "On a GPU", body, found)


if __name__ == "__main__":
    main()
