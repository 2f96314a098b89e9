"""Multi-task optimisation of models compared with NumPy and torch."""

from functools import partial

import algorithm_runs
import numpy as np
import pytest
from curve_tasks import INPUTS, SEED, WIDTH, curves, table
from flwr.app import ArrayRecord

from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.state import PREFIX
from flwr_frl.common.errors import SettingsError
from flwr_frl.predict import load_run
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.gossip.graphs import build_graph
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task.saddle_point import Proximity

NODES, BATCH = 4, 6
TOP_K = {"compressor": "top-k", "compressor_k": 2.0, "per_tensor": True}
# In the order of the model's parameters: two weights, each followed by its bias
SIZES = (WIDTH * INPUTS, WIDTH, WIDTH, 1)
HEAD = np.arange(WIDTH * INPUTS + WIDTH, sum(SIZES))


settings_of = partial(
    algorithm_runs.settings_of,
    "multi-task",
    task="curve_tasks:curves",
    num_clients=NODES,
    batch_size=BATCH,
    seed=SEED,
    compressor="identity",
    saddle_step=0.05,
    dual_regularizer=1.0,
    constraint_bound=0.01,
)


def run(rounds, **given):
    """Return the nodes' states and the metrics of every round."""
    settings = settings_of(**given)
    grid = InlineGrid(make_app(settings), NODES)
    strategy, rows = build_strategy(settings), []
    run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, rounds + 1),
        after_round=lambda r, a, m: rows.append(m),
    )
    states = []
    for context in grid.contexts.values():
        newest = max(context.state, key=lambda n: int(n.removeprefix(PREFIX)))
        record = context.state[newest]
        assert isinstance(record, ArrayRecord)
        states.append({name: array.numpy() for name, array in record.items()})
    return states, rows


def gradient(x, node, rows):
    """Return the gradient of the mean squared error of tanh(A x + a) w + c."""
    inputs, targets = (entries[rows] for entries in table(node))
    a, bias, w, c = np.split(x, np.cumsum(SIZES)[:-1])
    hidden = np.tanh(inputs @ a.reshape(WIDTH, INPUTS).T + bias)
    slope = 2 * (hidden @ w + c - targets[:, 0]) / len(rows)
    back = slope[:, None] * w * (1 - hidden**2)
    return np.concatenate(
        [(back.T @ inputs).ravel(), back.sum(0), hidden.T @ slope, [slope.sum()]]
    )


def loss(x, node, rows):
    inputs, targets = (entries[rows] for entries in table(node))
    a, bias, w, c = np.split(x, np.cumsum(SIZES)[:-1])
    hidden = np.tanh(inputs @ a.reshape(WIDTH, INPUTS).T + bias)
    return np.mean((hidden @ w + c - targets[:, 0]) ** 2)


def noise(node, draw, zeta=0.0):
    """Return a batch's rows and a direction on the sphere, drawn as nodes do."""
    rng = np.random.default_rng([0x4D546, SEED, node, draw - 1])
    rows = rng.choice(20, BATCH, replace=False)
    normal = rng.standard_normal(sum(SIZES)) if zeta else np.zeros(1)
    return rows, normal / np.linalg.norm(normal) if zeta else normal


def largest(vector, sizes, k):
    """Keep the k largest entries of each tensor."""
    kept = np.zeros_like(vector)
    for part in np.split(np.arange(len(vector)), np.cumsum(sizes)[:-1]):
        top = part[np.argsort(-np.abs(vector[part]), kind="stable")[:k]]
        kept[top] = vector[top]
    return kept


def initial():
    model = curves(NODES).initial_model()
    vectors = [p.detach().numpy().ravel() for p in model.parameters()]
    return np.concatenate(vectors).astype(np.float64)


# Bounds of the four edges of the ring, and a part of the model's parameters.
BOUNDS = {(0, 1): 0.0, (1, 2): 0.02, (2, 3): 0.5, (0, 3): 0.001}
SCALE = np.linspace(0, 2, sum(SIZES))


class Scaled(Proximity):
    """(x - y)' diag(scale) (x - y) - b."""

    def value(self, x_i, x_j):
        return ((x_i - x_j) ** 2) @ SCALE + self.offsets

    def gradient(self, x_i, x_j):
        return 2 * (x_i - x_j) * SCALE


def plain(
    iterations,
    *,
    eta=0.05,
    delta=1.0,
    bounds=None,
    scale=1.0,
    width=np.inf,
    entries=None,
    k=0,
    zeta=0.0,
):
    """Run Algorithms 2 and 3 node by node; X is a box of half this width."""
    bounds = bounds or dict.fromkeys(BOUNDS, 0.01)
    entries = np.arange(sum(SIZES)) if entries is None else entries
    sizes = SIZES if len(entries) == sum(SIZES) else SIZES[2:]
    edges = [
        e for i, j in build_graph("ring", NODES).tolist() for e in ((i, j), (j, i))
    ]
    raw = np.clip(np.tile(initial(), (NODES, 1)), -width, width)
    copy, average = np.zeros_like(raw), np.zeros_like(raw)
    duals = dict.fromkeys(edges, 0.0)
    for t in range(1, iterations + 1):
        for i in range(NODES):
            q = (raw[i] - copy[i]).astype(np.float32)[entries]
            own = raw[i].copy()
            own[entries] = copy[i][entries] + (
                largest(q, sizes, k) if k and t > 1 else q
            )
            copy[i] = own
        x = np.clip(copy, -width, width)
        average += (x - average) / t
        old = dict(duals)
        for i, j in edges:
            g = np.sum(scale * (x[i] - x[j])[entries] ** 2)
            g -= bounds[min(i, j), max(i, j)]
            duals[i, j] = max(0, old[i, j] + eta * (g - delta * eta * old[i, j]))
        for i in range(NODES):
            at, (rows, u) = x[i], noise(i, t, zeta)
            if zeta:
                apart = loss(at + zeta * u, i, rows) - loss(at - zeta * u, i, rows)
                slope = len(at) / (2 * zeta) * apart * u
            else:
                slope = gradient(at, i, rows)
            for _, j in (e for e in edges if e[0] == i):
                slope[entries] += 2 * old[i, j] * 2 * (scale * (at - x[j])[entries])
            raw[i] = np.clip(raw[i] - eta * slope, -width, width)
    return raw, average, [duals[e] for e in sorted(edges)]


@pytest.mark.parametrize(
    ("given", "expected", "tolerance"),
    [
        ({}, {}, 1e-5),
        ({"constrained_part": "head"}, {"entries": HEAD}, 1e-5),
        (TOP_K, {"k": 2}, 1e-5),
        ({**TOP_K, "constrained_part": "head"}, {"k": 2, "entries": HEAD}, 1e-5),
        ({"feasible_set": "box", "radius": 0.3}, {"width": 0.3}, 1e-5),
        ({"constraint": f"{__name__}:Scaled"}, {"scale": SCALE}, 1e-5),
        # Differences of float32 losses are multiplied by d / 2 zeta.
        ({"bandit_radius": 0.1, "saddle_step": 0.01}, {"zeta": 0.1, "eta": 0.01}, 1e-3),
    ],
    ids=["all", "head", "top-k", "top-k of the head", "box", "constraint", "bandit"],
)
def test_nodes_equal_a_loop_in_numpy(given, expected, tolerance):
    # The first round only sends the initial models.
    states, rows = run(26, **given)
    raw, average, duals = plain(25, **expected)
    for name, wanted in (("raw", raw), ("average", average)):
        values = np.concatenate([state[name] for state in states])
        np.testing.assert_allclose(values, wanted, rtol=0, atol=tolerance)
    values = np.concatenate([state["duals"] for state in states])
    np.testing.assert_allclose(values, duals, rtol=0, atol=tolerance)
    assert max(duals) > 0, "no constraint was ever at work"
    assert np.abs(raw - initial()).max() > 0.01
    assert rows[-1]["iterations"] == 25


@pytest.mark.parametrize(("part", "sums"), [("all", 2), ("head", 2 * 2)])
def test_nodes_stay_in_a_simplex(part, sums):
    states, _ = run(4, feasible_set="simplex", radius=2.0, constrained_part=part)
    raw = np.concatenate([state["raw"] for state in states])
    assert raw.min() >= 0
    np.testing.assert_allclose(raw.sum(1), sums)


def test_bounds_of_edges_equal_numpy_and_must_fit_the_graph(tmp_path):
    file = tmp_path / "bounds"
    lines = [f"{j} {i} {bound}" for (i, j), bound in BOUNDS.items()]
    file.write_text("# node node bound\n" + "\n".join(lines))
    states, _ = run(11, constraint_bound=str(file))
    raw, _, duals = plain(10, bounds=BOUNDS)
    values = [
        np.concatenate([state[name] for state in states]) for name in ("raw", "duals")
    ]
    for found, expected in zip(values, (raw, duals), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    for text in (
        "0 2 1",
        "\n".join(lines[1:]),
        "0 1",
        "0 1 x",
        "\n".join([*lines[1:], lines[1]]),
        "\n".join([*lines, "1 0 1"]),
        "\n".join([*lines[1:], "1 0 -1"]),
    ):
        file.write_text(text)
        with pytest.raises(SettingsError) as error:
            run(1, constraint_bound=str(file))
        assert error.value.code == "constraint-bound", text


def test_nodes_are_tested_with_their_models_and_task_metrics():
    states, rows = run(4)
    losses = []
    for node, state in enumerate(states):
        x = state["copy"][0]
        losses.append(loss(x, node, np.arange(20)))
        weight = state["head.weight"].ravel()
        np.testing.assert_allclose(weight, x[HEAD[:-1]], atol=1e-6)
    assert rows[-1]["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert rows[-1]["largest"] > 0
    assert rows[-1]["consensus-distance"] > 0


def test_each_node_keeps_its_batch_norm_statistics():
    states, _ = run(5, task="curve_tasks:normed")
    means = [state["representation.1.running_mean"] for state in states]
    counts = [int(state["representation.1.num_batches_tracked"]) for state in states]
    assert np.abs(means[0] - means[1]).max() > 1e-3
    # The first round evaluates a batch for its loss.
    assert counts == [5] * NODES


def test_saved_run_predicts_with_the_model_of_each_node(tmp_path):
    outcome = algorithm_runs.run_tiny("multi-task", tmp_path)
    for client in ("000000", "000003"):
        predictor = load_run(
            tmp_path / "multi-task", client, task="cohort_tasks:normed"
        )
        for name, value in predictor.model.state_dict().items():
            kept = outcome.arrays[f"{client}/{name}"]
            np.testing.assert_array_equal(value.numpy(), kept)
