"""Peak memory of every process of a deployment.

One SuperNode with 500 images of 32 x 32 trains FedRep with the CIFAR-10 CNN for two
rounds. The peak of a process is the kernel's value (VmHWM). `benchmarks.populations`
measures simulations.
"""

import argparse
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
    body = (
        "One SuperNode with 500 images of 32 x 32, FedRep with the CIFAR-10 CNN, two "
        "rounds, without TLS, on loopback. Peak resident memory (VmHWM):\n\n"
        + markdown(
            ("process", "MB"), [(n, f"{peaks[n]:.0f}") for n in PROCESSES if n in peaks]
        )
    )
    heading = "Memory of a deployment"
    write("memory", heading, body, {"mb": peaks})


if __name__ == "__main__":
    main()
