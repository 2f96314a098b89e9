"""FedRep's Figure 1 and the rate of Theorem 1, for linear representations.

``python -m benchmarks.fedrep_samples`` runs the package's strategies and clients.
Figure 1 shows the error of FedRep, FedAvg and local training by the number of training
samples per client. The rate is the distance to the true representation by round, next
to the bound of equation 10.
"""

import argparse
import logging
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.common import RESULTS, markdown, write
from benchmarks.fedrep_linear import FirstClients, Own, spread, train
from benchmarks.runs import of_page
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.fedrep import solve_head
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.base import Matrix
from flwr_frl.task.tasks.linear import LinearTask, principal_angle_distance
from flwr_frl.task.theory import FedRepTheory

CLIENTS, DIMENSION, RANK, NOISE = 100, 20, 2, 1e-3
SAMPLES = (3, 5, 10, 15, 20, 25, 30, 40, 60, 100)
METHODS = ("Local only", "FedAvg", "FedRep")
# Cases for the rate: number of clients, examples per client and round, and start.
CASES = (
    (20, 50, "moments"),
    (20, 500, "moments"),
    (20, 500, "random"),
    (100, 50, "moments"),
    (100, 500, "random"),
)
RATE_ROUNDS = 60


def global_model(settings: Own, rounds: int) -> Matrix:
    """Return B w of FedAvg's final model."""
    settings = resolve({"task": "linear", "algorithm": "fedavg", **settings})
    grid = FirstClients(make_app(settings), int(settings["num-clients"]))
    strategy = build_strategy(settings)
    arrays = run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, rounds + 1),
        evaluated=lambda server_round: False,
    )
    names = "representation.weight", "head.weight"
    b, w = (arrays[name].numpy().astype(np.float64) for name in names)
    return np.asarray(b.T @ w[0])


def error(method: str, samples: int, seed: int, rounds: int) -> float:
    """Return the clients' mean squared test error, including the noise.

    It equals E (y − ŷ)² = ‖φ̂_i − φ_i‖² + noise variance for x ~ N(0, I_d).
    """
    settings: Own = {
        "dimension": DIMENSION,
        "rank": RANK,
        "samples": samples,
        "noise-variance": NOISE,
        "num-clients": CLIENTS,
        "fraction-train": 0.1,
        "seed": seed,
    }
    task = LinearTask(DIMENSION, RANK, samples, NOISE, num_clients=CLIENTS, seed=seed)
    data = [task.draw(i) for i in range(CLIENTS)]
    if method == "FedAvg":
        sgd = {"learning-rate": 0.03, "momentum": 0.0, "weight-decay": 0.0}
        model = global_model({**settings, **sgd}, rounds)
        learned = [model] * CLIENTS
    else:
        b = np.eye(DIMENSION)
        if method == "FedRep":
            own = {"algorithm": "fedrep", "fresh-samples": False, "learning-rate": 0.2}
            _, b = train({**settings, **own}, rounds)
        learned = [b @ solve_head(b, x, y) for x, y in data]
    errors = [np.sum((m - task.models[:, i]) ** 2) for i, m in enumerate(learned)]
    return float(np.mean(errors)) + NOISE


def figure1(seeds: list[int], rounds: int) -> dict[str, list[list[float]]]:
    """Return each method's errors, with a list over seeds per number of samples."""
    return {
        method: [
            [error(method, samples, seed, rounds) for seed in seeds]
            for samples in track(SAMPLES, f"Figure 1, {method}")
        ]
        for method in METHODS
    }


def rate(clients: int, samples: int, start: str, seed: int) -> dict[str, Any]:
    """Return a run's distances with the theorem's largest step size, and the bound."""
    task = LinearTask(rank=RANK, num_clients=clients, seed=seed)
    heads = (task.representation.T @ task.models).T
    eta = FedRepTheory(heads, clients, 0.0).step_size
    found: list[float] = []
    train(
        {
            "algorithm": "fedrep",
            "num-clients": clients,
            "fraction-train": 1.0,
            "samples": samples,
            "noise-variance": 0.0,
            "initialization": start,
            "learning-rate": eta,
            "seed": seed,
        },
        RATE_ROUNDS,
        lambda _, b, __: found.append(principal_angle_distance(b, task.representation)),
    )
    theory = FedRepTheory(heads, clients, found[0])
    return {
        "step": eta,
        "distances": found,
        "bound": [theory.distance(t) for t in range(RATE_ROUNDS + 1)],
        # Contraction near B*, in the slowest direction
        "expected": 1 - eta * theory.sigmas[0] ** 2,
    }


def rates(seeds: list[int]) -> list[dict[str, Any]]:
    """Return the runs of all cases."""
    return [
        {"case": case, "runs": [rate(*case, seed) for seed in seeds]}
        for case in track(CASES, "rate")
    ]


def rate_table(data: list[dict[str, Any]]) -> str:
    """Return the measured distances and contractions next to the theorem's."""
    rows = []
    for entry in data:
        clients, samples, start = entry["case"]
        runs = entry["runs"]
        found = np.array([run["distances"] for run in runs])
        bound = np.array([run["bound"] for run in runs])
        # Mean contraction over the last ten rounds.
        last = [float(np.mean(np.array(d)[-10:] / np.array(d)[-11:-1])) for d in found]
        rows.append(
            (
                clients,
                samples,
                start,
                spread(found[:, 0]),
                spread(found[:, 20]),
                spread(bound[:, 20]),
                spread(found[:, -1]),
                spread(bound[:, -1]),
                spread([b[1] / b[0] for b in bound]),
                f"{np.mean(last):.3f}",
                f"{np.mean([run['expected'] for run in runs]):.3f}",
                "yes" if (found <= bound * (1 + 1e-9)).all() else "no",
            )
        )
    columns = (
        "n",
        "m",
        "start",
        "distance at the start",
        "after 20 rounds",
        "bound",
        f"after {RATE_ROUNDS} rounds",
        "bound",
        "bound's contraction",
        "measured in the last ten rounds",
        "1 - η s_min²",
        "below the bound in all rounds",
    )
    return markdown(columns, rows)


def plot(one: dict[str, list[list[float]]], two: list[dict[str, Any]]) -> None:
    """Plot Figure 1, and the distances with their bounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, errors in one.items():
        values = np.array(errors)
        (line,) = left.plot(SAMPLES, values.mean(1), marker=".", label=method)
        low, high = values.min(1), values.max(1)
        left.fill_between(SAMPLES, low, high, alpha=0.2, color=line.get_color(), lw=0)
    left.axhline(NOISE, color="grey", ls=":", lw=1, label="noise variance")
    left.set(xlabel="training samples per client", ylabel="mean squared error")
    left.set(yscale="log", title="FedRep, Figure 1")
    for entry in two:
        clients, samples, start = entry["case"]
        label = f"n = {clients}, m = {samples}, {start}"
        distances = np.mean([run["distances"] for run in entry["runs"]], axis=0)
        bound = np.mean([run["bound"] for run in entry["runs"]], axis=0)
        (line,) = right.plot(distances, label=label)
        right.plot(bound, ls="--", color=line.get_color(), lw=1)
    right.set(xlabel="round", ylabel="distance (dashed: bound)", yscale="log")
    right.set(title="Theorem 1", ylim=(1e-7, 2))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(RESULTS / "fedrep_samples.png", dpi=130)


BODY = """## Figure 1

n = {clients} clients, (d, k) = ({d}, {k}), noise variance {noise}, a tenth of the
clients per round, {rounds} rounds, seeds {seeds}. Clients have the same samples in
every round. Entries are the mean squared error on new data, with the noise: the mean
over the clients, ± the standard deviation over the seeds. *Local only* is least squares
in d dimensions, with minimum norm if there are fewer samples. FedRep's last heads are
solved on its last representation. The paper names neither its rounds nor FedAvg's step
size; FedAvg has one local epoch, batches of 10 and the step size 0.03.

{table}

![Figure 1, and distances beside the bound of theorem 1](fedrep_samples.png)

As in the paper, local training needs more than d samples, the global model does not
improve with more, and FedRep has a small error with few samples.

## Theorem 1

d = 10, k = 2, no noise, all clients in every round, m fresh samples each, and the
theorem's largest step η = 1/(4 s_max²). s_min and s_max are the smallest and the
largest singular value of W*/√n. The bound on the distance after t rounds is
(1 - η E_0 s_min²/2)^(t/2) times the first distance, with E_0 = 1 minus its square
(equation 10). Near B*, one step on the expected loss with exact heads multiplies the
distance by 1 - η s_min² in the slowest direction, and so do the runs. The bound holds
and is far from tight: even with E_0 = 1 it contracts by about 1 - η s_min²/4, and E_0
is close to 0 from a random start.

{rates}
"""


def main() -> None:
    """Run everything, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--page", action="store_true", help="only write the page, from its JSON"
    )
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    seeds, rounds = arguments.seeds, arguments.rounds
    if arguments.page:
        data = of_page(RESULTS / "fedrep_samples.json")
        data = {name: data[name] for name in ("figure-1", "rates")}
    else:
        data = {"figure-1": figure1(seeds, rounds), "rates": rates(seeds)}
    plot(data["figure-1"], data["rates"])
    columns = ("method", *(f"m = {m}" for m in SAMPLES))
    rows = [(m, *map(spread, errors)) for m, errors in data["figure-1"].items()]
    body = BODY.format(
        clients=CLIENTS,
        d=DIMENSION,
        k=RANK,
        noise=NOISE,
        rounds=rounds,
        seeds=", ".join(map(str, seeds)),
        table=markdown(columns, rows),
        rates=rate_table(data["rates"]),
    )
    title = "FedRep, Figure 1 and theorem 1: linear representations"
    write("fedrep_samples", title, body, data)


if __name__ == "__main__":
    main()
