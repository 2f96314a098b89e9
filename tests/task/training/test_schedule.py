"""Learning rate schedules compared with hand-computed numbers and with torch."""

import pytest
from refusals import code_of

from flwr_frl.clients.base import TrainingSettings
from flwr_frl.common.settings import build

# Learning rates by round for `learning-rate` 1
BY_HAND = [
    ("constant", [1, 1, 1]),
    ("cosine", [1, 0.75, 0.25]),
    ("step", [1, 1, 0.1, 0.01]),
]


def rates(text: str, rounds: int) -> list[float]:
    settings = TrainingSettings(1.0, learning_rate_schedule=text)
    return [settings.in_round(t + 1, rounds).learning_rate for t in range(rounds)]


@pytest.mark.parametrize(("text", "expected"), BY_HAND)
def test_learning_rates_equal_hand_computed_ones(text, expected):
    assert rates(text, len(expected)) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["cosin", "step:2:0.5", "inverse:10"])
def test_invalid_schedules_are_rejected(text):
    settings = {"learning-rate-schedule": text}
    assert code_of(build, TrainingSettings, settings) == "learning-rate-schedule"
