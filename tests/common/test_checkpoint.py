"""Checkpoint files."""

import numpy as np
import pytest

from flwr_frl.common.checkpoint import FILE, Content, pack, read
from flwr_frl.common.sealed import ChecksumError

CONTENT = Content(
    {"round": 3, "values": {"acknowledged": {"a": 3}}},
    {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T},
    {"heads/a/b": np.ones(2), "count": np.array(5)},
)


def test_every_flipped_bit_of_the_content_is_detected(tmp_path):
    path, data = tmp_path / FILE, pack(CONTENT)
    path.write_bytes(data)
    assert read(path).about == CONTENT.about
    begin = 8 + int.from_bytes(data[:8], "little")
    settings = data.index(b"acknowledged")
    for place in (*range(begin, len(data)), settings):
        flipped = bytearray(data)
        flipped[place] ^= 1
        path.write_bytes(bytes(flipped))
        with pytest.raises(ChecksumError):
            read(path)
