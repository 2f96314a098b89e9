"""Arrays in the .npy format: the bytes that NumPy writes, and decoding."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from flwr_frl.common.arrays import decode, encode

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
def test_bytes_equal_those_of_numpy(array):
    data = encode(array)
    assert data == saved(array)
    decoded = decode(data)
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array)


def test_fortran_order_is_written_in_c_order_and_both_are_read():
    by_column = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert encode(by_column) == saved(np.ascontiguousarray(by_column))
    np.testing.assert_array_equal(decode(saved(by_column)), by_column)


def test_decoded_arrays_are_read_only():
    # The bytes may belong to a saved state.
    with pytest.raises(ValueError, match="read-only"):
        decode(encode(np.zeros(2)))[0] = 1


def test_pickles_and_truncated_bytes_are_rejected():
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    intact = encode(np.arange(10))
    for data in (stream.getvalue(), intact[:-1], intact[:20], b"", b"\x93NUMPY"):
        with pytest.raises((ValueError, EOFError)):
            decode(data)
