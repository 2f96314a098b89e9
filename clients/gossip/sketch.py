"""Count sketches: short linear images of vectors that preserve lengths on average."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

# Entries of a sketch. The standard error of a squared length is at most
# √(2 / SKETCH) = 9 %.
SKETCH = 256
# Devices with private data send sketches of models with at least this many parameters.
SMALLEST_SKETCHED = 100 * SKETCH


def sketch(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the count sketch of a vector, shape (SKETCH,).

    Each entry is added with a random sign to one of `SKETCH` sums (Charikar, Chen and
    Farach-Colton 2002). Signs and sums are the same for all nodes, so the length of the
    difference of two sketches estimates the length of the difference of the vectors.

    A sketch provides at most `SKETCH` linear equations for d unknowns, always the same
    ones, so repeated sketches reveal no further directions. Vectors of few entries can
    be reconstructed. In general, the best reconstruction without prior knowledge is a
    projection, which has a cosine of √(SKETCH / d) with the vector. For d ≥ 100
    `SKETCH` this is at most 0.1; devices send no sketches of smaller models.
    """
    index, signs = _hash(len(vector))
    sums = np.bincount(index, signs * vector, SKETCH)
    return sums.astype(np.float32)


@lru_cache(maxsize=2)
def _hash(
    dimension: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the index of the sum to which each entry is added, and its sign."""
    raw = np.random.Philox(key=0x5CE7).random_raw(dimension)
    index = (raw >> np.uint64(1)) % np.uint64(SKETCH)
    return index.astype(np.int64), np.where(raw & np.uint64(1), 1.0, -1.0)
