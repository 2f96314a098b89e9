"""Arrays that are serialized when their bytes are read."""

import io
import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flwr_frl.common.arrays import (
    MemoryArray,
    is_finite,
    memory_record,
    size_of,
    values_of,
)

VALUES = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "by column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "a number": np.array(3, np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "booleans": np.array([True, False]),
}


def test_records_equal_those_of_flower_s_constructor():
    record = memory_record(VALUES)
    assert list(record) == list(VALUES)
    for name, value in VALUES.items():
        array, expected = record[name], Array(np.array(value, order="C"))
        # The bytes have not been read yet.
        assert size_of(array) == size_of(expected) == len(expected.data)
        np.testing.assert_array_equal(values_of(array), value)
        assert array.object_id == expected.object_id
        # With its children, as it is sent over a network
        assert Array.inflate(array.deflate(), dict(array.children or {})) == expected
        np.testing.assert_array_equal(values_of(array), value)
        np.testing.assert_array_equal(array.numpy(), value)
    np.testing.assert_array_equal(record.to_numpy_ndarrays()[0], VALUES["float32"])
    expected = ArrayRecord(
        {n: Array(np.array(v, order="C")) for n, v in VALUES.items()}
    )
    assert record.object_id == expected.object_id


def test_values_are_shared_and_cannot_be_written():
    values = np.ones(3)
    array = MemoryArray(values)
    assert np.shares_memory(values_of(array), values)
    with pytest.raises(ValueError, match="read-only"):
        values_of(array)[0] = 2.0
    # Flower's interface returns copies.
    array.numpy()[0] = 2.0
    assert values_of(array)[0] == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_non_finite_values_are_detected(value, dtype):
    largest = min(np.finfo(dtype).max, np.finfo("float32").max)
    values = np.full((3, 4), largest, dtype)
    # The sum of the squares of float32 overflows.
    assert is_finite(values)
    values[1, 2] = value
    assert not is_finite(np.ones(2), values)


def test_numbers_beyond_float32_do_not_count_as_finite():
    assert not is_finite(np.array([1e39]))


@pytest.mark.parametrize(
    ("shape", "dtype", "descr"), [((-1, 3), "float32", "<f4"), ((6,), "(6,)f4", None)]
)
def test_values_of_another_shape_than_declared_are_refused(shape, dtype, descr):
    values, stream = np.arange(6, dtype=np.float32), io.BytesIO()
    about = {"descr": descr or dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, about)
    data = stream.getvalue() + values.tobytes()
    array = Array(dtype=dtype, shape=shape, stype=Array(values).stype, data=data)
    with pytest.raises(ValueError, match=r"it holds|shape"):
        values_of(array)


def test_pickled_and_truncated_bytes_are_rejected():
    np.save(stream := io.BytesIO(), np.array([{}], dtype=object), allow_pickle=True)
    intact = Array(np.arange(10)).data
    for data in (stream.getvalue(), intact[:-1], intact[:20], b"", b"\x93NUMPY"):
        with pytest.raises((ValueError, EOFError)):
            values_of(Array("int64", (10,), "numpy.ndarray", data))


def test_a_copy_by_pickle_has_the_same_values_and_objects_are_refused():
    array = MemoryArray(np.ones(3))
    copy = pickle.loads(pickle.dumps(array))
    assert copy == array
    np.testing.assert_array_equal(values_of(copy), np.ones(3))
    with pytest.raises(ValueError, match="Object"):
        _ = MemoryArray(np.array([{}])).data
