"""Multi-task optimisation by messages compared with the computation in arrays."""

import logging
from functools import partial

import algorithm_runs
import numpy as np
import pytest
from client_messages import new_context
from flwr.app import Message, MessageType
from refusals import code_of

from benchmarks.multi_task import directed
from benchmarks.multi_task_network import Network
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.state import PREFIX, PersonalState
from flwr_frl.clients.multi_task import SyntheticMultiTaskClient, constraint_class
from flwr_frl.common.compression import Identity, RandK, Sign, TopK
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import build
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.gossip.graphs import build_graph
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task.saddle_point import SaddlePoint
from flwr_frl.task.tasks.multi_task import MultiTaskSetup, build_problem

NODES = 6


class Tampering(InlineGrid):
    """Records messages, drops replies and changes what nodes send."""

    def __init__(self, app, num_clients):
        super().__init__(app, num_clients)
        self.away: set[tuple[int, int]] = set()
        self.changes = {}
        self.messages: list[Message] = []
        self.round = 0

    def pull_messages(self, message_ids, *, timeout=None):
        ids = list(message_ids)
        sent = [self._pending[i] for i in ids]
        training = [m for m in sent if m.metadata.message_type == MessageType.TRAIN]
        if training:
            self.round = int(
                training[0].content.config_records["config"]["server-round"]
            )
        self.messages += training
        kept = []
        for reply in super().pull_messages(ids):
            node = reply.metadata.src_node_id
            change = self.changes.get((node, self.round))
            if training and change is not None:
                reply.content.config_records["bytes"]["message"] = change
            if not training or (node, self.round) not in self.away:
                kept.append(reply)
        return kept


settings_of = partial(
    algorithm_runs.settings_of,
    "multi-task",
    **{
        "task": "qcqp",
        "num_clients": NODES,
        "compressor": "top-k",
        "compressor_k": 2.0,
    },
    **{"graph": "erdos-renyi", "edge_probability": 0.5, "seed": 3},
    # Large enough that constraints bind within a few iterations
    saddle_step=0.02,
)


def run(rounds, *, away=(), changes=None, **given):
    settings = settings_of(**given)
    grid = Tampering(make_app(settings), NODES)
    grid.away, grid.changes = set(away), changes or {}
    strategy = build_strategy(settings)
    rows = []
    run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, rounds + 1),
        after_round=lambda r, a, m: rows.append(m),
    )
    states = []
    for context in grid.contexts.values():
        if not context.state:
            states.append({})
            continue
        newest = max(context.state, key=lambda n: int(n.removeprefix(PREFIX)))
        states.append({n: a.numpy() for n, a in context.state[newest].items()})
    return states, rows, grid, strategy


def network(iterations, problem="qcqp", zeta=0.0, operator=None, step=0.02):
    pairs = directed(build_graph("erdos-renyi", NODES, 0.5, 3))
    costs, constraint = build_problem(problem, range(NODES), pairs, 3)
    saddle = SaddlePoint(costs, constraint, step=step, zeta=zeta)
    result = Network(saddle, operator or TopK(2), 3)
    for _ in range(iterations):
        result.iterate()
    return result


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"compressor": "identity"}, {"operator": Identity()}),
        (
            {"compressor": "sign-top-k", "bandit_radius": 1e-4},
            {"operator": TopK(2, Sign()), "zeta": 1e-4},
        ),
        (
            {"compressor": "rand-k", "task": "multi-task-logistic"},
            {"operator": RandK(2), "problem": "logistic"},
        ),
    ],
    ids=["top-k", "identity", "bandit", "logistic"],
)
def test_messages_give_the_same_result_as_the_network_in_arrays(given, expected):
    # The first round only sends the initial models, so there is one iteration less.
    states, rows, _, _ = run(13, **given)
    expected_state = network(12, **expected).state
    for name in ("raw", "average"):
        values = np.concatenate([state[name] for state in states])
        np.testing.assert_allclose(
            values, getattr(expected_state, name), rtol=0, atol=1e-10
        )
    duals = np.concatenate([state["duals"] for state in states])
    np.testing.assert_allclose(duals, expected_state.duals, rtol=0, atol=1e-10)
    if expected.get("problem") != "logistic":
        assert duals.max() > 0, "no constraint was ever at work"
    assert rows[-1]["iterations"] == 12
    assert np.isfinite(rows[-1]["constraint"])


def test_neighbours_wait_for_an_absent_node():
    away = [(2, r) for r in (4, 5, 6)]
    states, rows, _, _ = run(16, away=away)
    done = [int(state["iteration"]) for state in states]
    undisturbed, _, _, _ = run(max(done) + 1)
    # A node that completed this many iterations has the same numbers.
    assert max(done) < 15
    assert min(done) >= 12
    for state, other, count in zip(states, undisturbed, done, strict=True):
        if count == max(done):
            np.testing.assert_allclose(state["raw"], other["raw"], atol=1e-12)
    assert any(row["sent"] < NODES - 1 for row in rows[3:7])


def test_rejected_iteration_is_repeated():
    # Its message never reached the neighbours, so the client must not continue from it.
    states, rows, _, _ = run(12, changes={(3, 5): b"of another length"})
    assert rows[4]["rejected"] == 1
    done = min(int(state["iteration"]) for state in states)
    again, _, _, _ = run(done + 1)
    for state, other in zip(states, again, strict=True):
        if int(state["iteration"]) == done:
            np.testing.assert_allclose(state["raw"], other["raw"], atol=1e-12)


def test_malformed_message_is_rejected_and_neighbours_continue(caplog):
    length = TopK(2).num_bytes(10)
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        states, rows, _, strategy = run(10, changes={(1, 5): b"\xff" * length})
    finally:
        logger.removeHandler(caplog.handler)
    degree = int((strategy.mixing_weights[0] > 0).sum()) - 1
    assert rows[5]["refused"] == degree
    assert "message of neighbour 000000 refused" in caplog.text
    assert [int(state["iteration"]) for state in states] == [9] * NODES
    for state in states:
        assert np.isfinite(state["raw"]).all()


def test_a_node_that_lost_its_state_ends_the_run():
    settings = settings_of()
    grid = Tampering(make_app(settings), NODES)
    strategy = build_strategy(settings)
    arrays = strategy.initialize(grid)
    run_rounds(strategy, grid, arrays, range(1, 6))
    grid.contexts[2].state.clear()
    with pytest.raises(SettingsError, match="client 000001 is lost: its state"):
        run_rounds(strategy, grid, arrays, range(6, 9))


def test_node_that_is_offline_for_too_long_ends_the_run():
    with pytest.raises(SettingsError, match="client 000003 is lost: it missed"):
        run(9, away=[(4, r) for r in range(3, 9)], max_missed_rounds=3)


def test_bits_are_those_of_the_messages():
    _, rows, _, _ = run(4)
    assert rows[0]["bits"] == NODES * 8 * 40
    later = 8 * TopK(2).num_bytes(10) * NODES
    assert [row["bits"] for row in rows[1:]] == [later] * 3
    expected = network(4)
    assert sum(row["bits"] for row in rows) == expected.bits


@pytest.mark.parametrize(("zeta", "factor"), [("0", 64), ("theory", 256)])
def test_theory_settings_match_the_theorems(zeta, factor):
    options = {"compressor": "identity", "saddle_step": 2e-5, "num_server_rounds": 8}
    options |= {"bandit_radius": zeta, "radius": 2.0}
    theory, _, _, _ = run(8, dual_regularizer="theory", **options)
    # Theorems 3 and 4: G = 2 sqrt(2) ||x_i - x_j|| <= 8 sqrt(2) on the ball of radius
    # 2, with two dual variables per edge.
    m = 2 * len(build_graph("erdos-renyi", NODES, 0.5, 3))
    inside = factor * 2e-5**2 * (1 + m) * (8 * 2**0.5) ** 2
    delta = (1 - (1 - inside) ** 0.5) / (4 * 2e-5**2)
    if zeta == "theory":
        options["bandit_radius"] = 1 / 8
    number, _, _, _ = run(8, dual_regularizer=delta, **options)
    for found, expected in zip(theory, number, strict=True):
        for name in ("raw", "duals"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    assert max(state["duals"].max() for state in theory) > 0


def client_of(**given) -> SyntheticMultiTaskClient:
    settings = build(SyntheticMultiTaskClient._settings_type, given)
    state = PersonalState(new_context())
    return SyntheticMultiTaskClient(MultiTaskSetup("qcqp"), 0, state, settings)


def test_steps_and_sets_that_the_theorems_exclude_are_rejected():
    theory = {"dual-regularizer": "theory", "compressor": "identity"}
    assert code_of(client_of(**theory).regularizer, 12) == "saddle-step"
    unbounded = client_of(**theory)
    unbounded.set_radius = np.inf
    assert code_of(unbounded.regularizer, 12) == "dual-regularizer"
    custom = {**theory, "constraint": "mine:Weighted"}
    assert code_of(client_of, **custom) == "dual-regularizer"
    simplex = {"feasible-set": "simplex", "bandit-radius": "0.1"}
    assert code_of(client_of, **simplex) == "bandit-radius"
    for name in ("proximal", "math:sqrt", "no_module:Constraint"):
        assert code_of(constraint_class, name) == "constraint"
