"""FedCAC compared with a NumPy implementation of server and clients."""

from itertools import permutations

import numpy as np
import pytest
from softmax_runs import N, assert_near, loss_of, matrix, run, start

from flwr_frl.strategies.fedcac import similar

TAU, BETA = 0.4, 5


def critical(new, old):
    """Return the positions of the ⌊τ n⌋ most sensitive weights, and of such biases."""
    size, mask = np.abs(new * (new - old)), np.zeros(new.shape, bool)
    for part in (np.s_[:, :-1], np.s_[:, -1]):
        order = np.argsort(-size[part].ravel())
        chosen = np.zeros(order.size, bool)
        chosen[order[: int(TAU * order.size)]] = True
        mask[part] = chosen.reshape(size[part].shape)
    return mask


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_every_round_matches_the_paper(fraction):
    more = {"fedcac_tau": TAU, "fedcac_beta": BETA, "fraction_train": fraction}
    result = run("fedcac", 7, evaluate=True, **more)
    shared, own, masks, numbers = start(), {}, {}, set()
    for now, clients in enumerate(result.trained):
        new = {}
        for i in clients:
            before = own.get(i, shared)
            new[i] = result.descend(before, i)
            masks[i] = critical(new[i], before)
        shared = np.mean(list(new.values()), axis=0)
        sizes = {i: 2 * masks[i].sum() for i in clients}
        overlap = {
            (i, j): 1 - (masks[i] ^ masks[j]).sum() / sizes[i]
            for i, j in permutations(clients, 2)
        }
        centre, most = np.mean(list(overlap.values())), max(overlap.values())
        limit = centre + (now + 1) / BETA * (most - centre) - 1e-9
        for i in clients:
            near = [j for j in clients if j == i or overlap[i, j] >= limit]
            numbers.add(len(near))
            own[i] = np.mean([new[j] for j in near], axis=0)
        own = {i: np.where(masks[i], c, shared) for i, c in own.items()}
        assert_near(matrix(result.arrays[now]), shared, 1e-6)
        for i in range(N):
            tested = loss_of(own.get(i, shared), i)
            assert result.metrics[now][i]["loss"] == pytest.approx(tested, abs=1e-6)
    for i, theta in own.items():
        assert_near(matrix(result.strategy.models[f"{i:06d}"]), theta, 1e-6)
    assert numbers >= {1, 2}


def test_without_critical_parameters_it_is_fedavg():
    found, expected = (
        run(name, 3, evaluate=True, **more)
        for name, more in (("fedcac", {"fedcac_tau": 0.0}), ("fedavg", {}))
    )
    assert_near(matrix(found.arrays[-1]), matrix(expected.arrays[-1]), 1e-6)
    for one, other in zip(found.metrics[-1], expected.metrics[-1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("masks", "progress", "expected"),
    [
        # Of 4 critical positions, a and b share 3, and c shares one with each.
        ([0b11110000, 0b01111000, 0b00010111], 0.0, ["ab", "ab", "c"]),
        ([0b11110000, 0b01111000, 0b00010111], 1.0, ["ab", "ab", "c"]),
        ([0b11110000, 0b01111000, 0b00010111], 1.1, ["a", "b", "c"]),
        # Overlaps of 1/2, and of 0; their mean is 1/6.
        ([0b11000000, 0b01100000, 0b00001100], 0.5, ["ab", "ab", "c"]),
        # All overlaps are equal.
        ([0b11000000] * 3, 3.0, ["abc"] * 3),
        ([0b11000000], 0.5, ["a"]),
        ([0, 0], 0.5, ["ab", "ab"]),
    ],
)
def test_similar_clients_share_critical_parameters(masks, progress, expected):
    found = similar(np.array(masks, np.uint8)[:, None], progress)
    names = ["".join(np.array([*"abc"])[: len(row)][row]) for row in found]
    assert names == expected
