"""Time and memory by problem size, with fitted straight lines.

The sizes are the numbers of clients, sampled clients, nodes of a graph and cores, and
the size of the model. Times are CPU time of one process, whose peak memory is the
kernel's value. The numbers for clients come from the page of `benchmarks.populations`,
and the functions that measure from the benchmarks of the other pages. The last table is
computed from the lines, not measured.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from benchmarks import large_models, populations
from benchmarks.common import RESULTS, markdown, write

SAMPLED = (10, 30, 100, 300, 1000)
POPULATION = 1_000
MODEL_MB = (4, 20, 100, 500)
NODES = (10, 30, 100, 300, 1000)
ROUNDS = 5
# The cluster of the last table: machines, cores per machine, and bytes per second of a
# link
MACHINES, CORES, LINK = 100, 2, 1.25e9
CLUSTER_CLIENTS, CLUSTER_SAMPLED = 1_000_000, (100, 1_000, 10_000, 100_000)
CLUSTER_MB = 100


class Line(NamedTuple):
    """A straight line y = fixed + slope · x."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        """Return the value of the line at x."""
        return self.fixed + self.slope * x


class Series(NamedTuple):
    """Measured values by one quantity.

    Parameters
    ----------
    name, part : str
        The quantity, and what was measured, with its unit.
    x, y : list of float
        Values of both.
    """

    name: str
    part: str
    x: list[float]
    y: list[float]

    @property
    def line(self) -> Line:
        """The line that minimises the squared relative errors."""
        weights = 1 / np.array(self.y)
        slope, fixed = np.polyfit(self.x, self.y, 1, w=weights)
        return Line(float(fixed), float(slope))

    @property
    def error(self) -> float:
        """Largest relative difference between the line and a measured value."""
        pairs = zip(self.x, self.y, strict=True)
        return max(abs(self.line.at(x) / y - 1) for x, y in pairs)


def gossip(nodes: int) -> dict[str, float]:
    """Return CPU seconds of a round of D-PSGD on a ring, and peak memory in MB."""
    from flwr_frl.clients.client_app import make_app
    from flwr_frl.common.settings import resolve
    from flwr_frl.strategies import build_strategy
    from flwr_frl.strategies.grids.simulation import InlineGrid
    from flwr_frl.strategies.server.rounds import run_rounds

    config = resolve(
        {
            "algorithm": "dpsgd",
            "graph": "ring",
            "task": "benchmarks.populations:tiny",
            "num-clients": nodes,
            "fraction-train": 1.0,
            "device": "cpu",
        }
    )
    grid, strategy = InlineGrid(make_app(config), nodes), build_strategy(config)
    grid, times = strategy.adapt_grid(grid), []
    arrays = strategy.initialize(grid)
    for number in range(1, ROUNDS + 1):
        began = time.process_time()
        one = range(number, number + 1)
        arrays = run_rounds(strategy, grid, arrays, one, evaluated=lambda _: False)
        times.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    # The first round builds objects that later rounds reuse.
    return {"round": statistics.median(times[1:]), "megabytes": peak}


def gossip_in_new_process(nodes: int) -> dict[str, float]:
    """Return the result of `gossip` in a new process."""
    command = [sys.executable, "-m", "benchmarks.scale", "--gossip", str(nodes)]
    done = subprocess.run(
        command, cwd=populations.ROOT, capture_output=True, check=True
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def clients_series() -> list[Series]:
    """Return FedAvg's series of the page ``populations``."""
    page = json.loads((RESULTS / "populations.json").read_text())
    rows = page["populations"]["fedavg"]
    x = [float(n) for n in rows]

    def series(part: str, key: str) -> Series:
        return Series("clients", part, x, [row[key] for row in rows.values()])

    return [
        series("start (s)", "start"),
        series("server's part of a round (s)", "server"),
        series("evaluation of all (s)", "evaluation"),
        series("memory (MB)", "megabytes"),
    ]


def sampled_series() -> list[Series]:
    """Measure rounds of FedAvg with increasing numbers of sampled clients."""
    rows = [populations.in_new_process("fedavg", POPULATION, n) for n in SAMPLED]
    x, name = [float(n) for n in SAMPLED], "sampled clients"
    server = [row["server"] for row in rows]
    clients = [row["round"] - row["server"] for row in rows]
    memory = [row["megabytes"] for row in rows]
    return [
        Series(name, "clients' part of a round (s)", x, clients),
        Series(name, "server's part of a round (s)", x, server),
        Series(name, "memory (MB)", x, memory),
    ]


def model_series() -> list[Series]:
    """Measure messages of models of increasing size."""
    timed, few = large_models.TIMED_CLIENTS, large_models.CLIENTS[0]
    times = [large_models.in_new_process(mb, timed, 3, 0) for mb in MODEL_MB]
    peaks = [large_models.in_new_process(mb, few, 2, 1) for mb in MODEL_MB]
    x, name = [float(mb) for mb in MODEL_MB], "MB of the model"
    return [
        Series(name, "messages of a client (s)", x, _of(times, "milliseconds", 1e-3)),
        Series(name, "memory (MB)", x, _of(peaks, "memory")),
    ]


def node_series() -> list[Series]:
    """Measure rounds of D-PSGD with increasing numbers of nodes."""
    rows = [gossip_in_new_process(n) for n in NODES]
    x, name = [float(n) for n in NODES], "nodes of a ring"
    return [
        Series(name, "round (s)", x, _of(rows, "round")),
        Series(name, "memory (MB)", x, _of(rows, "megabytes")),
    ]


def _of(rows: Sequence[dict[str, float]], key: str, factor: float = 1.0) -> list[float]:
    return [factor * row[key] for row in rows]


def rounds_at_once(processes: int) -> float:
    """Return the CPU seconds of a round while several processes do the same work."""
    with ThreadPoolExecutor(processes) as pool:
        runs = [
            pool.submit(populations.in_new_process, "fedrep", POPULATION)
            for _ in range(processes)
        ]
        return statistics.mean(run.result()["round"] for run in runs)


def cluster(series: Sequence[Series]) -> list[tuple[str, ...]]:
    """Return the table's rows for the cluster, computed from the lines."""
    lines = {(s.name, s.part): s.line for s in series}
    of_server = lines["sampled clients", "server's part of a round (s)"]
    of_clients = lines["sampled clients", "clients' part of a round (s)"]
    per_client = lines["clients", "server's part of a round (s)"].slope
    per_mb = lines["MB of the model", "messages of a client (s)"].slope
    rows = []
    for sampled in CLUSTER_SAMPLED:
        server = of_server.at(sampled) + per_client * CLUSTER_CLIENTS
        training = of_clients.at(sampled) / (MACHINES * CORES)
        messages = per_mb * CLUSTER_MB * sampled
        link = 2 * CLUSTER_MB * 1e6 * sampled / LINK
        rows.append(
            (
                f"{sampled:,}",
                f"{server:.3g}",
                f"{training:.3g}",
                f"{server + training:.3g}",
                f"{server + training + messages:.3g}",
                f"{link:.3g}",
            )
        )
    return rows


def plot(series: Sequence[Series]) -> None:
    """Plot times (above) and memory (below) against their quantity, with the lines."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(s.name for s in series))
    figure = Figure(figsize=(13, 6), layout="constrained")
    grid = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        for s in (s for s in series if s.name == name):
            axes = grid[int("MB" in s.part), column]
            (drawn,) = axes.plot(s.x, s.y, "o", label=s.part)
            x = np.geomspace(s.x[0], s.x[-1], 50)
            axes.plot(x, [s.line.at(v) for v in x], "-", color=drawn.get_color())
        grid[0, column].set_yscale("log")
        most = max(max(s.y) for s in series if s.name == name and "MB" in s.part)
        grid[1, column].set_ylim(0, 1.2 * most)
        for axes in grid[:, column]:
            axes.set_xscale("log")
            axes.set_xlabel(name)
            axes.legend(fontsize="small")
    grid[0, 0].set_ylabel("CPU time (s)")
    grid[1, 0].set_ylabel("peak memory (MB)")
    figure.savefig(RESULTS / "scale.png", dpi=150)


def main() -> None:
    """Measure and write ``results/scale``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--again", action="store_true", help="measure nothing; read the page of clients"
    )
    parser.add_argument("--gossip", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gossip:
        print(json.dumps(gossip(options.gossip)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.again:
        page = json.loads((RESULTS / "scale.json").read_text())
        measured = [Series(*row[:4]) for row in page["series"] if row[0] != "clients"]
        at_once = {int(n): seconds for n, seconds in page["at-once"].items()}
    else:
        measured = [*sampled_series(), *model_series(), *node_series()]
        at_once = {n: rounds_at_once(n) for n in (1, CORES)}
    series = [*clients_series(), *measured]
    rows = [
        (
            s.name,
            f"{s.x[0]:,.0f} to {s.x[-1]:,.0f}",
            s.part,
            f"{s.line.fixed:.3g}",
            f"{s.line.slope:.3g}",
            f"{100 * s.error:.0f} %",
        )
        for s in series
    ]
    columns = "quantity", "measured", "", "fixed", "for each more", "largest error"
    cluster_columns = (
        *("sampled clients", "server (s)", "training (s)", "round (s)"),
        *(f"round, {CLUSTER_MB} MB model (s)", f"link, {CLUSTER_MB} MB model (s)"),
    )
    slower = at_once[CORES] / at_once[1]
    body = (
        "Straight lines through measured values, with the least squares of the "
        "relative errors. Times are CPU time in one process and memory is its peak, "
        "both with FedAvg; a ring's nodes run D-PSGD. Clients have "
        f"{populations.EXAMPLES} examples of {populations.FEATURES} numbers, and "
        f"{populations.SAMPLED} of them are sampled, or the given number of "
        f"{POPULATION:,}. Models of some MB make no training step here (their memory "
        "is the growth of a process with one step); a client's messages are one in "
        "each direction. The values for clients are those of "
        "[populations](populations.md).\n\n"
        + markdown(columns, rows)
        + "\n![scale](scale.png)\n\n"
        f"Cores: while {CORES} processes run the same rounds at once, a round takes "
        f"{slower:.2f} times the CPU time of one process, so {CORES} cores do "
        f"{CORES / slower:.2f} times the work of one.\n\n"
        f"Computed, not measured: a cluster of {MACHINES} machines with {CORES} cores "
        f"each and {CLUSTER_CLIENTS:,} clients, by the lines above. Clients train on "
        "all cores, and the server's part runs on one. The next column adds the "
        f"messages of a model of {CLUSTER_MB} MB, as if all of their cost were the "
        "server's and without training of such a model; the last one is the time of "
        f"these bytes on one link of {LINK * 8 / 1e9:.0f} Gbit/s. Starting with as "
        "many clients takes "
        f"{series[0].line.at(CLUSTER_CLIENTS):.0f} s and "
        f"{series[3].line.at(CLUSTER_CLIENTS) / 1000:.1f} GB on the server.\n\n"
        + markdown(cluster_columns, cluster(series))
    )
    data: dict[str, Any] = {
        "series": [[*s, *s.line] for s in series],
        "at-once": {str(n): seconds for n, seconds in at_once.items()},
    }
    plot(series)
    write("scale", "Scale", body, data)


if __name__ == "__main__":
    main()
