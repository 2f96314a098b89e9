"""pFedFDA compared with a NumPy implementation of server and clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from layered import WIDTH, features, gradients, layered, loss_of, parts, start
from softmax_runs import CLASSES, RATE, STEPS, N, assert_near, draw, mean, run, weights

from flwr_frl.clients import PFedFDAClient
from flwr_frl.clients.pfedfda import minimum_in_unit_interval
from flwr_frl.task import ExampleSet

TASK = {"task": "layered:layered"}
RIDGE, EPS = 0.3, 1e-4
MEANS, COVARIANCE = "gaussian.means", "gaussian.covariance"


def priors_of(y):
    shares = np.bincount(y, minlength=CLASSES) / len(y) + EPS
    return shares / shares.sum()


def head_of(means, covariance, y):
    """Return [W | b] of linear discriminant analysis."""
    scale = np.trace(covariance) / WIDTH
    mixed = (1 - EPS) * covariance + EPS * scale * np.eye(WIDTH)
    w = means @ np.linalg.inv(mixed)
    return np.column_stack([w, np.log(priors_of(y)) - (means * w).sum(1) / 2])


def estimated(z, y, received):
    present = np.isin(np.arange(CLASSES), y)
    means = np.array(
        [z[y == c].mean(0) if present[c] else received[0][c] for c in (0, 1, 2)]
    )
    away = z - means[y]
    return means, away.T @ away / (len(y) - 1) + RIDGE * np.eye(WIDTH)


def mixed(local, received, beta):
    pairs = zip(local, received, strict=True)
    return [beta * mine + (1 - beta) * other for mine, other in pairs]


def best_beta(z, y, received):
    """Return the minimum of the risk by successively finer grids."""
    of_classes = [np.flatnonzero(y == c) for c in range(CLASSES)]
    pairs = [places for places in of_classes if len(places) > 1]
    halves = [np.concatenate([places[k::2] for places in pairs]) for k in (0, 1)]

    def risk(beta):
        total = 0.0
        for ours, others in (halves, halves[::-1]):
            local = estimated(z[ours], y[ours], received)
            w = head_of(*mixed(local, received, beta), y)
            scores = np.column_stack([z[others], np.ones(len(others))]) @ w.T
            right = scores[np.arange(len(others)), y[others]]
            total += np.mean(np.log(np.exp(scores).sum(1)) - right)
        return total

    best, width = 0.5, 0.5
    for _ in range(8):
        grid = np.clip(np.linspace(best - width, best + width, 41), 0, 1)
        best, width = min(grid, key=risk), width / 10
    return best


def adapted(a, i, received, how):
    x, y = draw(i)
    z = features(a, x)
    beta = 1.0 if how == "local" else best_beta(z, y, received)
    return mixed(estimated(z, y, received), received, beta)


def set_beta(how, monkeypatch):
    """Let β be 1 (``local``) or 0 (``global``) instead of the best one."""
    if how != "auto":
        beta = float(how == "local")
        monkeypatch.setattr(PFedFDAClient, "beta", lambda *_: beta)


@pytest.mark.parametrize(
    ("how", "weighting", "within"),
    [
        ("local", "uniform", 3e-6),
        ("local", "examples", 3e-6),
        ("auto", "uniform", 5e-5),
    ],
)
def test_every_round_matches_the_paper(how, weighting, within, monkeypatch):
    set_beta(how, monkeypatch)
    more = {"pfedfda_ridge": RIDGE, "weighting": weighting}
    outcome = run("pfedfda", 4, evaluate=True, **more, **TASK)
    assert [len(clients) for clients in outcome.trained] == [3] * 4
    a, _ = start()
    initial = run("pfedfda", 0, **TASK).client(0, 0).initial_group("gaussian.")
    gaussians = [initial[name].double().numpy() for name in ("means", "covariance")]
    for now, clients in enumerate(outcome.trained):
        results = []
        for i in clients:
            body, w = a, head_of(*gaussians, draw(i)[1])
            for _ in range(STEPS):
                body = body - RATE * gradients(body, w, i)[0]
            results.append([body, *adapted(body, i, gaussians, how)])
        shares = weights(clients, weighting)
        a, *gaussians = (mean([r[part] for r in results], shares) for part in range(3))
        arrays = outcome.arrays[now]
        np.testing.assert_allclose(arrays[MEANS], gaussians[0], atol=within)
        np.testing.assert_allclose(arrays[COVARIANCE], gaussians[1], atol=within)
        kept = next(state for state in outcome.kept[now] if state)
        assert_near(parts({**arrays, **kept})[0], a, within)
        for i in range(N):
            w = head_of(*adapted(a, i, gaussians, how), draw(i)[1])
            loss = outcome.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(a, w, i), abs=20 * within)


@pytest.mark.parametrize(("how", "within"), [("local", 1e-5), ("auto", 1e-3)])
def test_newcomer_saves_the_head_of_the_adapted_gaussians(how, within, monkeypatch):
    set_beta(how, monkeypatch)
    more = {"pfedfda_ridge": RIDGE, "fraction_train": 1.0}
    outcome = run("pfedfda", 2, new_clients=1, **more, **TASK)
    (i,) = {*range(N)} - {*outcome.trained[-1]}
    client, arrays = outcome.client(i, 2), outcome.arrays[-1]
    client._receive([arrays[n] for n in client._array_names(client.shared)], {})
    client.personalize()
    a, head = parts({**arrays, **client._current_arrays(client.personal)})
    gaussians = [arrays[name].astype(float) for name in (MEANS, COVARIANCE)]
    expected = head_of(*adapted(a, i, gaussians, how), draw(i)[1])
    np.testing.assert_allclose(head, expected, atol=within)


def test_client_with_beta_0_returns_the_received_gaussians(monkeypatch):
    set_beta("global", monkeypatch)
    result = run("pfedfda", 2, **TASK)
    for message, reply in result.between("train"):
        for name in (MEANS, COVARIANCE):
            sent, back = (m.content["arrays"][name].numpy() for m in (message, reply))
            np.testing.assert_allclose(back, sent, atol=1e-6)


def test_single_example_per_class_gives_beta_0():
    client = run("pfedfda", 0, **TASK).client(0, 0)
    client._receive(client.get_parameters({}), {})
    z, y = torch.zeros(3, WIDTH, dtype=torch.float64), torch.arange(3)
    assert client.beta(z, y, client.received_gaussians()) == 0


def single(num_clients):
    """The layered task, in which every client has one training example."""
    task = layered(num_clients)
    train = [ExampleSet(s.inputs[:1], s.targets[:1]) for s in task.train]
    return replace(task, train=train)


def pairs_of_one_class(num_clients):
    """The layered task, in which every client has two examples of one class."""
    task = layered(num_clients)
    train = [ExampleSet(s.inputs[:2], s.targets[:1].repeat(2)) for s in task.train]
    return replace(task, train=train)


@pytest.mark.parametrize("task", [single, pairs_of_one_class])
@pytest.mark.parametrize("beta", ["auto", "local"])
def test_few_examples_need_no_ridge(task, beta, monkeypatch):
    set_beta(beta, monkeypatch)
    own = {"task": f"{__name__}:{task.__name__}", "pfedfda_ridge": 0.0}
    result = run("pfedfda", 2, evaluate=True, **own)
    assert [len(clients) for clients in result.trained] == [3, 3]
    assert all(np.isfinite(m["loss"]) for m in result.metrics[-1])


@pytest.mark.parametrize("best", [0.0, 0.3, 1.0])
def test_search_finds_the_minimum(best):
    minimum = minimum_in_unit_interval(lambda beta: (beta - best) ** 2)
    assert minimum == pytest.approx(best, abs=1e-5)
