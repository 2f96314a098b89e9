"""Peak memory of every process of a deployment: SuperLink, SuperNode and their apps.

One SuperNode with 500 images of 32 x 32 trains FedRep with the CIFAR-10 CNN for two
rounds. The peak of a process is the kernel's own count (VmHWM).
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import RESULTS, markdown, write
from PIL import Image

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
# What a ClientApp imports, and what it imports of it at the least.
IMPORTS = ("torch", "flwr.clientapp", "clients.client_app", "strategies.server_app")


def write_images(folder: Path, train: int = 500, test: int = 100) -> None:
    """Write random images of ten classes.

    Parameters
    ----------
    folder : Path
        Gets ``train`` and ``test``.
    train, test : int
        How many images.
    """
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        for i in range(count):
            path = folder / part / str(i % 10) / f"{i:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(path)


def watch(home: Path, peaks: dict[str, float], stop: threading.Event) -> None:
    """Note the largest VmHWM (MB) of each kind of process until told to stop.

    Parameters
    ----------
    home : Path
        Only processes with this path in their environment count.
    peaks : dict of str to float
        Filled.
    stop : threading.Event
        Ends it.
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
            for name, program in PROCESSES.items():
                if lines and program in command.split("\0--")[0]:
                    peak = int(lines[0].split()[1]) / 1024
                    peaks[name] = max(peaks.get(name, 0.0), peak)
        time.sleep(0.1)


def import_seconds(module: str) -> tuple[float, bool]:
    """Return how long a new process takes to import a module.

    Parameters
    ----------
    module : str
        Its name.

    Returns
    -------
    seconds : float
        Median of three, without the start of Python.
    torchvision : bool
        Whether it was loaded on the way.
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


def main() -> None:
    """Measure and write ``results/memory``."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_images(home / "images")
        federation, stop = Federation(home / "federation"), threading.Event()
        watcher = threading.Thread(target=watch, args=(home, peaks, stop))
        watcher.start()
        try:
            federation.start_superlink()
            federation.start_supernode(
                "node", f'client-name="a" data-dir="{home / "images"}"'
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
    times = {module: import_seconds(module) for module in IMPORTS}
    body = (
        "One SuperNode with 500 images of 32 x 32, FedRep with the CIFAR-10 CNN, two "
        "rounds, insecure, on loopback. Peak resident memory (VmHWM):\n\n"
        + markdown(
            ("process", "MB"), [(n, f"{peaks[n]:.0f}") for n in PROCESSES if n in peaks]
        )
        + "\nTime of an import in a new process, median of 3:\n\n"
        + markdown(
            ("module", "seconds", "loads torchvision"),
            [(m, f"{s:.2f}", "yes" if v else "no") for m, (s, v) in times.items()],
        )
        + "\n![memory](memory.png)\n"
    )
    write("memory", "Memory and imports of a deployment", body, {"mb": peaks, **times})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.4), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(peaks), list(peaks.values()))
    axes.set_xlabel("peak memory (MB)")
    axes.invert_yaxis()
    figure.savefig(RESULTS / "memory.png", dpi=150)


if __name__ == "__main__":
    main()
