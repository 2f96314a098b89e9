"""Arrays of replies, some of which do not match what they declare."""

import io
import pickle
import struct

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from flwr_frl.strategies.server.replies import to_record

LIKE = Array(np.zeros((2, 3), np.float32))


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def npy(array: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **options)
    return buffer.getvalue()


def npy_with_header(header: str, data: bytes = VALUES.tobytes()) -> bytes:
    """Return the bytes of an .npy file with any header."""
    text = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def claimed(data: bytes, shape=(2, 3), dtype="float32", stype=LIKE.stype) -> Array:
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


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


def reply_of(arrays: ArrayRecord | None = None, *metrics: MetricRecord) -> Message:
    records = {} if arrays is None else {"arrays": arrays}
    records |= {f"metrics{i}": record for i, record in enumerate(metrics)}
    return Message(RecordDict(records), 1, "train")


EXPECTED = to_record({"a": VALUES, "b": np.ones(2, np.float32)})
