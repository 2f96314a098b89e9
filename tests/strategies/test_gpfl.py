"""GPFL compared with its equations in torch autograd, in float64."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from softmax_runs import CLASSES, DIMENSION, N, draw, example_sets, mean, run, weights
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

K, RATE, STEPS = 4, 0.3, 3
LAMBDA, MU = 0.5, 0.05
HEADS = ("head.weight", "head.bias")


def narrow(num_clients):
    """A linear representation of K features, and a linear head."""

    def model():
        return SplitModel(nn.Linear(DIMENSION, K, bias=False), nn.Linear(K, CLASSES))

    sets = [example_sets(test) for test in (False, True)]
    return ExampleTask(model, *sets, classes=("a", "b", "c"))


OWN = {"task": f"{__name__}:narrow", "representation_epochs": STEPS}
TERMS = {"gpfl_lambda": LAMBDA, "gpfl_mu": MU}


def valved(state, z, condition):
    """ReLU((1 + γ) ⊙ z + β)."""
    both = []
    for name in ("valve.gamma", "valve.beta"):
        inner = condition @ state[f"{name}.0.weight"].T + state[f"{name}.0.bias"]
        inner = inner.clamp(min=0)
        deviation = (inner.var(unbiased=False) + 1e-5).sqrt()
        normed = (inner - inner.mean()) / deviation
        both.append(normed * state[f"{name}.2.weight"] + state[f"{name}.2.bias"])
    return ((1 + both[0]) * z + both[1]).clamp(min=0)


def outputs_of(state, x, condition):
    z = valved(state, x @ state["representation.weight"].T, condition)
    return z @ state["head.weight"].T + state["head.bias"]


def cross_entropy(scores, y):
    return (scores.exp().sum(1).log() - scores[range(len(y)), y]).mean()


def examples(i, test=False):
    x, y = draw(i, test)
    return torch.tensor(x), torch.tensor(y)


def condition_of(embedding, i):
    _, y = examples(i)
    return torch.stack([(y == c).double().mean() for c in range(CLASSES)]) @ embedding


def trained(state, i):
    x, y = examples(i)
    frozen = state["embedding.weight"]
    personal, common = condition_of(frozen, i), frozen.mean(0)
    state = {name: value.clone() for name, value in state.items()}
    for _ in range(STEPS):
        for value in state.values():
            value.requires_grad_(True)
        z = valved(state, x @ state["representation.weight"].T, common)
        lengths = z.norm(dim=1, keepdim=True).clamp(min=1e-12)
        e = state["embedding.weight"]
        cosines = z / lengths @ (e / e.norm(dim=1, keepdim=True)).T
        loss = cross_entropy(outputs_of(state, x, personal), y)
        loss = loss + cross_entropy(cosines, y)
        loss = loss + LAMBDA * (z - frozen[y]).norm(dim=1).mean()
        slopes = torch.autograd.grad(loss, list(state.values()))
        state = {
            name: (value - RATE * (slope + decay(name) * value)).detach()
            for (name, value), slope in zip(state.items(), slopes, strict=True)
        }
    return state


def decay(name):
    decays = name.startswith(("valve.", "embedding.")) and not name.endswith("bias")
    return MU if decays else 0.0


def initial():
    client = run("gpfl", 0, **OWN).client(0, 0)
    arrays = client.get_parameters({})
    shared = dict(zip(client._array_names(client.shared), arrays, strict=True))
    head = {name: client.task.initial_state[name].numpy() for name in HEADS}
    return {n: torch.tensor(a).double() for n, a in {**shared, **head}.items()}


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_equations(weighting):
    more = {"weighting": weighting, **TERMS, **OWN}
    outcome = run("gpfl", 3, evaluate=True, **more)
    assert [len(clients) for clients in outcome.trained] == [3] * 3
    start = initial()
    shared = {name: value for name, value in start.items() if name not in HEADS}
    heads = [{name: start[name] for name in HEADS}] * N
    for now, clients in enumerate(outcome.trained):
        results = {i: trained({**shared, **heads[i]}, i) for i in clients}
        by = weights(clients, weighting)
        for name in shared:
            values = [r[name].numpy() for r in results.values()]
            shared[name] = torch.tensor(mean(values, by))
            expected = shared[name].numpy()
            np.testing.assert_allclose(outcome.arrays[now][name], expected, atol=5e-6)
        for i, result in results.items():
            heads[i] = {name: result[name] for name in HEADS}
        for i, head in enumerate(heads):
            x, y = examples(i, test=True)
            condition = condition_of(shared["embedding.weight"], i)
            scores = outputs_of({**shared, **head}, x, condition)
            loss = cross_entropy(scores, y).item()
            assert outcome.metrics[now][i]["loss"] == pytest.approx(loss, abs=1e-5)
            if kept := outcome.kept[now][i]:
                assert set(kept) == {*HEADS, "shares.value"}
                for name in HEADS:
                    expected = head[name].numpy()
                    np.testing.assert_allclose(kept[name], expected, atol=5e-6)
    for name, value in start.items():
        if name in shared:
            assert (shared[name] - value).abs().max() > 1e-3


def test_client_without_examples_uses_the_global_condition():
    client = run("gpfl", 0, **OWN).client(0, 0)
    client._receive(client.get_parameters({}), {})
    none = ExampleSet(torch.zeros(0, DIMENSION), torch.zeros(0, dtype=torch.long))
    client.task = replace(client.task, train=[none] * N)
    expected = client.received["embedding.weight"].mean(0)
    torch.testing.assert_close(client.condition(), expected)


@pytest.mark.parametrize("ignored", [-100, -1])
def test_targets_that_the_loss_ignores_change_nothing(ignored):
    plain, client = (run("gpfl", 0, **OWN).client(0, 0) for _ in range(2))
    x, y = client.task.train[0].inputs, client.task.train[0].targets
    more = torch.full((2,), ignored)
    examples = ExampleSet(torch.cat([x, x[:2]]), torch.cat([y, more]))
    loss = partial(nn.functional.cross_entropy, ignore_index=ignored)
    client.task = replace(client.task, train=[examples] * N, loss=loss)
    arrays = plain.get_parameters({})
    pairs = zip(client.fit(arrays, {})[0], plain.fit(arrays, {})[0], strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_class_shares_are_stored_for_prediction():
    result = run("gpfl", 2, **OWN)
    i = result.trained[-1][0]
    kept = result.kept[-1][i]["shares.value"]
    y = draw(i)[1]
    np.testing.assert_allclose(kept, np.bincount(y, minlength=CLASSES) / len(y))
