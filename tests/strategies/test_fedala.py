"""FedALA compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
import torch
from layered import descend, gradients, loss_of, model, parts, start
from softmax_runs import DIMENSION, N, assert_near, mean, run, weights

import flwr_frl.task.examples
from flwr_frl.task import ExampleSet, ExampleTask

TASK = {"task": "layered:layered"}
START_EPOCHS = 4
NONE = ExampleSet(torch.zeros(0, DIMENSION), torch.zeros(0, dtype=torch.int64))
PLAIN = {"ala_share": 1.0, "ala_learning_rate": 40.0, "ala_start_epochs": START_EPOCHS}


class Numpy:
    """Algorithm 1: the old model, weights and training status of each client.

    Only the head is weighted (p = 1).
    """

    def __init__(self):
        self.a, self.w = start()
        self.old = [start()] * N
        self.weights = [np.ones_like(self.w)] * N
        self.has_trained = [False] * N
        self.started = [False] * N

    def mixed_head(self, i, weights):
        return self.old[i][1] + (self.w - self.old[i][1]) * weights

    def learned_weights(self, i):
        weights = self.weights[i]
        if not self.has_trained[i]:
            return weights
        for _ in range(1 if self.started[i] else START_EPOCHS):
            slope = gradients(self.a, self.mixed_head(i, weights), i)[1]
            weights = weights - 40 * slope * (self.w - self.old[i][1])
            weights = np.clip(weights, 0, 1)
        return weights

    def deployed(self, i):
        return self.a, self.mixed_head(i, self.learned_weights(i))

    def round(self, clients, weighting):
        for i in clients:
            self.weights[i] = self.learned_weights(i)
            self.started[i] = self.has_trained[i]
            self.has_trained[i] = True
            self.old[i] = descend(self.a, self.mixed_head(i, self.weights[i]), i)
        shares = weights(clients, weighting)
        self.a, self.w = (
            mean([self.old[i][p] for i in clients], shares) for p in (0, 1)
        )


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(weighting):
    more = {"evaluate": True, "weighting": weighting}
    result = run("fedala", 6, **more, **PLAIN, **TASK)
    assert [len(clients) for clients in result.trained] == [3] * 6
    expected = Numpy()
    for now, clients in enumerate(result.trained):
        expected.round(clients, weighting)
        a, w = parts(result.arrays[now])
        assert_near(a, expected.a)
        assert_near(w, expected.w)
        for i in range(N):
            if kept := result.kept[now][i]:
                assert_near(parts(kept, "model.")[1], expected.old[i][1])
                values = [kept[f"weights.head.{n}"] for n in ("weight", "bias")]
                assert_near(np.column_stack(values), expected.weights[i])
                assert bool(kept["started.value"]) is expected.started[i]
            # The weights of the tested mixture are learned for the new global model.
            loss = result.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(*expected.deployed(i), i), abs=1e-5)
    # Some clients learn weights twice, and some weights reach 0 or 1.
    assert max(sum(i in c for c in result.trained) for i in range(N)) >= 3
    learned = np.array(expected.weights)
    assert learned.min() == 0
    assert (learned == 1).any()
    assert ((learned > 0) & (learned < 1)).any()


def test_without_examples_the_last_weights_are_used():
    result = run("fedala", 4, **PLAIN, **TASK)
    i = next(i for i, kept in enumerate(result.kept[-1]) if kept.get("started.value"))
    client, kept = result.client(i, 4), result.kept[-1][i]
    client._receive(
        [result.arrays[-1][n] for n in client._array_names(client.shared)], {}
    )
    client.task = ExampleTask(model, [NONE] * N, [NONE] * N)
    head = client.deployed_model().head
    for name in ("weight", "bias"):
        old, new = kept[f"model.head.{name}"], result.arrays[-1][f"head.{name}"]
        mixed = old + (new - old) * kept[f"weights.head.{name}"]
        assert_near(getattr(head, name).detach(), mixed)


def test_weights_are_learned_on_the_given_share_of_examples(monkeypatch):
    sizes = []
    original = flwr_frl.task.examples.ExampleSet.sample

    def sample(self, share):
        part = original(self, share)
        sizes.append((len(self), len(part)))
        return part

    monkeypatch.setattr(flwr_frl.task.examples.ExampleSet, "sample", sample)
    run("fedala", 3, ala_share=0.5, **TASK)
    assert sizes
    assert all(some == round(n / 2) for n, some in sizes)
