"""For all tests of gossip: nodes learn the model ``softmax``."""

import pytest


@pytest.fixture(autouse=True)
def _softmax(softmax):
    pass
