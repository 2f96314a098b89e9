"""E[T_SRPFL] / E[T_FedRep] by N in the linear case, next to the theory's 1/log N.

Linear FedRep with QR samples all N clients in each round, with ``fixed`` speeds
(exponential, drawn once for each seed). Fresh batches leave a floor of the distance
that decreases like 1/sqrt(N). The target is slightly above the floor of all N clients,
so that fewer clients do not reach it. Times are those of the simulated clock.
"""

import argparse
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.common import RESULTS, markdown, write
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import build, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulated_arrivals import SimulatedArrivals
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import speed_model
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.tasks.linear import LinearTask, principal_angle_distance

FEDREP = "fedrep"


def distances(
    num_clients: int, seed: int, arguments: argparse.Namespace, stages: str = ""
) -> Iterator[tuple[float, float]]:
    """Yield the clock and the principal angle distance to B* after each round.

    The algorithm is SRPFL with these stages, or FedRep if there are none.
    """
    settings = resolve(
        {
            "algorithm": "srpfl" if stages else "fedrep",
            "task": "linear",
            "dimension": 20,
            "rank": 3,
            "samples": 10,
            "noise-variance": arguments.noise_variance,
            "num-clients": num_clients,
            "fraction-train": 1.0,
            "learning-rate": arguments.step,
            "orthonormalize": True,
            "initialization": "random",
            "speed-model": "fixed",
            "initial-nodes": arguments.initial_nodes,
            "rounds-per-stage": stages or "auto",
            "contraction": arguments.contraction,
            "seed": seed,
        }
    )
    inner = InlineGrid(make_app(settings), num_clients)
    strategy = build_strategy(settings)
    arrays = strategy.initialize(inner)
    position = {node: i for i, node in enumerate(strategy.identify(inner))}
    speeds = speed_model(settings, num_clients)
    assert speeds is not None
    clock = SimulatedArrivals(inner, speeds, 0.0, position.__getitem__)
    task = build(LinearTask, settings, num_clients=num_clients)
    truth = task.representation
    for server_round in itertools.count(1):
        now = range(server_round, server_round + 1)
        arrays = run_rounds(strategy, clock, arrays, now, evaluated=lambda _: False)
        b = arrays["representation.weight"].numpy().T
        yield clock.seconds, principal_angle_distance(b, truth)


def time_to(found: Iterable[tuple[float, float]], target: float, rounds: int) -> float:
    """Return the time of the first round that reaches the target, or NaN."""
    reached = (time for time, far in itertools.islice(found, rounds) if far <= target)
    return next(reached, math.nan)


def main() -> None:
    """Carry out all runs and write ``results/srpfl_speedup``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[16, 32, 64, 128, 256]
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--noise-variance", type=float, default=0.5)
    parser.add_argument("--step", type=float, default=0.2)
    parser.add_argument("--initial-nodes", type=int, default=8)
    parser.add_argument(
        "--stages", nargs="+", default=["25,5", "theory"], help="rounds-per-stage"
    )
    parser.add_argument("--contraction", type=float, default=0.1, help="for theory")
    parser.add_argument("--rounds", type=int, default=100, help="FedRep's")
    parser.add_argument("--slack", type=float, default=1.5, help="target / floor")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    data: dict[str, Any] = {}
    for n in arguments.clients:
        found = [
            one(n, seed, arguments)
            for seed in track(range(arguments.seeds), f"N = {n}", transient=True)
        ]
        times = {name: [times[name] for _, times in found] for name in found[0][1]}
        data[str(n)] = {
            "targets": [target for target, _ in found],
            "times": times,
            "ratios": {
                stages: ratio(times[stages], times[FEDREP])
                for stages in arguments.stages
            },
        }
    body = (
        "d = 20, k = 3, 10 fresh samples per round, noise variance "
        f"{arguments.noise_variance}, step size {arguments.step}, QR, random "
        f"initialisation, n0 = {arguments.initial_nodes}, {arguments.seeds} seeds (± "
        "is the standard deviation over seeds). T is the simulated time until the "
        f"distance is at most {arguments.slack} times its mean over the last quarter "
        f"of FedRep's {arguments.rounds} rounds; SRPFL has at most twice as many "
        "rounds. *Stages* are the numbers of rounds of all stages but the last, "
        "which waits for all N clients; `theory` uses the stages of section 4 of the "
        f"paper with a contraction of {arguments.contraction}. A ratio is that of "
        "the mean times, over the seeds that reach the target.\n\n"
        + table(arguments.stages, data)
        + "\n"
        + "".join(fitted(stages, data) for stages in arguments.stages)
        + "\n![ratio](srpfl_speedup.png)\n"
    )
    write("srpfl_speedup", "SRPFL, speed-up in the linear case", body, data)
    plot(arguments.stages, data)


def one(
    n: int, seed: int, arguments: argparse.Namespace
) -> tuple[float, dict[str, float]]:
    """Return the target, and the times to it of FedRep and of SRPFL by its stages."""
    rounds = arguments.rounds
    fedrep = list(itertools.islice(distances(n, seed, arguments), rounds))
    floor = fmean(far for _, far in fedrep[-rounds // 4 :])
    target = float(arguments.slack * floor)
    times = {FEDREP: time_to(fedrep, target, rounds)}
    for stages in arguments.stages:
        found = distances(n, seed, arguments, stages)
        times[stages] = time_to(found, target, 2 * rounds)
    return target, times


def ratio(srpfl: Sequence[float], fedrep: Sequence[float]) -> float:
    """Return the ratio of mean times, over seeds in which SRPFL reaches the target."""
    both = [(a, b) for a, b in zip(srpfl, fedrep, strict=True) if not math.isnan(a)]
    return sum(a for a, _ in both) / sum(b for _, b in both) if both else math.nan


def table(stages: Sequence[str], data: dict[str, Any]) -> str:
    """Return the table of times and ratios by number of clients."""
    heads = ["N", "target", "T FedRep"]
    for name in stages:
        heads += [f"T SRPFL, stages {name}", "ratio", "ratio · ln N"]
    rows = []
    for n, entry in data.items():
        row = [n, f"{fmean(entry['targets']):.4f}", spread(entry["times"][FEDREP])]
        for name in stages:
            value = entry["ratios"][name]
            row += [spread(entry["times"][name]), f"{value:.3f}"]
            row.append(f"{value * math.log(int(n)):.2f}")
        rows.append(row)
    return markdown(heads, rows)


def spread(times: Sequence[float]) -> str:
    """Return mean ± standard deviation, and the number of values if some are NaN."""
    there = [time for time in times if not math.isnan(time)]
    if len(there) < 2:
        return f"{len(there)} of {len(times)} get there"
    text = f"{np.mean(there):.1f} ± {np.std(there, ddof=1):.1f}"
    return text + f" ({len(there)} of {len(times)})" * (len(there) < len(times))


def fitted(stages: str, data: dict[str, Any]) -> str:
    """Return a sentence on the fitted exponent of ln N."""
    log_n = [math.log(int(n)) for n in data]
    ratios = [entry["ratios"][stages] for entry in data.values()]
    if any(math.isnan(value) for value in ratios):
        return ""
    slope = float(np.polyfit(np.log(log_n), np.log(ratios), 1)[0])
    return (
        f"Stages {stages}: fitted, ratio ∝ (ln N)^{slope:.2f}; the theory's bound has "
        "the exponent -1.\n"
    )


def plot(stages: Sequence[str], data: dict[str, Any]) -> None:
    """Plot the ratio against N, with c / log N through its first point."""
    from matplotlib.figure import Figure

    clients = np.array([int(n) for n in data])
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for name in stages:
        ratios = [entry["ratios"][name] for entry in data.values()]
        (line,) = axes.plot(clients, ratios, marker="o", label=f"stages {name}")
        theory = ratios[0] * np.log(clients[0]) / np.log(clients)
        axes.plot(clients, theory, ls="--", color=line.get_color())
    axes.plot([], [], ls="--", color="0.5", label="∝ 1 / log N")
    axes.set(xscale="log", xlabel="clients N", ylabel="time SRPFL / time FedRep")
    axes.set(ylim=(0, None))
    axes.set_xticks(clients, [str(n) for n in clients])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "srpfl_speedup.png", dpi=150)


if __name__ == "__main__":
    main()
