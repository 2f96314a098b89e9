"""What a message of a small client costs beside its arithmetic, in one process.

CPU time of a client or node and round, with a profile; all clients take part in every
round, and there is no evaluation. The arithmetic is training, mixing with neighbours
and making messages; the rest is the messages themselves: made, checked, answered and
aggregated.
"""

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track

from benchmarks.common import markdown, write
from flwr_frl.clients import Client, DPSGDClient, GossipClient, SQuARMSGDClient
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.gossip.nodes import Nodes
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.settings import Setting, Settings, resolve
from flwr_frl.task.training.calls import TrainCall


class Case(NamedTuple):
    """A row of the table.

    Parameters
    ----------
    settings : dict
        Settings that differ from those of all cases.
    aim : int
        Microseconds of a client and round that were aimed at; 0 for none.
    """

    settings: dict[str, Setting]
    aim: int = 0

    @property
    def together(self) -> bool:
        """Whether the clients run together."""
        return self.settings.get("cohort", "auto") == "auto"


OFF: dict[str, Setting] = {"cohort": "off"}
# 100 clients of 50 examples.
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
# Methods of one client, and of several clients that run together.
ALONE: dict[type, list[str]] = {
    Client: ["train"],
    GossipClient: ["iterate", "message"],
    DPSGDClient: ["mix"],
    SQuARMSGDClient: ["mix"],
}
TOGETHER: dict[type, list[str]] = {
    TrainCall: ["together"],
    Nodes: ["exchange", "iterate"],
    GossipClient: ["messages"],
}
BLOCKS = 10


class Clock:
    """CPU time spent in some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method whose time is counted."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began

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
    """Return what makes some rounds, and the number of clients; three are made."""
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
    """Return microseconds of a client and round, and of its arithmetic.

    They are those of the cheapest block: the machine does other things as well, which
    can only add.
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
            whole = time.process_time() - began
            blocks.append((whole, clock.seconds))
    finally:
        for kind, name, method in originals:
            setattr(kind, name, method)
    whole, arithmetic = min(blocks)
    scale = 1e6 / (clients * rounds)
    return whole * scale, arithmetic * scale


def reference() -> float:
    """Return microseconds of CPU time of a loop in Python, for the machine's speed."""
    times = []
    for _ in range(20):
        began = time.process_time()
        sum(i * i for i in range(10_000))
        times.append(time.process_time() - began)
    return 1e6 * min(times)


def profile(case: Case, rounds: int) -> list[tuple[str, str, str]]:
    """Return where the time goes: function, calls a client and round, share."""
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


def main() -> None:
    """Measure and write ``results/message_cost``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help=f"in each of {BLOCKS} blocks"
    )
    parser.add_argument("--before", type=Path, help="the JSON of an earlier commit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loop = reference()
    found = {
        name: measure(case, arguments.rounds)
        for name, case in track(CASES.items(), "cases")
    }
    profiles = {name: profile(CASES[name], arguments.rounds) for name in PROFILED}
    data = {"loop": loop, "microseconds": found, "profiles": profiles}
    before: dict[str, Any] = {}
    if arguments.before:
        before = json.loads(arguments.before.read_text(encoding="utf-8"))
    rows = [
        (
            name,
            f"{before['microseconds'][name][0]:.0f}" if before else "",
            f"{whole:.0f}",
            f"{CASES[name].aim}" if CASES[name].aim else "",
            f"{arithmetic:.0f}",
            f"{whole - arithmetic:.0f}",
        )
        for name, (whole, arithmetic) in found.items()
    ]
    earlier = ""
    if before:
        earlier = (
            f" *Before* is commit {before['about']['commit']}, on the same machine, "
            f"where a loop in Python took {before['loop']:.0f} µs; it takes "
            f"{loop:.0f} µs now."
        )
    body = (
        "CPU time in µs of a client and round (request and reply), minimum over "
        f"{BLOCKS} blocks of {arguments.rounds} rounds. Softmax: 100 clients of 50 "
        "examples, 64 inputs, 10 classes, batches of 10, one epoch. The others: 60 "
        "nodes, logistic regression on digits, and one iteration a round (SQuARM-SGD: "
        "five). Clients run together unless the row says one by one. *Arithmetic* is "
        "the time in the methods that train, mix and compress, and includes the draw "
        f"of the examples; *rest* is everything else.{earlier}\n\n"
        + markdown(("", "before", "now", "aim", "arithmetic", "rest"), rows)
    )
    for name in PROFILED:
        columns = ("function", "calls per client and round", "share of the self time")
        body += f"\nProfile of {name}:\n\n" + markdown(columns, profiles[name])
    write("message_cost", "Cost of a message", body, data)


if __name__ == "__main__":
    main()
