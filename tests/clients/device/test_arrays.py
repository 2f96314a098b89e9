"""Arrays become Flower's as Flower's own constructor makes them."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flwr_frl.clients.device.arrays import from_array, to_array, to_record

VALUES = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "by column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "a number": np.array(3, np.int64),
    "empty": np.zeros((0, 4), np.float16),
}


@pytest.mark.parametrize("name", VALUES)
def test_an_array_is_what_flower_makes_of_it(name):
    value = VALUES[name]
    array, expected = to_array(value), Array(np.array(value, order="C"))
    assert array == expected
    assert array.object_id == expected.object_id
    # As it goes over a network, with its parts.
    assert Array.inflate(array.deflate(), dict(array.children or {})) == expected
    np.testing.assert_array_equal(from_array(array), value)
    np.testing.assert_array_equal(array.numpy(), value)


def test_a_record_of_arrays():
    assert to_record(VALUES) == ArrayRecord({n: to_array(v) for n, v in VALUES.items()})
