"""Decoding and checking the arrays, records and metrics of replies."""

import io
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from claimed_arrays import (
    BAD_ARRAYS,
    EXPECTED,
    HEADER,
    LIKE,
    VALUES,
    claimed,
    npy,
    npy_with_header,
    reply_of,
)
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.replies import (
    check_arrays,
    decode,
    is_finite,
    reply_metrics,
    to_record,
)
from flwr_frl.strategies.server.round import Reply

# Arrays


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_valid_array_is_decoded(version):
    decoded = decode(claimed(npy(VALUES, version=version)), LIKE)
    np.testing.assert_array_equal(decoded, VALUES)
    assert decoded.dtype == np.float32


def test_fortran_ordered_array_is_decoded():
    data = npy(np.asfortranarray(VALUES))
    assert b"'fortran_order': True" in data
    np.testing.assert_array_equal(decode(claimed(data), LIKE), VALUES)


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.float16]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=4),
        elements=st.integers(0, 100),
    )
)
def test_arrays_serialised_by_flower_round_trip(values):
    for sent in (values, np.asfortranarray(values), np.asarray(np.flip(values).T)):
        array = Array(sent)
        decoded = decode(array, Array(np.zeros_like(sent)))
        np.testing.assert_array_equal(decoded, sent)
        assert decoded.shape == sent.shape
        assert decoded.dtype == sent.dtype


def test_array_without_entries_is_decoded():
    empty = Array(np.zeros((0, 3), np.float32))
    assert decode(empty, empty).shape == (0, 3)


def test_header_that_the_other_tests_change_is_valid():
    np.testing.assert_array_equal(
        decode(claimed(npy_with_header(HEADER)), LIKE), VALUES
    )


@pytest.mark.parametrize("name", sorted(BAD_ARRAYS))
def test_invalid_array_is_rejected(name):
    with pytest.raises(InvalidReplyError):
        decode(BAD_ARRAYS[name], LIKE)


BAD_HEADERS = {
    "no dictionary": "3",
    "empty": "",
    "unclosed": "{'descr': (",
    "unclosed text": "{'descr': '",
    "unhashable key": "{[]: 1}",
    "nothing in descr": HEADER.replace("'<f4'", "()"),
    "number as descr": HEADER.replace("'<f4'", "7"),
    "nonsense as descr": HEADER.replace("'<f4'", "'f4,,('"),
    "nested descr": HEADER.replace("'<f4'", "[('a', '<f4'), ('b',)]"),
    "text as shape": HEADER.replace("(2, 3)", "'ab'"),
    "missing key": "{'descr': '<f4', 'shape': (2, 3)}",
    "extra key": HEADER.replace("}", "'x': 1}"),
    "code": "__import__('os').system('true')",
    "many brackets": "(" * 3000,
    "many minuses": "-" * 3000 + "1",
    "indented": "  \n 3",
    "null": "\0",
    "long number": "9" * 4000,
}


@pytest.mark.parametrize("name", sorted(BAD_HEADERS))
def test_invalid_header_is_rejected(name):
    with pytest.raises(InvalidReplyError):
        decode(claimed(npy_with_header(BAD_HEADERS[name])), LIKE)


@hypothesis_settings(max_examples=400)
@given(st.data())
def test_damaged_header_is_rejected_or_harmless(data):
    good = bytearray(npy(VALUES))
    for _ in range(data.draw(st.integers(1, 3))):
        # The header's 69 bytes are followed by blanks, up to byte 128.
        good[data.draw(st.integers(0, 85))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(claimed(bytes(good)), LIKE)
    except InvalidReplyError:
        return
    assert decoded.shape == (2, 3)
    assert np.all(np.isfinite(decoded))


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_nothing_is_unpickled(tmp_path):
    trap = np.array([[Trap(tmp_path / "sprung")] * 3] * 2, dtype=object)
    data = npy(trap, allow_pickle=True)
    for array in (
        claimed(data),
        claimed(data, dtype="object"),
        claimed(pickle.dumps(Trap(tmp_path / "sprung"))),
        claimed(npy_with_header(HEADER.replace("<f4", "|O"), pickle.dumps(trap))),
    ):
        with pytest.raises(InvalidReplyError):
            decode(array, LIKE)
        with pytest.raises(InvalidReplyError):
            decode(array, Array(np.zeros((2, 3))))
    assert list(tmp_path.iterdir()) == []
    # Unpickling the same bytes does create the file.
    np.load(io.BytesIO(data), allow_pickle=True)
    assert [path.name for path in tmp_path.iterdir()] == ["sprung"]


def test_declared_size_allocates_no_memory():
    array = claimed(npy_with_header(HEADER.replace("2, 3", "500000000, 3")))
    tracemalloc.start()
    with pytest.raises(InvalidReplyError):
        decode(array, LIKE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_scalar_needs_the_expected_number_of_dimensions():
    like = Array(np.array(3, np.int64))
    decoded = decode(Array(np.array(8, np.int64)), like)
    assert decoded.shape == ()
    assert decoded == 8
    with pytest.raises(InvalidReplyError):
        decode(Array(np.array([8], np.int64)), like)


# Records


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_infinity_and_nan_are_not_finite_in_any_precision(dtype):
    assert is_finite({"w": np.array([1, -1], dtype), "n": np.array(7)})
    assert is_finite({"w": np.array([], dtype)})
    for wrong in (np.inf, -np.inf, np.nan):
        assert not is_finite({"n": np.array(7), "w": np.array([1, wrong], dtype)})


def test_arrays_are_returned_in_the_expected_order():
    reordered = to_record({"b": np.ones(2, np.float32), "a": VALUES})
    arrays = check_arrays(reply_of(reordered), "arrays", EXPECTED)
    assert list(arrays) == ["a", "b"]
    np.testing.assert_array_equal(arrays["a"], VALUES)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (None, "has no arrays under 'arrays'"),
        (ArrayRecord(), r"lacks arrays \['a', 'b'\]"),
        (to_record({"a": VALUES}), r"lacks arrays \['b'\]"),
        (
            to_record({"a": VALUES, "c": VALUES}),
            r"lacks .*'b'.* unknown arrays \['c'\]",
        ),
        (
            to_record(
                {"a": VALUES, "b": np.ones(2, np.float32), "head.weight": VALUES}
            ),
            r"unknown arrays \['head.weight'\]",
        ),
        (to_record({"a": VALUES, "b": VALUES}), r"array 'b' is float32\[2, 3\], not"),
    ],
)
def test_unexpected_arrays_are_rejected(arrays, reason):
    with pytest.raises(InvalidReplyError, match=reason):
        check_arrays(reply_of(arrays), "arrays", EXPECTED)


def loss_and_examples(message: Message) -> tuple[float, float]:
    reply = Reply("a", message, 0, reply_metrics(message), {}, lambda reply: {})
    return reply.metric("num-examples"), reply.metric("loss")


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "lacks the metric 'num-examples'"),
        ([MetricRecord({"num-examples": 1})] * 2, "has 2 metric records, not 1"),
        ([MetricRecord({"loss": 1.0})], "lacks the metric 'num-examples'"),
        ([MetricRecord({"num-examples": 1})], "lacks the metric 'loss'"),
        ([MetricRecord({"num-examples": 1, "loss": [1.0]})], "lacks the metric 'loss'"),
        ([MetricRecord({"num-examples": 1, "loss": float("nan")})], "'loss' is nan"),
        ([MetricRecord({"num-examples": 1, "loss": float("inf")})], "'loss' is inf"),
        (
            [MetricRecord({"num-examples": 1, "loss": 1.0, "more": float("-inf")})],
            "'more' is -inf",
        ),
        ([MetricRecord({"num-examples": -1, "loss": 1.0})], "num-examples is -1"),
    ],
)
def test_invalid_metrics_are_rejected(records, reason):
    message = reply_of(None, *records)
    with pytest.raises(InvalidReplyError, match=reason):
        loss_and_examples(message)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], {}),
        ([MetricRecord({})], {}),
        (
            [MetricRecord({"num-examples": 3, "loss": 0.5})],
            {"num-examples": 3, "loss": 0.5},
        ),
        ([MetricRecord({"eval_acc": 0.5, "list": [1.0]})], {"eval_acc": 0.5}),
    ],
)
def test_metrics_that_are_not_required_may_be_missing(records, said):
    assert reply_metrics(reply_of(None, *records)) == said
