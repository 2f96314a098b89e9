"""Schedules by hand, including the paper's, and invalid texts."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_frl.clients.gossip.schedules import learning_rate, threshold
from flwr_frl.clients.squarm_sgd import SQuARMSettings
from flwr_frl.task.settings import SettingsError, declared


def test_a_constant_rate():
    rate = learning_rate("constant", 0.3)
    assert [rate(t) for t in (0, 1, 10**9)] == [0.3] * 3


def test_the_rate_of_the_convex_experiment():
    # 1 / (t + 100).
    rate = learning_rate("inverse:100", 1.0)
    assert [rate(t) for t in (0, 1, 100, 900)] == [1 / 100, 1 / 101, 1 / 200, 1 / 1000]
    assert learning_rate("inverse:0.5", 3.0)(1) == 2.0


def test_the_rate_of_the_deep_experiment():
    # 0.1, after 5 iterations of warm-up, divided by 5 at 200 and at 300.
    rate = learning_rate("steps:5:200,300:5", 0.1)
    expected = {
        0: 0.02,
        1: 0.04,
        3: 0.08,
        4: 0.1,
        5: 0.1,
        199: 0.1,
        200: 0.02,
        299: 0.02,
        300: 0.004,
        10**6: 0.004,
    }
    assert {t: rate(t) for t in expected} == pytest.approx(expected, rel=1e-12)


def test_steps_without_warm_up_in_any_order():
    rate = learning_rate("steps:0:7,3:10", 1.0)
    rates = [rate(t) for t in (0, 2, 3, 6, 7)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    # A milestone in the middle of the warm-up.
    rates = [learning_rate("steps:4:2:2", 1.0)(t) for t in range(5)]
    assert rates == [0.25, 0.5, 0.375, 0.5, 0.5]


def test_a_constant_threshold():
    assert [threshold("5000")(t) for t in (0, 1, 10**9)] == [5000] * 3
    assert threshold("0")(7) == 0


def test_a_rising_threshold():
    c = threshold("5:2:10")
    assert [c(t) for t in (0, 9, 10, 19, 20, 100)] == [5, 5, 7, 7, 9, 25]


def test_the_threshold_of_the_deep_experiment():
    # 2.5, raised by 1.5 every 20, until 350: 17 times, to 28.
    c = threshold("2.5:1.5:20:350")
    thresholds = [c(t) for t in (0, 19, 20, 40, 339, 340, 350, 351, 10**6)]
    assert thresholds == [2.5, 2.5, 4, 5.5, 26.5, 28, 28, 28, 28]


def test_infinite_threshold():
    assert threshold("inf")(0) == math.inf


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_rates_never_rise_after_the_warm_up_and_thresholds_never_fall(t, more):
    for text in ("constant", "inverse:3", "steps:0:10,1000:3"):
        rate = learning_rate(text, 0.5)
        assert 0 < rate(t + more) <= rate(t) <= 0.5
    for text in ("4", "4:2:7", "4:2:7:1000"):
        c = threshold(text)
        assert 4 <= c(t) <= c(t + more)


RATES = [
    "",
    "cosine",
    "Constant",
    "constant:1",
    "inverse",
    "inverse:",
    "inverse:0",
    "inverse:-1",
    "inverse:nan",
    "inverse:x",
    "inverse:1:2",
    "steps",
    "steps:5",
    "steps:5:200",
    "steps:5:200:0",
    "steps:5:200:-5",
    "steps:5:200:0.5",
    "steps:5:200:nan",
    "steps:-1:200:5",
    "steps:5::5",
    "steps:5:200,:5",
    "steps:5:2.5:5",
    "steps:1.5:200:5",
    "steps:5:200:5:1",
    "constant\nconstant",
]
TRIGGERS = [
    "",
    "often",
    "nan",
    "-1",
    "1:2",
    "1:",
    "1:2:",
    "1:2:3:4:5",
    "1:-2:3",
    "1:2:0",
    "1:2:-3",
    "1:2:nan",
    "1:nan:3",
    "1:inf:3",
    "nan:2:3",
    "1:2:3:-1",
    "1:2:3:nan",
    "1,2,3",
    "1\n2",
]


@pytest.mark.parametrize("text", RATES)
def test_invalid_learning_rate_schedules_are_rejected(text):
    with pytest.raises(SettingsError) as caught:
        learning_rate(text, 0.1)
    message = str(caught.value)
    allowed = "constant, inverse:A or steps:WARMUP:T1,T2,...:FACTOR"
    assert message == f"learning-rate-schedule is {text!r}; expected {allowed}"
    assert "\n" not in message


@pytest.mark.parametrize("text", TRIGGERS)
def test_invalid_triggers_are_rejected(text):
    with pytest.raises(SettingsError) as caught:
        threshold(text)
    message = str(caught.value)
    allowed = "START, START:INCREMENT:EVERY or START:INCREMENT:EVERY:UNTIL"
    assert message == f"trigger is {text!r}; expected {allowed}"
    assert str(declared(SQuARMSettings)["trigger"].allowed) == allowed
    assert "\n" not in message


@given(st.text(alphabet="0123456789.:-,einfastpcov ", max_size=25))
def test_any_text_is_parsed_or_rejected(text):
    for parse in (lambda s: learning_rate(s, 0.1), threshold):
        with contextlib.suppress(SettingsError):
            schedule = parse(text)
            assert all(schedule(t) >= 0 for t in (0, 1, 5, 1000))
