"""FD, FML, FedKD, FedGH and FedMRL compared with NumPy and torch."""

import numpy as np
import pytest
import torch
from layered import class_means, descend, parts, with_ones
from layered import loss_of as layered_loss
from layered import start as layered_start
from softmax_runs import (
    CLASSES,
    RATE,
    STEPS,
    N,
    assert_near,
    draw,
    loss_of,
    matrix,
    run,
    start,
)
from torch import nn
from torch.nn.functional import cross_entropy, linear, log_softmax, softmax

from flwr_frl import simulate
from flwr_frl.clients.device.architectures import with_model
from flwr_frl.common.low_rank import low_rank
from flwr_frl.task.models import MODELS

LAYERED = {"task": "layered:layered"}
MEANS, COUNTS = "prototypes.means", "prototypes.counts"


def probabilities(theta, x):
    scores = np.exp(with_ones(x) @ theta.T)
    return scores / scores.sum(1, keepdims=True)


def test_fd_matches_the_paper():
    gamma = 0.7
    result = run("fd", 4, fd_gamma=gamma, evaluate=True)
    models, means = [start()] * N, np.zeros((CLASSES, CLASSES))
    known = np.zeros(CLASSES, bool)
    for now, clients in enumerate(result.trained):
        sent = []
        for i in clients:
            (x, y), theta, seen = draw(i), models[i], []
            for _ in range(STEPS):
                p = probabilities(theta, x)
                seen.append(p)
                slope = p - np.eye(CLASSES)[y]
                slope += gamma * (p - means[y]) * known[y][:, None]
                theta = theta - RATE * slope.T @ with_ones(x) / len(y)
            models[i], p = theta, np.mean(seen, axis=0)
            sent.append({c: p[y == c].mean(0) for c in {*y}})
        for c in {c for each in sent for c in each}:
            means[c] = np.mean([each[c] for each in sent if c in each], axis=0)
            known[c] = True
        assert_near(result.arrays[now][MEANS], means)
        for i, metrics in enumerate(result.metrics[now]):
            assert metrics["loss"] == pytest.approx(loss_of(models[i], i), abs=1e-5)


@pytest.mark.parametrize("name", ["fd", "fml"])
def test_without_a_second_term_the_private_models_are_local(name):
    own = {"fd": {"fd_gamma": 0.0}, "fml": {"fml_alpha": 1.0, "fml_beta": 1.0}}[name]
    more = {**LAYERED, "batch_size": 4, "momentum": 0.5}
    result, local = run(name, 4, **own, **more), run("local", 4, **more)
    for kept, others in zip(result.kept[-1], local.kept[-1], strict=True):
        assert kept.keys() == others.keys()
        for n, value in kept.items():
            assert_near(value, others[n], 1e-6)
    if name == "fml":
        average = run("fedavg", 4, **more).arrays[-1]
        for n, value in result.arrays[-1].items():
            assert_near(value, average[n.removeprefix("small.")], 1e-6)


def test_fml_matches_the_paper():
    alpha, beta = 0.3, 0.8
    result = run("fml", 4, fml_alpha=alpha, fml_beta=beta, evaluate=True)
    models, shared = [start()] * N, start()
    for now, clients in enumerate(result.trained):
        sent = []
        for i in clients:
            (x, y), theta, meme = draw(i), models[i], shared
            for _ in range(STEPS):
                p, q = probabilities(theta, x), probabilities(meme, x)
                labels, inputs = np.eye(CLASSES)[y], RATE * with_ones(x) / len(y)
                slope = alpha * (p - labels) + (1 - alpha) * (p - q)
                of_meme = beta * (q - labels) + (1 - beta) * (q - p)
                theta, meme = theta - slope.T @ inputs, meme - of_meme.T @ inputs
            models[i] = theta
            sent.append(meme)
        shared = np.mean(sent, axis=0)
        assert_near(matrix(result.arrays[now], "small."), shared)
        for i, metrics in enumerate(result.metrics[now]):
            assert metrics["loss"] == pytest.approx(loss_of(models[i], i), abs=1e-5)


def reduced(m, energy):
    """Project a matrix on the leading eigenvectors of M Mᵀ."""
    values, vectors = np.linalg.eigh(m @ m.T)
    shares = np.cumsum(values[::-1]) / values.sum()
    leading = vectors[:, ::-1][:, : int((shares <= energy).sum()) + 1]
    return leading @ leading.T @ m


def test_fedkd_matches_the_paper():
    energies = {"fedkd_energy_start": 0.6, "fedkd_energy_end": 0.9}
    result = run("fedkd", 4, num_server_rounds=4, **energies, **LAYERED)
    models = [[torch.tensor(m) for m in layered_start()] for _ in range(N)]
    w = result.client(0, 0).link().weight.detach().double()
    transforms, mentee = [w] * N, layered_start()

    def outputs(a, head, x):
        z = torch.tanh(linear(x, a[:, :-1], a[:, -1]))
        return z, linear(z, head[:, :-1], head[:, -1])

    for now, clients in enumerate(result.trained):
        energy, changes = 0.6 + 0.1 * now, []
        for i in clients:
            x, y = map(torch.tensor, draw(i))
            values = [*models[i], *map(torch.tensor, mentee), transforms[i]]
            for _ in range(STEPS):
                each = [v.detach().requires_grad_() for v in values]
                (z, p), (of_mentee, q) = outputs(*each[:2], x), outputs(*each[2:4], x)
                total = cross_entropy(p, y) + cross_entropy(q, y)
                logs = log_softmax(p, 1) - log_softmax(q, 1)
                mutual = ((softmax(p, 1) - softmax(q, 1)) * logs).sum(1).mean()
                hidden = (z - of_mentee @ each[4].T).square().mean()
                loss = total + (mutual + 2 * hidden) / total
                slopes = torch.autograd.grad(loss, each)
                values = [v - RATE * s for v, s in zip(each, slopes, strict=True)]
            models[i], transforms[i] = values[:2], values[4]
            moved = [v.detach().numpy() for v in values[2:4]]
            changes.append([m - o for m, o in zip(moved, mentee, strict=True)])
            kept = result.kept[now][i]
            assert_near(kept["link.weight"], values[4].detach().numpy())
            for found, expected in zip(parts(kept), values[:2], strict=True):
                assert_near(found, expected.detach().numpy())
        steps = []
        for matrices in zip(*changes, strict=True):
            # The rank of weights is reduced, not that of biases.
            weight = np.mean([reduced(m[:, :-1], energy) for m in matrices], axis=0)
            bias = np.mean([m[:, -1] for m in matrices], axis=0)
            steps.append(np.column_stack([reduced(weight, energy), bias]))
        mentee = [m + s for m, s in zip(mentee, steps, strict=True)]
        for found, expected in zip(
            parts(result.arrays[now], "small."), mentee, strict=True
        ):
            assert_near(found, expected)


@pytest.mark.parametrize(
    ("energy", "rank"), [(0.0, 1), (0.6, 1), (9 / 14, 2), (0.9, 2), (0.95, 3)]
)
def test_rank_exceeds_the_share_of_the_energy(energy, rank):
    matrix = np.diag([2.0, 1.0, 3.0]) @ np.eye(3, 40)
    found = low_rank(matrix, energy)
    assert np.linalg.matrix_rank(found) == rank
    folded = low_rank(matrix.reshape(3, 4, 2, 5), energy)
    assert_near(folded.reshape(3, 40), found, 1e-12)
    assert low_rank(matrix, 1.0) is matrix
    assert (low_rank(matrix[0], energy) == matrix[0]).all()


def test_fedgh_matches_the_paper():
    rate, epochs = 0.4, 5
    own = {"fedgh_learning_rate": rate, "fedgh_epochs": epochs}
    result = run("fedgh", 4, evaluate=True, **own, **LAYERED)
    a, head = layered_start()
    bodies = [a] * N
    for now, clients in enumerate(result.trained):
        pairs = []
        for i in clients:
            bodies[i], _ = descend(bodies[i], head, i)
            means, counts = class_means(bodies[i], i)
            pairs += [(means[c], c) for c in range(CLASSES) if counts[c]]
        x, y = np.array([m for m, _ in pairs]), np.array([c for _, c in pairs])
        for _ in range(epochs):
            slope = probabilities(head, x) - np.eye(CLASSES)[y]
            head = head - rate * slope.T @ with_ones(x) / len(y)
        weight, bias = (result.arrays[now][f"head.{n}"] for n in ("weight", "bias"))
        assert_near(np.column_stack([weight, bias]), head)
        for i, metrics in enumerate(result.metrics[now]):
            expected = layered_loss(bodies[i], head, i)
            assert metrics["loss"] == pytest.approx(expected, abs=1e-5)


def test_fedmrl_matches_the_paper():
    result = run("fedmrl", 3, evaluate=True, **LAYERED)
    models = [[torch.tensor(m) for m in layered_start()] for _ in range(N)]
    linear_map = result.client(0, 0).link()
    p = [linear_map.weight.detach().double(), linear_map.bias.detach().double()]
    maps, shared = [p] * N, [torch.tensor(m) for m in layered_start()]

    def losses(a, w, b, v, weight, bias, x, y):
        z = [torch.tanh(linear(x, m[:, :-1], m[:, -1])) for m in (b, a)]
        r = linear(torch.cat(z, 1), weight, bias)
        heads = ((w, r), (v, r[:, : z[0].shape[1]]))
        return [cross_entropy(linear(f, h[:, :-1], h[:, -1]), y) for h, f in heads]

    for now, clients in enumerate(result.trained):
        sent = []
        for i in clients:
            values = [*models[i], *shared, *maps[i]]
            for _ in range(STEPS):
                each = [v.detach().requires_grad_() for v in values]
                total = sum(losses(*each, *map(torch.tensor, draw(i))))
                slopes = torch.autograd.grad(total, each)
                values = [v - RATE * s for v, s in zip(each, slopes, strict=True)]
            models[i], maps[i] = values[:2], values[4:]
            sent.append(values[2:4])
        shared = [torch.stack(each).mean(0) for each in zip(*sent, strict=True)]
        found = parts(result.arrays[now], "small.")
        for one, expected in zip(found, shared, strict=True):
            assert_near(one, expected.detach().numpy())
        for i, metrics in enumerate(result.metrics[now]):
            test = map(torch.tensor, draw(i, test=True))
            loss = losses(*models[i], *shared, *maps[i], *test)[0].item()
            assert metrics["loss"] == pytest.approx(loss, abs=1e-5)


# Different architectures


@pytest.fixture
def models(monkeypatch):
    """Register models with 32 features, as many as digits-cnn has."""

    def build(shape, classes, norm=False):
        layers = {"flatten": nn.Flatten(), "fc1": nn.Linear(64, 32)}
        layers |= {"norm": nn.BatchNorm1d(32)} if norm else {}
        return [layers, {"fc2": nn.Linear(32, classes)}]

    monkeypatch.setitem(MODELS, "narrow", build)
    normed = lambda *shape: build(*shape, norm=True)  # noqa: E731
    monkeypatch.setitem(MODELS, "normed", normed)


DIGITS = {"task": "digits", "partition": "iid", "learning_rate": 0.02}
SEVERAL = {**DIGITS, "client_models": "digits-cnn narrow", "batch_size": 60}
SMALL = {"shared_model": "mlp-2"}


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [(n, {}) for n in ("fd", "fedgh", "fedproto", "fedtgp", "local", "lg-fedavg")]
    + [(n, SMALL) for n in ("fml", "fedkd")]
    + [("fedmrl", {"shared_model": "narrow"})],
)
@pytest.mark.usefixtures("models")
def test_clients_with_two_architectures(algorithm, more):
    layers = {"head_layers": 1} if algorithm == "lg-fedavg" else {}
    result = run(algorithm, 1, fraction_train=1.0, **SEVERAL, **more, **layers)
    assert len(result.trained[0]) == N
    for i, kept in enumerate(result.kept[-1]):
        task = result.client(i, 1).task
        assert task.model_name == ("digits-cnn", "narrow")[i % 2]
        of_model = {n for n in kept if n.startswith(("representation.", "head."))}
        assert {n for n in task.initial_state if n.startswith("rep")} <= of_model
        assert of_model <= set(task.initial_state)
    if more:
        state = with_model(task, more["shared_model"]).initial_state
        assert set(result.arrays[-1]) == {f"small.{n}" for n in state}


@pytest.mark.usefixtures("models")
def test_a_batch_that_the_small_model_refuses_is_skipped():
    client = run("fml", 0, **DIGITS).client(0, 0)
    alone = len(client.train_examples) - 1
    more = {**DIGITS, "shared_model": "normed", "model": "narrow"}
    result = run("fml", 1, batch_size=alone, **more)
    assert np.isfinite(result.rows[0]["train-loss"])


def test_results_name_the_model_of_each_client(tmp_path):
    more = {"clients": 5, "rounds": 1, "output": str(tmp_path), "fraction": 1.0}
    found = simulate("fd", "inline", client_models="mlp logistic", **more)
    rows = found.clients.to_dict("records")
    assert [row["model"] for row in rows] == ["mlp", "logistic"] * 2 + ["mlp"]
