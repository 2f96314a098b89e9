"""CPU time of an inline round with clients trained together or one by one.

Each client has 50 examples of random noise. A round of FedRep trains all clients for
ten head epochs (one for the large models) and one epoch of the representation, in
batches of 10 and without evaluation.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from rich.progress import track

from benchmarks.common import RESULTS, markdown, write
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task import ExampleSet, ExampleTask
from flwr_frl.task.models import build_model

EXAMPLES, CLASSES = 50, 10
# Models and their input shapes
MODELS = {
    "logistic": (1, 8, 8),
    "mlp-2": (1, 8, 8),
    "mlp": (1, 8, 8),
    "digits-cnn": (1, 8, 8),
    "cifar10-cnn": (3, 32, 32),
    "resnet20": (3, 32, 32),
}
SIZES = (1, 3, 8, 32, 60, 100)
# Maximum numbers of clients for the large models; more would take too long.
LARGE = {"cifar10-cnn": 8, "resnet20": 8}


def noise(model: str, num_clients: int) -> ExampleTask:
    """Return a task with random inputs and labels."""
    rng = np.random.default_rng(0)

    def examples() -> ExampleSet:
        x = rng.standard_normal((EXAMPLES, *MODELS[model]), dtype=np.float32)
        return ExampleSet(
            torch.from_numpy(x), torch.from_numpy(rng.integers(CLASSES, size=EXAMPLES))
        )

    sets = [examples() for _ in range(num_clients)]
    make = partial(build_model, model, MODELS[model], CLASSES)
    return ExampleTask(make, sets, sets, classes=tuple("abcdefghij"))


def logistic(num_clients: int) -> ExampleTask:
    """Return `noise` for this model, as a task that settings can name.

    The functions below do the same for the other models.
    """
    return noise("logistic", num_clients)


def mlp_2(num_clients: int) -> ExampleTask:  # noqa: D103
    return noise("mlp-2", num_clients)


def mlp(num_clients: int) -> ExampleTask:  # noqa: D103
    return noise("mlp", num_clients)


def digits_cnn(num_clients: int) -> ExampleTask:  # noqa: D103
    return noise("digits-cnn", num_clients)


def cifar10_cnn(num_clients: int) -> ExampleTask:  # noqa: D103
    return noise("cifar10-cnn", num_clients)


def resnet20(num_clients: int) -> ExampleTask:  # noqa: D103
    return noise("resnet20", num_clients)


def prepare(model: str, clients: int, cohort: str) -> Callable[[], float]:
    """Warm up; return a function that runs a round and returns its CPU seconds."""
    large = model in LARGE
    settings = resolve(
        {
            "algorithm": "fedrep",
            "task": f"{__name__}:{model.replace('-', '_')}",
            "num-clients": clients,
            "fraction-train": 1.0,
            "batch-size": 10,
            "head-epochs": 1 if large else 10,
            "cohort": cohort,
        }
    )
    grid = InlineGrid(make_app(dict(settings)), clients)
    strategy = build_strategy(settings)
    arrays = strategy.initialize(grid)
    done = 0

    def once() -> float:
        nonlocal arrays, done
        done += 1
        began = time.process_time()
        numbers = range(done, done + 1)
        arrays = run_rounds(strategy, grid, arrays, numbers, evaluated=lambda _: False)
        return time.process_time() - began

    # Warm up.
    for _ in range(1 if large else 9):
        once()
    return once


def measure(model: str, clients: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of a round one by one, together and with ``auto``."""
    kinds = {"off": "off", "together": str(max(2, clients)), "auto": "auto"}
    runs = {name: prepare(model, clients, cohort) for name, cohort in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    # The variants alternate and take turns in coming first, because the machine's speed
    # drifts and caches fill.
    for i in range(rounds):
        first = i % len(runs)
        for name in [*runs, *runs][first : first + len(runs)]:
            times[name].append(runs[name]())
    return {name: 1000 * median(values) for name, values in times.items()}


def main() -> None:
    """Measure and write ``results/cohort``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cells = [
        (model, clients)
        for model in arguments.models
        for clients in SIZES
        if clients <= LARGE.get(model, clients)
    ]
    found = {cell: measure(*cell, arguments.rounds) for cell in track(cells, "cells")}
    rows = [
        (
            f"`{model}`",
            clients,
            f"{ms['off']:.1f}",
            f"{ms['together']:.1f}",
            f"{ms['off'] / ms['together']:.2f}",
            f"{ms['off'] / ms['auto']:.2f}",
        )
        for (model, clients), ms in found.items()
    ]
    columns = (
        "model",
        "clients",
        "one by one",
        "together",
        "speed-up",
        "speed-up of `auto`",
    )
    body = (
        "One round of FedRep for clients with 50 examples each: ten head epochs (one "
        "for the two models for CIFAR-10) and one representation epoch. Median CPU "
        f"time in ms over {arguments.rounds} alternating rounds.\n\n"
        + markdown(columns, rows)
        + "\n`auto` combines clients according to "
        "`flwr_frl.task.training.calls.fewest`: models with at most 50,000 "
        "parameters and, for convolutional models, inputs of at most 256 numbers; at "
        "least three clients, or six for models whose layers are not sequential "
        "(`resnet20`). Heads that train on features are combined by their own size.\n"
        "\n![gain](cohort.png)\n"
    )
    data = {f"{model}/{clients}": ms for (model, clients), ms in found.items()}
    write("cohort", "Clients trained together", body, {"ms": data})
    _plot(found)


def _plot(found: dict[tuple[str, int], dict[str, float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for model in dict.fromkeys(model for model, _ in found):
        points = [(n, ms) for (name, n), ms in found.items() if name == model]
        gains = [ms["off"] / ms["together"] for _, ms in points]
        axes.plot([n for n, _ in points], gains, "o-", label=model)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_xticks(SIZES, [str(n) for n in SIZES])
    axes.minorticks_off()
    axes.set_xlabel("clients trained together")
    axes.set_ylabel("times as fast as one by one")
    axes.legend()
    figure.savefig(RESULTS / "cohort.png", dpi=150)


if __name__ == "__main__":
    main()
