"""FLUTE, Figure 2: heads of three clients that are optimised locally or together.

``python -m benchmarks.neural_collapse`` solves the paper's example numerically: three
classes, and three clients that have classes 1 and 2, 1 and 3, 2 and 3. The features of
a class are free variables, as in observations B.2 and B.3. Each client has its own
(local), or they are common to all clients (together, condition 1). The loss is that of
equation 54 or, with the regularizer NC_i, of equation 10.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.common import RESULTS, markdown, write
from flwr_frl.task.models.neural_collapse import neural_collapse

CLASSES = torch.tensor([[0, 1], [0, 2], [1, 2]])
MASK = torch.zeros(3, 3).scatter(1, CLASSES, 1.0).bool()
WIDTH = 3
# λ1 and λ2
FEATURE_WEIGHT = HEAD_WEIGHT = 0.005
SEEDS = (0, 1, 2)


class Problem(NamedTuple):
    """A minimisation problem: its name, whether features are common, and λ3."""

    name: str
    together: bool
    nc_weight: float


PROBLEMS = (
    Problem("local, equation 54", False, 0.0),
    Problem("together, equation 54", True, 0.0),
    Problem("together, equation 10, λ3 = 0.02", True, 0.02),
    Problem("together, equation 10, λ3 = 0.05", True, 0.05),
    Problem("together, equation 10, λ3 = 0.25", True, 0.25),
)


def objective(
    problem: Problem, features: Tensor, heads: Tensor, bias: Tensor
) -> Tensor:
    """Return the sum of the clients' losses.

    Parameters
    ----------
    problem : Problem
        Whether features are common, and λ3.
    features : Tensor, shape (clients, classes, k)
        Feature of each class. Common features are those of the first client.
    heads, bias : Tensor, shapes (clients, classes, k) and (clients, classes)
        H_iᵀ and b_i.
    """
    if problem.together:
        features = features[:1].expand_as(features)
    own = features.gather(1, CLASSES[:, :, None].expand(-1, -1, WIDTH))
    logits = own @ heads.mT + bias[:, None]
    loss = cross_entropy(logits.flatten(0, 1), CLASSES.flatten()) * len(CLASSES)
    loss = loss + FEATURE_WEIGHT * own.square().sum() / CLASSES.shape[1]
    loss = loss + HEAD_WEIGHT * heads.square().sum()
    if problem.nc_weight:
        loss = loss + problem.nc_weight * neural_collapse(heads, MASK).sum()
    return loss


def solve(problem: Problem, seed: int) -> tuple[Tensor, float]:
    """Return the optimal heads and the loss, for a random initial point."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (3, 3, WIDTH), (3, 3, WIDTH)
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    variables = [v.requires_grad_() for v in (*start, torch.zeros(3, 3).double())]
    optimizer = torch.optim.LBFGS(
        variables,
        max_iter=250,
        history_size=50,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(problem, *variables)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return variables[1].detach(), float(closure().detach())


def degrees(a: Tensor, b: Tensor) -> float:
    """Return the angle between two vectors."""
    cosine = torch.cosine_similarity(a, b, 0).clamp(-1, 1)
    return float(torch.rad2deg(torch.arccos(cosine)))


def measure(heads: Tensor) -> dict[str, Any]:
    """Return angles in degrees, NC2, and the norm of the absent class's head."""
    pairs = [degrees(h[c[0]], h[c[1]]) for h, c in zip(heads, CLASSES, strict=True)]
    shared = [
        degrees(heads[i, c], heads[j, c])
        for c, i, j in ((0, 0, 1), (1, 0, 2), (2, 1, 2))
    ]
    norms = heads.norm(dim=2)
    return {
        "within": float(np.mean(pairs)),
        "between": float(np.mean(shared)),
        "absent": float((norms[~MASK] / norms[MASK].mean()).max()),
        "sum": float((heads.sum(1).norm(dim=1) / norms[MASK].mean()).max()),
        "global-nc2": float(neural_collapse(heads, MASK).mean()),
        "local-nc2": float(neural_collapse(heads, MASK, local=True).mean()),
    }


def plot(heads: dict[str, Tensor]) -> None:
    """Plot the normalised heads of each client, in the plane of all heads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.7 * len(heads)), layout="constrained")
    axes = figure.subplots(len(heads), 3)
    for row, (name, own) in zip(axes, heads.items(), strict=True):
        # With common features, all heads share a basis; otherwise, each client has its
        # own.
        together = name.startswith("together")
        for i, place in enumerate(row):
            shown = own[MASK] if together else own[i][MASK[i]]
            basis = torch.linalg.svd(shown).Vh[:2]
            for c in CLASSES[i].tolist():
                end = basis @ own[i, c] / own[i, c].norm()
                place.annotate(
                    "", end.tolist(), (0, 0),
                    arrowprops={"arrowstyle": "->", "color": f"C{c}", "lw": 2},
                )  # fmt: skip
                place.text(*(1.15 * end).tolist(), str(c + 1), color=f"C{c}")
            place.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), xticks=[], yticks=[])
            place.set_aspect("equal")
            place.set_title(f"{name}: client {i + 1}", fontsize=8)
    figure.savefig(RESULTS / "neural_collapse.png", dpi=110)


BODY = """FLUTE's Figure 2: three classes; the clients have classes 1 and 2, 1 and 3, 2
and 3. The features of a class are free variables with λ1 = {feature}, the heads have
λ2 = {head} and width {width}. Each problem is solved from {seeds} random starts, which
reach the same loss (to 1e-5); ranges are over the starts.

{table}

![Directions of the heads of each client's classes](neural_collapse.png)

The heads of a local optimum are opposite (180°), as in the paper's figure. So are those
of the common optimum of equation 54, in contrast to the second row of the figure and to
observation B.3 (equation 60, 120°). The reason is that adding one vector to all columns
of H_i does not change the softmax, so at every stationary point of λ2 ‖H_i‖² they sum
to 0; columns as in equation 60, of which the absent class's is 0, do not. Common
features have an effect between clients, though: a class's heads in two clients enclose
60° instead of an arbitrary angle. The regularizer NC_i of equation 10 leads to 120°
within a client, once its weight is large enough. It leaves the angles between clients
open: the heads' common component changes neither the loss nor NC_i by its direction.
"""


def main() -> None:
    """Solve all problems, and write the page."""
    data, best = dict[str, Any](), dict[str, Tensor]()
    for problem in PROBLEMS:
        found = [solve(problem, seed) for seed in SEEDS]
        heads, _ = min(found, key=lambda pair: pair[1])
        best[problem.name] = heads
        between = [measure(own)["between"] for own, _ in found]
        losses = [loss for _, loss in found]
        data[problem.name] = {
            "losses": losses,
            **measure(heads),
            "between": [min(between), max(between)],
        }
    rows = [
        (
            name,
            f"{min(own['losses']):.5f}",
            f"{own['within']:.1f}°",
            "{:.0f}° to {:.0f}°".format(*own["between"]),
            f"{own['absent']:.4f}",
            f"{own['sum']:.4f}",
            f"{own['global-nc2']:.3f}",
            f"{own['local-nc2']:.3f}",
        )
        for name, own in data.items()
    ]
    columns = (
        "problem",
        "loss",
        "angle of a client's two heads",
        "angle of a class's heads in two clients",
        "norm of the absent class's head",
        "norm of the sum of a client's heads",
        "Global NC2",
        "Local NC2",
    )
    plot(best)
    body = BODY.format(
        feature=FEATURE_WEIGHT,
        head=HEAD_WEIGHT,
        width=WIDTH,
        seeds=len(SEEDS),
        table=markdown(columns, rows),
    )
    write("neural_collapse", "Heads that are optimised locally or together", body, data)


if __name__ == "__main__":
    main()
