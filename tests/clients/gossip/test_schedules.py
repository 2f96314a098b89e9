"""Schedules match hand-computed values, and invalid ones are rejected."""

import math

import pytest

from flwr_frl.clients.gossip.settings import learning_rate, threshold

INVALID_RATES = [
    *("", "cosine", "Constant", "constant:1", "constant\nconstant"),
    *("inverse", "inverse:0", "inverse:nan", "inverse:x", "inverse:1:2", "steps:5:200"),
    *("steps:5:200:0.5", "steps:-1:200:5", "steps:5::5", "steps:5:2.5:5"),
]
INVALID_TRIGGERS = [
    *("", "often", "nan", "-1", "1:2", "1:2:3:4:5", "1:-2:3", "1:2:0", "1:nan:3"),
    *("1:inf:3", "1:2:3:-1", "1,2,3"),
]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (learning_rate("constant", 0.3), {0: 0.3, 1: 0.3, 10**9: 0.3}),
        # 1 / (t + 100): the paper's convex experiment
        (
            learning_rate("inverse:100", 1.0),
            {0: 1 / 100, 1: 1 / 101, 100: 1 / 200, 900: 1 / 1000},
        ),
        (learning_rate("inverse:0.5", 3.0), {1: 2.0}),
        # The paper's deep experiment: 0.1 after 5 iterations of warm-up, divided by 5
        # at 200 and at 300.
        (
            learning_rate("steps:5:200,300:5", 0.1),
            {0: 0.02, 1: 0.04, 3: 0.08, 4: 0.1, 5: 0.1, 199: 0.1}
            | {200: 0.02, 299: 0.02, 300: 0.004, 10**6: 0.004},
        ),
        # Milestones in any order, without warm-up and during warm-up
        (learning_rate("steps:0:7,3:10", 1.0), {0: 1, 2: 1, 3: 0.1, 6: 0.1, 7: 0.01}),
        (learning_rate("steps:4:2:2", 1.0), {0: 0.25, 1: 0.5, 2: 0.375, 3: 0.5}),
        (threshold("5000"), {0: 5000, 10**9: 5000}),
        (threshold("inf"), {0: math.inf}),
        (threshold("5:2:10"), {0: 5, 9: 5, 10: 7, 19: 7, 20: 9, 100: 25}),
        # The paper's deep experiment: 2.5, raised by 1.5 every 20 until 350 (17 times).
        (
            threshold("2.5:1.5:20:350"),
            {0: 2.5, 19: 2.5, 20: 4, 40: 5.5, 339: 26.5, 340: 28, 350: 28, 10**6: 28},
        ),
    ],
)
def test_schedules_match_hand_computed_values(schedule, expected):
    assert {t: schedule(t) for t in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "texts"),
    [(learning_rate, INVALID_RATES), (threshold, INVALID_TRIGGERS)],
)
def test_invalid_schedules_are_rejected(schedule, texts):
    for text in texts:
        with pytest.raises(ValueError):  # noqa: PT011
            schedule(text)
