"""Means of replies: hand-computed values, bit-identical in any order."""

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from flwr.app import Context, Message, MessageType
from function_clients import (
    START,
    averaging,
    grid_of,
    honest,
    partition_of,
    reply_with,
    train_once,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_frl.common.arrays import Matrix, ReplyRows, RowArrays, layout_of
from flwr_frl.strategies.server.replies import mean


def test_uniform_mean_matches_hand_computed_values():
    # The clients add 1, 2, 3 and 4 to 0: 2.5. Losses 0, 1, 2 and 3, weighted by 1 to 4
    # examples: 20/10.
    arrays, metrics = train_once(averaging(), grid_of(4))
    assert list(arrays) == ["w", "b"]
    assert arrays["w"].numpy().tolist() == [[2.5] * 3] * 2
    assert arrays["b"].numpy().dtype == np.float32
    assert metrics["train-loss"] == 2.0
    assert metrics["clients"] == 4
    assert metrics["rejected"] == 0
    assert metrics["unanswered"] == 0


def shuffled(seed: int) -> Callable[[list], list]:
    def shuffle(replies: list) -> list:
        order = np.random.default_rng(seed).permutation(len(replies))
        return [replies[i] for i in order]

    return shuffle


def as_they_arrive(replies: list) -> Iterator:
    """Yield replies; check that earlier ones, except the invalid one, are freed."""
    former: list[Message] = []
    for reply in replies:
        assert sum("arrays" in message.content for message in former) <= 1
        former.append(reply)
        yield reply


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_mean_does_not_depend_on_the_order_of_arrival(weighting):
    def noisy(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        i = partition_of(context)
        # Values of 20 orders of magnitude: sums in another order round differently.
        rng = np.random.default_rng(i)
        values = rng.standard_normal((300, 300)) * 10.0 ** rng.integers(-10, 10, 300)
        if i == 2:
            values[0, 0] = np.nan
        arrays = {"x": values.astype(np.float32), "n": np.array(i)}
        return reply_with(message, arrays, num_examples=i + 3, train_loss=1 / 3)

    start = {"x": np.zeros((300, 300), np.float32), "n": np.array(0)}
    (listed, about), *others = [
        train_once(averaging(weighting=weighting), grid_of(7, noisy), start, order)
        for order in (list, shuffled(1), as_they_arrive)
    ]
    assert about["rejected"] == 1
    for arrays, metrics in others:
        assert metrics == about
        assert {n: a.data for n, a in arrays.items()} == {
            n: a.data for n, a in listed.items()
        }


def test_round_in_which_no_client_has_examples():
    def without(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        return reply_with(message, START, num_examples=0, train_loss=0.0)

    arrays, metrics = train_once(averaging(), grid_of(3, without))
    assert arrays["w"].numpy().tolist() == [[0.0] * 3] * 2
    assert metrics["train-loss"] == 0.0
    # Weighted by examples all weights are 0, so the old arrays stay.
    arrays, _ = train_once(averaging(weighting="examples"), grid_of(3, without))
    assert arrays is None


# Means of arrays


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


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.booleans())
def test_rows_of_a_matrix_have_the_mean_of_their_arrays(counts, ends_by_name):
    """Batches of rows, the last reply perhaps not a row, are added in their order."""
    rng = np.random.default_rng(sum(counts))
    shapes = (2, 3), (), (1,)
    layout = layout_of(("a", "b", "c"), shapes)
    batches = [rng.normal(size=(n, layout.size)).astype(np.float32) for n in counts]
    each = [layout.views(row) for b in batches for row in b]
    weights = rng.integers(1, 9, len(each)).astype(float).tolist()
    rows = [
        RowArrays(ReplyRows(Matrix(b, layout), {"num-examples": [1] * len(b)}), i)
        for b in batches
        for i in range(len(b))
    ]
    if ends_by_name:
        rows[-1:] = each[-1:]
    expected = mean(zip(weights, each, strict=True))
    actual = mean(zip(weights, rows, strict=True))
    assert {n: a.tobytes() for n, a in actual.items()} == {
        n: a.tobytes() for n, a in expected.items()
    }
    assert {n: a.shape for n, a in actual.items()} == dict(
        zip("abc", shapes, strict=True)
    )
