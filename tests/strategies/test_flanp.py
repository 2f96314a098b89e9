"""FLANP's rule in SRPFL: a small gradient ends a stage."""

import json

import algorithm_runs
import numpy as np
from srpfl_runs import recorded

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server_app import serve
from flwr_frl.task.tasks.linear import LinearTask

CLIENTS, ROUNDS, SAMPLES, RATE, THRESHOLD = 12, 40, 20, 0.05, 0.2


def trained_clients(folder, **more) -> list[list[int]]:
    """Run FLANP, and return the clients that trained in each round."""
    chosen = {"stage_threshold": THRESHOLD, "rounds_per_stage": "gradient"}
    chosen |= {"num_server_rounds": ROUNDS, **more}
    settings = algorithm_runs.settings_of(
        "flanp",
        task="linear",
        output=str(folder),
        num_clients=CLIENTS,
        fraction_train=1.0,
        initial_nodes=2,
        samples=SAMPLES,
        # One gradient step on all examples
        batch_size=SAMPLES,
        learning_rate=RATE,
        momentum=0.0,
        weight_decay=0.0,
        representation_epochs=1,
        evaluate_every=0,
        evaluate_last=1,
        **chosen,
    )
    grid = InlineGrid(make_app(settings), CLIENTS)
    trained = recorded(grid)
    serve(grid, settings)
    lines = (folder / "flanp" / "metrics.jsonl").read_text().splitlines()
    counts = [json.loads(line)["clients"] for line in lines]
    assert counts[-len(trained) :] == list(map(len, trained))
    return trained


def test_flanp_equals_gradient_descent_on_the_fastest_clients(tmp_path):
    trained = trained_clients(tmp_path)
    task = LinearTask(samples=SAMPLES, num_clients=CLIENTS)
    data = [task.draw(i) for i in range(CLIENTS)]
    model = task.initial_model()
    b = model.representation.weight.detach().numpy().T.astype(float)
    w = model.head.weight.detach().numpy()[0].astype(float)
    fastest = np.argsort(SpeedModel("fixed", CLIENTS).times(1))
    n, first, expected = 2, None, []
    for _ in range(ROUNDS):
        chosen = sorted(fastest[:n].tolist())
        expected.append(chosen)
        grad_b, grad_w = np.zeros_like(b), np.zeros_like(w)
        for x, y in (data[i] for i in chosen):
            towards = 2 * x.T @ (x @ b @ w - y) / SAMPLES / n
            grad_b, grad_w = grad_b + np.outer(towards, w), grad_w + b.T @ towards
        squared = (grad_b**2).sum() + (grad_w**2).sum()
        first = squared if first is None else first
        b, w = b - RATE * grad_b, w - RATE * grad_w
        # ‖∇L_n‖² ≤ 2 μ c / (n s); the constants are taken from the first two clients.
        if n < CLIENTS and squared <= THRESHOLD * first * 2 / n:
            n = min(2 * n, CLIENTS)
    assert trained == expected
    assert {len(chosen) for chosen in expected} == {2, 4, 8, 12}


def test_resumed_run_continues_in_its_stage(tmp_path) -> None:
    at_once = trained_clients(tmp_path / "a")
    folder = tmp_path / "b"
    before = trained_clients(folder, num_server_rounds=15)
    after = trained_clients(tmp_path / "c", resume=str(folder))
    assert before + after == at_once
