"""Replies: bytes that a client may send, and means worked by hand."""

import io
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_frl.strategies.server.checks import InvalidReplyError
from flwr_frl.strategies.server.replies import (
    check_arrays,
    check_metrics,
    count_bytes,
    decode,
    mean,
    reply_arrays,
    single_metrics,
    to_record,
)

LIKE = Array(np.zeros((2, 3), np.float32))
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def npy(array: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **options)
    return buffer.getvalue()


def npy_with_header(header: str, data: bytes = VALUES.tobytes(), version=(1, 0)):
    """An .npy file with any header."""
    text = header.encode("latin1")
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + data


def claimed(data: bytes, shape=(2, 3), dtype="float32", stype=LIKE.stype) -> Array:
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


# Arrays


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_a_good_array(version):
    decoded = decode(claimed(npy(VALUES, version=version)), LIKE)
    np.testing.assert_array_equal(decoded, VALUES)
    assert decoded.dtype == np.float32


def test_columns_first():
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
def test_every_array_that_flower_sends_comes_back(values):
    for sent in (values, np.asfortranarray(values), np.asarray(np.flip(values).T)):
        array = Array(sent)
        decoded = decode(array, Array(np.zeros_like(sent)))
        np.testing.assert_array_equal(decoded, sent)
        assert decoded.shape == sent.shape
        assert decoded.dtype == sent.dtype


def test_an_array_without_entries():
    empty = Array(np.zeros((0, 3), np.float32))
    assert decode(empty, empty).shape == (0, 3)


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


def test_the_header_above_is_a_good_one():
    np.testing.assert_array_equal(
        decode(claimed(npy_with_header(HEADER)), LIKE), VALUES
    )


BAD_ARRAYS = {
    "wrong shape": Array(np.zeros((3, 2), np.float32)),
    "another number of dimensions": Array(np.zeros(6, np.float32)),
    "wrong dtype": Array(np.zeros((2, 3), np.float64)),
    "integers": Array(np.zeros((2, 3), np.int32)),
    "half as wide": Array(np.zeros((2, 3), np.float16)),
    "nan": Array(np.where(VALUES == 3, np.nan, VALUES)),
    "infinity": Array(np.where(VALUES == 0, np.inf, VALUES)),
    "minus infinity": Array(np.where(VALUES == 5, -np.inf, VALUES)),
    "no bytes": claimed(b""),
    "no .npy": claimed(b"hello" * 30),
    "magic only": claimed(b"\x93NUMPY\x01\x00"),
    "cut off": claimed(npy(VALUES)[:-1]),
    "header cut off": claimed(npy(VALUES)[:40]),
    "bytes too many": claimed(npy(VALUES) + b"\0"),
    "huge": claimed(npy(VALUES) + bytes(10_000_000)),
    "huge by header": claimed(npy_with_header(HEADER.replace("2, 3", "10**9, 3"))),
    "a terabyte by header": claimed(
        npy_with_header(HEADER.replace("2, 3", "500000000000, 3"))
    ),
    "negative by header": claimed(npy_with_header(HEADER.replace("2, 3", "-2, -3"))),
    "other shape in the bytes": claimed(npy(VALUES.T.copy())),
    "other dtype in the bytes": claimed(npy(VALUES.view(np.int32))),
    "big-endian in the bytes": claimed(npy(VALUES.astype(">f4"))),
    "other dtype claimed": claimed(npy(VALUES), dtype="float64"),
    "no dtype claimed": claimed(npy(VALUES), dtype="nonsense"),
    "other shape claimed": claimed(npy(VALUES), shape=(6,)),
    "huge shape claimed": claimed(npy(VALUES), shape=(10**9, 10**9)),
    "negative shape claimed": claimed(npy(VALUES), shape=(-1, -6)),
    "pickled": claimed(pickle.dumps(VALUES)),
    "other serialisation": claimed(npy(VALUES), stype="pickle"),
    "zip": claimed(b"PK\x03\x04" + bytes(100)),
    "unicode header": claimed(npy(VALUES, version=(3, 0))),
    "unknown version": claimed(b"\x93NUMPY\x09\x00" + npy(VALUES)[8:]),
}


@pytest.mark.parametrize("name", sorted(BAD_ARRAYS))
def test_a_bad_array(name):
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
def test_a_bad_header(name):
    with pytest.raises(InvalidReplyError):
        decode(claimed(npy_with_header(BAD_HEADERS[name])), LIKE)


@hypothesis_settings(max_examples=400)
@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(data):
    good = bytearray(npy(VALUES))
    for _ in range(data.draw(st.integers(1, 3))):
        # The header's text is 80 characters long, the rest of it blanks.
        good[data.draw(st.integers(0, 85))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(claimed(bytes(good)), LIKE)
    except InvalidReplyError:
        return
    assert decoded.shape == (2, 3)
    assert np.all(np.isfinite(decoded))


class Trap:
    """Writes a file when it is unpickled."""

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
    # The trap works.
    np.load(io.BytesIO(data), allow_pickle=True)
    assert [path.name for path in tmp_path.iterdir()] == ["sprung"]


def test_a_claim_allocates_nothing():
    array = claimed(npy_with_header(HEADER.replace("2, 3", "500000000, 3")))
    tracemalloc.start()
    with pytest.raises(InvalidReplyError):
        decode(array, LIKE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_scalars_and_integers():
    like = Array(np.array(3, np.int64))
    decoded = decode(Array(np.array(8, np.int64)), like)
    assert decoded.shape == ()
    assert decoded == 8
    with pytest.raises(InvalidReplyError):
        decode(Array(np.array([8], np.int64)), like)


# Records


def reply_of(arrays: ArrayRecord | None = None, *metrics: MetricRecord) -> Message:
    records = {} if arrays is None else {"arrays": arrays}
    records |= {f"metrics{i}": record for i, record in enumerate(metrics)}
    return Message(RecordDict(records), 1, "train")


EXPECTED = to_record({"a": VALUES, "b": np.ones(2, np.float32)})


def test_good_arrays_come_in_the_expected_order():
    turned = to_record({"b": np.ones(2, np.float32), "a": VALUES})
    arrays = check_arrays(reply_of(turned), "arrays", EXPECTED)
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
def test_records_that_are_not_as_expected(arrays, reason):
    with pytest.raises(InvalidReplyError, match=reason):
        check_arrays(reply_of(arrays), "arrays", EXPECTED)


def test_metrics():
    record = MetricRecord({"num-examples": 3, "loss": 0.5, "list": [1.0, 2.0]})
    metrics = check_metrics(reply_of(None, record), ("num-examples", "loss"))
    assert metrics == {"num-examples": 3, "loss": 0.5}


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
def test_bad_metrics(records, reason):
    with pytest.raises(InvalidReplyError, match=reason):
        check_metrics(reply_of(None, *records), ("num-examples", "loss"))


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], {}),
        ([MetricRecord({})], {}),
        ([MetricRecord({"eval_acc": 0.5, "list": [1.0]})], {"eval_acc": 0.5}),
    ],
)
def test_metrics_that_nobody_needs_may_be_missing(records, said):
    assert check_metrics(reply_of(None, *records)) == said


# Means


def test_mean_by_hand():
    replies = [{"w": np.array([1.0, 5.0])}, {"w": np.array([4.0, -1.0])}]
    # Uniform: (1 + 4)/2 and (5 - 1)/2. By examples 1 and 3: (1 + 12)/4 and (5 - 3)/4.
    uniform = mean((1.0, arrays) for arrays in replies)
    by_examples = mean(zip((1.0, 3.0), replies, strict=True))
    assert uniform["w"].tolist() == [2.5, 2.0]
    assert by_examples["w"].tolist() == [3.25, 0.5]


def test_dtypes_stay_and_integers_are_rounded():
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


def test_single_precision_is_summed_in_double():
    # 2**24 + 1 is no float32: a single-precision sum would stay at 2**24.
    values = [np.array([2.0**24], np.float32)] + [np.ones(1, np.float32)] * 3
    means = mean((1.0, {"x": value}) for value in values)
    assert means["x"][0] == np.float32((2**24 + 3) / 4)


def test_replies_are_left_as_they_are():
    values = [np.ones(3), np.ones(3)]
    mean((1.0, {"x": value}) for value in values)
    assert all(np.array_equal(value, np.ones(3)) for value in values)


def test_no_weight_means_no_mean():
    assert mean(iter([])) is None
    assert mean([(0.0, {"x": np.ones(2)})]) is None
    # A reply without weight does not count beside one with.
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
def test_mean_against_numpy(replies):
    means = mean((weight, {"x": values}) for weight, values in replies)
    expected = np.average(
        [values for _, values in replies], axis=0, weights=[w for w, _ in replies]
    )
    np.testing.assert_allclose(means["x"], expected, rtol=1e-9, atol=1e-6)


def test_one_running_sum_is_all_that_is_held():
    size, replies = 1_000_000, 50

    def arrive():
        for i in range(replies):
            yield 1.0, {"x": np.full(size, i, np.float32)}

    tracemalloc.start()
    means = mean(arrive())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert means["x"][0] == (replies - 1) / 2
    # The sum, a scaled reply and the replies of this and the last step: fewer than
    # five arrays of float64, where 50 replies are 25 of them.
    assert peak < 5 * size * 8


# Sizes


def test_bytes_by_hand():
    # .npy headers are padded to 128 bytes; 6 floats are 24 bytes, and the names
    # "arrays" and "w" are 7.
    message = Message(RecordDict({"arrays": to_record({"w": VALUES})}), 1, "train")
    assert count_bytes(message) == 128 + 24 + 6 + 1
    # One number of 8 bytes more, and the names "config" and "round".
    message.content["config"] = ConfigRecord({"round": 3})
    assert count_bytes(message) == 159 + 8 + 6 + 5


def test_single_metrics():
    record = single_metrics({"a": np.float64(0.5), "b": 3, "c": np.float32(2)})
    assert dict(record) == {"a": 0.5, "b": 3, "c": 2.0}
    assert [type(value) for value in record.values()] == [float, int, float]


def test_records_are_c_ordered():
    record = to_record({"w": np.asfortranarray(VALUES)})
    assert b"'fortran_order': False" in record["w"].data
    np.testing.assert_array_equal(record["w"].numpy(), VALUES)


# Arrays to which nothing can be compared


def test_own_arrays_are_what_they_say_they_are():
    reply = reply_of(EXPECTED)
    assert list(reply_arrays(reply, "arrays")) == ["a", "b"]
    with pytest.raises(InvalidReplyError, match="has no arrays under 'other'"):
        reply_arrays(reply, "other")


LIES = {
    name: array
    for name, array in BAD_ARRAYS.items()
    # These are consistent in themselves.
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
    # NumPy evaluates it: a SyntaxError.
    "dtype of two commas": claimed(npy(VALUES), dtype="f4,,"),
    "negative": claimed(
        npy_with_header(HEADER.replace("2, 3", "-2, -3")), shape=(-2, -3)
    ),
    "overflowing": claimed(npy(VALUES), shape=(2**62, 2**62)),
}


@pytest.mark.parametrize("name", sorted(LIES))
def test_own_arrays_that_are_not(name):
    record = ArrayRecord({"a": LIES[name]})
    with pytest.raises(InvalidReplyError, match="array 'a'"):
        reply_arrays(reply_of(record), "arrays")


def test_empty_values_are_counted():
    # Flower's own count raises for these, and anybody can send them.
    content = RecordDict(
        {
            "c": ConfigRecord({"text": "", "data": b"", "list": [], "flag": True}),
            "m": MetricRecord({"values": [], "x": 1.5}),
        }
    )
    message = Message(content, 1, "train")
    assert count_bytes(message) == 1 + (4 + 4 + 4 + 4 + 1) + 1 + (6 + 1 + 8)
