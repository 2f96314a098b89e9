"""Decoding and checking the arrays, records and metrics of replies."""

import io
import pickle
import tracemalloc

import numpy as np
import pytest
from claimed_arrays import (
    BAD_ARRAYS,
    HEADER,
    LIKE,
    VALUES,
    claimed,
    npy,
    npy_with_header,
    reply_of,
)
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from malformed import TRAPS, Trap

from flwr_frl.strategies.server.replies import InvalidReplyError, checked_arrays

# Arrays


def decode(array: Array, like: Array) -> np.ndarray:
    reply = reply_of(ArrayRecord({"a": array}))
    return checked_arrays(reply, "arrays", ArrayRecord({"a": like}))["a"]


def test_valid_array_is_decoded():
    decoded = decode(claimed(npy(VALUES)), LIKE)
    np.testing.assert_array_equal(decoded, VALUES)
    assert decoded.dtype == np.float32


def test_fortran_ordered_array_is_decoded():
    data = npy(np.asfortranarray(VALUES))
    assert b"'fortran_order': True" in data
    np.testing.assert_array_equal(decode(claimed(data), LIKE), VALUES)


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


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.setattr(Trap, "path", tmp_path / "sprung")
    data = npy(TRAPS, allow_pickle=True)
    for array in (
        claimed(data),
        claimed(data, dtype="object"),
        claimed(pickle.dumps(Trap())),
        claimed(npy_with_header(HEADER.replace("<f4", "|O"), pickle.dumps(TRAPS))),
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
