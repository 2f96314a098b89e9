"""FedRep's Figures 3 and 4 (linear representations), with strategies and clients.

Figure 3: principal angle distance to the true representation by round, for exact heads
(FedRep) and for 1 and 10 gradient steps on the head (GD-GD and 10GD-GD), each with its
best constant step. Figure 4: error of new clients that fit only a head.
"""

import argparse
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from rich.progress import track

from benchmarks.common import RESULTS, markdown, write
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.fedrep import solve_head
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.base import Matrix
from flwr_frl.task.tasks.linear import LinearTask, principal_angle_distance

Own = dict[str, Setting]
WEIGHT = "representation.weight"
METHODS: dict[str, Own] = {
    "FedRep": {"head-steps": 0},
    "GD-GD": {"head-steps": 1},
    "10GD-GD": {"head-steps": 10},
}
STEPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7)
SGD_STEPS = (0.01, 0.03, 0.1)
MANY = "FedAvg, 50 samples a client"
FIXED = "FedRep, same 5 samples every round"
COLORS = {"FedRep": "C0", "10GD-GD": "C1", "GD-GD": "C3"}


class FirstClients(InlineGrid):
    """A grid on which only the first clients of a task can be reached."""

    def __init__(self, app: Any, num_clients: int, trained: int | None = None) -> None:
        super().__init__(app, num_clients)
        self.trained = trained or num_clients

    def get_node_ids(self) -> list[int]:
        """Return the ids of the clients that take part."""
        return list(super().get_node_ids())[: self.trained]


def train(
    settings: Own,
    rounds: int,
    after_round: Callable[[int, Matrix, dict[str, Any]], None] = lambda *_: None,
    *,
    start: ArrayRecord | None = None,
    trained: int | None = None,
    evaluated: Callable[[int], bool] = lambda server_round: False,
) -> tuple[Strategy, Matrix]:
    """Run an algorithm inline on the linear task; return the strategy and the last B.

    ``after_round`` is called with the round (0 before training), B (d × k) and the
    metrics. ``start`` replaces the strategy's initial arrays. The first ``trained``
    clients take part (by default all). Clients evaluate in the rounds for which
    ``evaluated`` is true.
    """
    settings = resolve({"task": "linear", **settings})
    grid = FirstClients(make_app(settings), int(settings["num-clients"]), trained)
    strategy = build_strategy(settings)
    arrays = start or strategy.initialize(grid)
    after_round(0, arrays[WEIGHT].numpy().T, {})
    arrays = run_rounds(
        strategy,
        grid,
        arrays,
        range(1, rounds + 1),
        evaluated=evaluated,
        after_round=lambda r, a, m: after_round(r, a[WEIGHT].numpy().T, m),
    )
    return strategy, arrays[WEIGHT].numpy().T


def distances(
    method: str, clients: int, step: float, seed: int, rounds: int
) -> list[float]:
    """Return the distance to the true representation at the start and by round."""
    settings = {
        "algorithm": "fedrep",
        "num-clients": clients,
        "fraction-train": 0.1,
        "learning-rate": step,
        "seed": seed,
        **METHODS[method],
    }
    truth = LinearTask(num_clients=clients, seed=seed).representation
    curve: list[float] = []

    def note(_: int, b: Matrix, __: dict[str, Any]) -> None:
        curve.append(round(principal_angle_distance(b, truth), 6))

    train(settings, rounds, note)
    return curve


def figure3(arguments: argparse.Namespace) -> dict[str, Any]:
    """Choose each method's step and return its curves, by number of clients."""
    seeds = arguments.seeds
    cases = [(n, m) for n in arguments.clients for m in METHODS]
    results: dict[str, Any] = {}
    for n, method in track(cases, "Figure 3"):
        final = {}
        for step in STEPS:
            ends = [distances(method, n, step, s, arguments.rounds)[-1] for s in seeds]
            final[step] = float(np.mean(ends))
        best = min(STEPS, key=final.__getitem__)
        curves = [distances(method, n, best, s, arguments.long_rounds) for s in seeds]
        results.setdefault(str(n), {})[method] = {
            "step": best,
            "final-by-step": final,
            "curves": curves,
        }
    return results


def new_client_errors(
    task: LinearTask, clients: range, samples: Sequence[int], b: Matrix
) -> list[list[float]]:
    """Return mean squared errors of heads solved on B (the identity for local-only).

    Rows are clients, columns are numbers of samples.
    """
    errors = []
    for client in clients:
        test = task.test_examples(client)
        x, y = test.inputs.double().numpy(), test.targets.double().numpy()[:, 0]
        heads = [solve_head(b, *task.draw(client, samples=m)) for m in samples]
        errors.append([round(float(np.mean((x @ b @ w - y) ** 2)), 6) for w in heads])
    return errors


def figure4(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return each method's errors on new clients, with the seeds stacked."""
    n, new, d = 100, arguments.new_clients, 20
    common: Own = {"dimension": d, "num-clients": n + new, "fraction-train": 0.1}
    common["weight-decay"] = 0.0
    fedavg: Own = {"algorithm": "fedavg", "batch-size": 5, "momentum": 0.0}
    fedrep: Own = {"algorithm": "fedrep", "learning-rate": 0.2}
    methods: dict[str, list[Own]] = {
        "Local only": [],
        "FedRep": [fedrep],
        FIXED: [{**fedrep, "fresh-samples": False}],
        "FedAvg": [{**fedavg, "learning-rate": s} for s in SGD_STEPS],
        MANY: [{**fedavg, "samples": 50, "learning-rate": s} for s in SGD_STEPS],
    }
    column = arguments.samples.index(10) if 10 in arguments.samples else -1
    results: dict[str, Any] = {}
    for name, variants in track(methods.items(), "Figure 4"):
        tried = []
        for variant in variants or [{}]:
            errors, distance = [], []
            for seed in arguments.seeds:
                task = LinearTask(dimension=d, num_clients=n + new, seed=seed)
                b = np.eye(d)
                if variant:
                    settings = {**common, **variant, "seed": seed}
                    _, b = train(settings, arguments.long_rounds, trained=n)
                    b = b.astype(np.float64)
                    distance.append(principal_angle_distance(b, task.representation))
                clients = range(n, n + new)
                errors += new_client_errors(task, clients, arguments.samples, b)
            step = variant.get("learning-rate")
            tried.append({"step": step, "distance": distance, "errors": errors})
        results[name] = min(
            tried, key=lambda t: float(np.mean(np.array(t["errors"])[:, column]))
        )
    return results


def spread(values: Sequence[float]) -> str:
    """Return mean ± sample standard deviation."""
    return f"{np.mean(values):.2g} ± {np.std(values, ddof=1):.1g}"


def table3(results: dict[str, Any], rounds: int) -> str:
    """Return the table of Figure 3."""
    rows = []
    for n, methods in results.items():
        reference = np.mean(methods["FedRep"]["curves"], axis=0)
        for method, result in methods.items():
            curves = np.array(result["curves"])
            ahead = reference[1 : rounds + 1] < curves.mean(axis=0)[1 : rounds + 1]
            rows.append(
                (
                    n,
                    method,
                    result["step"],
                    spread(curves[:, rounds // 2]),
                    spread(curves[:, rounds]),
                    spread(curves[:, -1]),
                    "" if method == "FedRep" else f"{ahead.sum()} of {rounds} rounds",
                )
            )
    shown = [f"round {r}" for r in (rounds // 2, rounds, len(curves[0]) - 1)]
    return markdown(("n", "method", "best step", *shown, "FedRep is ahead in"), rows)


def table4(results: dict[str, Any], samples: Sequence[int]) -> str:
    """Return the table of Figure 4: mean over new clients, median in parentheses."""
    rows = []
    for name, result in results.items():
        errors = np.array(result["errors"])
        cells = zip(errors.mean(axis=0), np.median(errors, axis=0), strict=True)
        distance = spread(result["distance"]) if result["distance"] else ""
        about = f"{name}, step {result['step']}" if result["step"] else name
        rows.append((about, distance, *(f"{m:.2g} ({h:.2g})" for m, h in cells)))
    return markdown(("method", "distance", *(f"m = {m}" for m in samples)), rows)


def plot(three: dict[str, Any], four: dict[str, Any], samples: Sequence[int]) -> None:
    """Draw both figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    panels = figure.subplots(1, len(three), sharey=True, squeeze=False)[0]
    for axes, (n, methods) in zip(panels, three.items(), strict=True):
        for method, color in COLORS.items():
            curves = np.array(methods[method]["curves"])
            rounds = np.arange(curves.shape[1])
            label = f"{method}, step {methods[method]['step']}"
            axes.plot(rounds, curves.mean(axis=0), color=color, label=label)
            low, high = curves.min(axis=0), curves.max(axis=0)
            axes.fill_between(rounds, low, high, color=color, alpha=0.2, lw=0)
        axes.set(title=f"n = {n}", xlabel="round", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper right")
    panels[0].set_ylabel("principal angle distance")
    figure.savefig(RESULTS / "fedrep_linear-3.png", dpi=150)

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, result in four.items():
        errors = np.array(result["errors"])
        style = "--" if name == "Local only" else "-"
        median = np.median(errors, axis=0)
        axes.plot(samples, median, style, marker=".", label=name)
        low, high = np.quantile(errors, (0.25, 0.75), axis=0)
        axes.fill_between(samples, low, high, alpha=0.15, lw=0)
    axes.axhline(1e-3, color="grey", lw=1, ls=":", label="noise variance")
    axes.set(
        xlabel="samples of the new client",
        ylabel="test error, median and quartiles",
        yscale="log",
    )
    axes.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(RESULTS / "fedrep_linear-4.png", dpi=150)


def body(arguments: argparse.Namespace, data: dict[str, Any]) -> str:
    """Return the page that explains and shows the numbers."""
    rounds, last = arguments.rounds, arguments.long_rounds
    many = data["figure-4"][MANY]
    return rf"""## Figure 3

d = 10, k = 2, m = 5 fresh samples per round, a tenth of the n clients per round, noise
variance 1e-3, method-of-moments initialisation, seeds {arguments.seeds}. The table has
the principal angle distance to the true representation, mean ± standard deviation over
seeds. Each method has one constant step size for head and representation (FedRep's
exact heads need none). For each n it is the one of {", ".join(map(str, STEPS))} with
the smallest mean distance after {rounds} rounds. FedRep is ahead in a round if its mean
distance is below that of the other method.

{table3(data["figure-3"], rounds)}
![Figure 3](fedrep_linear-3.png)

Lines are means; bands are the range over seeds. As in the paper, the distance decreases
with more clients, and exact heads are ahead of one gradient step. Unlike in the paper,
ten gradient steps with their own best step size perform as well as exact heads: the
differences are within the spread. A constant step size leaves an error floor, which
depends on the noise of the fresh batches. By round {last} the step sizes that are best
at round {rounds} have reached it. GD-GD has the lowest floor, because its heads change
most slowly.

The heads w\* have norm √k, and the columns of B\* norm 1. The paper only states that
both are normalised.

## Figure 4

(d, k) = (20, 2), trained on n = 100 clients with m = 5 for {last} rounds, with a tenth
of the clients per round. Then {arguments.new_clients} new clients with the same B\* fit
a head on the learned B, and are tested on 200 further examples. Entries are the mean
squared error (including the noise, 1e-3) over new clients and seeds {arguments.seeds},
with the median in parentheses. *Local only* is least squares in all d dimensions, with
minimum norm if there are fewer samples than dimensions.

{table4(data["figure-4"], arguments.samples)}
![Figure 4](fedrep_linear-4.png)

With as many samples as unknowns (2 samples here, 20 for local only), the mean is
dominated by a few clients with nearly dependent inputs, so compare the medians there. A
head on FedRep's B is good with k samples, and near the noise level from k + 1. Local
only needs more than d samples.

The result of FedAvg depends on the number of local steps. With 5 samples and batches of
5 its clients make one gradient step per round, and, as in the paper, FedAvg learns no
representation. With 50 samples, and so 10 local steps per round, it does in some seeds
(distances {", ".join(f"{x:.2g}" for x in many["distance"])}), and the error decreases
to a few times the noise. A later paper shows that local steps make FedAvg learn
representations (Collins et al., NeurIPS 2022). The paper does not give its m, its
rounds or FedAvg's step size. Here FedAvg trains for one local epoch, with the best step
size of {", ".join(map(str, SGD_STEPS))} by the mean error at 10 samples. FedAvg's
clients have the same samples in every round; the table therefore also has FedRep under
this condition.

Both figures took {data["seconds"]} s on one core.
"""


def main() -> None:
    """Run both figures and write ``results/fedrep_linear``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 50, 100, 500])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=50, help="steps are chosen here")
    parser.add_argument("--long-rounds", type=int, default=200, help="in the plots")
    parser.add_argument("--new-clients", type=int, default=20)
    parser.add_argument(
        "--samples",
        type=int,
        nargs="+",
        default=[1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40],
    )
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    began = time.monotonic()
    # Steps that are too large overflow; their replies are rejected.
    with np.errstate(all="ignore"):
        data = {"figure-3": figure3(arguments), "figure-4": figure4(arguments)}
    data["seconds"] = round(time.monotonic() - began)
    plot(data["figure-3"], data["figure-4"], arguments.samples)
    title = "FedRep, Figures 3 and 4: linear representations"
    write("fedrep_linear", title, body(arguments, data), data)


if __name__ == "__main__":
    main()
