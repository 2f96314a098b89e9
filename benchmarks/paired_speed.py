"""Compare the CPU time of two checkouts in alternating pairs of the same runs."""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import track

from benchmarks.small_data import write_arrays

# Arguments of `simulation.py`; DATA is a folder of generated 32 x 32 colour images.
COMMANDS = {
    "the default command": [],
    "fedrep, CIFAR-10 CNN": [
        *["fedrep", "--task", "arrays", "--data-dir", "DATA", "--clients", "10"],
        *["--rounds", "3", "--run-config", 'model="cifar10-cnn" head-epochs=2'],
    ],
    "dpsgd": ["dpsgd", "--rounds", "60"],
}
# Largest accepted ratio of the minima. With equal code on a busy machine the minima
# differed by 0.1 %, and the medians of two pairs by 4 %.
ALLOWED = 1.03


def compare_speed(old: Path, new: Path, pairs: int) -> int:
    """Print new CPU time / old CPU time for each command; return 1 if one is slower.

    Slower means that the ratio of the minimum times exceeds `ALLOWED`. The runs
    alternate (old new, new old, …), so that a drift of the machine's speed cancels.
    """
    slower = 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_arrays(data, side=32, counts=(2000, 400))
        for name, command in COMMANDS.items():
            words = [str(data) if word == "DATA" else word for word in command]
            checkouts, times = (old, new), ([0.0] * pairs, [0.0] * pairs)
            for i in track(range(pairs), name, transient=True):
                for which in (0, 1) if i % 2 == 0 else (1, 0):
                    times[which][i] = cpu_time(checkouts[which], words)
            median = statistics.median(b / a for a, b in zip(*times, strict=True))
            least = [min(own) for own in times]
            slower += least[1] / least[0] > ALLOWED
            print(
                f"{name}: new / old = {median:.3f} (median of {pairs} pairs), "
                f"{least[1] / least[0]:.3f} (of the minima, {least[1]:.2f} s and "
                f"{least[0]:.2f} s)",
                flush=True,
            )
    return min(1, slower)


def cpu_time(checkout: Path, arguments: list[str]) -> float:
    """Return the user and system seconds of a run, including its child processes."""
    root = str(checkout.resolve())
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as output:
        where = ["--backend", "inline", "--output", output]
        subprocess.run(
            [sys.executable, "simulation.py", *arguments, *where],
            cwd=root,
            env=environment,
            check=True,
            capture_output=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
