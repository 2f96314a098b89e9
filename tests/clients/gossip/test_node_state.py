"""Single gossip clients: properties, replies and saved state of a node."""

import numpy as np
import pytest
import torch
from client_messages import new_context
from gossip_clients import by_algorithm, client_of, config_of, received

from flwr_frl.clients.device.groups import array_names, personal_arrays
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.flat import SMALLEST_SKETCHED, sketch
from flwr_frl.common.compression import Identity, PerTensor, TopK
from flwr_frl.common.messages import SKETCH

pytestmark = pytest.mark.usefixtures("softmax")


@by_algorithm
def test_node_properties(algorithm):
    client = client_of(algorithm, compressor="top-k", compressor_k=0.1)
    properties = client.get_properties({})
    expected = ([2600], 1.0) if algorithm == "dpsgd" else ([4 * 65 + 82], 0.1)
    assert (properties["message-bytes"], properties["omega"]) == expected
    # No array can be requested from the client by name.
    assert array_names(client, client.shared) == []
    assert client.get_parameters({}) == []
    # The state consists of the common initial model and of vectors of zeros.
    client = received(algorithm, compressor="top-k", compressor_k=0.1, per_tensor=True)
    for name, value in client.task.initial_state.items():
        assert torch.equal(client.model.state_dict()[name], value)
    more = () if algorithm == "dpsgd" else ("estimate", "neighbours")
    assert set(client.vectors) == {"momentum", *more}
    assert all((client.vector(name) == 0).all() for name in client.vectors)
    saved = {f"gossip.{n}" for n in client.vectors} | client.task.initial_state.keys()
    assert set(personal_arrays(client, client.personal)) == saved
    per_tensor = PerTensor(TopK(0.1), (640, 10))
    assert client.compressor == (per_tensor if more else Identity())


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
def test_evaluation_saves_nothing(algorithm):
    context = new_context()
    client = client_of(algorithm, PersonalState(context), compressor="identity")
    client.fit([], config_of(1))
    state = PersonalState(context)
    before = {n: v.copy() for n, v in state.load().items()}
    q = np.full(650, 0.1, np.float32).tobytes()
    config = config_of(1, [(1, "a", 1 / 3, q), (1, "b", 1 / 3, q)], exchanged=1)
    config["acknowledged-round"] = 1
    client = client_of(algorithm, state, compressor="identity")
    loss, n, metrics = client.evaluate([], config)
    assert not np.array_equal(client.x[0, :640], before["head.weight"].ravel())
    assert metrics.keys() >= {"accuracy"}
    assert client._attachments == {"sketch": sketch(client.x[0].numpy()).tobytes()}
    assert (n, np.isfinite(loss)) == (len(client.task.test_examples(0)), True)
    np.testing.assert_equal(state.load(), before)


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
