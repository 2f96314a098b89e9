"""Runs that are killed repeatedly must end with the results of undisturbed runs."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from replies import Outcome

from flwr_frl import cli
from flwr_frl.common.checkpoint import FILE

ROUNDS = 6
ALGORITHMS = ("fedrep", "flute", "scaffold", "apfl", "local", "dpsgd")
ALGORITHMS += ("srpfl", "fedbuff")
LIMIT = 120.0


def arguments_of(algorithm: str, output: Path, every: int) -> list[str]:
    config = (
        f"checkpoint-every={every} evaluate-every=2 evaluate-last=1 head-epochs=1 "
        "batch-size=50 model='mlp' compressor-k=0.2 initial-nodes=2 "
        "async-base='flute' concurrency=3 buffer-size=2"
    )
    if (output / algorithm / FILE).exists():
        config += f" resume='{output}'"
    arguments = [algorithm, "--backend", "inline", "--clients", "5", "--rounds"]
    return [*arguments, str(ROUNDS), "--output", str(output), "--run-config", config]


def child(arguments: list[str]) -> None:
    """Run the command in a separate process, without output."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    os._exit(cli.main(arguments))


def start(arguments: list[str]) -> Any:
    # Forked, so that modules need not be imported again
    process = multiprocessing.get_context("fork").Process(
        target=child, args=[arguments]
    )
    process.start()
    return process


def numbers(output: Path, algorithm: str) -> list[dict[str, Any]]:
    lines = (output / algorithm / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{n: v for n, v in row.items() if n != "seconds"} for row in rows]


def run(
    kills: int, seed: int, root: Path, algorithms: Sequence[str] = ALGORITHMS
) -> Outcome:
    """Kill runs ``kills`` times in total, resume them, and compare their results."""
    outcome, rng = Outcome(), np.random.default_rng([seed, 3])
    undisturbed: dict[str, tuple[list[dict[str, Any]], float]] = {}
    while outcome.tried < kills:
        algorithm = algorithms[len(undisturbed) % len(algorithms)]
        if len(undisturbed) == len(algorithms):
            algorithm = str(rng.choice(algorithms))
        else:
            began = time.monotonic()
            alone = root / "alone"
            start(arguments_of(algorithm, alone, 1)).join()
            undisturbed[algorithm] = numbers(alone, algorithm), time.monotonic() - began
        expected, seconds = undisturbed[algorithm]
        output = root / f"{outcome.tried}"
        every = int(rng.integers(1, 4))
        for _ in range(min(kills - outcome.tried, int(rng.integers(1, 5)))):
            process = start(arguments_of(algorithm, output, every))
            process.join(rng.uniform(0, seconds))
            # As by kill -9; the run may have ended by itself.
            process.kill()
            process.join()
            outcome.tried += 1
        process = start(arguments_of(algorithm, output, every))
        process.join(LIMIT)
        what = f"{algorithm}, checkpoints every {every} rounds, to {output.name}"
        if process.exitcode != 0:
            outcome.fell.append(f"{what}: it ended with {process.exitcode}")
            process.kill()
        elif numbers(output, algorithm) != expected:
            outcome.fell.append(f"{what}: other numbers than undisturbed")
    return outcome
