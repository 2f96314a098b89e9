"""What a message costs beside its arithmetic, in one process: CPU time and profile.

Logistic regression on digits (64 inputs), all clients in every round, no evaluation.
The arithmetic is what the client's own steps take: training, mixing with neighbours and
making its message. The rest is the message: drawn up, checked, answered and aggregated.
"""

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.common import markdown, write
from flwr_frl.clients import Client, DPSGDClient, GossipClient, SQuARMSGDClient
from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.settings import Settings, defaults, resolve

ALGORITHMS = {
    "fedavg": {"representation-epochs": 1},
    "dpsgd": {"graph": "ring"},
    "squarm-sgd": {"compressor": "sign-top-k", "compressor-k": 0.1, "local-steps": 5},
}
# Of a client's methods.
ARITHMETIC = {
    Client: ["train"],
    GossipClient: ["iterate"],
    DPSGDClient: ["mix", "message"],
    SQuARMSGDClient: ["mix", "message"],
}
BLOCKS = 20


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


def settings_for(algorithm: str, clients: int) -> Settings:
    """Return the settings of a run."""
    # One by one; earlier commits know nothing else.
    together = {"cohort": "off"} if "cohort" in defaults() else {}
    return resolve(
        {
            **together,
            "algorithm": algorithm,
            "task": "digits",
            "model": "logistic",
            "num-clients": clients,
            "classes-per-client": 10,
            "fraction-train": 1.0,
            "consensus-step": 0.1,
            **ALGORITHMS[algorithm],
        }
    )


def prepare(algorithm: str, clients: int) -> Callable[[int], None]:
    """Return what makes some rounds; the first ones are made."""
    settings = settings_for(algorithm, clients)
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
    return rounds


def measure(algorithm: str, clients: int, rounds: int) -> tuple[float, float]:
    """Return milliseconds of a message, and of its arithmetic: the cheapest block's.

    The machine does other things as well, which can only add.
    """
    clock = Clock()
    originals = [
        (kind, name, vars(kind)[name])
        for kind, names in ARITHMETIC.items()
        for name in names
    ]
    for kind, name, method in originals:
        setattr(kind, name, clock.timed(method))
    try:
        run = prepare(algorithm, clients)
        blocks = []
        for _ in track(range(BLOCKS), algorithm):
            clock.seconds, began = 0.0, time.process_time()
            run(rounds)
            whole = time.process_time() - began
            blocks.append((whole, clock.seconds))
    finally:
        for kind, name, method in originals:
            setattr(kind, name, method)
    whole, arithmetic = min(blocks, key=lambda block: block[0] - block[1])
    scale = 1000 / (clients * rounds)
    return whole * scale, arithmetic * scale


def profile(algorithm: str, clients: int, rounds: int) -> list[tuple[str, str, str]]:
    """Return where the time goes: function, calls a message, share of the whole."""
    run = prepare(algorithm, clients)
    profiler = cProfile.Profile()
    profiler.runcall(run, rounds)
    statistics: Any = pstats.Stats(profiler)
    total = statistics.total_tt
    own = sorted(statistics.stats.items(), key=lambda item: -item[1][2])[:12]
    return [
        (
            f"`{Path(place).name}: {name}`" if line else f"`{name}`",
            f"{calls / (clients * rounds):.1f}",
            f"{seconds / total:.1%}",
        )
        for (place, line, name), (_, calls, seconds, *_) in own
    ]


def main() -> None:
    """Measure and write ``results/message_cost``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument(
        "--rounds", type=int, default=30, help=f"in each of {BLOCKS} blocks"
    )
    parser.add_argument("--before", type=Path, help="the JSON of an earlier commit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = arguments.clients, arguments.rounds
    found = {name: measure(name, *size) for name in ALGORITHMS}
    profiles = {name: profile(name, *size) for name in ALGORITHMS}
    data = {"blocks": BLOCKS, "ms": found, "profiles": profiles}
    before: dict[str, Any] = {}
    if arguments.before:
        before = json.loads(arguments.before.read_text(encoding="utf-8"))
    rows = []
    for name, (whole, arithmetic) in found.items():
        old = before["ms"][name] if before else (float("nan"),) * 2
        rows.append(
            (
                f"`{name}`",
                f"{old[0] - old[1]:.2f}" if before else "",
                f"{whole - arithmetic:.2f}",
                f"{arithmetic:.2f}",
            )
        )
    body = (
        f"{arguments.clients} clients, minimum over {BLOCKS} blocks of "
        f"{arguments.rounds} rounds. CPU time in ms per message (request and reply), "
        "split into the training itself (*arithmetic*) and all other work "
        "(*overhead*).\n\n"
        + markdown(("", "overhead, before", "overhead, now", "arithmetic"), rows)
    )
    for name in ALGORITHMS:
        columns = ("function", "calls per message", "share of the self time")
        if before:
            body += f"\nProfile of `{name}` before ({before['about']['commit']}):\n\n"
            body += markdown(columns, before["profiles"][name])
        body += f"\nProfile of `{name}` now:\n\n" + markdown(columns, profiles[name])
    write("message_cost", "Cost of a message", body, data)


if __name__ == "__main__":
    main()
