"""Linear FedRep (algorithm 2) matches hand-computed values and NumPy."""

import numpy as np
import pytest
from client_messages import new_context
from flwr.app import Context

from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.fedrep import FedRepLinearClient, solve_head
from flwr_frl.task.tasks.linear import LinearTask

# Two examples in two dimensions, and B = (1, 0)ᵀ.
X, Y = np.array([[1.0, 2.0], [2.0, 0.0]]), np.array([1.0, 5.0])
B = np.array([[1.0], [0.0]])


def client_of(task: LinearTask, context: Context | None = None, **overrides):
    settings = FedRepLinearClient._settings_type(**{"learning_rate": 0.1, **overrides})
    state = PersonalState(context or new_context())
    return FedRepLinearClient(task, 0, state, settings)


def head_in(context: Context) -> np.ndarray:
    return PersonalState(context).load()["head.weight"]


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(LinearTask, "draw", lambda *_: (X, Y))
    return LinearTask(dimension=2, rank=1, samples=2, num_clients=2)


def test_moments_by_hand(by_hand):
    # ½ (1 [[1, 2], [2, 4]] + 25 [[4, 0], [0, 0]]) = [[50.5, 1], [1, 2]].
    statistics = client_of(by_hand).statistics({})
    assert list(statistics) == ["moments"]
    np.testing.assert_allclose(statistics["moments"], [[50.5, 1.0], [1.0, 2.0]])


def test_evaluation_by_hand(by_hand, monkeypatch):
    # φ = (3, 4), B = (1, 0)ᵀ and w = 2.2: error ‖(2.2, 0) - (3, 4)‖ = √(0.64 + 16).
    # The sine of the angle between (1, 0) and (3, 4) is 4/5.
    truth = np.array([[0.6], [0.8]]), np.array([[3.0, 0.0], [4.0, 0.0]])
    monkeypatch.setitem(by_hand.__dict__, "_truth", truth)
    context = new_context()
    client_of(by_hand, context).fit([B.T], {"server-round": 1})
    loss, _, metrics = client_of(by_hand, context).evaluate([B.T], {})
    assert loss == pytest.approx(16.64 / 2)
    assert metrics["error"] == pytest.approx(np.sqrt(16.64))
    assert metrics["distance"] == pytest.approx(0.8)
    # A single direction can represent both models, (3, 4) and (0, 0).
    assert metrics["error-best"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("steps", [0, 1, 10])
def test_rounds_against_numpy(steps):
    task = LinearTask(dimension=6, rank=3, samples=8, num_clients=4, seed=3)
    context = new_context()
    rng = np.random.default_rng(0)
    b, w = np.linalg.qr(rng.standard_normal((6, 3))).Q, np.zeros(3)
    for server_round in (1, 2, 3):
        client = client_of(task, context, head_steps=steps)
        (sent,), n, metrics = client.fit([b.T], {"server-round": server_round})
        x, y = task.draw(0, server_round)
        f = x @ b
        for _ in range(steps):
            w = w - 0.1 / 8 * f.T @ (f @ w - y)
        w = w if steps else np.linalg.solve(f.T @ f, f.T @ y)
        residual = f @ w - y
        step = 0.1 / 8 * x.T @ residual[:, None] @ w[None]
        np.testing.assert_allclose(sent, (b - step).T, rtol=1e-9, atol=1e-12)
        loss = pytest.approx(np.sum(residual**2) / 16)
        assert (n, metrics["train-loss"]) == (8, loss)
        np.testing.assert_allclose(head_in(context), w[None], rtol=1e-9)
        b = sent.T


def test_samples_repeat_in_every_round_unless_they_are_fresh():
    task = LinearTask(dimension=4, rank=2, samples=6)
    b = np.random.default_rng(1).standard_normal((4, 2))
    replies = {}
    for fresh in (True, False):
        clients = [client_of(task, fresh_samples=fresh) for _ in range(2)]
        rounds = zip(clients, (1, 2), strict=True)
        replies[fresh] = [c.fit([b.T], {"server-round": r})[0][0] for c, r in rounds]
    assert not np.array_equal(*replies[True])
    np.testing.assert_array_equal(*replies[False])
    # The fixed samples are those of draw 0, which fresh samples never use.
    x, y = task.draw(0)
    w = solve_head(b, x, y)
    step = 0.1 / 6 * np.outer(x.T @ (x @ b @ w - y), w)
    np.testing.assert_allclose(replies[False][0], (b - step).T)
