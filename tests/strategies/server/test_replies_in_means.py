"""Means of replies, sizes of messages, and arrays without expected shapes."""

import tracemalloc

import numpy as np
import pytest
from claimed_arrays import (
    BAD_ARRAYS,
    EXPECTED,
    HEADER,
    VALUES,
    claimed,
    npy,
    npy_with_header,
    reply_of,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.replies import (
    count_bytes,
    mean,
    reply_arrays,
    single_metrics,
    to_record,
)

# Means


def test_mean_matches_hand_computed_values():
    replies = [{"w": np.array([1.0, 5.0])}, {"w": np.array([4.0, -1.0])}]
    # Uniform: (1 + 4)/2 and (5 - 1)/2. With weights 1 and 3: (1 + 12)/4 and (5 - 3)/4.
    uniform = mean((1.0, arrays) for arrays in replies)
    by_examples = mean(zip((1.0, 3.0), replies, strict=True))
    assert uniform["w"].tolist() == [2.5, 2.0]
    assert by_examples["w"].tolist() == [3.25, 0.5]


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


def test_mean_does_not_modify_the_replies():
    values = [np.ones(3), np.ones(3)]
    mean((1.0, {"x": value}) for value in values)
    assert all(np.array_equal(value, np.ones(3)) for value in values)


def test_mean_is_none_if_all_weights_are_zero():
    assert mean(iter([])) is None
    assert mean([(0.0, {"x": np.ones(2)})]) is None
    # A reply with weight 0 does not affect the mean.
    means = mean([(0.0, {"x": np.full(2, 9.0)}), (2.0, {"x": np.ones(2)})])
    assert means["x"].tolist() == [1.0, 1.0]


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


# Sizes


def test_count_bytes_matches_a_hand_computed_size():
    # A padded .npy header has 128 bytes, 6 floats have 24, and the names "arrays" and
    # "w" have 7.
    message = Message(RecordDict({"arrays": to_record({"w": VALUES})}), 1, "train")
    assert count_bytes(message) == 128 + 24 + 6 + 1
    # The number adds 8 bytes, and the names "config" and "round" add 11.
    message.content["config"] = ConfigRecord({"round": 3})
    assert count_bytes(message) == 159 + 8 + 6 + 5


def test_single_metrics_converts_numpy_scalars():
    record = single_metrics({"a": np.float64(0.5), "b": 3, "c": np.float32(2)})
    assert dict(record) == {"a": 0.5, "b": 3, "c": 2.0}
    assert [type(value) for value in record.values()] == [float, int, float]


def test_records_are_c_ordered():
    record = to_record({"w": np.asfortranarray(VALUES)})
    assert b"'fortran_order': False" in record["w"].data
    np.testing.assert_array_equal(record["w"].numpy(), VALUES)


# Arrays without expected names and shapes


def test_consistent_arrays_are_accepted():
    reply = reply_of(EXPECTED)
    assert list(reply_arrays(reply, "arrays")) == ["a", "b"]
    with pytest.raises(InvalidReplyError, match="has no arrays under 'other'"):
        reply_arrays(reply, "other")


LIES = {
    name: array
    for name, array in BAD_ARRAYS.items()
    # These are consistent, and differ only from what is expected.
    if name
    not in {
        "wrong shape",
        "another number of dimensions",
        "wrong dtype",
        "integers",
        "half as wide",
    }
} | {
    "objects": claimed(b"\0" * 48, dtype="object"),
    "objects with a header": claimed(
        npy_with_header(HEADER.replace("<f4", "|O"), bytes(48)), dtype="object"
    ),
    "text": Array(np.array([["ab"] * 3] * 2)),
    "records": claimed(npy(VALUES), dtype="f4,f4"),
    "unreadable dtype": claimed(npy(VALUES), dtype="((("),
    "empty dtype": claimed(npy(VALUES), dtype=""),
    # NumPy raises SyntaxError for it.
    "dtype of two commas": claimed(npy(VALUES), dtype="f4,,"),
    "negative": claimed(
        npy_with_header(HEADER.replace("2, 3", "-2, -3")), shape=(-2, -3)
    ),
    "overflowing": claimed(npy(VALUES), shape=(2**62, 2**62)),
}


@pytest.mark.parametrize("name", sorted(LIES))
def test_inconsistent_arrays_are_rejected(name):
    record = ArrayRecord({"a": LIES[name]})
    with pytest.raises(InvalidReplyError, match="array 'a'"):
        reply_arrays(reply_of(record), "arrays")


def test_empty_values_are_counted():
    # Flower's own count raises an error for empty values, which any client can send.
    content = RecordDict(
        {
            "c": ConfigRecord({"text": "", "data": b"", "list": [], "flag": True}),
            "m": MetricRecord({"values": [], "x": 1.5}),
        }
    )
    message = Message(content, 1, "train")
    assert count_bytes(message) == 1 + (4 + 4 + 4 + 4 + 1) + 1 + (6 + 1 + 8)
