"""CPU time of a message on a SuperLink and two SuperNodes, by process and part.

The benchmark runs one round of FedAvg without training, with models of two sizes. The
difference between their CPU times is the cost of the bytes. The part that both have in
common is the start of processes, of which Flower starts one for each message. ServerApp
and ClientApp are profiled in their main threads, where our code runs. Profiling makes
imports slower.
"""

import argparse
import os
import pstats
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import markdown, write
from benchmarks.large_models import LAYERS, SECONDS, Usage, Watcher
from benchmarks.memory import PROCESSES, ROOT

sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from federation import Federation

NODES = 2
# The content of ``sitecustomize.py``, which Python runs when a process starts
PROFILER = """
import os, sys
programs = {"flwr-clientapp": "ClientApp", "flwr-serverapp": "ServerApp"}
command = " ".join(sys.orig_argv)
kind = next((k for program, k in programs.items() if program in command), None)
if kind:
    import atexit, cProfile, time
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    @atexit.register
    def end():
        profiler.disable()
        profiler.dump_stats(f"{os.environ['FRL_PROFILES']}/{kind}-{os.getpid()}")
"""
# Each part has a name, a process, and the file and function whose cumulative time is
# measured. The parts in our own code come first.
PARTS = (
    ("model built, settings read", "ClientApp", "client_app.py", "open_message"),
    ("arrays read and checked", "ClientApp", "records.py", "unpack"),
    ("`Client.fit`: loaded and copied", "ClientApp", "fedavg.py", "fit"),
    ("reply made", "ClientApp", "records.py", "pack"),
    ("replies checked and averaged", "ServerApp", "base.py", "aggregate_train"),
    ("checkpoint written", "ServerApp", "checkpoint.py", "write"),
    ("Flower: objects made", "ClientApp", "recorddict.py", "deflate"),
    (
        "Flower: objects read",
        "ClientApp",
        "inflatable_utils.py",
        "inflate_object_from_contents",
    ),
    (
        "Flower: objects read",
        "ServerApp",
        "inflatable_utils.py",
        "inflate_object_from_contents",
    ),
    ("Flower: requests", "ServerApp", "client.py", "send"),
    ("imports", "ClientApp", "<frozen importlib._bootstrap>", "_find_and_load"),
    ("imports", "ServerApp", "<frozen importlib._bootstrap>", "_find_and_load"),
)


def times(profile: Path) -> dict[tuple[str, str], float]:
    """Return cumulative seconds by file and function, the largest for equal names."""
    seconds_of: dict[tuple[str, str], float] = {}
    statistics: Any = pstats.Stats(str(profile))
    for (file, _, name), (_, _, _, seconds, _) in statistics.stats.items():
        key = Path(file).name, name
        seconds_of[key] = max(seconds, seconds_of.get(key, 0.0))
    return seconds_of


def parts(folder: Path) -> list[float]:
    """Return the mean seconds of each of `PARTS` over the processes that train."""
    profiles: dict[str, list[dict[tuple[str, str], float]]] = {}
    for path in folder.iterdir():
        profile = times(path)
        kind = path.name.partition("-")[0]
        if kind == "ServerApp" or ("fedavg.py", "fit") in profile:
            profiles.setdefault(kind, []).append(profile)
    return [
        sum(each.get((file, name), 0.0) for each in profiles[kind])
        / len(profiles[kind])
        for _, kind, file, name in PARTS
    ]


def run(home: Path, mb: int) -> tuple[Usage, list[float]]:
    """Run one round with a model of this size; return the usage and the parts."""
    profiles, site = home / f"profiles-{mb}", home / "site"
    profiles.mkdir()
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(PROFILER)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    settings = {"FRL_PROFILES": str(profiles), "PYTHONPATH": path}
    federation = Federation(home / f"federation-{mb}")
    federation.environment |= {**settings, LAYERS: str(mb // 4)}
    watcher = Watcher(str(federation.home), PROCESSES)
    watcher.start()
    try:
        federation.start_superlink()
        for i in range(NODES):
            node = f'client-name="{i}" partition-id={i} num-partitions={NODES}'
            federation.start_supernode(f"node{i}", node, warm=False)
        log = federation.run(
            ROOT,
            'algorithm="fedavg" task="benchmarks.large_models:message_task" '
            f"num-clients={NODES} fraction-train=1.0 representation-epochs=0 "
            "momentum=0.0 num-server-rounds=1 evaluate-every=0 evaluate-last=0 "
            f"min-available-nodes={NODES} round-timeout=600.0 "
            f'output="{home / f"output-{mb}"}"',
            SECONDS,
        )
        usage = watcher.usage()
    except subprocess.TimeoutExpired:
        raise SystemExit(f"no end after {SECONDS} s") from None
    finally:
        watcher.stopped.set()
        federation.close()
    if not (home / f"output-{mb}" / "fedavg" / "clients.json").is_file():
        raise SystemExit(f"the run with {mb} MB failed:\n{log[-2000:]}")
    return usage, parts(profiles)


def main() -> None:
    """Measure and write ``results/deployed_cost``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, nargs=2, default=[20, 100])
    small, large = parser.parse_args().mb
    with tempfile.TemporaryDirectory() as folder:
        found = {mb: run(Path(folder), mb) for mb in (small, large)}
    more = (large - small) / 1000

    def row(kind: str, a: float, b: float, clients: int) -> tuple[str, ...]:
        return kind, f"{a:.2f}", f"{b:.2f}", f"{(b - a) / more / clients:.1f}"

    usage = {mb: {n: u[1] for n, u in each.items()} for mb, (each, _) in found.items()}
    rows = [row(n, usage[small][n], usage[large][n], NODES) for n in PROCESSES]
    sums = [sum(usage[mb].values()) for mb in (small, large)]
    rows.append(row("all", sums[0], sums[1], NODES))
    seconds = {mb: each for mb, (_, each) in found.items()}
    columns = "", f"{small} MB, s", f"{large} MB, s", "ms per client and MB"
    cells = [
        # A ClientApp serves one client, the ServerApp serves all.
        row(f"{kind}: {name}", a, b, 1 if kind == "ClientApp" else NODES)
        for (name, kind, *_), a, b in zip(
            PARTS, seconds[small], seconds[large], strict=True
        )
    ]
    body = (
        f"One round of FedAvg without training on a SuperLink and {NODES} SuperNodes, "
        "which also send their initial arrays; CPU time in seconds. The last column "
        "is the difference of the two sizes, by clients and MB. Most of the time is "
        "the start of processes, of which Flower starts one for each message: three "
        "for each client here.\n\n"
        + markdown(columns, rows)
        + "\nParts of the main threads, per process that trains, with all that is "
        "called. Those before *Flower* are ours.\n\n" + markdown(columns, cells)
    )
    data = {"usage": usage, "parts": seconds, "names": [list(p) for p in PARTS]}
    write("deployed_cost", "Cost of a message between processes", body, data)


if __name__ == "__main__":
    main()
