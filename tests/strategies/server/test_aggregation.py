"""Robust aggregation rules, compared with hand-computed values and with NumPy."""

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from function_clients import (
    averaging,
    grid_of,
    honest,
    replies_of,
    reply_with,
    train_once,
)
from malformed import with_one_bad

from flwr_frl.strategies import SRPFL
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.server.aggregation import (
    RULES,
    assumed_byzantine,
    clip,
    geometric_median,
    make_rule,
    multi_krum,
)

ZERO = {"w": np.zeros(2, np.float32)}


def applied(name: str, *values, share: float = 0.2, bound: float = 0.0, weights=None):
    rule = make_rule(name, share, bound)
    combined = rule(weights or [1.0] * len(values), replies_of(*values), ZERO)
    assert combined["w"].dtype == np.float32
    return combined["w"].tolist()


def test_rules_match_hand_computed_values() -> None:
    values = [1, 8], [2, 6], [3, 7], [4, 9], [1e30, -1e30]
    assert applied("median", *values) == [3, 7]
    # Without the largest and smallest values of each entry.
    assert applied("trimmed-mean", *values) == [3, 7]
    assert applied("trimmed-mean", *values, share=0.0)[0] == np.float32(2e29)
    # Without the fifth reply, which is far from the others.
    assert applied("multi-krum", *values) == [2.5, 7.5]


def test_clip_matches_hand_computed_values() -> None:
    # The median of the norms 5, 10 and 50 is 10, so the third becomes (6, 8).
    assert applied("clip", [3, 4], [6, 8], [30, 40]) == [5, np.float32(20 / 3)]
    # All are scaled to the norm 5; the weights are 1, 1 and 2.
    combined = applied("clip", [3, 4], [-6, 8], [0, 40], bound=5, weights=[1, 1, 2])
    assert combined == [0, 4.5]
    # No client has changed its arrays.
    assert applied("clip", [0, 0], [0, 0]) == [0, 0]


def test_clip_is_centred_on_the_sent_arrays() -> None:
    sent = {"w": np.array([10, 10], np.float32)}
    combined = clip([1, 1], replies_of([13, 14], [10, 110]), sent, 5.0)
    assert combined["w"].tolist() == [11.5, 14.5]


def test_multi_krum_matches_numpy() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(9, 2)).astype(np.float32)
    values[[2, 5]] *= 50
    f, n = 2, 9
    scores = [
        sorted(np.sum((values[i] - values[j]) ** 2) for j in range(n) if j != i)
        for i in range(n)
    ]
    best = sorted(np.argsort([sum(s[: n - f - 2]) for s in scores])[: n - f])
    assert best == [0, 1, 3, 4, 6, 7, 8]
    combined = multi_krum([1.0] * n, replies_of(*values), ZERO, 0.2)
    np.testing.assert_allclose(combined["w"], values[best].mean(axis=0), rtol=1e-6)


def test_multi_krum_is_accurate_far_from_zero() -> None:
    far = {"w": np.full(2, 1e8)}
    values = [[1e8 + 1, 1e8], [1e8, 1e8 + 1], [1e8 + 1, 1e8 + 1], [1e8 + 9, 1e8]]
    replies = [{"w": np.array(v)} for v in values]
    combined = multi_krum([1.0] * 4, replies, far, 0.25)
    np.testing.assert_allclose(combined["w"] - 1e8, [2 / 3, 2 / 3], rtol=1e-6)


def counted(*values) -> list:
    """Return replies with a weight ``w`` and a batch-norm counter ``n``."""
    return [{"w": np.array([w]), "n": np.array(n)} for w, n in values]


def test_counters_have_no_part_in_norms_and_distances() -> None:
    sent = {"w": np.array([0.0]), "n": np.array(100)}
    # The median of the weights' norms 1, 2 and 4 is 2, that of the counters is 130.
    replies = counted((1.0, 110), (2.0, 130), (4.0, 10**12))
    combined = clip([1.0] * 3, replies, sent, 0.0)
    assert combined["w"].tolist() == [(1 + 2 + 2) / 3]
    assert combined["n"] == 130
    assert combined["n"].dtype == np.int64
    # The geometric median is that of the weights, too.
    combined = geometric_median([1.0] * 3, replies, sent)
    assert combined["w"] == pytest.approx([2], abs=1e-5)
    assert combined["n"] == 130
    # Multi-Krum drops the reply whose weight is far away, whatever its counter.
    honest = [(0.1, 120), (0.2, 180), (0.3, 240), (0.2, 300)]
    combined = multi_krum([1.0] * 5, counted(*honest, (-9.0, 210)), sent, 0.2)
    assert combined["w"][0] == pytest.approx(0.2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", range(1, 5))
def test_rules_accept_few_clients_and_integers(rule: str, n: int) -> None:
    same = make_rule(rule, 0.4, 0.0)
    replies = [{"n": np.array([3, 4]), "s": np.array(2.0)}] * n
    sent = {"n": np.array([1, 1]), "s": np.array(0.0)}
    combined = same([1.0] * n, replies, sent)
    assert combined["n"].tolist() == [3, 4]
    assert combined["n"].dtype == np.int64
    assert combined["s"].shape == ()
    assert float(combined["s"]) == pytest.approx(2)


def test_assumed_number_of_byzantine_clients() -> None:
    numbers = [assumed_byzantine(n, 0.2) for n in (1, 2, 3, 5, 6, 10)]
    assert numbers == [0, 0, 1, 1, 2, 2]
    assert assumed_byzantine(10, 0.4) == 4
    # Always fewer than half.
    assert assumed_byzantine(4, 0.49) == 1
    assert assumed_byzantine(10, 0.0) == 0


# Weights


def boasting(message: Message, context: Context) -> Message:
    reply = honest(message, context)
    reply.content.metric_records["metrics"]["num-examples"] = 10**6
    return reply


def test_number_of_examples_is_limited_to_the_declared_one() -> None:
    # Client 1 declared 2 examples in its properties, and that number counts.
    strategy = averaging(weighting="examples")
    arrays, metrics = train_once(strategy, grid_of(4, with_one_bad(boasting)))
    assert arrays["b"].numpy().tolist() == [30 / 10] * 4
    assert metrics["clients"] == 4


# Strategies


def lying(message: Message, context: Context) -> Message:
    sent = message.content.array_records["arrays"]
    arrays = {n: np.full(a.shape, 1e30, np.float32) for n, a in sent.items()}
    return reply_with(message, arrays, num_examples=2, train_loss=1.0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # The replies are 1, 1e30, 3, 4 and 5.
        ("median", 4.0),
        ("trimmed-mean", 4.0),
        ("multi-krum", 13 / 4),
        # Divided by √10, the norms are 1, 1e30, 3, 4 and 5; their median is the bound.
        ("clip", (1 + 4 + 3 + 4 + 4) / 5),
    ],
)
def test_rules_alone_in_srpfl_and_in_flowers_dp_wrapper(
    rule: str, expected: float
) -> None:
    grid = grid_of(5, with_one_bad(lying))

    def check(arrays) -> None:
        np.testing.assert_allclose(arrays["b"].numpy(), [expected] * 4, rtol=1e-6)
        np.testing.assert_allclose(arrays["w"].numpy(), [[expected] * 3] * 2, rtol=1e-6)

    arrays, _ = train_once(averaging(aggregation=rule), grid)
    check(arrays)
    wrapped = SRPFL(averaging(aggregation=rule), initial_nodes=5)
    arrays, _ = train_once(wrapped, Inbox(grid))
    check(arrays)
    # Flower's wrapper, without noise and with a bound above all honest changes.
    private = DifferentialPrivacyServerSideFixedClipping(
        averaging(aggregation=rule), 0.0, 1e3, 5
    )
    arrays, _ = train_once(private, grid)
    if rule == "median":
        # Flower computes the norm of 1e30 as infinite, in float32, and the change as 0.
        np.testing.assert_allclose(arrays["b"].numpy(), [3] * 4, rtol=1e-6)
    assert np.all(np.abs(arrays["w"].numpy()) < 100)
