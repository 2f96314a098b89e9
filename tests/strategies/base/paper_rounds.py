"""Comparison of softmax regression runs with a NumPy implementation of a paper."""

from typing import Any

import pytest
from softmax_runs import (
    Matrix,
    Run,
    assert_near,
    assert_same,
    loss_of,
    matrix,
    run,
    start,
)

# Settings under which an algorithm is compared with NumPy
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.6, "weight_decay": 0.05},
    "examples": {"weighting": "examples"},
    "srpfl": {"srpfl": True},
}
EACH_VARIANT = pytest.mark.parametrize("more", VARIANTS.values(), ids=list(VARIANTS))
# Small batches in random order, momentum and weight decay
SMALL_BATCHES = {"batch_size": 4, "momentum": 0.5, "weight_decay": 1e-3}


def run_variant(algorithm: str, rounds: int = 4, **more) -> Run:
    """Run a variant, and check how many clients counted in each round."""
    result = run(algorithm, rounds, **more)
    counts = [1, 1, 2, 2, 3][:rounds] if more.get("srpfl") else [3] * rounds
    assert [len(clients) for clients in result.trained] == counts
    return result


def assert_rounds(found: Run, expected: list[tuple[Matrix, list]]) -> None:
    """Compare the shared and the personal models with NumPy, in each round.

    A client that has not trained has no personal model; the expected one must then be
    None or the initial model.
    """
    for arrays, kept, (w, personal) in zip(
        found.arrays, found.kept, expected, strict=True
    ):
        assert_near(matrix(arrays), w)
        for state, v in zip(kept, personal, strict=True):
            if state:
                assert_near(matrix(state, "model."), v)
            elif v is not None:
                assert_near(start(), v)


def assert_losses(found: Run, models: list[Matrix], now: int = -1) -> None:
    """Assert that each client was tested with its model."""
    for i, (metrics, theta) in enumerate(zip(found.metrics[now], models, strict=True)):
        assert metrics["loss"] == pytest.approx(loss_of(theta, i), abs=1e-5)


def assert_near_arrays(found: Run, other: Run) -> None:
    """Assert that two runs have the same shared arrays, up to rounding."""
    for arrays, others in zip(found.arrays, other.arrays, strict=True):
        assert_near(matrix(arrays), matrix(others), within=1e-6)


def assert_same_arrays(found: Run, other: Run) -> None:
    """Assert that two runs have bit-identical shared arrays in each round."""
    for arrays, others in zip(found.arrays, other.arrays, strict=True):
        assert_same(arrays, others)
