"""Models of 100 and 500 MB: in one process, on Ray, and on two SuperNodes (loopback).

Two clients with twelve images each train FedAvg for two rounds, without an evaluation
before the last. The model is ``mlp-2``, whose first layer grows with the image size.
Peak memory is the kernel's count (VmHWM) and CPU time that of all processes of a kind.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

from benchmarks.common import markdown, write
from benchmarks.memory import ON_RAY, PROCESSES, ROOT, write_images

sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from federation import Federation

# Image sizes, by the MB of the model's float32 parameters.
SIZES = {100: 181, 500: 404}
ROUNDS = 2
INLINE = {"the command": "simulation.py"}
# Clock ticks of /proc in a second.
TICKS = os.sysconf("SC_CLK_TCK")
Usage = dict[str, tuple[float, float]]


class Watcher(threading.Thread):
    """Read the peak memory and the CPU time of processes until it is stopped.

    Parameters
    ----------
    mark : str
        Text in the environment of the processes that are read.
    programs : dict of str to str
        Kinds of processes, and a text in the command line of each.
    """

    def __init__(self, mark: str, programs: dict[str, str]) -> None:
        super().__init__()
        self.mark, self.programs = mark.encode(), programs
        self.peaks: Counter[str] = Counter()
        # Ticks by kind and process; the last reading of each counts.
        self.ticks: dict[tuple[str, str], int] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        """Read every 50 ms."""
        while not self.stopped.wait(0.05):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    self._read(process)
                except OSError:
                    continue

    def _read(self, process: Path) -> None:
        if self.mark not in (process / "environ").read_bytes():
            return
        command = (process / "cmdline").read_bytes().decode()
        status = (process / "status").read_text()
        ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        peak = next((s for s in status.splitlines() if s.startswith("VmHWM")), "")
        for name, program in self.programs.items():
            if peak and program in command.split("\0--")[0]:
                self.peaks[name] = max(self.peaks[name], int(peak.split()[1]) // 1024)
                self.ticks[name, process.name] = sum(map(int, ticks))

    def usage(self) -> Usage:
        """Return the peak of one process (MB) and the CPU seconds of all, by kind."""
        self.stopped.set()
        self.join()
        seconds: Counter[str] = Counter()
        for (name, _), ticks in self.ticks.items():
            seconds[name] += ticks
        return {n: (self.peaks[n], seconds[n] / TICKS) for n in self.programs}


def settings(size: int, output: Path) -> str:
    """Return the run config of a model for an image size."""
    return (
        f'algorithm="fedavg" task="image-folder" model="mlp-2" image-size={size} '
        f"num-clients=2 fraction-train=1.0 num-server-rounds={ROUNDS} augment=false "
        f'partition="iid" '
        f'evaluate-every=0 evaluate-last=1 output="{output}"'
    )


def simulated(home: Path, backend: str, size: int) -> tuple[Usage, str]:
    """Run one process or Ray; return the usage and the last line of the log."""
    output, mark = home / f"{backend}-{size}", f"{home}/{backend}-{size}"
    watcher = Watcher(mark, INLINE if backend == "inline" else ON_RAY)
    watcher.start()
    command = [sys.executable, "simulation.py", "fedavg", "--backend", backend]
    command += ["--data-dir", str(home / "images"), "--output", str(output)]
    command += ["--run-config", settings(size, output)]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "FRL_LARGE": mark},
        capture_output=True,
        text=True,
        check=False,
    )
    return watcher.usage(), outcome(output, result.stdout + result.stderr)


def deployed(home: Path, size: int) -> tuple[Usage, str]:
    """Run a SuperLink and two SuperNodes; return the usage and the last line."""
    federation = Federation(home / f"federation-{size}")
    watcher = Watcher(str(federation.home), PROCESSES)
    watcher.start()
    try:
        federation.start_superlink()
        for i in range(2):
            config = f'client-name="{i}" data-dir="{home / "images"}"'
            federation.start_supernode(f"node{i}", config, warm=False)
        output = home / f"deployed-{size}"
        nodes = " min-available-nodes=2 round-timeout=600.0"
        log = federation.run(ROOT, settings(size, output) + nodes, 900)
        return watcher.usage(), outcome(output, log)
    finally:
        watcher.stopped.set()
        federation.close()


def outcome(output: Path, log: str) -> str:
    """Return ``ok``, or the last line of the log of a run that failed."""
    if (output / "fedavg" / "clients.json").is_file():
        return "ok"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"failed: {lines[-1].strip()}" if lines else "failed"


def main() -> None:
    """Measure and write ``results/large_models``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, nargs="+", default=[*SIZES], choices=SIZES)
    parser.add_argument("--only", choices=("inline", "ray", "deployed"))
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_images(home / "images", 24, 12)
        for mb in options.mb:
            for way in ("inline", "ray", "deployed"):
                if options.only not in (None, way):
                    continue
                size = SIZES[mb]
                run = deployed(home, size) if way == "deployed" else None
                usage, how = run or simulated(home, way, size)
                rows += [
                    (f"{mb} MB", way, how, name, f"{peak:.0f}", f"{seconds:.1f}")
                    for name, (peak, seconds) in usage.items()
                    if peak
                ]
    columns = "model", "way", "outcome", "process", "peak MB", "CPU seconds"
    body = (
        "Two clients, two rounds of FedAvg, one evaluation. Flower sends arrays in "
        "chunks of at most 5 MiB, so no message limit has to be set.\n\n"
        + markdown(columns, rows)
    )
    if options.only or len(options.mb) < len(SIZES):
        print(body)
        return
    write("large_models", "Large models", body, {"rows": rows})


if __name__ == "__main__":
    main()
