"""A model of two layers, and its gradient in NumPy, on the data of `softmax_runs`.

Its parameters are matrices [A | a] and [W | b]: the outputs are W tanh(A x + a) + b.
"""

from collections.abc import Callable

import numpy as np
from softmax_runs import (
    CLASSES,
    DIMENSION,
    RATE,
    STEPS,
    Arrays,
    Matrix,
    N,
    draw,
    example_sets,
)
from torch import nn

from flwr_frl.task import ExampleTask, SplitModel

WIDTH = 5
NAMES = tuple(str(i) for i in range(CLASSES))


def model() -> SplitModel:
    layers = nn.Linear(DIMENSION, WIDTH), nn.Tanh()
    return SplitModel(nn.Sequential(*layers), nn.Linear(WIDTH, CLASSES))


def layered(num_clients: int) -> ExampleTask:
    """Return the task, for the setting ``task=layered:layered``."""
    return ExampleTask(model, example_sets(False), example_sets(True), classes=NAMES)


def parts(arrays: Arrays, prefix: str = "") -> tuple[Matrix, Matrix]:
    """Return [A | a] and [W | b] from named arrays."""
    matrices = []
    for part in ("representation.0", "head"):
        weight, bias = (arrays[f"{prefix}{part}.{n}"] for n in ("weight", "bias"))
        matrices.append(np.column_stack([weight, bias]).astype(float))
    return matrices[0], matrices[1]


def start() -> tuple[Matrix, Matrix]:
    return parts({n: t.numpy() for n, t in layered(N).initial_state.items()})


def features(a: Matrix, x: Matrix) -> Matrix:
    return np.tanh(with_ones(x) @ a.T)


def with_ones(x: Matrix) -> Matrix:
    return np.column_stack([x, np.ones(len(x))])


def gradients(
    a: Matrix,
    w: Matrix,
    i: int,
    memory: Matrix | float = 0.0,
    extra: Callable[[Matrix, np.ndarray], Matrix | float] = lambda z, y: 0.0,
) -> tuple[Matrix, Matrix, Matrix]:
    """Return gradients by both matrices and by ``memory``, added to the features.

    The objective is the mean cross-entropy plus a function of the features z and the
    targets, of which ``extra`` is the derivative by z.
    """
    x, y = draw(i)
    z = features(a, x)
    scores = np.exp(with_ones(z + memory) @ w.T)
    slope = (scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[y]) / len(y)
    back = slope @ w[:, :-1]
    through = (back + extra(z, y)) * (1 - z**2)
    return through.T @ with_ones(x), slope.T @ with_ones(z + memory), back.sum(0)


def loss_of(a: Matrix, w: Matrix, i: int, memory: Matrix | float = 0.0) -> float:
    """Return the mean cross-entropy on the test examples."""
    x, y = draw(i, test=True)
    scores = with_ones(features(a, x) + memory) @ w.T
    return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]))


def descend(a: Matrix, w: Matrix, i: int, **extra) -> tuple[Matrix, Matrix]:
    """Return both matrices after a client's steps; ``extra`` as in `gradients`."""
    for _ in range(STEPS):
        of_a, of_w, _ = gradients(a, w, i, **extra)
        a, w = a - RATE * of_a, w - RATE * of_w
    return a, w


def class_means(a: Matrix, i: int) -> tuple[Matrix, np.ndarray]:
    """Return a client's mean features of each class, or zeros, and its examples."""
    x, y = draw(i)
    z, counts = features(a, x), np.bincount(y, minlength=CLASSES)
    means = [z[y == c].mean(0) if n else np.zeros(WIDTH) for c, n in enumerate(counts)]
    return np.array(means), counts


def average_classes(
    means: Matrix, known: np.ndarray, own: list, weighting: str
) -> None:
    """Replace the means of the classes that some of the clients have."""
    for c in range(CLASSES):
        have = [(m[c], n[c]) for m, n in own if n[c]]
        if have:
            by = [n if weighting == "examples" else 1.0 for _, n in have]
            means[c] = np.average([m for m, _ in have], axis=0, weights=by)
            known[c] = True
