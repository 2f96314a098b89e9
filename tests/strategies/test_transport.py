"""Transport in float16 halves the bytes; the server keeps float32."""

import numpy as np
import pytest
from algorithm_runs import settings_of
from flwr.app import Array, ArrayRecord, MessageType
from function_clients import averaging, grid_of, honest, reply_with, train_once

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import FedAvg, build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server.replies import as_float16


class Recorder(InlineGrid):
    """Keeps all messages and replies."""

    def pull_messages(self, message_ids, *, timeout=None):
        ids = list(message_ids)
        self.messages = [self._pending[i] for i in ids]
        self.replies = list(super().pull_messages(ids))
        return self.replies


def arrays_after(rounds, **settings):
    options = {"num_clients": 5, "head_epochs": 1, "batch_size": 50, "model": "mlp-2"}
    options |= settings
    resolved = settings_of(**options)
    grid = Recorder(make_app(resolved), 5)
    strategy = build_strategy(resolved)
    rows = []
    arrays = run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, rounds + 1),
        evaluated=lambda _: False,
        after_round=lambda r, a, m: rows.append(m),
    )
    return {n: a.numpy() for n, a in arrays.items()}, rows, grid


def plus_one(message, context):
    if message.metadata.message_type != MessageType.TRAIN:
        return honest(message, context)
    sent = message.content.array_records["arrays"]
    one = np.float16(1)
    return reply_with(message, {n: a.numpy() + one for n, a in sent.items()})


@pytest.mark.parametrize("algorithm", ["fedrep", "flute", "scaffold", "apfl"])
def test_float16_halves_the_bytes_and_hardly_changes_arrays(algorithm):
    full, wide, _ = arrays_after(1, algorithm=algorithm)
    short, narrow, grid = arrays_after(1, algorithm=algorithm, transport="float16")
    for name, value in full.items():
        assert short[name].dtype == np.float32
        # Values are rounded once per direction, and training amplifies the difference.
        np.testing.assert_allclose(short[name], value, rtol=0.02, atol=2e-3)
    sent = sum(value.nbytes for value in full.values()) * narrow[0]["clients"]
    for way in ("bytes-down", "bytes-up"):
        assert wide[0][way] - narrow[0][way] == pytest.approx(sent / 2, rel=0.01)
    for message in (*grid.messages, *grid.replies):
        record = message.content.array_records["arrays"]
        assert {array.dtype for array in record.values()} == {"float16"}


def test_server_keeps_the_mean_in_float32():
    # The mean of three float16 numbers need not be a float16 number.
    short, _, grid = arrays_after(
        1, algorithm="fedrep", transport="float16", fraction_train=0.6
    )
    replies = [
        {n: a.numpy() for n, a in reply.content.array_records["arrays"].items()}
        for reply in grid.replies
    ]
    assert len(replies) == 3
    for name, value in short.items():
        mean = np.mean([reply[name].astype(np.float64) for reply in replies], axis=0)
        np.testing.assert_array_equal(value, mean.astype(np.float32))
    assert any((v != v.astype(np.float16)).any() for v in short.values())


def test_large_values_are_clipped_and_other_types_unchanged():
    record = ArrayRecord(
        {
            "a": Array(np.array([1e6, -1e6, 1.0], np.float32)),
            "count": Array(np.array(7, np.int64)),
            "temperature": Array(np.array(0.5, np.float32)),
            "double": Array(np.array([np.pi])),
        }
    )
    sent = {n: a.numpy() for n, a in as_float16(record).items()}
    assert sent["a"].tolist() == [65504.0, -65504.0, 1.0]
    assert sent["a"].dtype == np.float16
    assert sent["count"] == 7
    assert sent["temperature"].dtype == np.float16
    assert sent["temperature"] == 0.5
    assert sent["double"].tolist() == [np.pi]


@pytest.mark.parametrize("aggregation", ["mean", "clip"])
def test_half_precision_arrays_stay_so(aggregation):
    strategy = averaging(transport="float16", aggregation=aggregation, clip_norm=100.0)
    start = {"half": np.zeros(3, np.float16), "single": np.zeros(3, np.float32)}
    arrays, metrics = train_once(strategy, grid_of(3, plus_one), start)
    assert metrics["clients"] == 3
    assert {n: a.dtype for n, a in arrays.items()} == {
        "half": "float16",
        "single": "float32",
    }
    assert all(a.numpy().tolist() == [1.0] * 3 for a in arrays.values())


class EachItsOwn(FedAvg):
    """Sends each client its own last arrays instead of the mean."""

    def __init__(self, **base):
        super().__init__(**base)
        self.own = {}

    def per_client(self, client):
        return self.own.get(client, {})

    def aggregate(self, round):
        self.own |= {reply.client: dict(reply.arrays) for reply in round.replies}
        return round.mean()


def test_arrays_for_a_single_client_are_sent_as_float16():
    algorithm = f"{__name__}:EachItsOwn"
    _, rows, grid = arrays_after(
        2, algorithm=algorithm, transport="float16", fraction_train=1.0
    )
    assert [(row["clients"], row["rejected"]) for row in rows] == [(5, 0), (5, 0)]
    for message in grid.messages:
        record = message.content.array_records["arrays"]
        assert {array.dtype for array in record.values()} == {"float16"}


def test_reply_in_another_dtype_is_rejected(monkeypatch):
    monkeypatch.setattr(
        "flwr_frl.clients.device.codec.as_received", lambda array, dtype: array
    )
    _, rows, _ = arrays_after(1, algorithm="fedrep", transport="float16")
    assert rows[0]["clients"] == 0
    assert rows[0]["rejected"] == 2
