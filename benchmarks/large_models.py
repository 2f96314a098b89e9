"""Models of 100 and 500 MB: in one process, on Ray, and on two SuperNodes (loopback).

Two clients with twelve images each train FedAvg for one round and evaluate once. The
model is ``mlp-2``, whose first layer grows with the image size. Peak memory is the
kernel's count (VmHWM), and CPU time is summed over all processes of a kind.

A second table has the cost of the messages in one process: CPU time per client and MB
without training, and peak memory as a multiple of the model's size. Its model has only
linear layers.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import markdown, write
from benchmarks.memory import ON_RAY, PROCESSES, ROOT, write_images

sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from federation import Federation

# Size of the model's float32 parameters in MB, and the image size that yields it
SIZES = {100: 181, 500: 404}
WAYS = "inline", "deployed", "ray", "messages"
ROUNDS = 1
# Numbers of clients for measuring the time and the memory of messages
TIMED_CLIENTS, CLIENTS = 4, (2, 4)
# Width of a linear layer, whose weights take 4 MB, and the environment variable with
# the number of layers
WIDTH, LAYERS = 1000, "LARGE_MODEL_LAYERS"
SECONDS = 1500
INLINE = {"the command": "simulation.py"}
# Clock ticks per second in /proc
TICKS = os.sysconf("SC_CLK_TCK")
Usage = dict[str, tuple[float, float]]
Rows = list[tuple[str, ...]]


class Watcher(threading.Thread):
    """Monitor the peak memory and the CPU time of processes until stopped.

    Parameters
    ----------
    mark : str
        Text in the environment of the monitored processes.
    programs : dict of str to str
        Kinds of processes, and a text that identifies each in a command line.
    """

    def __init__(self, mark: str, programs: dict[str, str]) -> None:
        super().__init__()
        self.mark, self.programs = mark.encode(), programs
        self.peaks: Counter[str] = Counter()
        # Ticks by kind and process; the last reading of each counts.
        self.ticks: dict[tuple[str, str], int] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        """Read all processes every 50 ms."""
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
        try:
            log = federation.run(ROOT, settings(size, output) + nodes, SECONDS)
        except subprocess.TimeoutExpired:
            log = f"no end after {SECONDS} s"
        return watcher.usage(), outcome(output, log)
    finally:
        watcher.stopped.set()
        federation.close()


def cell(home: Path, way: str, mb: int) -> Rows:
    """Run one model in one way; return a row for each kind of process."""
    if way == "deployed":
        usage, how = deployed(home, SIZES[mb])
    else:
        usage, how = simulated(home, way, SIZES[mb])
    return [
        (f"{mb} MB", way, how, name, f"{peak:.0f}", f"{seconds:.1f}")
        for name, (peak, seconds) in usage.items()
        if peak
    ]


def outcome(output: Path, log: str) -> str:
    """Return ``ok``, or the last line of the log of a run that failed."""
    if (output / "fedavg" / "clients.json").is_file():
        return "ok"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"failed: {lines[-1].strip()}" if lines else "failed"


def message_task(num_clients: int) -> Any:
    """Return a task with one example per client and a model of linear layers."""
    import torch
    from torch import nn

    from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

    layers = int(os.environ[LAYERS])

    def model() -> SplitModel:
        hidden = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
        return SplitModel(nn.Sequential(*hidden), nn.Linear(WIDTH, 2))

    examples = ExampleSet(torch.ones(1, WIDTH), torch.zeros(1, dtype=torch.long))
    sets = [examples] * num_clients
    return ExampleTask(model, sets, sets, classes=("a", "b"))


def measure(clients: int, rounds: int, epochs: int) -> dict[str, float]:
    """Run some rounds in this process.

    Returns
    -------
    dict
        ``milliseconds`` of CPU time per client and round, and ``memory``, the growth of
        this process in MB from before the model is built to its peak.
    """
    import torch

    from flwr_frl.clients.client_app import make_app
    from flwr_frl.common.settings import resolve
    from flwr_frl.strategies import build_strategy
    from flwr_frl.strategies.grids.simulation import InlineGrid
    from flwr_frl.strategies.server.rounds import run_rounds

    torch.set_num_threads(1)
    config = resolve(
        {
            "algorithm": "fedavg",
            "task": "benchmarks.large_models:message_task",
            "num-clients": clients,
            "fraction-train": 1.0,
            "representation-epochs": epochs,
            "momentum": 0.0,
            "device": "cpu",
        }
    )
    grid = InlineGrid(make_app(dict(config)), clients)
    strategy = build_strategy(config)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays = strategy.initialize(grid)
    times = []
    for number in range(1, rounds + 1):
        began = time.process_time()
        one = range(number, number + 1)
        arrays = run_rounds(strategy, grid, arrays, one, evaluated=lambda _: False)
        times.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        # The first round builds objects that later rounds reuse.
        "milliseconds": 1000 * min(times[1:]) / clients,
        "memory": (peak - start) * 1024 / 1e6,
    }


def in_new_process(mb: int, *numbers: int) -> dict[str, float]:
    """Return the result of `measure` in a new process."""
    program = "import json, sys; from benchmarks.large_models import measure; "
    program += "print(json.dumps(measure(*map(int, sys.argv[1:]))))"
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, numbers)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", LAYERS: str(mb // 4)},
        capture_output=True,
        check=False,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(result.stderr)
    measured: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return measured


def messages(mb: int) -> tuple[str, ...]:
    """Return a model's row: time per client and MB, and peaks."""
    milliseconds = in_new_process(mb, TIMED_CLIENTS, 3, 0)["milliseconds"]
    peaks = [in_new_process(mb, clients, 2, 1)["memory"] / mb for clients in CLIENTS]
    return f"{mb} MB", f"{milliseconds / mb:.2f}", *(f"{peak:.1f}" for peak in peaks)


def page(rows: Rows, costs: Rows) -> str:
    """Return the text of the page for the cells measured so far."""
    failed = dict.fromkeys(f"{row[0]} {row[1]}" for row in rows if row[2] != "ok")
    limits = "without a message limit or another setting for large models"
    if failed:
        limits = f"these runs failed: {', '.join(failed)}"
    columns = "model", "way", "outcome", "process", "peak MB", "CPU seconds"
    clients = (f"peak in models, {clients} clients" for clients in CLIENTS)
    return (
        f"Two clients, {ROUNDS} round of FedAvg, one evaluation; {limits}. Flower "
        "sends arrays in chunks of at most 5 MiB. The peak is that of the largest "
        "process of a kind; the CPU time is that of all of them together.\n\n"
        + markdown(columns, rows)
        + "\nMessages in one process. The CPU time is that of a round without "
        f"training, with {TIMED_CLIENTS} clients and one thread. The peak is the "
        "growth of the process in two rounds with one step per client, without "
        "momentum.\n\n"
        + markdown(("model", "CPU ms per client and MB", *clients), costs)
    )


def main() -> None:
    """Measure, and write ``results/large_models`` after each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, nargs="+", default=[*SIZES], choices=SIZES)
    parser.add_argument("--only", choices=WAYS)
    options = parser.parse_args()
    part = options.only or len(options.mb) < len(SIZES)
    rows: Rows = []
    costs: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_images(home / "images", 24, 12)
        ways = [options.only] if options.only else WAYS
        for way, mb in itertools.product(ways, options.mb):
            if way == "messages":
                costs.append(messages(mb))
            else:
                rows += cell(home, way, mb)
            if part:
                print(page(rows, costs))
            else:
                data = {"rows": rows, "messages": costs}
                write("large_models", "Large models", page(rows, costs), data)


if __name__ == "__main__":
    main()
