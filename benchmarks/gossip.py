"""What the two gossip benchmarks share: runs, watched from outside, and their plots.

The dissertation's curves are those of the mean of the nodes' models, which nobody in
the system holds. All nodes live in this process here, so the benchmark looks into them.
"""

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS
from rich.progress import track

from clients.algorithms import complete
from clients.client_app import make_app
from clients.device.state import PREFIX
from strategies import build_strategy
from strategies.grids.simulation import InlineGrid
from strategies.server.rounds import run_rounds
from task.settings import Settings, resolve
from task.tasks import build_task
from task.training import evaluate

# Bits a second of a link (dissertation, section 3.5.3).
LINK = 100_000

Rows = list[dict[str, float]]


def run(name: str, given: Settings, output: Path, every: int) -> Rows:
    """Run one algorithm inline and watch the mean of the nodes' models.

    Parameters
    ----------
    name : str
        What the run is called.
    given : mapping
        Settings that differ from the defaults.
    output : Path
        Where the rows are kept; a run that is there is not run again.
    every : int
        Rounds between two looks.

    Returns
    -------
    list of dict
        ``iteration``, ``bits`` (per node, so far), ``error`` of the mean model,
        ``loss``, ``consensus``, ``seconds`` (compute) and ``link`` (seconds on a link
        of 100 kbit/s, all nodes sending at once).
    """
    path = output / f"{name}.json"
    if path.is_file():
        kept: Rows = json.loads(path.read_text())
        return kept
    settings = complete(resolve(given))
    nodes = int(settings["num-clients"])
    task = build_task(settings, nodes)
    grid = InlineGrid(make_app(dict(settings)), nodes)
    strategy = build_strategy(settings)
    arrays = strategy.initialize(grid)
    local = int(settings["local-steps"]) if settings["algorithm"] == "squarm-sgd" else 1
    rows: Rows = []
    bits, link, began = 0.0, 0.0, time.monotonic()
    rounds = track(
        range(1, int(settings["num-server-rounds"]) + 1), name, transient=True
    )
    for server_round in rounds:
        seen: dict[str, Any] = {}

        def note(_: int, __: Any, metrics: dict[str, Any], seen: Any = seen) -> None:
            seen.update(metrics)

        run_rounds(
            strategy,
            grid,
            arrays,
            range(server_round, server_round + 1),
            evaluated=lambda _: False,
            after_round=note,
        )
        if seen["clients"] < nodes:
            raise RuntimeError(
                f"{name}: round {server_round}: {strategy.training.rejections}"
            )
        bits += seen["bits"] / nodes
        link += seen["bits"] / max(seen["sent"], 1) / LINK
        if server_round % every == 0 or server_round == 1:
            state, consensus = mean_model(grid)
            model = task.scratch_model
            with torch.no_grad():
                model.load_state_dict(state)
            loss, accuracy = evaluate(model, task.test_examples(0), task.loss)
            rows.append(
                {
                    "iteration": server_round * local,
                    "bits": bits,
                    "error": 1 - accuracy,
                    "loss": loss,
                    "consensus": consensus,
                    "seconds": time.monotonic() - began,
                    "link": link,
                }
            )
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return rows


def mean_model(grid: InlineGrid) -> tuple[dict[str, torch.Tensor], float]:
    """Return the mean of the nodes' models and 1/n Σ ‖x_i − x̄‖².

    Before and after an exchange the mean is the same (equation 3.9).

    Parameters
    ----------
    grid : InlineGrid
        The grid with the nodes' states.

    Returns
    -------
    state : dict of str to Tensor
        Mean of parameters and of batch statistics.
    consensus : float
        Of the parameters, and batch statistics where there are any.
    """
    models = []
    for context in grid.contexts.values():
        newest = max(
            (n for n in context.state if n.startswith(PREFIX)),
            key=lambda n: int(n.removeprefix(PREFIX)),
        )
        record: Mapping[str, Any] = context.state[newest]
        models.append(
            {n: a.numpy() for n, a in record.items() if not n.startswith("gossip.")}
        )
    state, consensus = {}, 0.0
    for name in models[0]:
        stacked = np.stack([model[name] for model in models])
        mean = stacked.mean(axis=0, dtype=np.float64)
        if np.issubdtype(stacked.dtype, np.floating):
            consensus += float(np.square(stacked - mean).sum()) / len(models)
        state[name] = torch.tensor(mean.astype(stacked.dtype))
    return state, consensus


def first(rows: Rows, target: float, what: str) -> float:
    """Return a quantity when the error is first at most the target; NaN for never.

    Parameters
    ----------
    rows : list of dict
        Of one run.
    target : float
        The error.
    what : str
        The quantity.

    Returns
    -------
    float
        Its value.
    """
    return next((row[what] for row in rows if row["error"] <= target), float("nan"))


def table(
    runs: Mapping[str, Rows], target: float, reference: str
) -> list[tuple[str, ...]]:
    """Return a row for each run: final error, and what it took to reach the target.

    Parameters
    ----------
    runs : mapping of str to list of dict
        The runs.
    target : float
        The error to reach.
    reference : str
        The run to which the bits of the others are compared.

    Returns
    -------
    list of tuple of str
        Name, final error (mean of the last five looks), iterations, bits and seconds
        of the link to the target, and the bits as a multiple of the reference's.
    """
    # Its trigger may not have let anything through.
    least = first(runs[reference], target, "bits") or float("nan")
    lines = []
    for name, rows in runs.items():
        final = float(np.mean([row["error"] for row in rows[-5:]]))
        bits = first(rows, target, "bits")
        lines.append(
            (
                name,
                f"{final:.4f}",
                f"{first(rows, target, 'iteration'):,.0f}",
                f"{bits:.4g}",
                f"{first(rows, target, 'link'):,.4g}",
                f"{bits / least:,.1f}",
                f"{rows[-1]['seconds']:.0f}",
            )
        )
    return lines


HEADER = (
    "run",
    "final test error",
    "iterations to target",
    "bits a node to target",
    "seconds on 100 kbit/s",
    "bits / SQuARM's",
    "compute seconds",
)


def plot(runs: Mapping[str, Rows], target: float, name: str) -> None:
    """Draw the test error against iterations, bits, and time over the link.

    Parameters
    ----------
    runs : mapping of str to list of dict
        The runs.
    target : float
        The error to reach.
    name : str
        File name in the results.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    panels = figure.subplots(1, 4)
    axes_of = (
        ("iteration", "error", "iterations", False),
        ("bits", "error", "bits sent by a node", True),
        ("link", "error", "seconds on a 100 kbit/s link", True),
        ("iteration", "consensus", "iterations", False),
    )
    for axes, (x, y, label, logarithmic) in zip(panels, axes_of, strict=True):
        for run_name, rows in runs.items():
            axes.plot(
                [r[x] for r in rows], [r[y] for r in rows], label=run_name, lw=1.3
            )
        axes.set(xlabel=label, ylabel="test error of the mean model")
        if logarithmic:
            axes.set_xscale("log")
        if y == "error":
            axes.axhline(target, color="0.6", lw=0.8, ls=":")
        else:
            axes.set(ylabel="consensus distance", yscale="log")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    figure.savefig(RESULTS / name, dpi=150)


def quiet() -> None:
    """Keep Flower's log to errors, and torch to one thread."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
