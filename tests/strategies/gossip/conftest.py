"""Define the model ``softmax`` for all tests of gossip."""

import pytest


@pytest.fixture(autouse=True)
def _softmax(softmax):
    pass
