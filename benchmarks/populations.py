"""CPU time and memory of a simulation by its number of clients.

100 clients are sampled in each round, so that only the start, the evaluation of all
clients and the end of a run need to grow with their number. Every client has ten
examples of eight numbers, and the model is so small that its training takes hardly any
time. Each run has its own process.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import markdown, write
from flwr_frl.task.base import ExampleTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel

ROOT = Path(__file__).resolve().parents[1]
# The largest population of each algorithm
LARGEST = {"fedavg": 1_000_000, "fedrep": 100_000}
POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
SAMPLED, ROUNDS = 100, 5
FEATURES, EXAMPLES, CLASSES = 8, 10, 2


class Examples(Sequence[ExampleSet]):
    """The clients' examples; each client has one of seven sets."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.sets = [self._set(i) for i in range(7)]

    @staticmethod
    def _set(first: int) -> ExampleSet:
        inputs = torch.arange(first, first + EXAMPLES * FEATURES) % 7 - 3.0
        targets = torch.arange(EXAMPLES) % CLASSES
        return ExampleSet(inputs.reshape(EXAMPLES, FEATURES), targets)

    def __len__(self) -> int:
        """Return the number of clients."""
        return self.num_clients

    def __getitem__(self, client: Any) -> ExampleSet:
        """Return the examples of one client."""
        return self.sets[client % len(self.sets)]


def model() -> SplitModel:
    """Return a model with one hidden layer of eight units."""
    representation = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU())
    return SplitModel(representation, nn.Linear(8, CLASSES))


def tiny(num_clients: int) -> ExampleTask:
    """Return a task whose clients all have the same number of examples."""
    return ExampleTask(model, Examples(num_clients), Examples(num_clients))


def measure(algorithm: str, num_clients: int) -> dict[str, float]:
    """Run one algorithm; return CPU seconds and peak memory of this process.

    Returns
    -------
    dict
        ``start`` (until the first round), ``round`` and ``server`` (medians of a round,
        in total and without the clients), ``evaluation`` (of all clients), ``end``
        (after the evaluation) and ``megabytes`` (peak of this process).
    """
    from flwr_frl import simulate
    from flwr_frl.strategies.server import loop as runner

    original, evaluate = runner.run_rounds, runner.evaluate
    clients_seconds, marks, evaluation = [0.0], list[tuple[float, float]](), [0.0, 0.0]

    def timed(strategy: Any, grid: Any, arrays: Any, rounds: Any, **more: Any) -> Any:
        send, after_round = grid.send_and_receive, more.pop("after_round")

        def timed_send(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            replies = send(*arguments, **options)
            clients_seconds[0] += time.process_time() - began
            return replies if isinstance(replies, list) else timed_iterator(replies)

        def timed_iterator(replies: Iterator[Any]) -> Iterator[Any]:
            while True:
                began = time.process_time()
                reply = next(replies, None)
                clients_seconds[0] += time.process_time() - began
                if reply is None:
                    return
                yield reply

        def then(*arguments: Any) -> None:
            after_round(*arguments)
            marks.append((time.process_time(), clients_seconds[0]))

        grid.send_and_receive = timed_send
        marks.append((time.process_time(), 0.0))
        return original(strategy, grid, arrays, rounds, after_round=then, **more)

    def timed_evaluate(*arguments: Any) -> Any:
        began = time.process_time()
        metrics = evaluate(*arguments)
        evaluation[:] = time.process_time() - began, time.process_time()
        return metrics

    runner.run_rounds, runner.evaluate = timed, timed_evaluate
    with tempfile.TemporaryDirectory() as output:
        began = time.process_time()
        simulate(
            algorithm,
            "inline",
            task="benchmarks.populations:tiny",
            clients=num_clients,
            fraction=SAMPLED / num_clients,
            rounds=ROUNDS,
            device="cpu",
            evaluate_every=0,
            evaluate_last=1,
            output=output,
        )
    # The first round, which builds objects that later rounds reuse, and the last one,
    # which ends the run, are excluded.
    pairs = [(marks[i], marks[i + 1]) for i in range(1, ROUNDS - 1)]
    return {
        "start": marks[0][0] - began,
        "round": statistics.median(b[0] - a[0] for a, b in pairs),
        "server": statistics.median(b[0] - a[0] - (b[1] - a[1]) for a, b in pairs),
        "evaluation": evaluation[0],
        "end": time.process_time() - evaluation[1],
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_new_process(algorithm: str, num_clients: int) -> dict[str, float]:
    """Return the result of `measure` in a new process."""
    command = [sys.executable, "-m", "benchmarks.populations", "--one"]
    command += [algorithm, str(num_clients)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def cells(name: str, clients: int, row: dict[str, float]) -> tuple[str, ...]:
    """Return the row of a table."""
    return (
        name,
        f"{clients:,}",
        f"{row['start']:.2f}",
        f"{1000 * row['start'] / clients:.2f}",
        f"{1000 * row['round']:.0f}",
        f"{1000 * row['server']:.1f}",
        f"{1000 * row['evaluation'] / clients:.2f}",
        f"{row['end']:.1f}",
        f"{row['megabytes']:.0f}",
    )


def main() -> None:
    """Measure and write ``results/populations``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=POPULATIONS[-1])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        algorithm, clients = options.one
        print(json.dumps(measure(algorithm, int(clients))))
        return
    measured = {
        algorithm: {
            str(n): in_new_process(algorithm, n)
            for n in POPULATIONS
            if n <= min(largest, options.largest)
        }
        for algorithm, largest in LARGEST.items()
    }
    rows = [
        cells(f"`{algorithm}`", int(n), row)
        for algorithm, by_size in measured.items()
        for n, row in by_size.items()
    ]
    columns = ["algorithm", "clients", "start (s)", "start (ms a client)"]
    columns += ["round (ms)", "server's part (ms)", "evaluation (ms a client)"]
    columns += ["end (s)", "peak memory (MB)"]
    body = (
        f"{SAMPLED} of the clients train in each of {ROUNDS} rounds, in one process, "
        f"each on {EXAMPLES} examples of {FEATURES} numbers. All times are CPU time. "
        "The start is all that happens before the first round, and the server's part "
        "of a round is all of it that is not done by its clients. All clients are "
        "evaluated once, after the last round; the end is what follows: their states, "
        "the checkpoint and the report.\n\n" + markdown(columns, rows)
    )
    heading = "Time and memory against the number of clients"
    write("populations", heading, body, {"populations": measured})


if __name__ == "__main__":
    main()
