"""Single gossip clients: properties, replies and saved state of a node."""

import numpy as np
import pytest
from client_messages import new_context
from gossip_clients import by_algorithm, client_of, config_of

from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.flat import SMALLEST_SKETCHED
from flwr_frl.common.messages import SKETCH

pytestmark = pytest.mark.usefixtures("softmax")


def test_nodes_must_agree_on_the_operator_and_on_the_model():
    def structure(*algorithm, **more):
        return client_of(*algorithm, **more).get_properties({})["structure"]

    digests = {
        structure(compressor="top-k", compressor_k=0.1),
        structure(compressor="top-k", compressor_k=0.2),
        structure(compressor="sign"),
        structure(compressor="sign", per_tensor=True),
        structure(compressor="sign", model="digits-cnn"),
    }
    assert len(digests) == 5
    # D-PSGD does not compress, so settings of the compressor are ignored.
    plain = structure("dpsgd", compressor="sign")
    assert plain == structure("dpsgd", compressor="top-k")


@pytest.mark.parametrize("least", [650, 651])
def test_a_device_sends_no_sketch_of_a_small_model(least, monkeypatch):
    # The best estimate of 25,600 parameters from their sketch has a cosine of 0.1.
    assert (SKETCH / SMALLEST_SKETCHED) ** 0.5 == 0.1
    monkeypatch.setattr("flwr_frl.clients.gossip.base.SMALLEST_SKETCHED", least)
    client = client_of("choco-sgd")
    client._own_data = True
    client.evaluate([], config_of(1))
    assert ("sketch" in client._attachments) is (least == 650)


@by_algorithm
def test_a_state_older_than_the_acknowledged_round_is_an_error(algorithm):
    client = client_of(algorithm)
    config = config_of(5, **{"acknowledged-round": 4})
    for call in (client.fit, client.evaluate):
        with pytest.raises(RuntimeError, match="not that of round 4"):
            call([], config)


def test_only_the_model_of_an_earlier_run_is_reused(tmp_path):
    def state_of(run: str, acknowledged: int) -> PersonalState:
        return PersonalState(new_context(), tmp_path, acknowledged, 0, run, "me")

    first = client_of(state=state_of("a", 0), trigger="0")
    first.fit([], config_of(1))
    kept = state_of("a", 1).load()
    assert np.abs(kept["gossip.estimate"]).max() > 0
    second = client_of(state=state_of("b", 0), trigger="0")
    second._receive([], {})
    np.testing.assert_array_equal(second.x[0, :640], kept["head.weight"].ravel())
    # Neighbours start with an estimate of 0 for this node, so its own must be 0, too.
    for name in second.vectors:
        assert (second.vector(name) == 0).all()
