"""kNN-Per compared with a NumPy implementation and with FedAvg."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from layered import features, layered, parts, with_ones
from softmax_runs import CLASSES, N, assert_same, draw, run
from torch import nn

from flwr_frl.clients.knn_per import KNNPerClient, MixedHead, neighbours
from flwr_frl.task import ExampleSet, SplitModel

TASK = {"task": "layered:layered"}
K, WEIGHT, SCALE = 4, 0.7, 0.3


def settings_of(k, weight, scale):
    own = {"knn_neighbours": k, "knn_lambda": weight, "knn_scale": scale}
    return KNNPerClient._settings_type(**own)


def mixture(arrays, i):
    """Return the probabilities of client i's test examples, and their targets."""
    a, w = parts(arrays)
    (x, y), (tested, targets) = draw(i), draw(i, test=True)
    stored, z = features(a, x), features(a, tested)
    distances = np.square(z[:, None] - stored).sum(2)
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :K]
    kernel = np.exp(-np.take_along_axis(distances, nearest, 1) / (SCALE * z.shape[1]))
    shares = kernel / kernel.sum(1, keepdims=True)
    knn = (shares[:, :, None] * np.eye(CLASSES)[y[nearest]]).sum(1)
    scores = np.exp(with_ones(z) @ w.T)
    model = scores / scores.sum(1, keepdims=True)
    return WEIGHT * knn + (1 - WEIGHT) * model, targets


def test_every_client_mixes_its_neighbours_with_the_global_model():
    options = {"knn_neighbours": K, "knn_lambda": WEIGHT, "knn_scale": SCALE}
    result = run("knn-per", 4, evaluate=True, **options, **TASK)
    plain = run("fedavg", 4, evaluate=True, **TASK)
    assert [len(clients) for clients in result.trained] == [3] * 4
    for arrays, others in zip(result.arrays, plain.arrays, strict=True):
        assert_same(arrays, others)
    for now, arrays in enumerate(result.arrays):
        for i in range(N):
            # Includes clients that were not sampled.
            p, targets = mixture(arrays, i)
            chosen = p[np.arange(len(p)), targets]
            metrics = result.metrics[now][i]
            expected = -np.log(chosen).mean()
            assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
            assert metrics["accuracy"] == pytest.approx((p.argmax(1) == targets).mean())
            other = plain.metrics[now][i]["accuracy"]
            assert metrics["accuracy-global"] == pytest.approx(other)
    assert any(m["accuracy"] != m["accuracy-global"] for m in result.metrics[-1])


def test_prediction_is_the_class_of_the_nearest_stored_example():
    head = torch.nn.Linear(2, 3)
    stored = torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 0.0]])
    datastore = ExampleSet(stored, torch.tensor([2, 0, 1]))
    mixed = MixedHead(head, datastore, settings_of(1, 1.0, 1.0))
    # The second example is so far from all others that the kernel is 0 in float32.
    z = torch.tensor([[0.1, 0.4], [0.0, 300.0], [5.0, 1.0]])
    predicted = mixed(z).exp().detach()
    np.testing.assert_allclose(predicted, np.eye(3)[[2, 0, 1]], atol=1e-20)
    assert mixed.nearest(z, 3).shape == (3, 3)


@pytest.mark.parametrize("offset", [0, 1000])
def test_neighbours_are_the_nearest_of_many(offset):
    rng = np.random.default_rng(5)
    stored = rng.normal(offset, 1, (400, 3)).astype(np.float32)
    # Half of the examples are repeated, so that distances are equal. With the offset
    # inner products are too inexact to tell any of them apart.
    stored[200:] = stored[:200]
    z = rng.normal(offset, 1, (20, 3)).astype(np.float32)
    exact = np.square(z[:, None].astype(float) - stored).sum(2)
    expected = np.argsort(exact, axis=1, kind="stable")[:, :5]
    distances, rows = neighbours(*map(torch.from_numpy, (z, stored)), 5)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(
        distances, np.take_along_axis(exact, expected, 1), rtol=1e-3
    )


def pooled(num_clients):
    """The layered task with features of shape (4, 2), which the head averages."""
    representation = nn.Sequential(nn.LazyLinear(8), nn.Unflatten(1, (4, 2)))
    representation(layered(num_clients).train[0].inputs)

    def model():
        pool = nn.Sequential(nn.AvgPool1d(2), nn.Flatten(), nn.Linear(4, CLASSES))
        return SplitModel(deepcopy(representation), pool)

    return replace(layered(num_clients), model=model)


def test_features_need_not_be_vectors():
    settings = {"task": f"{__name__}:pooled", "knn_lambda": 1.0, "knn_neighbours": 1}
    result = run("knn-per", 1, evaluate=True, fraction_train=1.0, **settings)
    model = pooled(N).model()
    model.load_state_dict({n: torch.tensor(a) for n, a in result.arrays[0].items()})
    (x, y), (tested, targets) = draw(0), draw(0, test=True)
    stored, z = (
        model.representation(torch.from_numpy(inputs).float()).detach().flatten(1)
        for inputs in (x, tested)
    )
    nearest = np.square(z[:, None] - stored).sum(2).argmin(1)
    expected = (y[nearest] == targets).mean()
    assert result.metrics[0][0]["accuracy"] == pytest.approx(expected)


def loss_of_unlabelled(outputs, targets):
    """Cross-entropy is NaN without labels, which is refused."""
    return nn.functional.cross_entropy(outputs, targets.clamp(min=0))


def without_labels(num_clients):
    """The layered task, in which client 0 has no labelled example."""
    task = layered(num_clients)
    none = torch.full_like(task.train[0].targets, -100)
    train = [ExampleSet(task.train[0].inputs, none), *task.train[1:]]
    return replace(task, train=train, loss=loss_of_unlabelled)


def test_client_without_labels_deploys_the_model_alone():
    settings = {"task": f"{__name__}:without_labels", "knn_lambda": 1.0}
    result = run("knn-per", 1, evaluate=True, fraction_train=1.0, **settings)
    metrics = result.metrics[0][0]
    assert metrics["accuracy"] == metrics["accuracy-global"]
