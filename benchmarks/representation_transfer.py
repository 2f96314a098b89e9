"""Table 5.1 of Singh (UCLA 2024): representation transfer for linear regression.

The table is computed with the true V*, as in the dissertation, by the functions of
``flwr_frl.task.transfer``, and with a basis learned from sources, by strategy and
clients.
"""

import argparse
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.progress import track

from benchmarks.common import RESULTS, markdown, write
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.tasks.linear import principal_angle_distance
from flwr_frl.task.transfer import (
    TransferData,
    basis,
    benign_index,
    effective_ranks,
    halves,
    phase_one,
    phase_two,
    phase_two_descent,
)

D, Q = 1000, 50
RATIOS = (50.0, 20.0, 10.0, 5.0, 1.0)
# "Far below" means at most this fraction of the error from scratch.
FAR = 1 / 3
METHODS = {
    "error-phase-1": "phase 1",
    "error": "phase 2",
    "error-descent": "phase 2, descent",
    "error-scratch": "from scratch",
}
Errors = dict[str, float]
# By samples per phase and by ratio, with an entry for each run
Table = dict[str, dict[str, list[Errors]]]


def with_true_basis(
    ratio: float, n: int, noise: float, steps: int, seed: int
) -> Errors:
    """Return one run's errors / that of θ*, with V of V*, and phase 2's excess / σ²."""
    data = TransferData(
        dimension=D,
        rank=Q,
        num_sources=0,
        target_samples=2 * n,
        ratio_db=ratio,
        noise_variance=noise,
        seed=seed,
    )
    x, y = data.draw(0)
    x1, y1, x2, y2 = halves(x, y)
    first = phase_one(basis([data.span]), x1, y1)
    models = (
        first,
        phase_two(first, x2, y2),
        phase_two_descent(first, x2, y2, max_steps=steps),
        phase_two(np.zeros(D), x, y),
    )
    errors = dict(zip(METHODS, data.errors(0, *models)[1:], strict=True))
    return {**errors, "excess": data.excess_risk(0, models[1]) / noise}


class LastClient(InlineGrid):
    """A grid on which only the target, which joined last, can be reached."""

    def get_node_ids(self) -> list[int]:
        """Return the last client's id."""
        return list(super().get_node_ids())[-1:]


def with_sources(arguments: argparse.Namespace, seed: int) -> tuple[Table, Errors]:
    """Run the package: sources once, then one late target for each cell of the table.

    Also return the rank of the learned basis and its distance to V*.
    """
    count = arguments.sources
    settings: dict[str, Setting] = resolve(
        {
            "algorithm": "representation-transfer",
            "task": "transfer",
            "dimension": D,
            "rank": Q,
            "num-sources": count,
            "source-samples": arguments.source_samples,
            "num-clients": count + 1,
            "noise-variance": arguments.noise_variance,
            "seed": seed,
        }
    )
    teachers = build_strategy(settings)
    grid = InlineGrid(make_app(settings), count + 1)
    start = teachers.initialize(grid)
    shared = run_rounds(
        teachers, grid, start, range(1, 2), evaluated=lambda server_round: False
    )
    learned = shared["representation.weight"].numpy().T
    truth = TransferData(dimension=D, rank=Q, seed=seed).span
    distance = principal_angle_distance(learned, truth)
    about = {"rank": float(learned.shape[1]), "distance": distance}

    def target(**own: Setting) -> Errors:
        changed = {**settings, **{n.replace("_", "-"): v for n, v in own.items()}}
        strategy = build_strategy(changed)
        strategy.restore(teachers.snapshot()())
        late = LastClient(make_app(changed), count + 1)
        found: dict[str, Any] = {}
        run_rounds(
            strategy,
            late,
            shared,
            range(2, 3),
            after_round=lambda _, __, metrics: found.update(metrics),
        )
        return found

    table: Table = {}
    for n in arguments.samples:
        for ratio in RATIOS:
            cell: dict[str, Setting] = {"ratio_db": ratio, "target_samples": 2 * n}
            errors = target(**cell)
            descent = target(**cell, descent_steps=arguments.steps)
            errors["error-descent"] = descent["error"]
            kept = {method: errors[method] for method in METHODS}
            table.setdefault(str(n), {})[str(ratio)] = [kept]
    return table, about


def values(table: Table, n: object, ratio: object, method: str) -> list[float]:
    """Return a cell's errors, one for each run."""
    return [run[method] for run in table[str(n)][str(ratio)]]


def mean(table: Table, n: object, ratio: object, method: str) -> float:
    """Return a cell's mean error."""
    return float(np.mean(values(table, n, ratio, method)))


def shown(runs: Sequence[float]) -> str:
    """Return mean ± standard deviation, and the median if the deviation is larger."""
    center, spread = np.mean(runs), np.std(runs, ddof=1)
    text = f"{number(center)} ± {number(spread)}"
    return f"{text}, median {number(np.median(runs))}" if spread > center else text


def number(value: np.floating[Any] | float) -> str:
    """Return a number with at least three digits, never with an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table_of(table: Table) -> str:
    """Return Table 5.1."""
    rows = [
        (
            f"{n} + {n}",
            f"{float(ratio):g} dB",
            *(shown(values(table, n, ratio, method)) for method in METHODS),
        )
        for n in table
        for ratio in table[n]
    ]
    return markdown(("samples", "in/out ratio", *METHODS.values()), rows)


def risks(table: Table, noise: float) -> list[dict[str, float | None]]:
    """Return theorem 6's k*, r, R and terms / σ² by cell, with its constants as 1."""
    spectrum = TransferData(dimension=D, rank=Q).eigenvalues
    condition = spectrum[0] / spectrum[-1] * effective_ranks(spectrum, 0)[0]
    rows: list[dict[str, float | None]] = []
    for n in map(int, table):
        k = benign_index(spectrum, n)
        r, big_r = (None, None) if k is None else effective_ranks(spectrum, k)
        second = None if k is None or big_r is None else k / n + n / big_r
        for ratio in RATIOS:
            epsilon = 10 ** (-ratio / 10) * spectrum.sum()
            first = None if k is None else condition / n * (Q / n + epsilon / noise)
            cell = {"n": n, "ratio": ratio, "k*": k, "r": r, "R": big_r}
            rows.append({**cell, "transfer term": first, "noise term": second})
    return rows


def table_of_risks(table: Table, rows: list[dict[str, float | None]]) -> str:
    """Return the terms of theorem 6 beside the measured excess risk."""
    cells = [
        (
            *("none" if value is None else number(value) for value in row.values()),
            shown(values(table, row["n"], row["ratio"], "excess")),
        )
        for row in rows
    ]
    header = [name.replace("*", "\\*") for name in rows[0]]
    return markdown((*header, "measured excess"), cells)


def statements(table: Table) -> list[tuple[str, str, bool]]:
    """Return statements about the table, the measurements, and whether they hold."""
    rows = []
    for n in [n for n in table if int(n) < D]:
        for ratio in map(str, RATIOS):
            scratch = mean(table, n, ratio, "error-scratch")
            for method in ("error-phase-1", "error"):
                far, useful = (
                    mean(table, n, ratio, method) / scratch,
                    float(ratio) >= 10,
                )
                claim = "far below" if useful else "not far below"
                rows.append(
                    (
                        f"{n} + {n}, {float(ratio):g} dB: {METHODS[method]} is {claim} "
                        "training from scratch",
                        f"{far:.2g} of it",
                        (far <= FAR) == useful,
                    )
                )
    for n in [n for n in table if int(n) >= D]:
        for ratio in map(str, RATIOS[-2:]):
            before = values(table, n, ratio, "error-phase-1")
            for method in ("error", "error-descent"):
                after = values(table, n, ratio, method)
                below = np.mean(after) < np.mean(before)
                wins = sum(a < b for a, b in zip(after, before, strict=True))
                rows.append(
                    (
                        f"{n} + {n}, {float(ratio):g} dB: {METHODS[method]} is below "
                        "phase 1",
                        f"{number(np.mean(after))} and {number(np.mean(before))}, "
                        f"medians {number(np.median(after))} and "
                        f"{number(np.median(before))}, below "
                        f"in {wins} of {len(after)} runs",
                        bool(below),
                    )
                )
    return rows


def plot(table: Table) -> None:
    """Plot Table 5.1, with a panel for each number of samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = figure.subplots(1, len(table), sharey=True, squeeze=False)[0]
    for axes, n in zip(panels, table, strict=True):
        for i, (method, label) in enumerate(METHODS.items()):
            runs = np.array([values(table, n, r, method) for r in table[n]])
            # The two variants of phase 2 coincide for n < d.
            style = {"error-scratch": "--", "error-descent": ":"}.get(method, "-")
            axes.plot(
                RATIOS, runs.mean(axis=1), f"C{i}{style}", marker=".", label=label
            )
            low, high = runs.min(axis=1), runs.max(axis=1)
            axes.fill_between(RATIOS, low, high, color=f"C{i}", alpha=0.15, lw=0)
        axes.set(title=f"{n} + {n} samples", xlabel="in/out ratio (dB)", yscale="log")
        axes.set_xscale("log")
        axes.set_xticks(RATIOS, [f"{r:g}" for r in RATIOS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("error / error of θ*")
    panels[0].legend(fontsize=7)
    figure.savefig(RESULTS / "representation_transfer.png", dpi=150)


def body(arguments: argparse.Namespace, data: dict[str, Any]) -> str:
    """Return the page that explains and shows the numbers."""
    claims = markdown(
        ("statement", "measured", "true"),
        [
            (text, found, "yes" if true else "no")
            for text, found, true in data["claims"]
        ],
    )
    held = sum(true for _, _, true in data["claims"])
    learned = data["learned"]
    ranks = ", ".join(f"{about['rank']:g}" for about in learned["about"])
    distances = ", ".join(f"{about['distance']:.2g}" for about in learned["about"])
    return f"""d = {D}, q = {Q}, τ = 1, eigenvalues exp(-j/τ) + 1e-4, noise variance
{arguments.noise_variance:g}, {arguments.runs} runs (seeds 0 to {arguments.runs - 1}).
Entries are the mean squared error on 500 test samples divided by that of θ\\*: mean ±
standard deviation over the runs, and the median if the deviation exceeds the mean.
"Phase 2" is the closed form θ1 + X2⁺(y2 - X2 θ1); "descent" is at most
{arguments.steps:,} steps of gradient descent from θ1. V is a basis of the true V\\*, as
in the dissertation.

{table_of(data["true"])}
![Table 5.1](representation_transfer.png)

Lines are means; bands are the range over runs.

The dissertation gives neither the noise variance nor the scale of u, on which all
numbers above depend. Here u = V\\* w with w ~ N(0, I/q), so that its entries have
variance 1. The ratio in dB is a ratio of powers, and v is Gaussian in all directions.

## Statements

"Far below" means at most {FAR:.2g} of the error from scratch (means). {held} of
{len(data["claims"])} statements hold.

{claims}
With 1000 + 1000 samples the second half has as many samples as dimensions, so X2 is
square. Gradient descent converges to the interpolating solution, which amplifies the
noise through the smallest singular values of X2; its error has no finite mean. The
statement can therefore only hold for gradient descent that stops early. After
{arguments.steps:,} steps it has learned the relevant directions, but not yet the noise
in the others. The dissertation does not state its number of steps. Training from
scratch fits all 2000 samples at once, more than there are dimensions, and performs
well, as the dissertation states.

## The bound of theorem 6

With n samples in each phase and ratios in dB, k\\* is the least k with r_k ≥ b n; r
and R are the effective ranks r_k and R_k at k\\*. The theorem bounds the excess risk
(5.2) of phase 2 by a transfer term, λ_1 r_0 / (λ_d n) (σ² q / n + ε²), a noise term,
σ² (k\\* / n + n / R), and a third term, which vanishes as V is exact. The constants are
unknown: they, b and the logarithms are 1 here, so the terms are no bounds, and only
show how the bound scales. ε² is E (xᵀ v)². All are divided by σ², as is the measured
excess risk of the closed form. "None": no k has r_k ≥ n: the theorem does not apply.

{table_of_risks(data["true"], data["risks"])}
## With a learned basis, through strategy and clients

{arguments.sources} source clients with {arguments.source_samples} samples each (inputs
N(0, I)) send the direction of their least-squares model. The server's basis has rank
{ranks} (tolerance {resolve({})["rank-tolerance"]:g}; seeds 0 to
{arguments.learned_runs - 1}) and principal angle distance {distances} to V\\*. Each row
is for a target client that joins later.

{table_of(learned["table"])}
All took {data["seconds"]} s.
"""


def main() -> None:
    """Run everything and write ``results/representation_transfer``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--learned-runs", type=int, default=3)
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 200, 300, 1000])
    parser.add_argument("--noise-variance", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=10_000, help="of gradient descent")
    parser.add_argument("--sources", type=int, default=100)
    parser.add_argument("--source-samples", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    began = time.monotonic()
    noise, steps = arguments.noise_variance, arguments.steps
    learned: Table = {}
    abouts = []
    for seed in track(range(arguments.learned_runs), "learned basis"):
        table, about = with_sources(arguments, seed)
        abouts.append(about)
        for n, ratios in table.items():
            for ratio_name, runs in ratios.items():
                learned.setdefault(n, {}).setdefault(ratio_name, []).extend(runs)
    true: Table = {str(n): {str(r): [] for r in RATIOS} for n in arguments.samples}
    for seed in track(range(arguments.runs), "true basis"):
        for n in arguments.samples:
            for ratio in RATIOS:
                errors = with_true_basis(ratio, n, noise, steps, seed)
                true[str(n)][str(ratio)].append(errors)
    data: dict[str, Any] = {
        "true": true,
        "learned": {"table": learned, "about": abouts},
        "claims": statements(true),
        "risks": risks(true, noise),
        "seconds": round(time.monotonic() - began),
    }
    plot(true)
    title = "Table 5.1: representation transfer for linear regression"
    write("representation_transfer", title, body(arguments, data), data)


if __name__ == "__main__":
    main()
