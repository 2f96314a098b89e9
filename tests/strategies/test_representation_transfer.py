"""Representation transfer: participation, rejected replies and sent arrays."""

from functools import partial

import algorithm_runs
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MessageType

from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.task.tasks.linear import TransferTask

WEIGHT = "representation.weight"
SMALL = {"dimension": 12, "rank": 2, "num_sources": 4, "num_clients": 7}


class RecordingGrid(InlineGrid):
    """A grid that records messages and replies; ``absent`` nodes are offline."""

    def __init__(self, app, num_clients: int) -> None:
        super().__init__(app, num_clients)
        self.messages: list[Message] = []
        self.replies: list[Message] = []
        self.absent: set[int] = set()

    def get_node_ids(self):
        return [n for n in super().get_node_ids() if n not in self.absent]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.messages += messages
        replies = list(super().send_and_receive(messages))
        self.replies += replies
        return replies

    def asked(self, kind: str) -> list[int]:
        metadata = [
            m.metadata for m in self.messages if m.metadata.message_type == kind
        ]
        self.messages.clear()
        return [m.dst_node_id for m in metadata]


settings_of = partial(
    algorithm_runs.settings_of, "representation-transfer", task="transfer", **SMALL
)


def started(app=None, **overrides):
    settings = settings_of(**overrides)
    grid = RecordingGrid(app or make_app(settings), int(settings["num-clients"]))
    strategy = build_strategy(settings)
    return strategy, grid, strategy.initialize(grid)


def rounds(strategy, grid, arrays, first: int, last: int):
    """Run rounds and evaluate the last; return the arrays and the metrics by round."""
    rows = []
    arrays = run_rounds(
        strategy,
        grid,
        arrays,
        range(first, last + 1),
        evaluated=lambda server_round: server_round == last,
        after_round=lambda r, a, metrics: rows.append(metrics),
    )
    return arrays, rows


def trained(grid: RecordingGrid) -> list[Message]:
    """Return the replies to train messages."""
    replies = [r for r in grid.replies if r.has_content()]
    return [r for r in replies if {"arrays", "metrics"} <= set(r.content)]


def minimum_norm(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.linalg.pinv(x) @ y


def failing(broken: set[int]):
    """Return a ClientApp in which training fails on the broken nodes."""
    honest = make_app(settings_of())

    def app(message: Message, context: Context) -> Message:
        training = message.metadata.message_type == MessageType.TRAIN
        if training and context.node_id in broken:
            raise RuntimeError("no power")
        return honest(message, context)

    return app


# Complete pipeline


@pytest.mark.parametrize("samples", [8, 40])
def test_linear_transfer_equals_numpy(samples):
    strategy, grid, start = started(target_samples=samples, seed=5)
    arrays, rows = rounds(strategy, grid, start, 1, 2)
    data = TransferTask(12, 2, 4, 100, samples, 20.0, seed=5)
    directions = []
    for i in range(4):
        theta = minimum_norm(*data.draw(i))
        directions.append(theta / np.linalg.norm(theta))
    u, s, _ = np.linalg.svd(np.array(directions).T, full_matrices=False)
    v = u[:, s > 0.01 * s[0]]
    np.testing.assert_allclose(arrays[WEIGHT].numpy(), v.T, atol=1e-10)
    errors = []
    for i in (4, 5, 6):
        x, y = data.draw(i)
        half = samples // 2
        first = v @ minimum_norm(x[:half] @ v, y[:half])
        second = first + minimum_norm(x[half:], y[half:] - x[half:] @ first)
        kept = PersonalState(grid.contexts[i + 1]).load()
        np.testing.assert_allclose(kept["phase-1"], first, atol=1e-10)
        np.testing.assert_allclose(kept["phase-2"], second, atol=1e-10)
        x, y = data.draw(i, 1, 500)
        best = np.mean((y - x @ data.model(i)) ** 2)
        errors.append(np.mean((y - x @ second) ** 2) / best)
        reported = strategy._run.evaluation.metrics[f"{i:06d}"]["error"]
        assert reported == pytest.approx(errors[-1], rel=1e-9)
    assert rows[1]["error"] == pytest.approx(np.mean(errors), rel=1e-9)
    assert {"error-phase-1", "error-scratch", "loss"} <= set(rows[1])
    assert [row["clients"] for row in rows] == [4, 3]


def test_heads_and_data_of_sources_stay_local():
    strategy, grid, start = started(seed=2)
    rounds(strategy, grid, start, 1, 3)
    data, secrets, names = TransferTask(12, 2, 4, seed=2), [], set()
    for i in range(4):
        x, y = data.draw(i)
        theta = minimum_norm(x, y)
        head = PersonalState(grid.contexts[i + 1]).load()["head.weight"]
        assert head == pytest.approx(np.linalg.norm(theta))
        numbers = [*x.ravel(), *y, head.item()]
        secrets += [np.float64(n).tobytes() for n in numbers]
        secrets += [np.float32(n).tobytes() for n in (*x[0], *y)]
    for message in [*grid.messages, *grid.replies]:
        content = message.content
        for record in content.array_records.values():
            names |= set(record)
            for array in record.values():
                assert not any(secret in array.data for secret in secrets)
        reported = {n for r in content.metric_records.values() for n in r}
        if message.metadata.src_node_id in (1, 2, 3, 4):
            assert reported <= {"num-examples", "train-loss", "server-round"}
    assert names == {WEIGHT}
    from_sources = [r for r in trained(grid) if r.metadata.src_node_id <= 4]
    shapes = {tuple(r.content["arrays"][WEIGHT].shape) for r in from_sources}
    assert shapes == {(1, 12)}
    # The models of targets stay local as well.
    from_targets = [r for r in trained(grid) if r.metadata.src_node_id > 4]
    assert len(from_targets) == 3
    assert all(len(r.content["arrays"]) == 0 for r in from_targets)


# Participation


def test_every_client_is_trained_once():
    strategy, grid, start = started()
    grid.asked("")
    arrays, rows = rounds(strategy, grid, start, 1, 1)
    assert grid.asked(MessageType.TRAIN) == [1, 2, 3, 4]
    arrays, more = rounds(strategy, grid, arrays, 2, 2)
    assert grid.asked(MessageType.TRAIN) == [5, 6, 7]
    after, idle = rounds(strategy, grid, arrays, 3, 3)
    assert grid.asked(MessageType.TRAIN) == []
    assert [row["asked"] for row in (*rows, *more, *idle)] == [4, 3, 0]
    np.testing.assert_array_equal(after[WEIGHT].numpy(), arrays[WEIGHT].numpy())


def test_only_targets_with_a_model_are_evaluated():
    strategy, grid, start = started()
    arrays, (row,) = rounds(strategy, grid, start, 1, 1)
    assert "error" not in row
    grid.absent = {6}
    rounds(strategy, grid, arrays, 2, 2)
    assert grid.asked(MessageType.EVALUATE) == [5, 7]
    assert strategy._traits.evaluate_last_round_only


def test_late_target_receives_the_basis_in_the_next_round():
    strategy, grid, start = started()
    grid.absent = {6}
    arrays, _ = rounds(strategy, grid, start, 1, 3)
    grid.absent, grid.messages = set(), []
    rounds(strategy, grid, arrays, 4, 4)
    sent = [m for m in grid.messages if m.metadata.message_type == MessageType.TRAIN]
    assert [m.metadata.dst_node_id for m in sent] == [6]
    basis = sent[0].content["arrays"][WEIGHT].numpy()
    np.testing.assert_array_equal(basis, arrays[WEIGHT].numpy())
    assert set(strategy._run.evaluation.metrics) == {"000004", "000005", "000006"}


def test_failed_target_is_retried():
    broken = {5}
    strategy, grid, start = started(failing(broken))
    arrays, (_, row) = rounds(strategy, grid, start, 1, 2)
    assert (row["clients"], row["rejected"]) == (2, 1)
    broken.clear()
    grid.asked("")
    rounds(strategy, grid, arrays, 3, 3)
    assert grid.asked(MessageType.TRAIN) == [5]


def test_zeros_from_the_only_available_source_do_not_end_the_run():
    asleep = {2, 3, 4}
    some = failing(asleep)

    def app(message: Message, context: Context) -> Message:
        reply = some(message, context)
        training = message.metadata.message_type == MessageType.TRAIN
        if training and context.node_id == 1:
            reply.content["arrays"] = ArrayRecord({WEIGHT: Array(np.zeros((1, 12)))})
        return reply

    strategy, grid, start = started(app)
    arrays, (row,) = rounds(strategy, grid, start, 1, 1)
    assert (row["rejected"], strategy.built) == (3, False)
    asleep.clear()
    arrays, _ = rounds(strategy, grid, arrays, 2, 2)
    assert strategy.built
    assert np.linalg.matrix_rank(arrays[WEIGHT].numpy()) >= 1


# Settings and other models


def test_image_models_are_stacked_and_their_targets_learn():
    images = {"task": "digits", "num_sources": 3, "source_epochs": 20}
    images |= {"num_clients": 5, "batch_size": 50, "learning_rate": 0.1}
    strategy, grid, start = started(**images)
    arrays, rows = rounds(strategy, grid, start, 1, 2)
    assert set(arrays) == set(start)
    replies = {r.metadata.src_node_id: r.content["arrays"] for r in trained(grid)}
    for name in start:
        sources = [replies[node][name].numpy() for node in (1, 2, 3)]
        np.testing.assert_array_equal(arrays[name].numpy(), np.stack(sources))
    assert rows[1]["evaluated"] == 2
    # Each target has two classes, so guessing gives one half.
    assert rows[1]["accuracy"] > 0.8
    sent = [m.content for m in (*grid.messages, *grid.replies) if m.has_content()]
    names = {n for c in sent for r in c.array_records.values() for n in r}
    assert names == set(start)
