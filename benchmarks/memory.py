"""Peak memory of every process of a deployment, and of a simulation.

One SuperNode with 500 images of 32 x 32 trains FedRep with the CIFAR-10 CNN for two
rounds. Ten clients train the same model on Ray, and 100 and 10,000 clients with digits
of 8 x 8 train in one process. The peak of a process is the kernel's value (VmHWM).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common import markdown, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from federation import Federation  # noqa: E402

PROCESSES = {
    "SuperLink": "flower-superlink",
    "SuperLink's SuperExec": "flower-superexec",
    "SuperNode": "flower-supernode",
    "ServerApp": "flwr-serverapp",
    "ClientApp": "flwr-clientapp",
}
ON_RAY = {"Ray: the command": "simulation.py", "Ray: a worker": "ray::_Worker"}
# Numbers of clients in one process, and how many of them train in a round
CROWDS, SAMPLED = (100, 10_000), 100
# Modules whose import is timed: parts of the apps, the ClientApp, the ServerApp
IMPORTS = (
    "torch",
    "flwr.clientapp",
    "flwr_frl.clients.client_app",
    "flwr_frl.strategies.server_app",
)


def write_images(folder: Path, train: int = 500, test: int = 100) -> None:
    """Write random images of ten classes.

    Parameters
    ----------
    folder : Path
        Folder in which ``train`` and ``test`` are created.
    train, test : int
        Numbers of images.
    """
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        for i in range(count):
            path = folder / part / str(i % 10) / f"{i:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(path)


def watch(
    home: Path,
    programs: dict[str, str],
    peaks: dict[str, float],
    stop: threading.Event,
) -> None:
    """Record the largest VmHWM (MB) of each kind of process until stopped.

    Parameters
    ----------
    home : Path
        Only processes with this path in their environment count.
    programs : dict of str to str
        Kinds of processes, and a text that identifies each in a command line.
    peaks : dict of str to float
        Updated with the peaks.
    stop : threading.Event
        Ends the recording when set.
    """
    while not stop.is_set():
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(home).encode() not in (process / "environ").read_bytes():
                    continue
                command = (process / "cmdline").read_bytes().decode()
                status = (process / "status").read_text()
            except OSError:
                continue
            lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
            for name, program in programs.items():
                if lines and program in command.split("\0--")[0]:
                    peak = int(lines[0].split()[1]) / 1024
                    peaks[name] = max(peaks.get(name, 0.0), peak)
        time.sleep(0.1)


def import_seconds(module: str) -> tuple[float, bool]:
    """Return how long a new process takes to import a module.

    Parameters
    ----------
    module : str
        Name of the module.

    Returns
    -------
    seconds : float
        Median of three measurements, without the start of Python.
    torchvision : bool
        Whether the import loads torchvision.
    """
    code = (
        f"import time; t = time.perf_counter(); import {module}, sys; "
        "print(time.perf_counter() - t, 'torchvision' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    outputs = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    found = sorted(output.stdout.split() for output in outputs)
    return float(found[1][0]), found[1][1] == "True"


def peak_of(*command: str, **environment: str) -> float:
    """Run a Python process to its end and return its peak memory (MB)."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with status {status}")
    return usage.ru_maxrss / 1024


def write_digits(folder: Path, train: int = 100_000, test: int = 20_000) -> None:
    """Write 8 x 8 digits, drawn from scikit-learn's with replacement.

    All classes have the same size, so that each of many clients gets some digits.
    """
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.default_rng(0)
    folder.mkdir()
    for part, count in (("train", train), ("test", test)):
        chosen = np.concatenate(
            [
                rng.choice(np.flatnonzero(digits.target == c), count // 10)
                for c in range(10)
            ]
        )
        np.savez(
            folder / f"{part}.npz",
            images=(digits.images[chosen] * 15.9).astype(np.uint8),
            labels=digits.target[chosen],
        )


def simulated(home: Path) -> dict[str, float]:
    """Return the peak memory (MB) of the processes of simulations."""
    peaks = {"a process that imports torch alone": peak_of("-c", "import torch")}
    write_digits(home / "digits")
    common = ["simulation.py", "--rounds", "3", "--output", str(home / "simulated")]
    for algorithm in ("fedavg", "fedrep"):
        for clients in CROWDS:
            peaks[f"`{algorithm}`, {clients:,} clients in one process"] = peak_of(
                *common, algorithm, "--backend", "inline", "--task", "arrays",
                "--data-dir", str(home / "digits"), "--clients", str(clients),
                "--fraction", str(SAMPLED / clients), "--run-config",
                'model="mlp-2" augment=false evaluate-every=0 evaluate-last=1',
            )  # fmt: skip
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(home, ON_RAY, peaks, stop))
    watcher.start()
    try:
        peak_of(
            *common, "fedrep", "--task", "image-folder", "--data-dir",
            str(home / "images"), "--clients", "10", "--fraction", "1",
            "--run-config", 'partition="iid" head-epochs=1', FRL_MEMORY=str(home),
        )  # fmt: skip
    finally:
        stop.set()
        watcher.join()
    return peaks


def main() -> None:
    """Measure and write ``results/memory``."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_images(home / "images")
        federation, stop = Federation(home / "federation"), threading.Event()
        watcher = threading.Thread(target=watch, args=(home, PROCESSES, peaks, stop))
        watcher.start()
        try:
            federation.start_superlink()
            federation.start_supernode(
                "node",
                f'client-name="a" data-dir="{home / "images"}"',
                # Flower's default: a new process for each message
                warm=False,
            )
            log = federation.run(
                ROOT,
                'task="image-folder" fraction-train=1.0 num-server-rounds=2 '
                f'head-epochs=1 evaluate-last=1 output="{home / "results"}"',
                600,
            )
        finally:
            stop.set()
            watcher.join()
            federation.close()
        if not (home / "results" / "fedrep" / "clients.json").is_file():
            raise RuntimeError(log)
        shared = simulated(home)
    times = {module: import_seconds(module) for module in IMPORTS}
    body = (
        "One SuperNode with 500 images of 32 x 32, FedRep with the CIFAR-10 CNN, two "
        "rounds, without TLS, on loopback. Peak resident memory (VmHWM):\n\n"
        + markdown(
            ("process", "MB"), [(n, f"{peaks[n]:.0f}") for n in PROCESSES if n in peaks]
        )
        + "\nMemory of a simulation. FedAvg stores no client state, so the "
        "difference for 9,900 more clients is the data that server and simulation "
        "keep about each client. FedRep also stores the head of each client. "
        f"{SAMPLED} clients train in each of 3 rounds (`mlp-2`, 100,000 digits of 8 "
        "x 8). The run on Ray has ten clients, with the 500 images and the model of "
        "the SuperNode above.\n\n"
        + markdown(("process", "MB"), [(n, f"{mb:.0f}") for n, mb in shared.items()])
        + "\nImport time in a new process, median of 3:\n\n"
        + markdown(
            ("module", "seconds", "loads torchvision"),
            [(m, f"{s:.2f}", "yes" if v else "no") for m, (s, v) in times.items()],
        )
    )
    heading = "Memory and imports of a deployment, and of a simulation"
    write("memory", heading, body, {"mb": peaks, "simulated": shared, **times})


if __name__ == "__main__":
    main()
