"""FLUTE, Figure 2: heads of three clients that are optimised locally or together.

The paper's example is solved numerically: three classes, and three clients that have
classes 1 and 2, 1 and 3, 2 and 3. The features of a class are free variables, as in
observations B.2 and B.3. Each client has its own (local), or they are common to all
clients (together, condition 1). The loss is that of equation 54 or, with the
regularizer NC_i, of equation 10.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flwr_frl.common.settings import Setting
from flwr_frl.task.models.neural_collapse import neural_collapse

CLASSES = torch.tensor([[0, 1], [0, 2], [1, 2]])
MASK = torch.zeros(3, 3).scatter(1, CLASSES, 1.0).bool()
WIDTH = 3
# λ1 and λ2
FEATURE_WEIGHT = HEAD_WEIGHT = 0.005


def objective(
    together: bool, nc_weight: float, features: Tensor, heads: Tensor, bias: Tensor
) -> Tensor:
    """Return the sum of the clients' losses.

    Parameters
    ----------
    together, nc_weight : bool, float
        Whether features are common, and λ3.
    features : Tensor, shape (clients, classes, k)
        Feature of each class. Common features are those of the first client.
    heads, bias : Tensor, shapes (clients, classes, k) and (clients, classes)
        H_iᵀ and b_i.
    """
    if together:
        features = features[:1].expand_as(features)
    own = features.gather(1, CLASSES[:, :, None].expand(-1, -1, WIDTH))
    logits = own @ heads.mT + bias[:, None]
    loss = cross_entropy(logits.flatten(0, 1), CLASSES.flatten()) * len(CLASSES)
    loss = loss + FEATURE_WEIGHT * own.square().sum() / CLASSES.shape[1]
    loss = loss + HEAD_WEIGHT * heads.square().sum()
    if nc_weight:
        loss = loss + nc_weight * neural_collapse(heads, MASK).sum()
    return loss


def solve(together: bool, nc_weight: float, seed: int) -> tuple[Tensor, float]:
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
        loss = objective(together, nc_weight, *variables)
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


def run(settings: Mapping[str, Setting], place: Path) -> dict[str, Any]:
    """Solve a problem; return the loss and what `measure` returns."""
    together = settings["algorithm"] == "together"
    heads, loss = solve(together, float(settings["nc-weight"]), int(settings["seed"]))
    return {"loss": loss, **measure(heads)}
