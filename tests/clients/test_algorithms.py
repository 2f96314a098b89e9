"""FedRep, FedPer, FedAvg, local training and fine-tuning match a NumPy implementation.

The task is linear with two bias-free layers. Each batch contains all examples, so
shuffling has no effect and an epoch is one step.
"""

import numpy as np
import pytest
import torch
from client_messages import new_context
from flwr.app import Context
from refusals import code_of

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.clients.fedper import FedPerClient
from flwr_frl.clients.fedrep import FedRepClient
from flwr_frl.clients.local import LocalClient
from flwr_frl.common.settings import Settings, build, resolve
from flwr_frl.task.tasks.linear import LinearTask

HEAD_EPOCHS, REPRESENTATION_EPOCHS = 4, 3
RATE, MOMENTUM, DECAY = 0.05, 0.6, 0.03
TRAINING = {"learning-rate": RATE, "momentum": MOMENTUM, "weight-decay": DECAY}
EPOCHS = {"head-epochs": HEAD_EPOCHS, "representation-epochs": REPRESENTATION_EPOCHS}
EPOCHS |= {"batch-size": 100}
SETTINGS = resolve({"task": "linear", **EPOCHS, **TRAINING})
TASK = LinearTask(dimension=4, rank=2, samples=9, num_clients=3)


def client_of(
    kind: type[Client],
    context: Context | None = None,
    index: int = 1,
    settings: Settings = SETTINGS,
    **state,
) -> Client:
    held = PersonalState(context or new_context(), None, **state)
    return kind(TASK, index, held, build(kind._settings_type, settings))


def as_sent(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float32) for array in arrays]


def near(loss: float):
    return pytest.approx(loss, rel=1e-5)


def initial() -> tuple[np.ndarray, np.ndarray]:
    state = TASK.initial_state
    b, w = state["representation.weight"], state["head.weight"]
    return b.double().numpy(), w.double().numpy()


def numpy_train(
    b: np.ndarray, w: np.ndarray, index: int, epochs: int, parts: str, mu: float = 0.0
) -> tuple[np.ndarray, np.ndarray, float]:
    """Minimise mean (y - w b x)² by momentum SGD, starting with zero velocities.

    If ``mu`` > 0, the proximal term mu/2 ‖· − start‖² is added to the objective, but
    not to the returned loss.
    """
    start_b, start_w = b, w
    x, y = TASK.draw(index)
    y = y[:, None]
    velocity_b, velocity_w, loss = np.zeros_like(b), np.zeros_like(w), 0.0
    for _ in range(epochs):
        residual = x @ b.T @ w.T - y
        loss = float(np.mean(residual**2))
        slope = 2 * residual / len(y)
        gradient_w = slope.T @ (x @ b.T) + DECAY * w + mu * (w - start_w)
        gradient_b = (slope @ w).T @ x + DECAY * b + mu * (b - start_b)
        if "w" in parts:
            velocity_w = MOMENTUM * velocity_w + gradient_w
            w = w - RATE * velocity_w
        if "b" in parts:
            velocity_b = MOMENTUM * velocity_b + gradient_b
            b = b - RATE * velocity_b
    return b, w, loss


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_fedrep_trains_its_own_head_and_then_the_representation():
    context = new_context()
    sent, w = initial()
    for server_round in (1, 2, 3):
        client = client_of(FedRepClient, context, acknowledged=server_round - 1)
        reply = client.fit(as_sent(sent), {"server-round": server_round})
        _, w, _ = numpy_train(sent, w, 1, HEAD_EPOCHS, "w")
        b, _, loss = numpy_train(sent, w, 1, REPRESENTATION_EPOCHS, "b")
        # Only the representation is sent; the head is saved for the next round.
        (array,), num_examples, metrics = reply
        assert_near(array, b)
        assert (num_examples, metrics) == (9, {"train-loss": near(loss)})
        kept = PersonalState(context).load()
        assert list(kept) == ["head.weight"]
        assert_near(kept["head.weight"], w)
        # The server sends a different representation in the next round.
        sent = b + 0.1


@pytest.mark.parametrize(
    ("kind", "shared", "personal"),
    [
        (FedAvgClient, 2, []),
        (FedPerClient, 1, ["head"]),
        (LocalClient, 0, ["representation", "head"]),
    ],
)
def test_both_parts_are_trained_and_personal_ones_saved(kind, shared, personal):
    context = new_context()
    b, w = initial()
    for server_round in (1, 2, 5):
        arrays, num_examples, metrics = client_of(kind, context).fit(
            as_sent(b, w)[:shared], {"server-round": server_round}
        )
        b, w, loss = numpy_train(b, w, 1, REPRESENTATION_EPOCHS, "bw")
        assert (len(arrays), num_examples) == (shared, 9)
        for array, expected in zip(arrays, (b, w), strict=False):
            assert_near(array, expected)
        assert metrics == {"train-loss": near(loss)}
        saved = PersonalState(context).load() or {}
        assert list(saved) == [f"{name}.weight" for name in personal]
        for name in personal:
            assert_near(saved[f"{name}.weight"], w if name == "head" else b)


def test_the_proximal_term_does_not_affect_personal_groups():
    # The server sends FedRep's representation but not its head.
    (b, w), context = initial(), new_context()
    config = {"server-round": 1, "proximal-mu": 0.8}
    (array,), _, _ = client_of(FedRepClient, context).fit(as_sent(b), config)
    _, w, _ = numpy_train(b, w, 1, HEAD_EPOCHS, "w")
    near_b, _, _ = numpy_train(b, w, 1, REPRESENTATION_EPOCHS, "b", 0.8)
    assert_near(PersonalState(context).load()["head.weight"], w)
    assert_near(array, near_b)


def test_the_proximal_term_adds_to_a_client_s_regularizer():
    # A regularizer as in FLUTE: here 0.3 Σ b, whose gradient is 0.3 everywhere
    client, (b, w) = client_of(FedAvgClient), initial()
    term = 0.3 * torch.ones(2, 4)
    found = []
    for regularizer in (
        {"regularizer": lambda _, __, m: (term * m.representation.weight).sum()},
        # A correction is equivalent to a regularizer with that gradient.
        {"correction": {"representation.weight": term}},
    ):
        client._receive(as_sent(b, w), {"server-round": 1, "proximal-mu": 0.8})
        client.train("all", 2, **regularizer)
        found.append(client.model.representation.weight.detach().clone().numpy())
    assert_near(*found)
    without, _, _ = numpy_train(b, w, 1, 2, "bw", 0.8)
    # Two steps shift b by about -0.05 (0.3 + (0.6 + 1) 0.3) = -0.039.
    assert (found[0] - without).mean() == pytest.approx(-0.039, rel=0.05)


def expected_loss(b: np.ndarray, w: np.ndarray, index: int) -> float:
    x, y = TASK.draw(index, 2**31, 200)
    return float(np.mean((x @ b.T @ w.T - y[:, None]) ** 2))


def test_evaluation_uses_the_received_representation_and_the_personal_head():
    context = new_context()
    b, initial_w = initial()
    client_of(FedRepClient, context).fit(as_sent(b), {"server-round": 1})
    _, w, _ = numpy_train(b, initial_w, 1, HEAD_EPOCHS, "w")
    other = np.full_like(b, 0.3)
    client = client_of(FedRepClient, context)
    loss, num_examples, metrics = client.evaluate(as_sent(other), {"server-round": 1})
    assert loss == pytest.approx(expected_loss(other, w, 1), rel=1e-4)
    # The targets are not classes, so there is no accuracy.
    assert (num_examples, metrics) == (200, {})
    # A client that has never trained is tested with the initial head and saves nothing.
    context = new_context()
    client = client_of(FedRepClient, context, index=2)
    loss, _, _ = client.evaluate(as_sent(other), {"server-round": 7})
    assert loss == pytest.approx(expected_loss(other, initial_w, 2), rel=1e-4)
    assert len(context.state) == 0


def test_a_personal_head_may_be_fitted_only_for_the_test():
    settings = {**SETTINGS, "head-epochs-before-test": 5}
    b, w = initial()
    _, tuned, _ = numpy_train(b, w, 1, 5, "w")
    context = new_context()
    client = client_of(FedRepClient, context, settings=settings)
    for _ in range(2):
        loss, _, _ = client.evaluate(as_sent(b), {"server-round": 3})
        assert loss == pytest.approx(expected_loss(b, tuned, 1), rel=1e-4)
    assert len(context.state) == 0
    # A global method has no personal head.
    other = client_of(FedAvgClient, settings=settings)
    assert code_of(other.get_properties, {}) == "head-epochs-before-test"
