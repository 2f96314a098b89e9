"""Compressed uploads compared with NumPy, and the settings that refuse them."""

from functools import partial

import numpy as np
import pytest
from algorithm_runs import DisturbedGrid, KilledError, assert_same, run_tiny
from flwr.app import Array

from flwr_frl import predict
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.upload import GROUP, VECTOR
from flwr_frl.strategies.grids.simulation import InlineGrid

TOP = {"upload_compressor": "top-k", "compressor_k": 0.3}
# Batch-norm statistics and counters, which are not compressed
PLAIN = ("running_mean", "running_var", "num_batches_tracked")


class Twin(DisturbedGrid):
    """Also asks clients that compress nothing, which receive the same messages."""

    def __init__(self, settings):
        super().__init__(settings)
        plain = {**settings, "upload-compressor": "none", "checkpoint-every": 0}
        self.twin = InlineGrid(make_app(plain), int(settings["num-clients"])).contexts
        self.plain, self.uncompressed = make_app(plain), []

    def pull_messages(self, message_ids, *, timeout=None):
        for message in (self._pending[i] for i in message_ids):
            if message.metadata.message_type == "train":
                context = self.twin[message.metadata.dst_node_id]
                self.uncompressed.append(arrays_of(self.plain(message, context)))
        return super().pull_messages(message_ids, timeout=timeout)


def arrays_of(message):
    return {n: a.numpy() for n, a in message.content["arrays"].items()}


def flat(arrays, names):
    return np.concatenate([arrays[name].ravel() for name in names])


def top(v, k):
    """Return v with all but its k largest magnitudes set to 0."""
    kept = np.argsort(-np.abs(v), kind="stable")[:k]
    q = np.zeros_like(v)
    q[kept] = v[kept]
    return q


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", "fedprox"])
def test_rounds_equal_numpy(algorithm):
    outcome = run_tiny(algorithm, grid=Twin, num_server_rounds=5, momentum=0.9, **TOP)
    shared = {n.removeprefix("server/arrays/"): a for n, a in outcome.arrays.items()}
    exchanged, errors, new = outcome.grid.exchanged, {}, {}
    names = sorted(n for n in arrays_of(exchanged[0][0]) if not n.endswith(PLAIN))
    for (message, reply), local in zip(
        exchanged, outcome.grid.uncompressed, strict=True
    ):
        received, sent = flat(arrays_of(message), names), reply.content
        node, number = message.metadata.dst_node_id, int(message.metadata.group_id)
        v = flat(local, names) - received + errors.get(node, 0)
        k = round(0.3 * len(v))
        q = top(v, k)
        errors[node] = v - q
        new.setdefault(number + 1, []).append(received + q)
        # All but the parameters are sent as they are; indices have 6 bits each.
        others = {n: a.tolist() for n, a in arrays_of(reply).items()}
        assert others == {n: a.tolist() for n, a in local.items() if n not in names}
        length = -(-k * (len(v) - 1).bit_length() // 8) + 4 * k
        assert len(sent["bytes"]["message"]) == length
        assert outcome.rows[number - 1]["bits"] == 3 * 8 * length
        if number in new:
            mean = np.mean(new[number], 0)
            np.testing.assert_allclose(received, mean, 1e-5, 1e-6)
    np.testing.assert_allclose(flat(shared, names), np.mean(new[6], 0), 1e-5, 1e-6)
    # The error is saved with the personal arrays.
    for node, error in errors.items():
        saved = outcome.arrays[f"{node - 1:06d}/{GROUP}{VECTOR}"]
        np.testing.assert_allclose(saved, error, 1e-4, 1e-6)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", "pfedme", "fedbuff"])
def test_identity_equals_no_compressor_to_rounding(algorithm):
    plain, identity = (
        run_tiny(algorithm, upload_compressor=name) for name in ("none", "identity")
    )
    for name, array in plain.arrays.items():
        np.testing.assert_allclose(identity.arrays[name], array, 1e-4, 1e-5, name)


def test_killed_and_resumed_run_continues_with_its_errors(tmp_path):
    settings = {"upload_compressor": "qsgd-rand-k", "per_tensor": True, "momentum": 0.9}
    left = tmp_path / "left"
    killed = partial(DisturbedGrid, killed_in=2, copy=left)
    with pytest.raises(KilledError):
        run_tiny("fedrep", tmp_path / "killed", killed, **settings)
    resumed = run_tiny("fedrep", left, resume=str(left), **settings)
    assert_same(resumed, run_tiny("fedrep", **settings))
    # A saved model needs no error.
    assert predict.load_run(
        left / "fedrep", client="000001", task="cohort_tasks:normed"
    )


def cut(reply):
    record = reply.content["bytes"]
    record["message"] = record["message"][:-1]


def lost(reply):
    del reply.content["bytes"]


def whole(reply):
    arrays = reply.content["arrays"]
    arrays["head.bias"] = Array(np.zeros(3, np.float32))


@pytest.mark.parametrize("change", [cut, lost, whole])
def test_damaged_reply_is_rejected_and_its_error_taken_back(change):
    damaged, absent = (
        run_tiny(
            "fedavg",
            grid=partial(DisturbedGrid, changes={(0, 1): first, (0, 2): None}),
            fraction_train=1.0,
            **TOP,
        )
        for first in (change, None)
    )
    assert [row["rejected"] for row in damaged.rows] == [1, 0, 0]
    for name, array in absent.arrays.items():
        np.testing.assert_array_equal(damaged.arrays[name], array, name)
