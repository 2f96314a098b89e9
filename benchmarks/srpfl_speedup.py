"""E[T_SRPFL] / E[T_FedRep] against N in the linear case, beside the theory's 1/log N.

Linear FedRep with QR, all N clients sampled in each round, speeds ``fixed``
(exponential, drawn once for each seed). A fresh batch in each round leaves a floor of
the distance that falls like 1/sqrt(N); the target is that of all N clients, times a
little, so that fewer clients do not get there. The time is that of the simulated clock.
"""

import argparse
import logging
from typing import Any

import numpy as np
import numpy.typing as npt
from common import RESULTS, markdown, write
from rich.progress import track

from clients.client_app import make_app
from strategies import build_strategy
from strategies.grids.arrivals import SimulatedArrivals
from strategies.grids.simulation import InlineGrid
from strategies.grids.speeds import speed_model
from strategies.server.rounds import run_rounds
from task.settings import build, resolve
from task.tasks.linear import LinearTask, principal_angle_distance

Vector = npt.NDArray[np.float64]


def distances(
    algorithm: str, num_clients: int, seed: int, arguments: argparse.Namespace
) -> tuple[Vector, Vector]:
    """Return the clock and the principal angle distance to B* after each round."""
    settings = resolve(
        {
            "algorithm": algorithm,
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
            "rounds-per-stage": arguments.stages,
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
    noted: list[tuple[float, float]] = []

    def note(server_round: int, arrays: Any, metrics: Any) -> None:
        b = arrays["representation.weight"].numpy().T
        noted.append((clock.seconds, principal_angle_distance(b, truth)))

    rounds = range(1, arguments.rounds + 1)
    run_rounds(
        strategy, clock, arrays, rounds, evaluated=lambda _: False, after_round=note
    )
    times, values = np.array(noted).T
    return times, values


def time_to(track: tuple[Vector, Vector], target: float) -> float:
    """Return the time of the first round at the target; NaN for never."""
    times, values = track
    reached = np.flatnonzero(values <= target)
    return float(times[reached[0]]) if reached.size else float("nan")


def main() -> None:
    """Run and write ``results/srpfl_speedup``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512]
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--noise-variance", type=float, default=0.5)
    parser.add_argument("--step", type=float, default=0.2)
    parser.add_argument("--initial-nodes", type=int, default=8)
    parser.add_argument("--stages", default="25,5", help="rounds-per-stage")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--slack", type=float, default=1.3, help="target / floor")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows, data, ratios = [], {}, []
    for n in arguments.clients:
        times: dict[str, list[float]] = {"srpfl": [], "fedrep": []}
        targets = []
        for seed in track(range(arguments.seeds), f"N = {n}", transient=True):
            fedrep = distances("fedrep", n, seed, arguments)
            floor = fedrep[1][-arguments.rounds // 4 :].mean()
            targets.append(float(arguments.slack * floor))
            srpfl = distances("srpfl", n, seed, arguments)
            times["fedrep"].append(time_to(fedrep, targets[-1]))
            times["srpfl"].append(time_to(srpfl, targets[-1]))
        ratio = float(np.mean(times["srpfl"]) / np.mean(times["fedrep"]))
        ratios.append(ratio)
        data[str(n)] = {**times, "targets": targets, "ratio": ratio}
        rows.append(
            (
                n,
                f"{np.mean(targets):.4f}",
                *(
                    f"{np.mean(times[a]):.1f} ± {np.std(times[a]):.1f}"
                    for a in ("srpfl", "fedrep")
                ),
                f"{ratio:.3f}",
                f"{ratio * np.log(n):.2f}",
            )
        )
    log_n = np.log(arguments.clients)
    slope = float(np.polyfit(np.log(log_n), np.log(ratios), 1)[0])
    body = (
        "d = 20, k = 3, 10 fresh samples a round, noise variance "
        f"{arguments.noise_variance}, step {arguments.step}, QR, random start, n0 = "
        f"{arguments.initial_nodes}, rounds a stage {arguments.stages}, "
        f"{arguments.seeds} seeds. Simulated time until the distance is at most "
        f"{arguments.slack} times its mean over the last quarter of FedRep's "
        f"{arguments.rounds} rounds.\n\n"
        + markdown(
            ("N", "target", "T SRPFL", "T FedRep", "ratio", "ratio · ln N"), rows
        )
        + f"\nFitted: ratio ∝ (ln N)^{slope:.2f}; the theory's bound has the exponent "
        "-1.\n\n![ratio](srpfl_speedup.png)\n"
    )
    write("srpfl_speedup", "SRPFL, speed-up in the linear case", body, data)
    plot(arguments.clients, ratios)


def plot(clients: list[int], ratios: list[float]) -> None:
    """Draw the ratio against N, with c / log N through its first point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(clients, ratios, marker="o", label="measured")
    theory = ratios[0] * np.log(clients[0]) / np.log(clients)
    axes.plot(clients, theory, ls="--", label="∝ 1 / log N")
    axes.set(xscale="log", xlabel="clients N", ylabel="time SRPFL / time FedRep")
    axes.set_xticks(clients, [str(n) for n in clients])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "srpfl_speedup.png", dpi=150)


if __name__ == "__main__":
    main()
