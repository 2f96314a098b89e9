"""FLUTE for regression compared with NumPy and with finite differences."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from algorithm_runs import settings_of
from torch import nn

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import FLUTERegression, build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

CLIENTS, D, K, M, N = 3, 4, 2, 2, 12
WEIGHT, REPRESENTATION, COUPLING = (
    "head.weight",
    "representation.weight",
    "coupling.matrix",
)
GAMMA1, GAMMA2, RATE, SERVER_RATE = 0.2, 0.15, 0.05, 0.03


def draw(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whitened inputs, XᵀX / N = I, and outputs of a full-rank linear model."""
    rng = np.random.default_rng([7, client])
    x = np.linalg.qr(rng.standard_normal((N, D))).Q * np.sqrt(N)
    return x, x @ rng.standard_normal((D, M))


def linear_models(num_clients: int) -> ExampleTask:
    """Linear regression with M outputs, in double precision."""

    def model() -> SplitModel:
        linear = nn.Linear(D, K, bias=False), nn.Linear(K, M, bias=False)
        return SplitModel(*linear).double()

    sets = {str(i): ExampleSet(*map(torch.tensor, draw(i))) for i in range(CLIENTS)}
    loss = nn.functional.mse_loss
    return ExampleTask(model=model, train=sets, test=sets, loss=loss)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs rounds; it returns start, end and strategy."""
    module = ModuleType("regression_task")
    module.linear_models = linear_models
    monkeypatch.setitem(sys.modules, "regression_task", module)

    def run(rounds: int, **more):
        settings = settings_of(
            "flute-regression",
            task="regression_task:linear_models",
            num_clients=CLIENTS,
            fraction_train=1.0,
            batch_size=N,
            representation_epochs=1,
            momentum=0.0,
            weight_decay=0.0,
            learning_rate=RATE,
            regularizer_learning_rate=SERVER_RATE,
            gamma1=GAMMA1,
            gamma2=GAMMA2,
            **more,
        )
        grid, strategy = (
            InlineGrid(make_app(settings), CLIENTS),
            build_strategy(settings),
        )
        start = strategy.initialize(grid)
        end = run_rounds(strategy, grid, start, range(1, rounds + 1))
        return start, end, strategy

    return run


def test_a_run_equals_plain_numpy(trained) -> None:
    start, end, strategy = trained(25)
    b = start[REPRESENTATION].numpy().T
    heads = [strategy.initial_head[WEIGHT].T.copy() for _ in range(CLIENTS)]
    a = np.zeros((K, K))
    for _ in range(25):
        bs, new = [], []
        for i, h in enumerate(heads):
            x, y = draw(i)
            residual = 2 * (x @ b @ h - y) / (N * M)
            # The gradient of mean_x ψᵀ A ψ with XᵀX / N = I is 2 B A.
            bs.append(b - RATE * (x.T @ residual @ h.T + 2 * b @ a))
            new.append(h - RATE * (x @ b).T @ residual)
        s = sum(each.T @ each for each in bs) / CLIENTS
        b = sum(bs) / CLIENTS
        g = sum(h @ h.T for h in new) / CLIENTS
        heads = [h - 2 * SERVER_RATE * (2 * GAMMA2 * g - GAMMA1 * s) @ h for h in new]
        g = sum(h @ h.T for h in heads) / CLIENTS
        a = SERVER_RATE / RATE * (2 * GAMMA2 * s - GAMMA1 * g)
    np.testing.assert_allclose(end[REPRESENTATION].numpy().T, b, atol=1e-9)
    np.testing.assert_allclose(end[COUPLING].numpy(), a, atol=1e-9)
    for i, h in enumerate(heads):
        np.testing.assert_allclose(
            strategy.per_client(f"{i:06d}")[WEIGHT].T, h, atol=1e-9
        )


def test_both_steps_follow_the_gradient_of_the_regularizer() -> None:
    rng = np.random.default_rng(3)
    b, w = rng.standard_normal((D, K)), rng.standard_normal((CLIENTS, K, M))

    def regularizer(b: np.ndarray, w: np.ndarray) -> float:
        """R of the linear case with W / √(clients), so that sums become means."""
        every = np.concatenate(list(w), axis=1) / np.sqrt(CLIENTS)
        norms = np.sum((b.T @ b) ** 2) + np.sum((every @ every.T) ** 2)
        return GAMMA2 * norms - GAMMA1 * np.sum((b @ every) ** 2)

    def slope(function, at: np.ndarray) -> np.ndarray:
        gradient = np.zeros_like(at)
        for place in np.ndindex(at.shape):
            step = np.zeros_like(at)
            step[place] = 1e-5
            gradient[place] = (function(at + step) - function(at - step)) / 2e-5
        return gradient

    strategy = FLUTERegression(gamma1=GAMMA1, gamma2=GAMMA2)
    strategy.heads.update({str(i): {WEIGHT: h.T} for i, h in enumerate(w)})
    s, g = b.T @ b, strategy.gram()
    in_b = 2 * b @ (2 * GAMMA2 * s - GAMMA1 * g)
    np.testing.assert_allclose(slope(lambda b: regularizer(b, w), b), in_b, atol=1e-8)
    # Each head has the share 1 / clients of the mean.
    in_w = 2 * (2 * GAMMA2 * g - GAMMA1 * s) @ w / CLIENTS
    np.testing.assert_allclose(slope(lambda w: regularizer(b, w), w), in_w, atol=1e-8)
