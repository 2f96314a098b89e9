"""FLUTE's server compared with hand-computed numbers and with NumPy."""

from functools import partial
from logging import WARNING

import numpy as np
import pytest
from algorithm_runs import settings_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import FLUTE, build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.task.tasks import build_task
from flwr_frl.task.tasks.linear import LinearTask

WEIGHT, REPRESENTATION = "head.weight", "representation.weight"


linear_settings = partial(
    settings_of,
    **{"algorithm": "flute", "task": "linear", "spectrum": "gaussian"},
    **{"dimension": 4, "rank": 2, "samples": 6, "noise_variance": 0.3},
    **{"num_clients": 3, "fraction_train": 1.0, "learning_rate": 0.03},
)


class Answers:
    """A grid whose clients only report their classes."""

    def __init__(self, masks, heads=None):
        self.masks = masks
        self.heads = heads or {}
        self.names: dict[int, str] = {}
        self.messages: list[Message] = []

    def get_node_ids(self):
        return list(self.masks)

    def get_nodes(self):
        return []

    def send_and_receive(self, messages, timeout=None):
        return [self.answer(message) for message in messages]

    def answer(self, message):
        node = message.metadata.dst_node_id
        if message.metadata.message_type == "query":
            name = self.names.get(node, f"c{node}")
            record = ConfigRecord({"client": name, "structure": "s"})
            if self.masks[node] is not None:
                record["classes"] = self.masks[node]
            return Message(RecordDict({"properties": record}), reply_to=message)
        if message.metadata.message_type == "query.arrays":
            arrays = {
                REPRESENTATION: np.zeros((2, 2), np.float32),
                WEIGHT: np.eye(3, 2, dtype=np.float32),
                "head.bias": np.zeros(3, np.float32),
            }
            return Message(RecordDict({"arrays": to_record(arrays)}), reply_to=message)
        self.messages.append(message)
        head = {WEIGHT: self.heads[node], "head.bias": np.full(3, node, np.float32)}
        content = RecordDict(
            {
                "arrays": message.content["arrays"],
                "head": to_record(head),
                "metrics": MetricRecord({"num-examples": 1, "train-loss": 0.0}),
            }
        )
        return Message(content, reply_to=message)


@pytest.fixture(autouse=True)
def inside_a_run():
    InlineGrid(make_app({}), 1)


def test_linear_run_equals_plain_numpy() -> None:
    settings = linear_settings()
    grid, strategy = InlineGrid(make_app(settings), 3), build_strategy(settings)
    arrays = strategy.initialize(grid)
    b = arrays[REPRESENTATION].numpy().T
    w = np.stack([strategy.per_client(f"{i:06d}")[WEIGHT][0] for i in range(3)], axis=1)
    arrays = run_rounds(strategy, grid, arrays, range(1, 21))

    task = build_task(settings, 3)
    assert isinstance(task, LinearTask)
    data = [task.draw(i) for i in range(3)]
    for _ in range(20):
        grad_b, grad_w = np.zeros_like(b), np.zeros_like(w)
        for i, (x, y) in enumerate(data):
            residual = x @ b @ w[:, i] - y
            grad_b += x.T @ np.outer(residual, w[:, i]) / len(y)
            grad_w[:, i] = b.T @ x.T @ residual / len(y)
        # The paper's form for γ1 = 1/4, γ2 = 1/8: ½ B (BᵀB - WWᵀ), and -½ for W.
        balance = b.T @ b - w @ w.T
        b, w = (
            b - 0.03 * (grad_b + b @ balance / 2),
            w - 0.03 * (grad_w - balance @ w / 2),
        )
    np.testing.assert_allclose(arrays[REPRESENTATION].numpy().T, b, atol=1e-10)
    for i in range(3):
        head = strategy.per_client(f"{i:06d}")[WEIGHT][0]
        np.testing.assert_allclose(head, w[:, i], atol=1e-10)


def test_clients_receive_their_own_or_the_initial_head() -> None:
    heads = {n: np.full((3, 2), n, np.float32) for n in (1, 2, 3, 4)}
    grid = Answers(dict.fromkeys(heads, "111"), heads)
    strategy = FLUTE(fraction_train=0.5, server_learning_rate=0.0)
    arrays = strategy.initialize(grid)
    first = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    assert len(first) == 2
    strategy.aggregate_train(1, [grid.answer(m) for m in first])
    trained = {m.metadata.dst_node_id for m in first}
    assert set(strategy.heads) == {f"c{n}" for n in trained}
    for message in strategy.configure_evaluate(1, arrays, ConfigRecord(), grid):
        node = message.metadata.dst_node_id
        sent = message.content["head"][WEIGHT].numpy()
        expected = heads[node] if node in trained else np.eye(3, 2)
        np.testing.assert_array_equal(sent, expected)
        assert set(message.content["arrays"]) == {REPRESENTATION}


def test_run_started_from_a_full_model_sends_its_head_separately() -> None:
    # Flower's `start(grid, initial_arrays)` begins a run this way.
    heads = {n: np.full((3, 2), n, np.float32) for n in (1, 2)}
    grid = Answers(dict.fromkeys(heads, "111"), heads)
    started, usual = FLUTE(fraction_train=1.0), FLUTE(fraction_train=1.0)
    rest = usual.initialize(grid)
    model = {**rest, **{n: Array(a) for n, a in usual.initial_head.items()}}
    messages = started.configure_train(1, ArrayRecord(model), ConfigRecord(), grid)
    for message in messages:
        assert set(message.content["arrays"]) == set(rest) == {REPRESENTATION}
        sent = message.content["head"][WEIGHT].numpy()
        np.testing.assert_array_equal(sent, usual.initial_head[WEIGHT])


@pytest.mark.parametrize("mask", [None, "", "11", "1111", "12x", "000"])
def test_invalid_class_masks_are_rejected(
    mask, caplog: pytest.LogCaptureFixture
) -> None:
    grid, strategy = Answers({1: "111", 2: mask}), FLUTE()
    with caplog.at_level(WARNING, "flwr"):
        strategy.initialize(grid)
        assert strategy._identify(grid) == [1]
    reported = "" if mask is None else mask
    (line,) = [m for m in caplog.messages if "takes no part" in m]
    assert (
        f"client c2 takes no part: its classes are {reported!r}; they must be" in line
    )


def test_reconnected_client_updates_its_classes(monkeypatch) -> None:
    heads = {node: np.full((3, 2), node, np.float32) for node in (1, 2, 3)}
    grid = Answers({1: "111", 2: "110"}, heads)
    strategy = FLUTE(fraction_train=1.0)
    arrays = strategy.initialize(grid)
    used = []
    improve = strategy.improve

    def improved(heads, classes):
        used.append(classes.tolist())
        return improve(heads, classes)

    monkeypatch.setattr(strategy, "improve", improved)
    for server_round in (1, 2):
        messages = list(
            strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        )
        strategy.aggregate_train(server_round, [grid.answer(m) for m in messages])
        # Client 2 has reconnected as another node with an additional class.
        grid.masks, grid.names = {1: "111", 3: "111"}, {3: "c2"}
    assert used == [[[True] * 3, [True, True, False]], [[True] * 3] * 2]
