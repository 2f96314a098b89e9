"""Means of replies."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_frl.strategies.server.replies import mean

# Means


def test_dtypes_are_kept_and_integers_are_rounded():
    # (1 + 2 + 4)/3 = 2.33 and (1 + 2 + 2)/3 = 1.67.
    replies = [
        {"n": np.array([a, b]), "s": np.array(a), "x": np.array([a], np.float32)}
        for a, b in ((1, 1), (2, 2), (4, 2))
    ]
    means = mean((1.0, arrays) for arrays in replies)
    assert means["n"].tolist() == [2, 2]
    assert means["n"].dtype == np.int64
    assert means["s"].shape == ()
    assert means["s"] == 2
    assert means["x"].dtype == np.float32
    assert means["x"][0] == np.float32(7 / 3)


def test_float32_is_summed_in_float64():
    # float32 cannot represent 2**24 + 1, so a sum in float32 would stay at 2**24.
    values = [np.array([2.0**24], np.float32)] + [np.ones(1, np.float32)] * 3
    means = mean((1.0, {"x": value}) for value in values)
    assert means["x"][0] == np.float32((2**24 + 3) / 4)


@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 1000),
            hnp.arrays(np.float64, 3, elements=st.floats(-1e6, 1e6)),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_mean_matches_numpy(replies):
    means = mean((weight, {"x": values}) for weight, values in replies)
    expected = np.average(
        [values for _, values in replies], axis=0, weights=[w for w, _ in replies]
    )
    np.testing.assert_allclose(means["x"], expected, rtol=1e-9, atol=1e-6)


def test_mean_holds_only_one_running_sum():
    size, replies = 1_000_000, 50

    def arrive():
        for i in range(replies):
            yield 1.0, {"x": np.full(size, i, np.float32)}

    tracemalloc.start()
    means = mean(arrive())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert means["x"][0] == (replies - 1) / 2
    # The sum, a scaled reply, and the current and previous replies take less memory
    # than five float64 arrays; 50 float32 replies would take as much as 25 of them.
    assert peak < 5 * size * 8
