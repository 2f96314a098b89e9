"""Names of classes, and examples that are held out for testing."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

# Larger integers are probably not classes.
MAX_CLASSES = 100_000
# Seed of held-out test sets, the same for all runs.
HELD_OUT_SEED = 0x4E1D
# An integer as a program writes it if other cells of its column are empty.
WHOLE = re.compile(r"([+-]?\d+)\.0*")


def class_name(label: str) -> str:
    """Return the class that a label names: ``1`` for ``1.0``, and without blanks."""
    label = label.strip()
    whole = WHOLE.fullmatch(label)
    return whole[1] if whole else label


def held_out(
    count: int, fraction: float, clients: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.int64]:
    """Return ascending rows for testing, the same for all seeds.

    Parameters
    ----------
    count : int
        Number of rows.
    fraction : float
        Share of the rows that is for testing; at least one row.
    clients : ndarray, optional
        Client of each row. Each then has its share of the test rows, up to one row.
    """
    tested = max(1, round(count * fraction))
    order = np.random.default_rng(HELD_OUT_SEED).permutation(count)
    if clients is None:
        return np.sort(order[:tested])
    names = clients[order].astype(str)
    _, starts = np.unique(np.sort(names), return_index=True)
    rows_of = np.split(order[np.argsort(names, kind="stable")], starts[1:])
    exact = np.array([len(rows) * fraction for rows in rows_of])
    counts = exact.astype(np.int64)
    # The clients with the largest remainders get one more.
    first = np.argsort(counts - exact, kind="stable")
    counts[first[: tested - counts.sum()]] += 1
    chosen = [rows[:k] for rows, k in zip(rows_of, counts, strict=True)]
    return np.sort(np.concatenate(chosen))
