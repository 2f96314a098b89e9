"""Single gossip clients: exchanges, iterations and messages.

`tests/strategies/gossip` compares whole networks with the equations in NumPy.
"""

import copy
from logging import WARNING

import numpy as np
import pytest
import torch
from gossip_clients import by_algorithm, client_of, config_of, received
from small_models import CE, torch_groups

from flwr_frl.clients.gossip.base import exchanges
from flwr_frl.common.errors import TrainingDivergedError

pytestmark = pytest.mark.usefixtures("softmax")


def test_exchanges_are_in_order_without_gaps():
    relayed = [
        (4, "b", 0.5, b"1"),
        (2, "a", 0.25, b"2"),
        (4, "a", 0.25, b"3"),
        (5, "b", 0.5, b"4"),
    ]
    assert exchanges(config_of(7, relayed), 2) == [
        [("a", 0.25, b"2")],
        [],
        [("b", 0.5, b"1"), ("a", 0.25, b"3")],
        [("b", 0.5, b"4")],
        [],
    ]
    # The first round relays nothing.
    assert exchanges(config_of(1), 0) == [[]]


@pytest.mark.parametrize("model", ["softmax", "digits-cnn", "resnet20"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_iterations_match_nesterov_momentum_of_torch(model, momentum):
    more = {"learning_rate": 0.05, "momentum": momentum, "weight_decay": 0.1}
    client = received(model=model, local_steps=4, batch_size=12, **more)
    other = copy.deepcopy(client.task.initial_model()).train()
    torch.manual_seed(11)
    total, steps = client.iterate(1, client.gradients())
    nesterov = momentum > 0
    optimizer = torch.optim.SGD(torch_groups(other), 0.05, momentum, nesterov=nesterov)
    torch.manual_seed(11)
    losses = []
    for _ in range(4):
        inputs, targets = client.task.train_examples(0).draw(12)
        optimizer.zero_grad()
        value = CE(other(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    found, close = client.model.state_dict(), {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, other.state_dict(), **close)
    assert total.item() / steps == pytest.approx(np.mean(losses), rel=1e-5)
    if momentum:
        parts = client.vector("momentum")[0].split(client.flat.sizes)
        for p, part in zip(other.parameters(), parts, strict=True):
            norm = optimizer.state[p]["momentum_buffer"].norm().item()
            assert part.norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-6)


def test_nan_loss_raises_training_diverged():
    client = received(learning_rate=1e38, local_steps=5)
    line = r"in round 1 with learning-rate 1e\+38"
    with pytest.raises(TrainingDivergedError, match=line):
        client.iterate(1, client.gradients())


@pytest.mark.parametrize(("factor", "sent"), [(0.999, True), (1.001, False)])
def test_the_trigger_compares_with_c_t_eta_t_squared(factor, sent):
    # H = 3: round 2 ends with t = 5, where eta = 2 / 15 and c = 4 + 6 * (5 // 2).
    more = {"learning_rate": 2.0, "learning_rate_schedule": "inverse:10"}
    client = received(local_steps=3, trigger="4:6:2", **more)
    client.x.zero_()[0, 7] = (16 * (2 / 15) ** 2 / factor) ** 0.5
    assert (client.messages(2, [0])[0] != [b""]) is sent
    assert bool(client.vector("estimate").any()) is sent
    # A difference of zero is not sent.
    client = received(trigger="0")
    client.x.zero_()
    assert client.messages(1, [0])[0] == [b""]


BAD = ([np.nan], [np.inf], [-np.inf], [1e30])


@by_algorithm
@pytest.mark.parametrize(
    "values", [*([0.0] * 649 + last for last in BAD), [0.0] * 649, [0.0] * 651, []]
)
def test_malformed_message_is_counted_and_ignored(algorithm, values, caplog):
    good = ("good", 0.25, np.ones(650, np.float32).tobytes())
    bad = ("bad", 0.25, np.array(values, np.float32).tobytes())
    found = []
    for messages in ([good, bad], [good]):
        client = received(algorithm, compressor="identity")
        config = {"consensus-step": 0.5, "neighbour-weight": 0.5}
        with caplog.at_level(WARNING, "flwr"):
            client.exchange([messages], [config])
        found.append([client.x.clone(), *map(torch.clone, client.saved.values())])
        assert client.refused == len(messages) - 1
    assert "message of neighbour bad refused" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    relayed = [(1, "a", 0.3, b"123"), (1, "b", 0.3, b""), (2, "a", 0.3, bytes(2600))]
    client = client_of(algorithm, compressor="identity")
    assert client.fit([], config_of(3, relayed))[2]["refused"] == 2
