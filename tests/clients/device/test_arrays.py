"""Conversion to and from Flower's arrays."""

import numpy as np
from flwr.app import Array

from flwr_frl.clients.device.arrays import from_array, to_record

VALUES = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "by column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "a number": np.array(3, np.int64),
    "empty": np.zeros((0, 4), np.float16),
}


def test_records_equal_those_of_flower_s_constructor():
    record = to_record(VALUES)
    assert list(record) == list(VALUES)
    for name, value in VALUES.items():
        array, expected = record[name], Array(np.array(value, order="C"))
        assert array == expected
        assert array.object_id == expected.object_id
        # As it goes over a network, with its parts.
        assert Array.inflate(array.deflate(), dict(array.children or {})) == expected
        np.testing.assert_array_equal(from_array(array), value)
        np.testing.assert_array_equal(array.numpy(), value)
