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


def test_exact_head_and_one_step_by_hand(by_hand):
    # Features XB = (1, 2): w = (1*1 + 2*5) / (1 + 4) = 2.2.
    # Residual XBw - y = (1.2, -0.6); loss (1.44 + 0.36) / (2*2) = 0.45.
    # Gradient Xᵀ(1.2, -0.6) w / 2 = (0, 2.4) 2.2 / 2 = (0, 2.64).
    # B - 0.1 (0, 2.64) = (1, -0.264).
    context = new_context()
    (b,), n, metrics = client_of(by_hand, context).fit([B.T], {"server-round": 1})
    np.testing.assert_allclose(b, [[1.0, -0.264]], atol=1e-12)
    assert (n, metrics) == (2, {"train-loss": pytest.approx(0.45)})
    assert head_in(context) == pytest.approx(2.2)


def test_one_gradient_step_on_the_head_by_hand(by_hand):
    # From w = 0: gradient (1*(0 - 1) + 2*(0 - 5)) / 2 = -5.5, w = 0.55.
    # Residual (0.55 - 1, 1.1 - 5) = (-0.45, -3.9); Xᵀ of it (-8.25, -0.9).
    # Gradient (-8.25, -0.9) 0.55 / 2 = (-2.26875, -0.2475).
    context = new_context()
    client = client_of(by_hand, context, head_steps=1)
    arrays, _, _ = client.fit([B.T], {"server-round": 1})
    np.testing.assert_allclose(arrays[0], [[1.226875, 0.02475]], atol=1e-12)
    assert head_in(context) == pytest.approx(0.55)
    # The next round continues from the saved head: features (1, 2) again,
    # gradient (0.55 - 1 + 2 (1.1 - 5)) / 2 = -4.125, w = 0.9625.
    client_of(by_hand, context, head_steps=1).fit([B.T], {"server-round": 2})
    assert head_in(context) == pytest.approx(0.9625)


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


def test_fewer_examples_than_the_rank_give_the_minimum_norm_head():
    rng = np.random.default_rng(2)
    b, x, y = rng.standard_normal((6, 4)), rng.standard_normal((2, 6)), rng.random(2)
    f = x @ b
    expected = f.T @ np.linalg.solve(f @ f.T, y)
    np.testing.assert_allclose(solve_head(b, x, y), expected)


def test_the_step_is_a_gradient_step_on_the_paper_s_loss():
    # f(B) = 1/(2m) Σ (y - wᵀBᵀx)², differentiated numerically at the saved head
    task = LinearTask(dimension=4, rank=2, samples=6)
    context = new_context()
    b = np.random.default_rng(1).standard_normal((4, 2))
    arrays, _, _ = client_of(task, context, learning_rate=1.0).fit(
        [b.T], {"server-round": 5}
    )
    w = head_in(context)[0]
    x, y = task.draw(0, 5)

    def loss(matrix: np.ndarray) -> float:
        return float(np.sum((y - x @ matrix @ w) ** 2)) / 12

    gradient = np.zeros_like(b)
    for i in np.ndindex(*b.shape):
        nudge = np.zeros_like(b)
        nudge[i] = 1e-6
        gradient[i] = (loss(b + nudge) - loss(b - nudge)) / 2e-6
    np.testing.assert_allclose(b - arrays[0].T, gradient, rtol=1e-5, atol=1e-8)


def test_a_new_client_needs_k_rather_than_d_examples():
    # Figure 4: with the true B, a head from m ≥ k examples is exact up to the noise.
    task = LinearTask(dimension=20, rank=2, num_clients=100)
    x, y = task.draw(7, 1, samples=6)
    truth = task.models[:, 7]
    head = solve_head(task.representation, x, y)
    alone = np.linalg.lstsq(x, y, rcond=None)[0]
    assert np.linalg.norm(task.representation @ head - truth) < 0.15
    assert np.linalg.norm(alone - truth) > 0.5


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
