"""The neural-collapse distance, by hand, in NumPy and by finite differences."""

import numpy as np
import pytest
import torch

from flwr_frl.task.models.neural_collapse import neural_collapse, step


def reference(head, classes, m=None):
    """Compute FLUTE's section 7.2 in NumPy, with H = headᵀ."""
    m = m or len(head)
    gram = head @ head.T
    u = classes.astype(float)
    simplex = np.eye(len(head)) - np.ones((len(head), len(head))) / m
    target = np.outer(u, u) * simplex / np.sqrt(m - 1)
    return np.linalg.norm(gram / np.linalg.norm(gram) - target)


def test_masked_value_by_hand() -> None:
    # Three classes, of which the client has the first two. HᵀH = diag(1, 1, 0), with
    # norm √2. The target is 1/√2 [[2/3, -1/3], [-1/3, 2/3]], so the difference is
    # 1/√2 · 1/3 in four entries, and its norm is 2 / (3√2) = √2/3.
    head = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    classes = torch.tensor([[True, True, False]])
    assert neural_collapse(head, classes).item() == pytest.approx(2**0.5 / 3)
    # Among the client's two classes, the target is [[1/2, -1/2], [-1/2, 1/2]], so the
    # differences are 1/√2 - 1/2 on the diagonal and 1/2 off the diagonal.
    expected = (2 * (0.5**0.5 - 0.5) ** 2 + 2 * 0.25) ** 0.5
    assert neural_collapse(head, classes, local=True).item() == pytest.approx(expected)


def test_batch_equals_one_by_one() -> None:
    rng = np.random.default_rng(1)
    heads, classes = rng.standard_normal((4, 6, 3)), rng.random((4, 6)) < 0.5
    classes[:, :2] = True
    args = torch.from_numpy(heads), torch.from_numpy(classes)
    expected = [reference(h, c) for h, c in zip(heads, classes, strict=True)]
    np.testing.assert_allclose(neural_collapse(*args).numpy(), expected)
    expected = [reference(h, c, c.sum()) for h, c in zip(heads, classes, strict=True)]
    np.testing.assert_allclose(neural_collapse(*args, local=True).numpy(), expected)


@pytest.mark.parametrize("first", [True, False])
def test_local_collapse_with_at_most_one_class_is_finite(first) -> None:
    classes = torch.tensor([[first, False, False]])
    # The target is 0 and the Gram matrix has norm 1.
    value = neural_collapse(torch.ones(1, 3, 2), classes, local=True)
    assert value.item() == pytest.approx(1)


def test_step_follows_finite_differences() -> None:
    rng = np.random.default_rng(2)
    heads, classes = rng.standard_normal((2, 4, 3)), np.array([[1, 1, 0, 1]] * 2) > 0
    moved = step(torch.from_numpy(heads), torch.from_numpy(classes), 0.5)
    gradient, width = np.zeros_like(heads), 1e-6
    for i in np.ndindex(heads.shape):
        values = []
        for sign in (1, -1):
            shifted = heads.copy()
            shifted[i] += sign * width
            pairs = zip(shifted, classes, strict=True)
            values.append(np.mean([reference(h, c) for h, c in pairs]))
        gradient[i] = (values[0] - values[1]) / (2 * width)
    np.testing.assert_allclose(moved.numpy(), heads - 0.5 * gradient, atol=1e-8)


def test_distance_of_a_zero_head_is_the_norm_of_the_simplex() -> None:
    # The target is that of the first test: 1/√2 times entries 2/3, -1/3, -1/3, 2/3.
    heads, classes = torch.zeros(1, 3, 2), torch.tensor([[True, True, False]])
    expected = (10 / 9 / 2) ** 0.5
    assert neural_collapse(heads, classes).item() == pytest.approx(expected)
    assert neural_collapse(heads, classes, local=True).item() == pytest.approx(1)
    # A zero head has no descent direction, so the step does not change it.
    assert torch.equal(step(heads, classes, 0.5), heads)
