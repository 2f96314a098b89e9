"""CFL compared with a NumPy implementation of server and clients."""

from itertools import product

import numpy as np
import pytest
from softmax_runs import N, assert_near, loss_of, matrix, run, start

from flwr_frl.strategies.cfl import bipartition

EPS = 0.3, 0.4


def cosine(one, other):
    return np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other)


def best_parts(similarity):
    """Return, of all bipartitions, the one with the least similarity across."""
    n = len(similarity)
    parts = [
        np.array([0, *rest]) for rest in product((0, 1), repeat=n - 1) if any(rest)
    ]
    return min(parts, key=lambda p: similarity[np.ix_(p == 0, p == 1)].max())


@pytest.mark.parametrize(
    ("fraction", "gamma", "weighting"),
    [(1.0, 0.0, "uniform"), (0.7, 0.0, "examples"), (1.0, 0.9, "uniform")],
)
def test_every_round_matches_the_paper(fraction, gamma, weighting):
    more = {"cfl_eps1": EPS[0], "cfl_eps2": EPS[1], "cfl_gamma": gamma}
    more |= {"fraction_train": fraction, "weighting": weighting}
    result = run("cfl", 12, evaluate=True, **more)
    thetas, of, splits, moved = {"c": start()}, dict.fromkeys(range(N), "c"), {}, 0
    for now, clients in enumerate(result.trained):
        new = {i: result.descend(thetas[of[i]], i) for i in clients}
        names = {of[i] for i in clients}
        groups = {name: [i for i in clients if of[i] == name] for name in names}
        for name, members in groups.items():
            theta = thetas[name]
            updates = [new[i] - theta for i in members]
            if name in splits:
                for i, update in zip(members, updates, strict=True):
                    _, of[i] = max(
                        (cosine(update, d), part) for d, part in splits[name]
                    )
                    moved += 1
                continue
            mean = result.mean([new[i] for i in members], members)
            norms = [np.linalg.norm(update) for update in updates]
            similarity = np.array([[cosine(u, v) for u in updates] for v in updates])
            if np.linalg.norm(mean - theta) < EPS[0] and max(norms) > EPS[1]:
                parts = best_parts(similarity) if len(members) > 1 else np.zeros(1)
                across = similarity[np.ix_(parts == 0, parts == 1)].max(initial=-1)
                if len(members) > 1 and np.sqrt((1 - across) / 2) > gamma:
                    splits[name] = []
                    for part in (0, 1):
                        ours = [
                            i for i, p in zip(members, parts, strict=True) if p == part
                        ]
                        child = f"{name}{part}"
                        thetas[child] = result.mean([new[i] for i in ours], ours)
                        of |= dict.fromkeys(ours, child)
                        splits[name] += [(new[i] - theta, child) for i in ours]
                    continue
            thetas[name] = mean
        assert result.rows[now]["clusters"] == 1 + len(splits)
        assert_near(matrix(result.arrays[now]), thetas["c"])
        for i in range(N):
            loss = result.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(thetas[of[i]], i), abs=1e-5)
    assert {f"{i:06d}": of[i] for i in range(N)} == result.strategy.members
    for client, theta in result.strategy.models.items():
        assert_near(matrix(theta), thetas[of[int(client)]])
    # With few clients a round, others come to a part later; noise prevents splits.
    assert (len(splits) > 1) == (gamma == 0)
    assert (moved > 0) == (fraction < 1)


def test_without_splits_it_is_fedavg():
    found, expected = (
        run(name, 3, momentum=0.5, **more)
        for name, more in (("cfl", {"cfl_eps1": 0.0}), ("fedavg", {}))
    )
    assert_near(matrix(found.arrays[-1]), matrix(expected.arrays[-1]), 0)
    assert not found.strategy.models


def test_parts_have_the_least_similarity_across():
    for seed in range(30):
        points = np.random.default_rng(seed).standard_normal((6, 3))
        similarity = np.array([[cosine(p, q) for p in points] for q in points])
        parts, expected = bipartition(similarity), best_parts(similarity)
        across = [similarity[np.ix_(p == 0, p == 1)].max() for p in (parts, expected)]
        assert across[0] == across[1]
    assert bipartition(np.eye(2)).tolist() == [0, 1]
