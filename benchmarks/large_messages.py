"""Time and memory of a large model's messages in one process, before and now.

FedAvg with a model of linear layers and no momentum. For the time the clients train no
epoch: what is left is what a round does with their messages. For the memory they train
one step on one example. Each run has a process of its own.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path.cwd()))

# Width of a layer, which has 4 MB.
WIDTH = 1000
MEGABYTES = (4, 100, 500)
TIMED_CLIENTS, CLIENTS = 4, (2, 4, 8)


def task(num_clients: int) -> Any:
    """Return a task whose model has as many megabytes as the environment says."""
    import torch
    from torch import nn

    from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

    layers = int(os.environ["MODEL_MEGABYTES"]) // 4

    def model() -> SplitModel:
        hidden = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
        return SplitModel(nn.Sequential(*hidden), nn.Linear(WIDTH, 2))

    examples = ExampleSet(torch.ones(1, WIDTH), torch.zeros(1, dtype=torch.long))
    sets = [examples] * num_clients
    return ExampleTask(model, sets, sets, classes=("a", "b"))


def measure(clients: int, rounds: int, epochs: int) -> dict[str, float]:
    """Run some rounds in this process.

    Returns
    -------
    dict
        ``milliseconds`` of CPU time of a client and round, and ``peak`` and ``start``:
        the MB of this process at its peak and before the model was made.
    """
    import torch

    from flwr_frl.clients.client_app import make_app
    from flwr_frl.strategies import build_strategy
    from flwr_frl.strategies.grids.simulation import InlineGrid
    from flwr_frl.strategies.server.rounds import run_rounds
    from flwr_frl.task.settings import resolve

    torch.set_num_threads(1)
    settings = resolve(
        {
            "algorithm": "fedavg",
            "task": "benchmarks.large_messages:task",
            "num-clients": clients,
            "fraction-train": 1.0,
            "representation-epochs": epochs,
            "momentum": 0.0,
            "device": "cpu",
        }
    )
    grid = InlineGrid(make_app(dict(settings)), clients)
    strategy = build_strategy(settings)
    start = resident()
    arrays = strategy.initialize(grid)
    times = []
    for number in range(1, rounds + 1):
        began = time.process_time()
        one = range(number, number + 1)
        arrays = run_rounds(strategy, grid, arrays, one, evaluated=lambda _: False)
        times.append(time.process_time() - began)
    return {
        # The first round builds what the others reuse.
        "milliseconds": 1000 * min(times[1:]) / clients,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "start": start,
    }


def resident() -> float:
    """Return the MB of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmRSS")) / 1024


def in_new_process(checkout: Path, megabytes: int, *numbers: int) -> dict[str, float]:
    """Return what `measure` returns with the code of a checkout."""
    program = "import json, sys; from benchmarks.large_messages import measure; "
    program += "print(json.dumps(measure(*map(int, sys.argv[1:]))))"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "MODEL_MEGABYTES": str(megabytes),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, numbers)],
        cwd=checkout,
        env=environment,
        capture_output=True,
        check=False,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def in_models(measured: dict[str, float], megabytes: int) -> float:
    """Return the peak above the start, in models."""
    return (measured["peak"] - measured["start"]) * 2**20 / (megabytes * 1e6)


def main() -> None:
    """Measure and write ``results/large_messages``."""
    from benchmarks.common import markdown, write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--largest", type=int, default=MEGABYTES[-1])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    checkouts = {"now": ROOT}
    if options.before:
        checkouts = {"before": options.before.resolve(), **checkouts}
    sizes = [m for m in MEGABYTES if m <= options.largest]
    found: dict[str, dict[str, list[float]]] = {}
    for megabytes in sizes:
        cell = found[f"{megabytes} MB, time"] = {name: [] for name in checkouts}
        for _ in range(options.repeats):
            for name, checkout in checkouts.items():
                measured = in_new_process(checkout, megabytes, TIMED_CLIENTS, 4, 0)
                cell[name].append(measured["milliseconds"] / megabytes)
                print(megabytes, name, cell[name][-1], flush=True)
    for clients in CLIENTS:
        cell = found[f"{sizes[-1]} MB, {clients} clients, memory"] = {}
        for name, checkout in checkouts.items():
            measured = in_new_process(checkout, sizes[-1], clients, 2, 1)
            cell[name] = [in_models(measured, sizes[-1])]
            print(clients, name, cell[name], flush=True)
    rows = [
        (
            what.removesuffix(", time").removesuffix(", memory"),
            "ms per client and MB" if what.endswith("time") else "peak in models",
            *(f"{statistics.median(values):.2f}" for values in cell.values()),
        )
        for what, cell in found.items()
    ]
    body = (
        "One process, FedAvg, one thread, no momentum. The time is CPU time of a "
        f"round without its training, with {TIMED_CLIENTS} clients: median of "
        f"{options.repeats} processes, which alternate. The peak is that of the "
        "process less its size before the model is made, in rounds of one step.\n\n"
        + markdown(("model", "", *checkouts), rows)
    )
    write("large_messages", "Messages of large models in one process", body, found)


if __name__ == "__main__":
    main()
