"""Graphs and mixing weights: hand-computed cases, and spectra in closed form."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_says

from flwr_frl.strategies.gossip.graphs import (
    GRAPHS,
    build_graph,
    connected,
    consensus_step,
    mixing_matrix,
    spectrum,
)

ring, torus, complete, star = (partial(build_graph, name) for name in GRAPHS[:4])
# A tree of five nodes:
#
#   0 - 1 - 3 - 4        degrees 1, 3, 1, 2, 1
#       |
#       2
TREE = connected([(0, 1), (1, 2), (1, 3), (3, 4)], 5)


def erdos_renyi(n, probability, seed=0):
    return build_graph("erdos-renyi", n, probability, seed)


def text(edges) -> str:
    return " ".join(f"{i}{j}" for i, j in edges.tolist())


# Graphs


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        (ring(4), "01 03 12 23"),
        (ring(2), "01"),
        (star(4), "01 02 03"),
        (complete(3), "01 02 12"),
        # Rows 0 1 2 and 3 4 5: two triangles and three rungs.
        (torus(6), "01 02 03 12 14 25 34 35 45"),
        (connected([(2, 1), (1, 0), (0, 1), (1, 2)], 3), "01 12"),
        (erdos_renyi(5, 0.5, seed=7), "04 12 14 34"),
        (erdos_renyi(5, 1, seed=7), text(complete(5))),
    ],
)
def test_edges_are_known_ones(edges, expected):
    assert text(edges) == expected


def test_graph_is_read_from_a_file_of_edges(tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text("# a tree\n1 0\n1 2  # the leaf\n\n3\t1\n3 4\n")
    assert text(build_graph(str(file), 5)) == text(TREE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(ring, 1), "the number of nodes is 1"),
        (partial(torus, 7), "torus is 7"),
        (partial(torus, 2), "torus is 2"),
        (partial(connected, [(0, 3), (1, 2), (2, 4)], 5), "is [1, 2, 4]"),
        (partial(erdos_renyi, 60, 0.01), "graph is 'erdos-renyi'; none of 1000"),
        (partial(build_graph, "rign", 5), "unknown graph 'rign'; did you mean 'ring'"),
        (partial(build_graph, "", 5), "unknown graph ''; known: complete, erdos-renyi"),
        (partial(build_graph, "no/such/file", 5), "a file of edges"),
    ],
)
def test_an_impossible_graph_is_a_one_line_error(build, message):
    assert_says(message, build)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        *(("1", "row 2"), ("1 2 3", "row 2"), ("a b", "row 1"), ("0,1", "row 2")),
        *(("0 1.5", "'1.5'"), ("-1 0", "is [-1, 0]"), ("1 1", "is [1, 1]")),
        ("1 3", "is [1, 3]"),
    ],
)
def test_an_invalid_line_of_a_file_is_named(tmp_path, line, named):
    file = tmp_path / "graph.txt"
    file.write_text(f"0 1\n{line}\n")
    assert_says(named, build_graph, str(file), 3)


# Mixing weights


def test_metropolis_weights_match_hand_computed_ones():
    # A star: the centre has degree n-1 = 3, so every edge has 1/4. The diagonal has the
    # rest: 1/4 at the centre and 3/4 at the leaves.
    expected = np.array([[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]) / 4
    assert np.allclose(mixing_matrix(star(4)), expected, atol=1e-15)
    # The tree: node 1 has degree 3, so its edges have 1/4; edge 3-4 has 1/3. In 12ths:
    expected = [
        [9, 3, 0, 0, 0],
        [3, 3, 3, 3, 0],
        [0, 3, 9, 0, 0],
        [0, 3, 0, 5, 4],
        [0, 0, 0, 4, 8],
    ]
    assert np.allclose(mixing_matrix(TREE), np.array(expected) / 12, atol=1e-15)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 30), st.floats(0.3, 1), st.integers(0, 1000))
def test_weights_are_mixing_matrices(n, probability, seed):
    graph = erdos_renyi(n, probability, seed)
    weights = mixing_matrix(graph)
    assert np.array_equal(weights, weights.T)
    assert np.allclose(weights.sum(axis=1), 1, atol=1e-14)
    assert (weights >= 0).all()
    assert (np.diag(weights) > 0).all()
    assert np.argwhere(np.triu(weights, 1)).tolist() == graph.tolist()
    # Fact 5 of the dissertation: W^k converges to the mean at rate (1 - delta)^k.
    delta, _ = spectrum(weights)
    for k in (1, 2, 5):
        distance = np.linalg.matrix_power(weights, k) - 1 / n
        assert np.linalg.norm(distance, 2) == pytest.approx((1 - delta) ** k, abs=1e-12)


# Spectra


@pytest.mark.parametrize("n", [3, 4, 5, 8, 60, 101])
def test_spectrum_of_the_ring(n):
    # Weights 1/3: lambda_k = (1 + 2 cos(2 pi k / n)) / 3.
    eigenvalues = [(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(n)]
    delta, lambda_max = spectrum(mixing_matrix(ring(n)))
    assert delta == pytest.approx(1 - max(map(abs, eigenvalues[1:])), abs=1e-12)
    assert lambda_max == pytest.approx(1 - min(eigenvalues), abs=1e-12)


def test_spectrum_matches_hand_computed_eigenvalues():
    # Complete graph: W = 11^T / n has the eigenvalues 1 and 0.
    assert spectrum(mixing_matrix(complete(6))) == pytest.approx((1, 1), abs=1e-12)
    # Star of 4: two differences of leaves have eigenvalue 3/4, (3, -1, -1, -1) has 0.
    assert spectrum(mixing_matrix(star(4))) == pytest.approx((0.25, 1), abs=1e-12)
    # The eigenvalues are 1 and -0.6: the second largest in magnitude is negative.
    negative = np.array([[0.2, 0.8], [0.8, 0.2]])
    assert spectrum(negative) == pytest.approx((0.4, 1.6), abs=1e-12)


# Consensus step (Theorem 2)


def test_consensus_step_matches_hand_computed_values():
    # delta = lambda = omega = 1: 2 / (64 + 1 + 16 + 8 - 16).
    gamma = consensus_step(mixing_matrix(complete(6)), 1)
    assert gamma == pytest.approx(2 / 73)
    # delta = 1/4, lambda = 1, omega = 1/2: 1/4 / (16 + 1/16 + 16 + 2 - 2).
    gamma = consensus_step(mixing_matrix(star(4)), 0.5)
    assert gamma == pytest.approx(0.25 / 32.0625)


@pytest.mark.parametrize("graph", [ring(8), star(5), complete(4), torus(9)])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_consensus_step_contracts_as_in_the_proof(graph, k):
    """Exchange Top_k of x_i - xhat_i; without gradients, only consensus is left.

    With alpha = gamma delta / 2 and omega / 4 in the two inequalities
    ||a + b||^2 <= (1 + alpha) ||a||^2 + (1 + 1 / alpha) ||b||^2, a step leaves at
    most 1 - gamma delta / 2 of the sum of ||X - mean||^2 and ||X - Xhat||^2.
    """
    d = 10
    weights = mixing_matrix(graph)
    gamma = consensus_step(weights, k / d)
    shrinks = 1 - gamma * spectrum(weights)[0] / 2
    x = np.random.default_rng(0).standard_normal((len(weights), d))
    start, public = x.mean(axis=0), np.zeros_like(x)

    def energy():
        return np.square(x - x.mean(axis=0)).sum() + np.square(x - public).sum()

    for _ in range(300):
        before = energy()
        difference = x - public
        dropped = np.argsort(np.abs(difference), axis=1)[:, : d - k]
        np.put_along_axis(difference, dropped, 0, axis=1)
        public = public + difference
        x = x + gamma * (weights @ public - public)
        assert energy() <= shrinks * before
    # Equation 3.9: an exchange does not change the mean.
    assert np.allclose(x.mean(axis=0), start, atol=1e-12)
