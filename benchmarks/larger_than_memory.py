"""Peak memory with an image folder of one and of four times the memory limit.

``python -m benchmarks.larger_than_memory`` decodes each folder and trains on it in a
control group (version 1 or 2, as root), whose limit includes the page cache. The peaks
are the kernel's: VmHWM (resident memory, including pages of mapped files, which can be
dropped at any time), the largest RssAnon (memory that cannot be dropped without swap),
and the usage of the group.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common import markdown, write

ROOT = Path(__file__).resolve().parents[1]
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
SIDE = 224
# Number of distinct files; the others are links to them.
FILES = 50


def write_folder(root: Path, num_bytes: int) -> int:
    """Write photos that decode to a number of bytes; return the number of photos."""
    rng = np.random.default_rng(0)
    originals = []
    for i in range(FILES):
        small = Image.fromarray(rng.integers(0, 256, (28, 28, 3), np.uint8))
        path = root / "originals" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small.resize((SIDE, SIDE)).save(path)
        originals.append(path)
    total = num_bytes // (SIDE * SIDE * 3)
    for i in range(total):
        part = "test" if i % 10 == 9 else "train"
        path = root / "images" / part / str(i % 5) / f"{i:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(originals[i % FILES], path)
    return total


class Group:
    """A control group with a memory limit."""

    def __init__(self, limit: int) -> None:
        self.old = (V1 / "memory.limit_in_bytes").exists()
        self.path = (V1 if self.old else V2) / f"frl-{os.getpid()}"
        self.path.mkdir()
        name = "memory.limit_in_bytes" if self.old else "memory.max"
        (self.path / name).write_text(str(limit))
        swap = self.path / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def enter(self) -> None:
        """Move this process, and the processes that it starts, into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        """Return the largest usage so far, including the page cache."""
        name = "memory.max_usage_in_bytes" if self.old else "memory.peak"
        return int((self.path / name).read_text())

    def close(self) -> None:
        """Remove the group."""
        self.path.rmdir()


def status(pid: int) -> dict[str, float]:
    """Return VmHWM and RssAnon of a process in MB, or nothing if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {
        line.split(":")[0]: int(line.split()[1]) / 1024
        for line in lines
        if line.startswith(("VmHWM", "RssAnon"))
    }


def measure(folder: Path, limit: int, home: Path) -> dict[str, float]:
    """Decode a folder and train on it within a memory limit; return peaks in MB."""
    group = Group(limit)
    words = ["fedavg", "--backend", "inline", "--rounds", "1", "--clients", "5"]
    words += ["--task", "image-folder", "--data-dir", str(folder)]
    words += ["--classes-per-client", "1", "--fraction", "1", "--output", str(home)]
    words += ["--run-config", 'model="logistic" batch-size=32 learning-rate=1e-4']
    command = [sys.executable, str(ROOT / "simulation.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(home)}
    peaks: dict[str, float] = {}
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, preexec_fn=group.enter)
    while process.poll() is None:
        for name, value in status(process.pid).items():
            peaks[name] = max(peaks.get(name, 0.0), value)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    peaks["group"] = group.peak() / 2**20
    peaks["seconds"] = time.perf_counter() - start
    group.close()
    return peaks


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=768, help="memory limit in MB")
    options = parser.parse_args()
    limit = options.limit * 2**20
    rows, found = [], {}
    for times in (1, 4):
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory)
            total = write_folder(home, times * limit)
            peaks = measure(home / "images", limit, home / "results")
            (cache,) = (home / "results" / "flwr-frl").glob("*/train-images.npy")
            decoded = sum(p.stat().st_size for p in cache.parent.iterdir()) / 2**20
        found[f"{times}"] = {"images": total, "decoded": decoded, **peaks}
        numbers = [peaks["RssAnon"], peaks["VmHWM"], peaks["group"], peaks["seconds"]]
        rows.append((f"{times} x", total, *(f"{n:,.0f}" for n in [decoded, *numbers])))
    body = (
        f"FedAvg with logistic regression on {SIDE} x {SIDE} photos: one round of "
        "five clients and an evaluation of all, in one process that may use "
        f"{options.limit} MB including the page cache. Pages of memory-mapped files "
        "count as resident (VmHWM) until the kernel reclaims them. Pages of the "
        "libraries, about 400 MB, are not charged to the control group.\n\n"
        + markdown(
            [
                "folder",
                "images",
                "decoded (MB)",
                "peak RssAnon (MB)",
                "peak VmHWM (MB)",
                "peak of the control group (MB)",
                "seconds",
            ],
            rows,
        )
    )
    write("larger_than_memory", "Image folders larger than memory", body, found)


if __name__ == "__main__":
    main()
