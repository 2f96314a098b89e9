"""Server of linear FedRep: the method-of-moments start and the optional QR step."""

from functools import partial

import algorithm_runs
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from seen_replies import round_of

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import build
from flwr_frl.strategies import FedRepLinear, build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.task.tasks.linear import LinearTask, principal_angle_distance

WEIGHT = "representation.weight"


settings_of = partial(algorithm_runs.settings_of, "fedrep", task="linear")


def test_start_consists_of_leading_eigenvectors_of_the_mean_moment():
    settings = settings_of(dimension=7, rank=3, samples=20, seed=2)
    n = 9
    grid = InlineGrid(make_app(settings), n)
    start = build_strategy(settings).initialize(grid)[WEIGHT].numpy()
    # mean_i 1/m Σ_j y_j² x_j x_jᵀ; it is symmetric and positive semidefinite, so its
    # singular vectors are its eigenvectors.
    task = build(LinearTask, settings, num_clients=n)
    moments = np.zeros((7, 7))
    for i in range(n):
        x, y = task.draw(i)
        for x_j, y_j in zip(x, y, strict=True):
            moments += y_j**2 * np.outer(x_j, x_j) / 20 / n
    leading = np.linalg.svd(moments)[0][:, :3]
    assert start.shape == (3, 7)
    np.testing.assert_allclose(start @ start.T, np.eye(3), atol=1e-9)
    assert principal_angle_distance(start.T, leading) < 1e-9


def test_random_start_is_orthonormal():
    settings = settings_of(initialization="random")
    start = build_strategy(settings).initialize(InlineGrid(make_app(settings), 5))
    b = start[WEIGHT].numpy()
    assert b.shape == (2, 10)
    np.testing.assert_allclose(b @ b.T, np.eye(2), atol=1e-9)
    truth = build(LinearTask, settings, num_clients=5).representation
    assert principal_angle_distance(b.T, truth) > 0.2


@pytest.mark.parametrize("orthonormalize", [False, True])
def test_the_mean_may_be_orthonormalised(orthonormalize):
    strategy = FedRepLinear(orthonormalize=orthonormalize)
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 2, 6))
    mean = (first + second) / 2
    b = strategy.aggregate(round_of([], combine=lambda _: {WEIGHT: mean}))[WEIGHT]
    if not orthonormalize:
        np.testing.assert_allclose(b, mean)
        return
    np.testing.assert_allclose(b @ b.T, np.eye(2), atol=1e-12)
    assert principal_angle_distance(b.T, mean.T) < 1e-9
    # Gram–Schmidt keeps the signs of the columns, on which stored heads depend.
    one = mean[0] / np.linalg.norm(mean[0])
    rest = mean[1] - (mean[1] @ one) * one
    np.testing.assert_allclose(b, [one, rest / np.linalg.norm(rest)], atol=1e-12)


@pytest.mark.parametrize("bad", ["nan", "shape", "name", "nothing"])
def test_malformed_moments_of_one_client_are_ignored(bad):
    settings = settings_of(samples=500)
    honest = make_app(settings)

    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        asked = message.metadata.message_type == "query.statistics"
        if asked and context.node_id == 2:
            moments = {
                "nan": {"moments": np.full((10, 10), np.nan)},
                "shape": {"moments": np.eye(3)},
                "name": {WEIGHT: np.eye(10)},
                "nothing": {},
            }[bad]
            record = ArrayRecord({n: Array(v) for n, v in moments.items()})
            reply.content["arrays"] = record
        return reply

    start = build_strategy(settings).initialize(InlineGrid(client, 10))[WEIGHT].numpy()
    truth = build(LinearTask, settings, num_clients=10).representation
    assert principal_angle_distance(start.T, truth) < 0.3


def test_start_without_any_moments_fails():
    def broken(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.statistics":
            raise RuntimeError("broken")
        properties = ConfigRecord({"client": str(context.node_id)})
        return Message(RecordDict({"properties": properties}), reply_to=message)

    line = (
        "^no client has sent its moments; the last to fail was client 3: its reply is "
        "an error: RuntimeError: broken$"
    )
    with pytest.raises(SettingsError, match=line):
        FedRepLinear().initialize(InlineGrid(broken, 3))


def test_gaussian_start_equals_that_of_flute():
    settings = settings_of(initialization="gaussian", dimension=7, rank=3, seed=5)
    grid = InlineGrid(make_app(settings), 4)
    start = build_strategy(settings).initialize(grid)[WEIGHT].numpy()
    other = algorithm_runs.settings_of("flute", task="linear", dimension=7, rank=3)
    flute = build_strategy({**other, "seed": 5})
    np.testing.assert_array_equal(start, flute.initialize(grid)[WEIGHT].numpy())
    assert start.shape == (3, 7)
    # 21 entries with standard deviation 1/70
    assert 0.5 < start.std() * 70 < 1.5


def test_private_moments_are_clipped_noised_and_counted():
    privacy = {"server_dp_noise": 0.5, "server_dp_clip": 3.0, "server_dp_delta": 1e-3}
    settings = settings_of(dimension=4, rank=2, samples=30, seed=2, **privacy)
    grid, strategy = InlineGrid(make_app(settings), 5), build_strategy(settings)
    strategy._run.privacy.rng = np.random.default_rng(8)
    start = strategy.initialize(grid)[WEIGHT].numpy()
    task, total = build(LinearTask, settings, num_clients=5), np.zeros((4, 4))
    for i in range(5):
        x, y = task.draw(i)
        z = (x * y[:, None] ** 2).T @ x / 30
        total += z * min(1, 3.0 / np.linalg.norm(z))
    noisy = (total + np.random.default_rng(8).normal(0, 1.5, (4, 4))) / 5
    u = np.linalg.eigh((noisy + noisy.T) / 2).eigenvectors[:, 2:]
    np.testing.assert_allclose(start.T @ start, u @ u.T, atol=1e-6)
    # One release by each of the five clients
    assert set(strategy._run.privacy.asked.values()) == {1}
    assert len(strategy._run.privacy.asked) == 5
