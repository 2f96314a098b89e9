"""FedBuff and FedAsync compared with an event simulation in NumPy."""

from dataclasses import replace

import inline_runs
import numpy as np
import pytest
from inline_runs import rows_of
from quadratic_clients import CLIENTS, TARGETS, quadratic, step

from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies import FedAsync, FedAvg, FedBuff
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import SimulatedArrivals, SpeedModel
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server.replies import to_record


def versions_of(wrapper, speeds: SpeedModel, count: int, communication: float):
    """Return the shared array and the metrics after each version."""
    strategy, seen = wrapper, []
    grid = InlineGrid(quadratic, CLIENTS)
    speeds = replace(speeds, communication_time=communication)
    clock = SimulatedArrivals(grid, speeds, lambda node: node - 1)

    def after(version, arrays, metrics):
        seen.append((arrays["w"].numpy(), {**metrics, "seconds": clock.seconds}))

    start = to_record({"w": np.zeros(4)})
    run_rounds(
        strategy,
        clock,
        start,
        range(1, count + 1),
        evaluated=lambda version: False,
        after_round=after,
    )
    return seen


def simulate(speeds, count, communication, *, C, B, mix, combine=None):  # noqa: N803
    """Simulate events: return (x, seconds, staleness) after each version.

    ``mix(x, sent, y, τ)`` is what a client's model y contributes to the mean, or to
    ``combine``.
    """
    x, now, work, rows = np.zeros(4), 0.0, {}, []
    for version in range(1, count + 1):
        buffer, arrived, order = [], set(), None
        rng = np.random.default_rng([0, 0x5A3B, version])
        while True:
            idle = [c for c in range(CLIENTS) if c not in work and c not in arrived]
            count = min(C - len(work), len(idle))
            if not arrived:
                chosen = [idle[i] for i in rng.choice(len(idle), count, replace=False)]
            else:
                if order is None:
                    order = [idle[i] for i in rng.permutation(len(idle))]
                chosen = [order.pop() for _ in range(count)]
            for c in chosen:
                due = now + speeds.times(version)[c] + communication
                work[c] = (due, c, version, x)
            now = min(work.values())[0]
            for due, c, since, sent in sorted(work.values(), key=lambda w: w[:2]):
                if due != now or len(buffer) == B:
                    break
                del work[c]
                arrived.add(c)
                y, age = step(sent, c), version - since
                buffer.append((c, mix(x, sent, y, age), age))
            if len(buffer) == B:
                break
        points = [point for _, point, _ in sorted(buffer, key=lambda change: change[0])]
        x = combine(points) if combine else np.mean(points, axis=0)
        rows.append((x, now, [age for *_, age in buffer]))
    return rows


@pytest.mark.parametrize("rate", [2.0, 0.5])
def test_statistics_of_batch_norms_are_mixed(rate, monkeypatch):
    monkeypatch.setattr("flwr_frl.strategies.fedbuff.BATCH_NORM", ("w",))
    speeds = SpeedModel("dynamic", CLIENTS, seed=5)
    wrapper = FedBuff(FedAvg(), concurrency=6, buffer_size=3, global_learning_rate=rate)
    versions = versions_of(wrapper, speeds, 20, 0.25)

    def mix(x, sent, y, age):
        weight = min(rate, 1) * (1 + age) ** -0.5
        return (1 - weight) * x + weight * y

    expected = simulate(speeds, 20, 0.25, C=6, B=3, mix=mix)
    for (x, _), (y, *_) in zip(versions, expected, strict=True):
        assert np.allclose(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_fedbuff_equals_an_event_simulation(rate):
    speeds = SpeedModel("dynamic", CLIENTS, seed=5)
    wrapper = FedBuff(FedAvg(), concurrency=6, buffer_size=3, global_learning_rate=rate)
    versions = versions_of(wrapper, speeds, 220, 0.25)
    expected = simulate(
        speeds,
        220,
        0.25,
        C=6,
        B=3,
        mix=lambda x, sent, y, age: x + rate * (1 + age) ** -0.5 * (y - sent),
    )
    for (x, metrics), (y, seconds, ages) in zip(versions, expected, strict=True):
        assert np.allclose(x, y, rtol=1e-12, atol=1e-13)
        assert metrics["seconds"] == pytest.approx(seconds, rel=1e-12)
        assert sorted(metrics["staleness"]) == sorted(ages)
        assert metrics["staleness-mean"] == pytest.approx(np.mean(ages))
        assert metrics["staleness-max"] == max(ages)
    ages = [age for *_, ages in expected for age in ages]
    assert max(ages) > 3
    assert sum(wrapper._run.participation.updates.values()) == len(ages)


def test_fedasync_equals_an_event_simulation():
    speeds = SpeedModel("fixed", CLIENTS, seed=1)
    wrapper = FedAsync(FedAvg(), concurrency=CLIENTS, staleness_exponent=1.0)
    versions = versions_of(wrapper, speeds, 200, 0.0)

    def mix(x, sent, y, age):
        alpha = 0.6 / (1 + age)
        return (1 - alpha) * x + alpha * y

    expected = simulate(speeds, 200, 0.0, C=CLIENTS, B=1, mix=mix)
    for (x, metrics), (y, seconds, ages) in zip(versions, expected, strict=True):
        assert np.allclose(x, y, rtol=1e-12, atol=1e-13)
        assert metrics["seconds"] == pytest.approx(seconds, rel=1e-12)
        assert metrics["staleness-max"] == ages[0]


@pytest.mark.parametrize(("active", "size"), [(6, 3), (1, 1)])
def test_invalid_reply_does_not_reduce_the_updates_of_a_version(
    active, size, monkeypatch
):
    # Client 3 sends NaN in every version.
    monkeypatch.setattr(
        "quadratic_clients.TARGETS",
        np.where(np.arange(CLIENTS)[:, None] == 3, np.nan, TARGETS),
    )
    wrapper = FedBuff(FedAvg(), concurrency=active, buffer_size=size)
    rows = versions_of(wrapper, SpeedModel("dynamic", CLIENTS, seed=5), 20, 0.0)
    assert all(metrics["clients"] == size for _, metrics in rows)
    assert sum(metrics["rejected"] for _, metrics in rows) > 0
    assert "000003" not in wrapper._run.participation.updates
    assert np.isfinite(rows[-1][0]).all()


# Complete runs


def settings_of(tmp_path, algorithm: str, **more):
    speeds = tmp_path / "speeds"
    speeds.write_text("1\n" * 10)
    usual = {"algorithm": algorithm, "num-clients": 10, "fraction-train": 0.5}
    usual |= {"num-server-rounds": 4, "evaluate-every": 1, "image-size": 8}
    usual |= {"cohort": "off", "speed-model": str(speeds), "communication-time": 0.5}
    output = str(tmp_path / algorithm)
    return inline_runs.settings_of(usual, **{"output": output, **more})


SAME = ("accuracy", "loss", "train-loss", "seconds-simulated", "bytes-up", "bytes-down")


@pytest.mark.parametrize(
    ("base", "optimizer"),
    [
        *((base, "none") for base in ("fedavg", "fedrep", "fedper", "lg-fedavg")),
        *((base, "adam") for base in ("fedavg", "flute")),
    ],
)
def test_buffer_of_all_active_clients_equals_the_synchronous_base(
    tmp_path, base, optimizer
):
    more = {"server_optimizer": optimizer}
    synchronous = rows_of(settings_of(tmp_path, base, **more))
    asynchronous = rows_of(
        settings_of(
            tmp_path,
            "fedbuff",
            async_base=base,
            concurrency=5,
            buffer_size=5,
            staleness_exponent=0.0,
            **more,
        )
    )
    for row, other in zip(synchronous, asynchronous, strict=True):
        assert {n: row[n] for n in SAME} == {n: other[n] for n in SAME}
        assert other["staleness-max"] == 0


@pytest.mark.parametrize(
    ("rule", "more"), [("median", {}), ("clip", {"clip_norm": 0.2})]
)
def test_aggregation_rule_combines_the_weighted_updates_of_a_buffer(rule, more):
    speeds = SpeedModel("dynamic", CLIENTS, seed=5)
    wrapper = FedBuff(
        FedAvg(aggregation=rule, byzantine_fraction=0.1, **more),
        concurrency=6,
        buffer_size=3,
    )
    versions = versions_of(wrapper, speeds, 30, 0.0)

    def clipped(change: np.ndarray) -> np.ndarray:
        return change * min(1, 0.2 / np.linalg.norm(change))

    def mix(x, sent, y, age):
        return x, (1 + age) ** -0.5 * (y - sent)

    def combine(pairs):
        x, changes = pairs[0][0], [change for _, change in pairs]
        if rule == "median":
            return x + np.median(changes, axis=0)
        return x + np.mean([clipped(change) for change in changes], axis=0)

    expected = simulate(speeds, 30, 0.0, C=6, B=3, mix=mix, combine=combine)
    for (x, _), (y, *_) in zip(versions, expected, strict=True):
        assert np.allclose(x, y, rtol=1e-12, atol=1e-13)


ATTACKERS = 3


@pytest.mark.parametrize(
    "rule", ["median", "trimmed-mean", "multi-krum", "geometric-median"]
)
def test_fast_byzantine_clients_do_not_determine_the_model(rule, monkeypatch, tmp_path):
    # The first three of nine clients are 100 times as fast, and send huge changes.
    far = np.where(np.arange(CLIENTS)[:, None] < ATTACKERS, 1e6, TARGETS)
    monkeypatch.setattr("quadratic_clients.TARGETS", far)
    speeds = tmp_path / "speeds"
    speeds.write_text("0.01\n" * ATTACKERS + "1\n" * (CLIENTS - ATTACKERS))
    model = SpeedModel(str(speeds), CLIENTS)
    size = 9 if rule == "multi-krum" else 7

    def wrapper(buffer_size: int) -> FedBuff:
        strategy = FedAvg(aggregation=rule, byzantine_fraction=ATTACKERS / CLIENTS)
        return FedBuff(strategy, concurrency=CLIENTS, buffer_size=buffer_size)

    with pytest.raises(SettingsError) as error:
        versions_of(wrapper(size - 1), model, 1, 0.0)
    assert error.value.code == "buffer-size"
    assert f"at least {size}" in str(error.value)
    fedbuff = wrapper(size)
    versions = versions_of(fedbuff, model, 20, 0.0)
    largest = np.abs(TARGETS[ATTACKERS:]).max()
    assert max(np.abs(x).max() for x, _ in versions) <= largest
    # A client counts once in a version, however fast it is.
    updates = fedbuff._run.participation.updates
    assert sum(updates.values()) == 20 * size
    assert max(updates.values()) == 20


@pytest.mark.parametrize(
    ("clients", "more", "size"),
    [
        (20, {}, 9),
        (20, {"byzantine_fraction": 0.0}, 1),
        (20, {"byzantine_fraction": 0.01}, 3),
        (20, {"aggregation": "multi-krum"}, 11),
        # A buffer cannot hold more than all clients.
        (5, {"aggregation": "multi-krum"}, 5),
        (20, {"aggregation": "mean"}, 1),
    ],
)
def test_smallest_buffer_of_a_robust_rule(clients, more, size):
    def check(buffer_size: int) -> None:
        strategy = FedAvg(**{"aggregation": "clip", **more})
        FedBuff(strategy, concurrency=clients, buffer_size=buffer_size)
        strategy._check_clients(clients)

    check(size)
    if size > 1:
        with pytest.raises(SettingsError) as error:
            check(size - 1)
        assert error.value.code == "buffer-size"


def test_missing_speeds_or_too_few_clients_are_rejected(tmp_path):
    with pytest.raises(SettingsError) as error:
        rows_of(settings_of(tmp_path, "fedbuff", speed_model="none", concurrency=5))
    assert error.value.code == "speed-model"
    with pytest.raises(SettingsError) as error:
        rows_of(settings_of(tmp_path, "fedbuff", concurrency=11))
    assert error.value.code == "concurrency"
