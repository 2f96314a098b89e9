"""Graphs and mixing weights: hand-computed cases, and spectra in closed form."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies.gossip import mixing
from flwr_frl.strategies.gossip.graphs import (
    Graph,
    build_graph,
    complete,
    erdos_renyi,
    from_file,
    k_regular,
    ring,
    small_world,
    star,
    torus,
)
from flwr_frl.strategies.gossip.mixing import (
    ConsensusStep,
    Spectrum,
    consensus_step,
    metropolis_weights,
    relaxed_consensus_step,
    spectrum,
    uniform_weights,
)

# A tree of five nodes:
#
#   0 - 1 - 3 - 4        degrees 1, 3, 1, 2, 1
#       |
#       2
TREE = Graph(5, ((0, 1), (1, 2), (1, 3), (3, 4)))


# Graphs


def test_edges_match_hand_computed_ones():
    assert ring(4).edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert ring(2).edges == ((0, 1),)
    assert star(4).edges == ((0, 1), (0, 2), (0, 3))
    assert complete(3).edges == ((0, 1), (0, 2), (1, 2))
    # Rows 0 1 2 and 3 4 5: two triangles and three rungs.
    rungs = ((0, 3), (1, 4), (2, 5))
    triangles = ((0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5))
    assert torus(6).edges == tuple(sorted(rungs + triangles))
    # Three rows of four: 0 1 2 3, 4 5 6 7, 8 9 10 11.
    assert torus(12).neighbours[0] == (1, 3, 4, 8)
    assert torus(12).neighbours[6] == (2, 5, 7, 10)


def test_neighbours_and_degrees():
    assert TREE.neighbours == ((1,), (0, 2, 3), (1,), (1, 4), (3,))
    assert TREE.degrees().tolist() == [1, 3, 1, 2, 1]


def test_direction_order_and_repetition_of_edges_do_not_matter():
    assert Graph(3, ((2, 1), (1, 0), (0, 1), (1, 2))) == Graph(3, ((0, 1), (1, 2)))


def test_random_graph_of_a_thousand_nodes():
    graph = erdos_renyi(1000, 0.01, seed=0)
    assert sum(len(graph.neighbours[i]) for i in range(1000)) == 2 * len(graph.edges)
    # Of 499,500 pairs 4,995 are edges on average, with standard deviation 70.
    assert abs(len(graph.edges) - 4995) < 6 * 70.3


def sorted_pairs(pairs):
    return tuple(sorted({(min(pair), max(pair)) for pair in pairs}))


@pytest.mark.parametrize("n", [2, 3, 4, 6, 7, 8, 12, 15, 36])
def test_graphs_match_their_definitions(n):
    assert ring(n).edges == sorted_pairs((i, (i + 1) % n) for i in range(n))
    assert complete(n).edges == tuple((i, j) for i in range(n) for j in range(i + 1, n))
    assert star(n).edges == tuple((0, i) for i in range(1, n))
    rows = max((r for r in range(2, n) if n % r == 0 and r * r <= n), default=None)
    if rows is not None:
        columns = n // rows
        cells = [divmod(i, columns) for i in range(n)]
        right = [(r * columns + c, r * columns + (c + 1) % columns) for r, c in cells]
        down = [(r * columns + c, (r + 1) % rows * columns + c) for r, c in cells]
        assert torus(n).edges == sorted_pairs(right + down)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 14), st.integers(2, 6), st.integers(0, 2**64))
def test_k_regular_gives_every_node_the_same_degree(n, degree, seed):
    if degree >= n or n * degree % 2:
        degree = 2
    graph = k_regular(n, degree, seed)
    assert graph.degrees().tolist() == [degree] * n
    assert graph == k_regular(n, degree, seed)


def test_small_world_is_a_rewired_ring():
    # Six nodes on a ring, each connected to the next two on either side.
    next_one = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5)]
    next_but_one = [(0, 2), (1, 3), (2, 4), (3, 5), (0, 4), (1, 5)]
    assert small_world(6, 4, 0.0, 7).edges == sorted_pairs(next_one + next_but_one)
    lattice = set(small_world(200, 4, 0.0, 7).edges)
    rewired = small_world(200, 4, 0.25, 7)
    assert len(rewired.edges) == 400
    # On average a quarter of the 400 edges, with standard deviation 8.7.
    assert abs(len(lattice - set(rewired.edges)) - 100) < 6 * 8.7
    assert rewired == small_world(200, 4, 0.25, 7) != small_world(200, 4, 0.25, 8)


def test_random_graphs_are_reproducible():
    # Recorded with networkx 3.6: a change would make old runs irreproducible.
    regular, world = k_regular(6, 3, seed=7), small_world(6, 2, 0.5, seed=7)
    as_text = [
        " ".join(f"{i}{j}" for i, j in graph.edges) for graph in (regular, world)
    ]
    assert as_text == ["01 02 05 14 15 23 24 34 35", "03 12 13 15 24 34"]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.floats(0.2, 1), st.integers(0, 2**64))
def test_erdos_renyi_follows_the_documented_rule(n, probability, seed):
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    for attempt in range(1000):
        words = np.random.PCG64([seed, attempt]).random_raw(len(pairs)).tolist()
        edges = [
            pair
            for pair, word in zip(pairs, words, strict=True)
            if (word >> 11) / 2**53 < probability
        ]
        adjacency = np.eye(n)
        for i, j in edges:
            adjacency[i, j] = adjacency[j, i] = 1
        # Connected if every two nodes have a path of n steps.
        if np.linalg.matrix_power(adjacency, n).all():
            break
    assert erdos_renyi(n, probability, seed).edges == tuple(edges)


def test_erdos_renyi_is_reproducible():
    # Recorded once: a change would make old runs irreproducible.
    assert erdos_renyi(5, 0.5, seed=7).edges == ((0, 4), (1, 2), (1, 4), (3, 4))
    assert erdos_renyi(5, 1, seed=7) == complete(5)


def test_graph_is_read_from_a_file_of_edges(tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text("# a tree\n1 0\n1 2  # the leaf\n\n3\t1\n3 4\n")
    assert from_file(file, 5) == TREE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ring(1), "the number of nodes is 1"),
        (lambda: torus(7), "torus is 7"),
        (lambda: torus(2), "torus is 2"),
        (lambda: Graph(3, ((0, 1), (1, 1), (1, 2))), r"edge is \(1, 1\)"),
        (lambda: Graph(3, ((0, 1), (1, 3))), r"edge is \(1, 3\).*nodes of 0 to 2"),
        (lambda: Graph(3, ((0, 1), (-1, 1))), r"edge is \(-1, 1\)"),
        (lambda: Graph(5, ((0, 3), (1, 2), (2, 4))), r"ed: .* \{0, 3\} to node 1"),
        (lambda: Graph(3, ((0, 1),)), r"\{0, 1\} to node 2"),
        # Nothing of this size is allocated.
        (lambda: Graph(10**12 + 1, ((0, 1), (2, 10**12))), r"\{0, 1\} to node 2"),
        (lambda: Graph(0, ()), "the number of nodes is 0"),
        (lambda: Graph(30, tuple((i, i + 1) for i in range(20))), r"8, 9, ...\} to"),
        (lambda: erdos_renyi(60, 0.01, 0), "none of 1000 random graphs of 60 nodes"),
        (lambda: k_regular(5, 3, 0), "graph-degree is 3"),
        (lambda: k_regular(5, 5, 0), "graph-degree is 5"),
        (lambda: k_regular(2, 2, 0), "the number of nodes is 2"),
        (lambda: small_world(9, 3, 0.1, 0), "graph-degree is 3"),
        (lambda: small_world(4, 4, 0.1, 0), "graph-degree is 4"),
        (lambda: from_file("no/such/file", 5), "'no/such/file'"),
    ],
)
def test_invalid_graph_fails_with_a_one_line_error(call, message):
    with pytest.raises(SettingsError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_drawing_stops_if_no_graph_is_connected(monkeypatch):
    monkeypatch.setattr("flwr_frl.strategies.gossip.graphs._DRAWS", 1)
    with pytest.raises(SettingsError, match="choose a larger graph-degree"):
        k_regular(1000, 2, 1)
    with pytest.raises(SettingsError, match="choose a smaller rewiring-probability"):
        small_world(300, 2, 1.0, 0)


@pytest.mark.parametrize("line", ["1", "1 2 3", "a b", "-1 0", "0,1", "0 1.5"])
def test_invalid_line_of_a_file_is_named(tmp_path, line):
    file = tmp_path / "graph.txt"
    file.write_text(f"0 1\n{line}\n")
    with pytest.raises(SettingsError, match=r"line 2 of .*two node numbers"):
        from_file(file, 3)


def test_build_graph_selects_by_name(tmp_path):
    for build in (ring, torus, complete, star):
        name = build.__name__
        assert build_graph(name, 12) == build(12)
        # These graphs depend on neither the probability nor the seed.
        assert build_graph(name, 12, 0.1, 9) == build(12)
    assert build_graph("erdos-renyi", 9) == erdos_renyi(9, 0.5, 0)
    assert build_graph("erdos-renyi", 9, 0.7, 4) == erdos_renyi(9, 0.7, 4)
    assert build_graph("k-regular", 9, seed=4) == k_regular(9, 4, 4)
    assert build_graph("k-regular", 9, seed=4, degree=2) == k_regular(9, 2, 4)
    assert build_graph("small-world", 9, seed=4) == small_world(9, 4, 0.1, 4)
    world = build_graph("small-world", 9, seed=4, degree=2, rewiring=0.5)
    assert world == small_world(9, 2, 0.5, 4)
    file = tmp_path / "tree"
    file.write_text("0 1\n1 2\n1 3\n3 4\n")
    assert build_graph(str(file), 5) == TREE


@pytest.mark.parametrize(
    ("name", "n", "message"),
    [
        ("rign", 5, "unknown graph 'rign'; did you mean 'ring'"),
        ("", 5, "unknown graph ''; known: complete, erdos-renyi"),
        (".", 5, r"unknown graph '\.'"),
        ("no/such/file", 5, "unknown graph 'no/such/file'.*a file of edges"),
        ("erdos-renyi", 1, "the number of nodes is 1"),
        # A file with another number of nodes
        ("tree", 4, r"an edge is \(3, 4\)"),
        ("tree", 6, "to node 5"),
        ("empty", 4, r"\{0\} to node 1"),
        ("text", 4, "line 1 of .*two node numbers"),
    ],
)
def test_unusable_graph_is_a_one_line_error(name, n, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").write_text("0 1\n1 2\n1 3\n3 4\n")
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "text").write_text("a tree\n")
    with pytest.raises(SettingsError, match=message) as refusal:
        build_graph(name, n)
    assert "\n" not in str(refusal.value)


# Mixing weights


def test_metropolis_weights_match_hand_computed_ones():
    # A star: the centre has degree n-1 = 3, so every edge has 1/4. The diagonal has the
    # rest: 1/4 at the centre and 3/4 at the leaves.
    expected = np.array([[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]) / 4
    assert np.allclose(metropolis_weights(star(4)), expected, atol=1e-15)
    # The tree: node 1 has degree 3, so its edges have 1/4; edge 3-4 has 1/3. In 12ths:
    expected = [
        [9, 3, 0, 0, 0],
        [3, 3, 3, 3, 0],
        [0, 3, 9, 0, 0],
        [0, 3, 0, 5, 4],
        [0, 0, 0, 4, 8],
    ]
    assert np.allclose(metropolis_weights(TREE), np.array(expected) / 12, atol=1e-15)


def test_uniform_weights_match_hand_computed_ones():
    # The largest degree is 3, so every edge has 1/4, even edge 3-4. In quarters:
    expected = [
        [3, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [0, 1, 3, 0, 0],
        [0, 1, 0, 2, 1],
        [0, 0, 0, 1, 3],
    ]
    assert np.allclose(uniform_weights(TREE), np.array(expected) / 4, atol=1e-15)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 30), st.floats(0.3, 1), st.integers(0, 1000))
def test_weights_are_mixing_matrices(n, probability, seed):
    graph = erdos_renyi(n, probability, seed)
    for weights in (metropolis_weights(graph), uniform_weights(graph)):
        assert np.array_equal(weights, weights.T)
        assert np.allclose(weights.sum(axis=1), 1, atol=1e-14)
        assert (weights >= 0).all()
        assert (np.diag(weights) > 0).all()
        pairs = zip(*np.nonzero(np.triu(weights, 1)), strict=True)
        assert tuple((int(i), int(j)) for i, j in pairs) == graph.edges
        # Fact 5 of the dissertation: W^k converges to the mean at rate (1 - delta)^k.
        delta = spectrum(weights).delta
        for k in (1, 2, 5):
            distance = np.linalg.matrix_power(weights, k) - 1 / n
            assert np.linalg.norm(distance, 2) == pytest.approx(
                (1 - delta) ** k, abs=1e-12
            )


# Spectra


@pytest.mark.parametrize("n", [3, 4, 5, 8, 60, 101])
def test_spectrum_of_the_ring(n):
    # Weights 1/3: lambda_k = (1 + 2 cos(2 pi k / n)) / 3.
    eigenvalues = [(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(n)]
    for weights in (metropolis_weights(ring(n)), uniform_weights(ring(n))):
        delta, lambda_max = spectrum(weights)
        assert delta == pytest.approx(1 - max(map(abs, eigenvalues[1:])), abs=1e-12)
        assert lambda_max == pytest.approx(1 - min(eigenvalues), abs=1e-12)


def test_spectrum_of_the_torus():
    # 3 rows, 5 columns, weights 1/5: lambda = (1 + 2 cos a + 2 cos b) / 5.
    eigenvalues = sorted(
        (1 + 2 * math.cos(2 * math.pi * r / 3) + 2 * math.cos(2 * math.pi * c / 5)) / 5
        for r in range(3)
        for c in range(5)
    )
    delta, lambda_max = spectrum(metropolis_weights(torus(15)))
    assert delta == pytest.approx(1 - max(eigenvalues[-2], -eigenvalues[0]), abs=1e-12)
    assert lambda_max == pytest.approx(1 - eigenvalues[0], abs=1e-12)


def test_spectrum_matches_hand_computed_eigenvalues():
    # Complete graph: W = 11^T / n has the eigenvalues 1 and 0.
    assert spectrum(uniform_weights(complete(6))) == pytest.approx((1, 1), abs=1e-12)
    # Star of 4: two differences of leaves have eigenvalue 3/4, (3, -1, -1, -1) has 0.
    assert spectrum(metropolis_weights(star(4))) == pytest.approx((0.25, 1), abs=1e-12)
    # The eigenvalues are 1 and -0.6: the second largest in magnitude is negative.
    negative = np.array([[0.2, 0.8], [0.8, 0.2]])
    assert spectrum(negative) == pytest.approx((0.4, 1.6), abs=1e-12)


# Consensus step (Theorem 2)


def test_consensus_step_matches_hand_computed_values():
    # delta = lambda = omega = 1: 2 / (64 + 1 + 16 + 8 - 16).
    gamma = consensus_step(uniform_weights(complete(6)), 1)
    assert gamma == pytest.approx(2 / 73)
    # delta = 1/4, lambda = 1, omega = 1/2: 1/4 / (16 + 1/16 + 16 + 2 - 2).
    gamma = consensus_step(metropolis_weights(star(4)), 0.5)
    assert gamma == pytest.approx(0.25 / 32.0625)


def test_consensus_step_of_theorem_1_matches_hand_computed_values():
    # delta = lambda = omega = 1: 2 / (4 + 1 + 128 + 24).
    gamma = relaxed_consensus_step(uniform_weights(complete(6)), 1)
    assert gamma == pytest.approx(2 / 157)
    # delta = 1/4, lambda = 1, omega = 1/2: 1/16 / (1/16 + 1/16 + 128 + 6).
    gamma = relaxed_consensus_step(metropolis_weights(star(4)), 0.5)
    assert gamma == pytest.approx(1 / 16 / 134.125)
    step = ConsensusStep("theorem-1")
    step.derive(metropolis_weights(star(4)), 0.5, 0.9)
    assert step.value == gamma


@pytest.mark.parametrize("graph", [ring(8), star(5), complete(4), torus(9)], ids=str)
@pytest.mark.parametrize("k", [1, 4, 10])
def test_consensus_step_contracts_as_in_the_proof(graph, k):
    """Exchange Top_k of x_i - xhat_i; without gradients, only consensus is left.

    With alpha = gamma delta / 2 and omega / 4 in the two inequalities
    ||a + b||^2 <= (1 + alpha) ||a||^2 + (1 + 1 / alpha) ||b||^2, a step leaves at
    most 1 - gamma delta / 2 of the sum of ||X - mean||^2 and ||X - Xhat||^2.
    """
    d = 10
    weights = metropolis_weights(graph)
    gamma = consensus_step(weights, k / d)
    shrinks = 1 - gamma * spectrum(weights).delta / 2
    x = np.random.default_rng(0).standard_normal((graph.n, d))
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


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-4, 1), st.floats(0, 1), st.floats(1e-4, 1))
def test_consensus_step_keeps_the_recursion_of_the_proof_below_one(delta, at, omega):
    """The same inequalities for any spectrum, with lambda from delta to 2 - delta."""
    lambda_max = delta + at * (2 - 2 * delta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "spectrum", lambda _: Spectrum(delta, lambda_max))
        gamma = consensus_step(np.eye(2), omega)
    near, far = gamma * delta / 2, omega / 4
    mean = (1 + near) * (1 - gamma * delta) ** 2
    mean += (1 + 1 / far) * (gamma * lambda_max) ** 2
    estimate = (1 + far) * (1 + gamma * lambda_max) ** 2
    estimate += (1 + 1 / near) * (gamma * lambda_max) ** 2
    assert max(mean, (1 - omega) * estimate) <= 1 - gamma * delta / 2
