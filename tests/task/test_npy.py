"""The same bytes as NumPy's own, and back."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flwr_frl.task.npy import decode, encode

DTYPES = st.sampled_from(["<f4", "<f8", "<f2", "<i8", "|u1", "|b1", ">f4"])


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


@given(
    DTYPES.flatmap(
        lambda d: arrays(d, array_shapes(min_dims=0, max_dims=4, min_side=0))
    )
)
def test_the_bytes_are_those_of_numpy(array):
    data = encode(array)
    assert data == saved(array)
    found = decode(data)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_what_lies_by_column_is_written_by_row_and_read_either_way():
    by_column = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert encode(by_column) == saved(np.ascontiguousarray(by_column))
    np.testing.assert_array_equal(decode(saved(by_column)), by_column)


def test_what_is_read_cannot_be_written_to():
    # It may be the bytes of a state that is kept.
    with pytest.raises(ValueError, match="read-only"):
        decode(encode(np.zeros(2)))[0] = 1


def test_nothing_is_unpickled_and_nothing_cut_off_is_read():
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    whole = encode(np.arange(10))
    for data in (stream.getvalue(), whole[:-1], whole[:20], b"", b"\x93NUMPY"):
        with pytest.raises((ValueError, EOFError)):
            decode(data)
