"""FedCP compared with its equations in NumPy and finite-difference gradients."""

import numpy as np
import pytest
import torch
from paper_rounds import run_variant
from softmax_runs import CLASSES, DIMENSION, N, draw, run, task_of
from torch import nn

from flwr_frl.clients.fedcp import BANDWIDTHS, SeparatingHead
from flwr_frl.task import SplitModel

K, RATE, STEPS = 3, 0.3, 3
SHAPES = {
    "representation.weight": (K, DIMENSION),
    "head.weight": (CLASSES, K),
    "head.bias": (CLASSES,),
    "policy.0.weight": (2 * K, K),
    "policy.0.bias": (2 * K,),
    "policy.1.weight": (2 * K,),
    "policy.1.bias": (2 * K,),
}


def narrow(num_clients):
    """A linear representation of K features, and a linear head."""

    def model():
        return SplitModel(nn.Linear(DIMENSION, K, bias=False), nn.Linear(K, CLASSES))

    return task_of(model, classes=("a", "b", "c"))


OWN = {"task": f"{__name__}:narrow", "representation_epochs": STEPS}


def outputs_of(state, x, shared, context):
    """Return W_i (s ⊙ h) + W (r ⊙ h), and h."""
    h = x @ state["representation.weight"].T
    a = h * context / np.linalg.norm(context)
    a = a @ state["policy.0.weight"].T + state["policy.0.bias"]
    # Layer norm and ReLU
    a = (a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5)
    a = np.maximum(a * state["policy.1.weight"] + state["policy.1.bias"], 0)
    s = np.exp(a[:, :K]) / (np.exp(a[:, :K]) + np.exp(a[:, K:]))
    personal = (s * h) @ state["head.weight"].T + state["head.bias"]
    return personal + ((1 - s) * h) @ shared["head.weight"].T + shared["head.bias"], h


def cross_entropy(scores, y):
    return np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y])


def mmd(x, y):
    def kernel(a, b):
        squares = ((a[:, None] - b[None]) ** 2).sum(2)
        return sum(np.exp(-squares / (2 * width)) for width in BANDWIDTHS)

    return np.mean(kernel(x, x) + kernel(y, y) - 2 * kernel(x, y))


def flat(state):
    return np.concatenate([state[name].ravel() for name in SHAPES])


def shaped(vector):
    sizes = np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
    parts = zip(SHAPES.items(), np.split(vector, sizes), strict=True)
    return {name: part.reshape(shape) for (name, shape), part in parts}


def trained_by(i, shared, head, weight, batches=None):
    """Return client i's state after steps on W_i, the representation and the policy.

    Each batch holds all examples, unless ``batches`` lists indices, the largest first.
    """
    context = head["head.weight"].sum(0)
    theta = flat({**shared, **head})

    def objective(vector, x, y, share):
        scores, h = outputs_of(shaped(vector), x, shared, context)
        h_before = x @ shared["representation.weight"].T
        penalty = weight * share * mmd(h, h_before) if weight else 0.0
        return cross_entropy(scores, y) + penalty

    x, y = draw(i)
    batches = batches or [np.arange(len(x))] * STEPS
    for rows in batches:
        batch = x[rows], y[rows], len(rows) / len(batches[0])
        moves = 1e-5 * np.eye(len(theta))
        slopes = [
            objective(theta + m, *batch) - objective(theta - m, *batch) for m in moves
        ]
        theta = theta - RATE * np.array(slopes) / 2e-5
    return shaped(theta)


def head_of(state):
    return {name: state[name] for name in ("head.weight", "head.bias")}


def numpy_fedcp(found):
    """Return the shared state and all personal heads after each round."""
    shared, rounds = initial(), []
    heads = [head_of(shared)] * N
    for clients in found.trained:
        sent, heads = [], list(heads)
        for i in clients:
            trained = trained_by(i, shared, heads[i], found["fedcp_lambda"])
            heads[i] = head_of(trained)
            half = {n: (trained[n] + shared[n]) / 2 for n in head_of(trained)}
            sent.append(flat({**trained, **half}))
        shared = shaped(found.mean(sent, clients))
        rounds.append((shared, heads))
    return rounds


def initial():
    client = run("fedcp", 0, **OWN).client(0, 0)
    names, arrays = client._array_names(client.shared), client.get_parameters({})
    assert {n: a.shape for n, a in zip(names, arrays, strict=True)} == SHAPES
    return {n: a.astype(float) for n, a in zip(names, arrays, strict=True)}


@pytest.mark.parametrize(
    "more",
    [{"fedcp_lambda": 0.0}, {"fedcp_lambda": 3.0, "weighting": "examples"}],
    ids=["without MMD", "examples"],
)
def test_every_round_matches_the_paper(more):
    result = run_variant("fedcp", 2, **OWN, **more)
    for arrays, kept, (shared, heads) in zip(
        result.arrays, result.kept, numpy_fedcp(result), strict=True
    ):
        for name, value in shared.items():
            np.testing.assert_allclose(arrays[name], value, rtol=0, atol=1e-5)
        for state, head in zip(kept, heads, strict=True):
            for name in head if state else ():
                personal = state[f"personal-{name}"]
                np.testing.assert_allclose(personal, head[name], rtol=0, atol=1e-5)
    # Every array has moved by far more than the tolerance.
    for name, value in initial().items():
        assert np.abs(result.arrays[-1][name] - value).max() > 1e-4, name


def test_discrepancy_of_a_short_batch_is_weighted_by_its_size():
    # Client 0 has 6 examples, so the second batch of an epoch has two.
    more = {"batch_size": 4, "representation_epochs": 2, "fedcp_lambda": 20.0}
    client = run("fedcp", 0, **{**OWN, **more}).client(0, 0)
    arrays = client.get_parameters({})
    torch.manual_seed(7)
    sent = dict(
        zip(client._array_names(client.sent), client.fit(arrays, {})[0], strict=True)
    )
    torch.manual_seed(7)
    orders = [torch.randperm(6).numpy() for _ in range(2)]
    batches = [part for order in orders for part in (order[:4], order[4:])]
    start = initial()
    expected = trained_by(0, start, head_of(start), 20.0, batches)
    for name in ("representation.weight", "policy.0.weight"):
        np.testing.assert_allclose(sent[name], expected[name], rtol=0, atol=1e-5)


def test_clients_are_tested_with_both_heads():
    result = run("fedcp", 2, evaluate=True, **OWN)
    for i, metrics in enumerate(result.metrics[-1]):
        shared = {name: a.astype(float) for name, a in result.arrays[-1].items()}
        kept = result.kept[-1][i]
        personal = {
            n: kept[f"personal-{n}"] if kept else initial()[n] for n in head_of(shared)
        }
        x, y = draw(i, test=True)
        context = personal["head.weight"].sum(0)
        scores, h = outputs_of({**shared, **personal}, x, shared, context)
        assert metrics["loss"] == pytest.approx(cross_entropy(scores, y), abs=1e-5)
        plain = h @ shared["head.weight"].T + shared["head.bias"]
        right = np.mean(plain.argmax(1) == y)
        assert metrics["accuracy-global"] == pytest.approx(right)


def test_features_of_several_positions_are_split_per_position():
    torch.manual_seed(2)
    policy = nn.Sequential(nn.Linear(K, 2 * K), nn.LayerNorm(2 * K), nn.ReLU())
    head = SeparatingHead(nn.Linear(K, CLASSES), nn.Linear(K, CLASSES), policy)
    features = torch.randn(4, 6, K)
    expected = torch.stack([head(features[:, place]) for place in range(6)], 1)
    torch.testing.assert_close(head(features), expected)
