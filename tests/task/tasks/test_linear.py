"""Linear tasks: hand-computed angles, and best approximations by the SVD."""

import numpy as np
import pytest
from command_line import rows_of, run
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_says, code_of

from flwr_frl.task.tasks.linear import (
    LinearData,
    LinearTask,
    TransferTask,
    principal_angle_distance,
)

# Principal angle distance


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 6))
def test_distance_matches_its_definition(seed, k, extra):
    # ‖B̂₁,⊥ᵀ B̂₂‖₂ with a basis of the complement from the full QR decomposition
    rng = np.random.default_rng(seed)
    b1, b2 = rng.standard_normal((2, k + extra, k))
    complement = np.linalg.qr(b1, mode="complete").Q[:, k:]
    basis = np.linalg.qr(b2).Q
    expected = np.linalg.svd(complement.T @ basis, compute_uv=False).max()
    assert principal_angle_distance(b1, b2) == pytest.approx(expected, abs=1e-9)
    # Only the column spaces matter.
    mixed = b2 @ (rng.standard_normal((k, k)) + 3 * np.eye(k))
    assert principal_angle_distance(b1, mixed) == pytest.approx(expected, abs=1e-6)


# True models


def test_true_models_of_low_rank():
    task = LinearTask(dimension=12, rank=3, num_clients=8, seed=4)
    b = task.representation
    np.testing.assert_allclose(b.T @ b, np.eye(3), atol=1e-12)
    assert task.models.shape == (12, 8)
    # Φ lies in the span of B*, and every head has the norm √k.
    np.testing.assert_allclose(b @ b.T @ task.models, task.models, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(task.models, axis=0), np.sqrt(3))
    assert np.linalg.matrix_rank(task.models) == 3
    np.testing.assert_allclose(task.best_errors, 0, atol=1e-12)


@pytest.mark.parametrize(("dimension", "clients"), [(10, 15), (10, 6)])
def test_decaying_spectrum(dimension, clients):
    task = LinearTask(
        dimension=dimension, rank=4, num_clients=clients, spectrum="decaying"
    )
    # min(d, M) = r singular values: 2 r/2, 2 r/3, 2 r/4, ...
    r = min(dimension, clients)
    expected = [2 * r / (i + 1) for i in range(1, r + 1)]
    spectrum = np.linalg.svd(task.models, compute_uv=False)
    np.testing.assert_allclose(spectrum, expected)
    # Eckart–Young: the best rank-4 approximation errs by the remaining spectrum.
    assert np.sum(task.best_errors**2) == pytest.approx(np.sum(np.square(expected[4:])))


# Examples


def test_inputs_and_noise_have_the_stated_variances():
    task = LinearTask(dimension=4, rank=2, noise_variance=0.25)
    x, y = task.draw(1, 1, samples=20_000)
    noise = y - x @ task.models[:, 1]
    assert abs(x.mean()) < 5 / np.sqrt(80_000)
    assert abs(x.var() - 1) < 5 * np.sqrt(2 / 80_000)
    assert abs(noise.mean()) < 5 * 0.5 / np.sqrt(20_000)
    assert abs(noise.var() - 0.25) < 5 * 0.25 * np.sqrt(2 / 20_000)


def test_test_examples_are_not_in_training_batches():
    task = LinearTask(dimension=3, samples=4)
    held_out = task.test_examples(0)
    assert len(held_out) == 200
    seen = {tuple(row) for row in held_out.inputs.tolist()}
    for draw in range(50):
        x, _ = task.draw(0, draw)
        assert not seen & {tuple(row) for row in x.astype(np.float32).tolist()}


def test_a_rank_above_the_dimension_and_too_many_numbers_are_an_error():
    assert code_of(LinearTask, rank=11) == code_of(TransferTask, rank=11) == "rank"
    code = code_of(LinearTask, dimension=2**20, samples=2**20)
    assert code == "too-many-numbers"


# Data of one's own


def own_data(**changes) -> LinearData:
    rng = np.random.default_rng(1)
    b, heads = rng.standard_normal((4, 1)), rng.standard_normal((3, 1))

    def drawn(n):
        x = [rng.standard_normal((n, 4)) for _ in heads]
        return [(xi, xi @ (b @ w)) for xi, w in zip(x, heads, strict=True)]

    return LinearData(**{"train": drawn(20), "test": drawn(5), "rank": 1, **changes})


def test_linear_data_is_tested_on_its_test_examples():
    task = own_data()
    x, y = task.draw(1, task.test_draw)
    assert len(y) == 5 == len(task.test_examples(1))
    assert len(task.draw(1, 7)[1]) == 20 == len(task.train_examples(1))
    b, w = np.ones((4, 1)), np.array([0.5])
    loss, examples, metrics = task.compare(1, b, w)
    error = y - x @ np.full(4, 0.5)
    assert loss == pytest.approx(np.mean(error**2))
    assert metrics == {"r2": pytest.approx(1 - error @ error / (5 * y.var()))}
    assert examples == 5


def test_a_subclass_with_another_draw_is_not_compared_with_the_synthetic_truth():
    class Own(LinearTask):
        def draw(self, client, draw=0, samples=None):
            return np.eye(3), np.array([1.0, 2.0, 3.0])

    task = Own(dimension=3, rank=1)
    loss, _, metrics = task.compare(0, np.array([[1.0], [2.0], [3.0]]), np.ones(1))
    assert (loss, metrics) == (0, {"r2": 1})


@pytest.mark.parametrize(
    ("train", "code"),
    [
        ([(np.eye(4), np.arange(4)), (np.eye(3), np.arange(3))], "inputs"),
        ([(np.eye(4), np.arange(4)), (np.eye(4), np.arange(3))], "inputs"),
        ([(np.eye(4), np.ones(4))] * 2, "targets"),
    ],
)
def test_invalid_linear_data_is_a_one_line_error(train, code):
    assert code_of(own_data, train=train, test=train) == code
    assert code_of(own_data, train=train[:1]) == "inputs"
    assert code_of(own_data, rank=5) == "rank"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("targets", (np.eye(4), np.array([1, 2, 3, np.nan]))),
        ("inputs", (np.diag([1, 2, 3, np.nan]), np.arange(4))),
    ],
)
def test_missing_values_of_linear_data_are_found_before_the_first_round(name, missing):
    complete = np.eye(4), np.arange(4)
    task = LinearData([complete, missing], [complete] * 2)
    task.check(0)
    line = f"train examples of client 1: the {name} of row 3 are not finite"
    assert_says(line, task.check, 1)


@pytest.mark.parametrize("algorithm", ["fedrep", "flute", "representation-transfer"])
def test_linear_algorithms_learn_from_a_table(tmp_path, algorithm):
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((5, 1)) @ rng.uniform(1, 2, (1, 6))
    lines = ["site,a,b,c,d,e,label"]
    for i in range(180):
        x = rng.standard_normal(5)
        y = 3 + x @ weights[:, i % 6]
        lines.append(",".join([f"s{i % 6}", *map(str, x), str(y)]))
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    flags = ("--task", "linear-table", "--data-dir", str(tmp_path / "rows.csv"))
    named = {"client_column": "site", "cache_dir": str(tmp_path), "num_sources": 3}
    assert run(tmp_path / "out", algorithm, *flags, **named) == 0
    row = rows_of(tmp_path / "out", algorithm)[-1]
    error = row["error"] if algorithm == "representation-transfer" else 1 - row["r2"]
    assert error < 0.05
