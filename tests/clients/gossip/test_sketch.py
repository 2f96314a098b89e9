"""Count sketches are linear and preserve lengths within their standard error."""

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from flwr_frl.clients.gossip.sketch import SKETCH, SMALLEST_SKETCHED, _hash, sketch


@hypothesis_settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 3000))
def test_a_sketch_is_linear(seed, d):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, d)).astype(np.float32)
    np.testing.assert_allclose(
        sketch(x + 2 * y), sketch(x) + 2 * sketch(y), rtol=0, atol=1e-3
    )
    assert sketch(x).shape == (SKETCH,)
    assert sketch(x).dtype == np.float32


def test_a_sketch_adds_each_entry_to_one_sum():
    d = 2000
    columns = np.stack([sketch(row) for row in np.eye(d, dtype=np.float32)])
    assert (np.abs(columns).sum(1) == 1).all()
    # Counts of the two signs and of the 256 buckets. Each tolerance is 5 standard
    # deviations, which a random hash exceeds about once in 10^6 times.
    assert abs(columns.sum()) < 5 * d**0.5
    counts = np.abs(columns).sum(0)
    chi_squared = ((counts - d / SKETCH) ** 2 / (d / SKETCH)).sum()
    assert abs(chi_squared - 255) < 5 * (2 * 255) ** 0.5


def test_a_sketch_preserves_lengths_within_its_standard_error():
    """||Sx||^2 / ||x||^2 has mean 1 and standard deviation sqrt(2 / 256) = 8.8 %.

    For 300 Gaussian vectors, each ratio is within 5.5 standard deviations (a sum of 256
    squares; by Laurent and Massart's bound, one fails with probability below 10^-5, any
    of them with 0.3 %). The standard deviation of all ratios is within 20 % of its
    theoretical value.
    """
    rng = np.random.default_rng(0)
    ratios = []
    for d in (650, 7850, 20_000):
        for _ in range(100):
            x = rng.standard_normal(d).astype(np.float32)
            ratios.append(np.square(sketch(x)).sum() / np.square(x).sum())
    ratios = np.array(ratios)
    error = (2 / SKETCH) ** 0.5
    assert np.abs(ratios - 1).max() < 5.5 * error
    assert abs(ratios.mean() - 1) < 0.05
    assert 0.8 * error < ratios.std() < 1.2 * error


def test_reconstruction_from_a_sketch_is_poor():
    # The minimum-norm solution of the sketch's equations.
    x = np.random.default_rng(0).normal(size=SMALLEST_SKETCHED).astype(np.float32)
    index, signs = _hash(len(x))
    shares = signs / np.bincount(index)[index]
    guess = shares * sketch(x)[index]
    cosine = x @ guess / np.linalg.norm(x) / np.linalg.norm(guess)
    # Expected cosine: sqrt(256 / 25,600) = 0.1
    assert 0.07 < cosine < 0.13
