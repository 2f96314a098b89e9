"""CPU time of a small client's messages and of its arithmetic, in one process.

The benchmark measures the CPU time per client (or node) and round, and writes a
profile. All clients take part in every round, and there is no evaluation. The
arithmetic is training, mixing with neighbours and computing messages. The rest is the
cost of the messages themselves: creating, checking, answering and aggregating them.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track

from benchmarks.common import markdown, write
from benchmarks.large_models import LAYERS, TIMED_CLIENTS
from benchmarks.large_models import measure as large_model
from benchmarks.memory import ROOT
from flwr_frl.clients import Client, DPSGDClient, Node, SQuARMSGDClient
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.gossip.nodes import Nodes
from flwr_frl.common.settings import Setting, Settings, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.replies import RunningMean
from flwr_frl.strategies.server.round import Round
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.calls import TrainCall


class Case(NamedTuple):
    """A row of the table.

    Parameters
    ----------
    settings : dict
        Settings that differ from those of all cases.
    aim : int
        Target in microseconds per client and round; 0 for no target.
    """

    settings: dict[str, Setting]
    aim: int = 0

    @property
    def together(self) -> bool:
        """Whether the clients run together."""
        return self.settings.get("cohort", "auto") == "auto"


OFF: dict[str, Setting] = {"cohort": "off"}
# 100 clients with 50 examples each
SOFTMAX: dict[str, Setting] = {
    "algorithm": "fedavg",
    "task": "benchmarks.cohort:logistic",
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
CASES = {
    "softmax, together": Case(SOFTMAX, 200),
    "softmax, one by one": Case(SOFTMAX | OFF, 1150),
    "D-PSGD, ring": Case({"algorithm": "dpsgd", "graph": "ring"}, 90),
    "D-PSGD, complete graph": Case({"algorithm": "dpsgd", "graph": "complete"}, 120),
    "CHOCO-SGD, ring": Case(CHOCO | {"graph": "ring"}, 250),
    "CHOCO-SGD, complete graph": Case(CHOCO | {"graph": "complete"}, 400),
    "SQuARM-SGD, ring": Case(SQUARM | {"graph": "ring"}, 400),
    "SQuARM-SGD, complete graph": Case(SQUARM | {"graph": "complete"}, 500),
    "D-PSGD, ring, one by one": Case({"algorithm": "dpsgd", "graph": "ring"} | OFF),
    "SQuARM-SGD, ring, one by one": Case(SQUARM | {"graph": "ring"} | OFF),
}
PROFILED = ("softmax, together", "softmax, one by one", "D-PSGD, ring")
# Methods that do the arithmetic, of one client and of clients that run together
ALONE: dict[type, list[str]] = {
    Client: ["train"],
    Node: ["iterate", "message"],
    DPSGDClient: ["mix"],
    SQuARMSGDClient: ["mix"],
}
TOGETHER: dict[type, list[str]] = {
    TrainCall: ["together"],
    Nodes: ["exchange", "iterate"],
    Node: ["messages"],
}
BLOCKS = 4
# Size of the large model in MB, its number of rounds, and the methods that are timed
LARGE, LARGE_ROUNDS = 100, 8
LARGE_PARTS: dict[str, tuple[Any, str]] = {
    "loaded into the model": (SplitModel, "load"),
    "copied for the reply": (Client, "send"),
    "reply checked": (Round, "reply_of"),
    "added to the sum": (RunningMean, "add"),
    "divided": (RunningMean, "result"),
}


class Clock:
    """CPU time spent in some methods, in total and in each call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: list[float] = []

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method to count its time."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self.calls.append(time.thread_time() - began)
                self.seconds += self.calls[-1]

        return call


def settings_for(case: Case) -> Settings:
    """Return the settings of a run."""
    common: dict[str, Setting] = {
        "task": "digits",
        "model": "logistic",
        "num-clients": 60,
        "classes-per-client": 10,
        "fraction-train": 1.0,
        "consensus-step": 0.1,
    }
    return resolve(common | case.settings)


def prepare(case: Case) -> tuple[Callable[[int], None], int]:
    """Warm up; return a function that runs rounds, and the number of clients."""
    settings = settings_for(case)
    clients = int(settings["num-clients"])
    grid = InlineGrid(make_app(dict(settings)), clients)
    strategy = build_strategy(settings)
    arrays = strategy.initialize(grid)
    done = 0

    def rounds(count: int) -> None:
        nonlocal arrays, done
        numbers = range(done + 1, done + count + 1)
        arrays = run_rounds(strategy, grid, arrays, numbers, evaluated=lambda _: False)
        done += count

    rounds(3)
    return rounds, clients


def measure(case: Case, rounds: int) -> tuple[float, float]:
    """Return microseconds per client and round, in total and for the arithmetic.

    The cheapest block counts, because other processes of the machine only add time.
    """
    clock = Clock()
    methods = TOGETHER if case.together else ALONE
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
        run, clients = prepare(case)
        blocks = []
        for _ in range(BLOCKS):
            clock.seconds, began = 0.0, time.process_time()
            run(rounds)
            total = time.process_time() - began
            blocks.append((total, clock.seconds))
    finally:
        for kind, name, method in originals:
            setattr(kind, name, method)
    total, arithmetic = min(blocks)
    scale = 1e6 / (clients * rounds)
    return total * scale, arithmetic * scale


def reference() -> float:
    """Return microseconds of CPU time of a Python loop, for the machine's speed."""
    times = []
    for _ in range(20):
        began = time.process_time()
        sum(i * i for i in range(10_000))
        times.append(time.process_time() - began)
    return 1e6 * min(times)


def profile(case: Case, rounds: int) -> list[tuple[str, str, str]]:
    """Return a profile: function, calls per client and round, share of the time."""
    run, clients = prepare(case)
    profiler = cProfile.Profile()
    profiler.runcall(run, rounds)
    statistics: Any = pstats.Stats(profiler)
    total = statistics.total_tt
    own = sorted(statistics.stats.items(), key=lambda item: -item[1][2])[:15]
    return [
        (
            f"`{Path(place).name}: {name}`" if line else f"`{name}`",
            f"{calls / (clients * rounds):.2f}",
            f"{seconds / total:.1%}",
        )
        for (place, line, name), (_, calls, seconds, *_) in own
    ]


def large() -> dict[str, float]:
    """Return ms of CPU time per client and MB of a large model, by part."""
    os.environ[LAYERS] = str(LARGE // 4)
    clocks = {name: Clock() for name in LARGE_PARTS}
    for name, (kind, method) in LARGE_PARTS.items():
        setattr(kind, method, clocks[name].timed(getattr(kind, method)))
    total = large_model(TIMED_CLIENTS, LARGE_ROUNDS, 0)["milliseconds"] / LARGE
    parts = {}
    for name, clock in clocks.items():
        # Every round has the same number of calls. The first round is excluded, because
        # it creates objects that later rounds reuse.
        calls = len(clock.calls) // LARGE_ROUNDS
        rounds = [
            sum(clock.calls[i : i + calls])
            for i in range(calls, len(clock.calls), calls)
        ]
        parts[name] = 1000 * min(rounds) / (LARGE * TIMED_CLIENTS)
    source = torch.ones(LARGE * 250_000)
    target, times = torch.ones(LARGE * 250_000), []
    for _ in range(5):
        began = time.thread_time()
        target.copy_(source)
        times.append(time.thread_time() - began)
    return {"one copy of memory": 1000 * min(times) / LARGE, **parts, "all": total}


def measure_all(rounds: int) -> dict[str, Any]:
    """Return the times of all cases in this process."""
    cases = {name: measure(case, rounds) for name, case in CASES.items()}
    return {"loop": reference(), "microseconds": cases, "large": large()}


def in_tree(tree: Path, rounds: int) -> dict[str, Any]:
    """Return the result of `measure_all` with the code of a checkout."""
    result = subprocess.run(
        [sys.executable, __file__, "--rounds", str(rounds), "--json"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(result.stderr)
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def cheapest(passes: list[dict[str, Any]], case: str) -> tuple[float, float]:
    """Return a case's total and arithmetic time in its cheapest pass."""
    total, arithmetic = min(each["microseconds"][case] for each in passes)
    return total, arithmetic


def main() -> None:
    """Measure and write ``results/message_cost``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help=f"in each of {BLOCKS} blocks"
    )
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--json", action="store_true", help="print one pass only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.json:
        print(json.dumps(measure_all(arguments.rounds)))
        return
    trees = {"now": ROOT}
    if arguments.before:
        trees = {"before": arguments.before.resolve(), **trees}
    passes: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    # The trees alternate, because the machine's speed changes.
    for _ in track(range(arguments.passes), "passes"):
        for name, tree in trees.items():
            passes[name].append(in_tree(tree, arguments.rounds))
    profiles = {name: profile(CASES[name], arguments.rounds) for name in PROFILED}
    rows = []
    for name, case in CASES.items():
        whole, arithmetic = cheapest(passes["now"], name)
        before = (
            f"{cheapest(passes['before'], name)[0]:.0f}" if arguments.before else ""
        )
        aim = f"{case.aim}" if case.aim else ""
        numbers = whole, arithmetic, whole - arithmetic
        rows.append((name, before, aim, *(f"{number:.0f}" for number in numbers)))
    best = min(passes["now"], key=lambda each: each["large"]["all"])["large"]
    body = (
        "CPU time in µs of a client and round (request and reply): the cheapest of "
        f"{BLOCKS} blocks of {arguments.rounds} rounds in each of {arguments.passes} "
        "passes. In a pass, the code before and the code now run one after the other "
        "in processes of their own. Softmax: 100 clients of 50 examples, 64 inputs, "
        "10 classes, batches of 10, one epoch. The others: 60 nodes, logistic "
        "regression on digits, one iteration a round (SQuARM-SGD: five). Clients run "
        "together unless the row says one by one. *Arithmetic* is the time in the "
        "methods that train, mix and compress, including the draw of the examples; "
        "*rest* is everything else.\n\n"
        + markdown(("", "before", "aim", "now", "arithmetic", "rest"), rows)
        + f"\nA model of {LARGE} MB, {TIMED_CLIENTS} clients, without training; CPU "
        "time in ms of a client and MB (aim 0.5), of each part in its cheapest of "
        f"{LARGE_ROUNDS} rounds.\n\n"
        + markdown(tuple(best), [[f"{ms:.3f}" for ms in best.values()]])
    )
    for name in PROFILED:
        columns = ("function", "calls per client and round", "share of the self time")
        body += f"\nProfile of {name}:\n\n" + markdown(columns, profiles[name])
    data = {"passes": passes, "profiles": profiles}
    write("message_cost", "Cost of a message", body, data)


if __name__ == "__main__":
    main()
