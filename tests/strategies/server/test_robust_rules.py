"""Geometric median and centered clipping, compared with plain NumPy."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message
from function_clients import (
    START,
    averaging,
    grid_of,
    honest,
    partition_of,
    replies_of,
    reply_with,
)

from flwr_frl.strategies.server.aggregation import RULES, geometric_median, make_rule
from flwr_frl.strategies.server.checkpoint import State
from flwr_frl.strategies.server.replies import to_record

ZERO = {"w": np.zeros(2, np.float32)}
LIMIT = np.finfo(np.float32).max


def geometric_median_of(*values, weights=None) -> list[float]:
    weights = weights or [1.0] * len(values)
    return geometric_median(weights, replies_of(*values), ZERO)["w"].tolist()


def test_geometric_median_matches_hand_computed_values() -> None:
    # Of three points on a line it is the middle one; of a convex quadrilateral's
    # corners it is the intersection of the diagonals.
    combined = geometric_median_of([1, 1], [2, 2], [90, 90])
    assert combined == pytest.approx([2, 2], abs=1e-5)
    combined = geometric_median_of([0, 0], [6, 0], [4, 4], [0, 2])
    assert combined == pytest.approx([1.5, 1.5], abs=1e-5)
    # A point with at least half of the total weight is the geometric median.
    combined = geometric_median_of([0, 0], [6, 0], [4, 4], [0, 2], weights=[3, 1, 1, 1])
    assert combined == pytest.approx([0, 0], abs=1e-4)
    assert geometric_median([0.0], replies_of([1, 2]), ZERO) is None


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
@pytest.mark.parametrize("lie", [[1e30, -1e30], [LIMIT, LIMIT], [-LIMIT, 0]])
def test_huge_values_neither_overflow_nor_move_the_result(
    rule: str, lie: list[float]
) -> None:
    rng = np.random.default_rng(4)
    values = [*rng.normal(1, 0.1, (7, 2)), *[lie] * 3]
    with np.errstate(over="raise", invalid="raise"):
        combined = make_rule(rule, 0.3, 0.0)([1.0] * 10, replies_of(*values), ZERO)["w"]
    assert np.all(np.abs(combined) < 1.5)
    assert np.linalg.norm(combined - 1) < 1


def changing_by(*values):
    """Return a grid whose client i adds ``values[i]`` to each entry in a round."""

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type != "train":
            return honest(message, context)
        sent = message.content.array_records["arrays"]
        step = np.float32(values[partition_of(context)])
        arrays = {name: array.numpy() + step for name, array in sent.items()}
        return reply_with(message, arrays, num_examples=1, train_loss=0.0)

    return grid_of(len(values), client)


def after(strategy, grid, rounds: range, arrays=None):
    """Return the shared arrays after training for these rounds."""
    arrays = to_record(START) if arrays is None else arrays
    for server_round in rounds:
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages)
        arrays, _ = strategy.aggregate_train(server_round, replies)
    return arrays


# The norm of a change by 2 in each of the ten entries
CENTERED = {"aggregation": "centered-clip", "clip_norm": 2 * 10**0.5}


def test_centered_clipping_matches_hand_computed_values() -> None:
    grid = changing_by(1, 2, 9)
    # Clipped around 0: (1 + 2 + 2) / 3
    first = after(averaging(**CENTERED), grid, range(1, 2))
    np.testing.assert_allclose(first["b"].numpy(), 5 / 3, rtol=1e-6)
    # Clipped around the last change, 5/3: 5/3 + (-2/3 + 1/3 + 2) / 3 = 20/9
    second = after(averaging(**CENTERED), grid, range(1, 3))
    np.testing.assert_allclose(second["w"].numpy(), 5 / 3 + 20 / 9, rtol=1e-6)


def test_centered_clipping_resumes_from_its_saved_state() -> None:
    grid = changing_by(1, 2, 9)
    strategy = averaging(**CENTERED)
    middle = after(strategy, grid, range(1, 3))
    arrays, values = strategy._snapshot()
    saved = {name: array.copy() for name, array in arrays.items()}
    end = after(strategy, grid, range(3, 5), middle)
    other = averaging(**CENTERED)
    other._restore(State(saved, json.loads(json.dumps(values))))
    again = after(other, grid, range(3, 5), middle)
    assert again["w"].numpy().tolist() == end["w"].numpy().tolist()
    forgetful = after(averaging(**CENTERED), grid, range(3, 5), middle)
    assert abs(forgetful["w"].numpy() - end["w"].numpy()).min() > 0.1


def test_centered_clipping_recovers_from_an_overflow() -> None:
    large = {name: np.full_like(array, 3e38) for name, array in START.items()}

    def client(message: Message, context: Context) -> Message:
        trains = message.metadata.message_type == "train"
        return reply_with(message, large) if trains else honest(message, context)

    # The change of the first round exceeds the largest float32.
    start = to_record({name: -array for name, array in large.items()})
    strategy = averaging(aggregation="centered-clip")
    end = after(strategy, grid_of(3, client), range(1, 3), start)
    assert end is not None
    assert end["w"].numpy().tolist() == large["w"].tolist()
