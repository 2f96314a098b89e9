"""Clients that join after training, compared with a NumPy implementation."""

import json

import numpy as np
import pytest
from flwr.app import MessageType
from softmax_runs import RATE, N, assert_near, gradient, loss_of, matrix, run, start

from flwr_frl import simulate
from flwr_frl.clients.device.setup import newcomers
from flwr_frl.clients.fedrep import solve_head
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.server.evaluation import let_join
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.task.tasks import build_task

EPOCHS = 4
NEW = sorted(newcomers(N, 2, 0))
SHARED = {"new_clients": 2, "fraction_train": 1.0, "newcomer_epochs": EPOCHS}


def joined(algorithm: str, **more):
    """Return the trained run, and each newcomer's metrics."""
    result = run(algorithm, 2, **SHARED, **more)
    arrays = to_record(result.arrays[-1])
    metrics = let_join(result.strategy, result.grid, arrays, 2, 60.0)
    assert list(metrics) == [f"{i:06d}" for i in NEW]
    return result, [metrics[f"{i:06d}"] for i in NEW]


def descend(theta, i, slope_of):
    for _ in range(EPOCHS):
        theta = theta - RATE * slope_of(theta, i)
    return theta


def test_newcomers_do_not_train_with_others():
    result, _ = joined("fedper", evaluate=True)
    others = [i for i in range(N) if i not in NEW]
    assert result.trained == [others, others]
    assert [row["evaluated"] for row in result.rows] == [len(others)] * 2
    asked = {
        m.metadata.dst_node_id - 1
        for m in result.grid.sent
        if m.metadata.message_type in (MessageType.TRAIN, MessageType.EVALUATE)
    }
    assert asked == set(others)


def test_newcomer_fits_its_own_head():
    # The representation of the model has no parameters, so the head is the whole model.
    _, metrics = joined("fedper")
    for i, entry in zip(NEW, metrics, strict=True):
        theta = descend(start(), i, gradient)
        assert entry["loss"] == pytest.approx(loss_of(theta, i), abs=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "settings", "epochs", "pull"),
    [
        ("fedavg", {}, 0, 0.0),
        ("ditto", {"ditto_lambda": 0.0}, EPOCHS, 0.0),
        ("ditto", {"ditto_lambda": 0.8}, EPOCHS, 0.8),
        ("ditto", {"ditto_lambda": 0.8, "srpfl": True}, EPOCHS, 0.8),
        ("l2gd", {"l2gd_lambda": 0.2}, EPOCHS, 0.2),
        # The shared arrays are the mean of the last models.
        ("fedamp", {"fedamp_lambda": 1.2, "fedamp_alpha": 2.0}, EPOCHS, 0.6),
    ],
)
def test_newcomer_trains_near_the_shared_model(algorithm, settings, epochs, pull):
    result, metrics = joined(algorithm, **settings)
    w = matrix(result.arrays[-1])
    for i, entry in zip(NEW, metrics, strict=True):
        theta = w
        for _ in range(epochs):
            theta = theta - RATE * (gradient(theta, i) + pull * (theta - w))
        assert entry["loss"] == pytest.approx(loss_of(theta, i), abs=1e-5)


def test_newcomer_that_stops_replying_is_omitted(monkeypatch):
    result = run("fedper", 2, **SHARED)
    answers, dead = result.grid.send_and_receive, NEW[0] + 1

    def send_and_receive(messages, **how):
        return answers([m for m in messages if m.metadata.dst_node_id != dead], **how)

    monkeypatch.setattr(result.grid, "send_and_receive", send_and_receive)
    arrays = to_record(result.arrays[-1])
    metrics = let_join(result.strategy, result.grid, arrays, 2, 60.0)
    assert list(metrics) == [f"{i:06d}" for i in NEW[1:]]


def test_newcomer_of_an_algorithm_with_extra_parts_uses_its_fit():
    # FedRoD has no representation here; only the personal head is trained.
    result, metrics = joined("fedrod")
    assert all(np.isfinite(entry["loss"]) for entry in metrics)
    generic = {name: array.tobytes() for name, array in result.arrays[-1].items()}
    asked = [
        m for m in result.grid.sent if m.metadata.message_type.endswith("newcomer")
    ]
    for message in asked:
        sent = message.content.array_records["arrays"]
        assert {n: a.numpy().tobytes() for n, a in sent.items()} == generic


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_newcomer_of_apfl_trains_its_part_of_the_mixture(alpha):
    result, metrics = joined("apfl", apfl_alpha=alpha)
    w = matrix(result.arrays[-1])

    def mixed(v):
        return alpha * v + (1 - alpha) * w

    for i, entry in zip(NEW, metrics, strict=True):
        v = descend(w, i, lambda v, i: alpha * gradient(mixed(v), i))
        assert entry["loss"] == pytest.approx(loss_of(mixed(v), i), abs=1e-5)


@pytest.mark.parametrize("algorithm", ["fedrep", "flute"])
def test_linear_heads_are_solved_exactly(tmp_path, algorithm):
    settings = {"task": "linear", "samples": 8, "num-clients": 6, "seed": 2}
    named = {name.replace("-", "_"): value for name, value in settings.items()}
    options = {**named, "rounds": 3, "new_clients": 2, "output": str(tmp_path)}
    result = simulate(algorithm, backend="inline", **options)
    entries = json.loads((tmp_path / algorithm / "newcomers.json").read_text())
    new = sorted(newcomers(6, 2, 2))
    assert list(entries) == [f"{i:06d}" for i in new]
    from safetensors.numpy import load_file

    arrays = load_file(tmp_path / algorithm / "checkpoint.safetensors")
    b = arrays["arrays/representation.weight"].T.astype(float)
    task = build_task(resolve(settings), 6)
    errors = []
    for i in new:
        x, y = task.draw(i)
        w = np.linalg.pinv(x @ b) @ y
        errors.append(np.linalg.norm(b @ w - task.models[:, i]))
        assert entries[f"{i:06d}"]["error"] == pytest.approx(errors[-1])
    assert result.summary["error-newcomers"] == pytest.approx(np.mean(errors))
    assert_near(solve_head(b, x, y), w)
