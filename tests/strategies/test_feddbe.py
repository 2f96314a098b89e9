"""FedDBE compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
import torch
from layered import WIDTH, features, gradients, loss_of, parts, start
from paper_rounds import run_variant
from softmax_runs import RATE, STEPS, N, assert_near, draw, run

TASK = {"task": "layered:layered"}
KAPPA, MU = 3.0, 0.7
PLAIN = {"dbe_kappa": KAPPA, "dbe_momentum": MU}


def learn(a, w, i, memory=0.0, consensus=None, largest=np.inf):
    """Train locally; without a consensus, its terms are omitted.

    The running mean of the features starts at 0. The norm of the gradient by all
    parameters is at most ``largest``.
    """
    running = np.zeros(WIDTH)
    for _ in range(STEPS):
        now = features(a, draw(i)[0])
        running = (1 - MU) * running + MU * now.mean(0)
        pull = 0.0
        if consensus is not None:
            # Gradient of κ/2 mean (z̄_i − z̄)²; each example contributes μ/n to z̄_i.
            pull = KAPPA / WIDTH * (running - consensus) * MU / len(now)
        of_a, of_w, of_memory = gradients(a, w, i, memory, lambda z, y, p=pull: p)
        of_memory = of_memory * (consensus is not None)
        squares = [(g**2).sum() for g in (of_a, of_w, of_memory)]
        rate = RATE * min(1.0, largest / np.sqrt(sum(squares)))
        a, w, memory = a - rate * of_a, w - rate * of_w, memory - rate * of_memory
    return a, w, memory, running


@pytest.mark.parametrize(("weighting", "largest"), [("uniform", 0), ("examples", 0.3)])
def test_every_round_matches_the_paper(weighting, largest):
    more = {"evaluate": True, "weighting": weighting, "max_gradient_norm": largest}
    largest = largest or np.inf
    outcome = run_variant("feddbe", 3, **more, **PLAIN, **TASK)
    a, w = start()
    everyone = list(range(N))
    means = [learn(a, w, i, largest=largest)[3] for i in everyone]
    consensus = outcome.mean(means, everyone)
    memories = np.zeros((N, WIDTH))
    for now, clients in enumerate(outcome.trained):
        results = {i: learn(a, w, i, memories[i], consensus, largest) for i in clients}
        a, w = (
            outcome.mean([r[part] for r in results.values()], clients)
            for part in (0, 1)
        )
        for i, (_, _, memory, _) in results.items():
            memories[i] = memory
        arrays = outcome.arrays[now]
        np.testing.assert_allclose(arrays["consensus.mean"], consensus, atol=1e-6)
        assert_near(parts(arrays)[0], a)
        assert_near(parts(arrays)[1], w)
        for i in range(N):
            kept = outcome.kept[now][i].get("memory.value", np.zeros(WIDTH))
            np.testing.assert_allclose(kept, memories[i], atol=1e-5)
            loss = outcome.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(a, w, i, memories[i]), abs=1e-5)
    assert np.abs(memories).max() > 1e-2


@pytest.mark.parametrize("momentum", [1.0, 0.7])
def test_short_batch_is_weighted_by_its_size(momentum):
    # Client 0 has 6 examples: the second batch has one, which moves z̄_i by a fifth.
    usual = {"batch_size": 5, "representation_epochs": 1, "learning_rate": 1e-9}
    client = run("feddbe", 0, dbe_momentum=momentum, **usual, **TASK).client(0, 0)
    torch.manual_seed(7)
    mean = client.statistics({})["mean"]
    torch.manual_seed(7)
    order = torch.randperm(6).numpy()
    z = features(start()[0], draw(0)[0])[order]
    first, short = momentum * z[:5].mean(0), momentum / 5
    np.testing.assert_allclose(mean, (1 - short) * first + short * z[5], atol=1e-6)


@pytest.mark.parametrize("rule", ["median", "clip"])
def test_consensus_follows_the_aggregation_rule(rule):
    result = run("feddbe", 2, fraction_train=1.0, aggregation=rule, **TASK)
    a, w = start()
    consensus = result.arrays[0]["consensus.mean"]
    if rule == "median":
        means = [learn_mean_of_last_batch(a, w, i) for i in range(N)]
        np.testing.assert_allclose(consensus, np.median(means, axis=0), atol=1e-6)
    assert [row["clients"] for row in result.rows] == [N, N]


def learn_mean_of_last_batch(a, w, i):
    for _ in range(STEPS):
        last = features(a, draw(i)[0]).mean(0)
        of_a, of_w, _ = gradients(a, w, i)
        a, w = a - RATE * of_a, w - RATE * of_w
    return last
