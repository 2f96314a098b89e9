"""SRPFL: stages with growing numbers of clients, around any strategy that samples."""

import math

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from function_clients import grid_of
from srpfl_runs import settings_of

from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies import SRPFL, Strategy, build_strategy
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.server.round import Round
from flwr_frl.strategies.srpfl import theory_stages


def schedule(strategy: Strategy, sampled: int, rounds: int) -> list[int]:
    wanted = strategy._run.participation.wanted
    return [wanted(r, sampled) for r in range(1, rounds + 1)]


@pytest.mark.parametrize(
    ("given", "sampled", "expected"),
    [
        # n0 = 2, N = 12, and three rounds per stage: 2, 4, 8, then min(16, 12)
        ({"rounds_per_stage": 3}, 12, [2] * 3 + [4] * 3 + [8] * 3 + [12] * 3),
        # One round with 2 clients, two with 4; the last length is reused for 8.
        ({"rounds_per_stage": "1, 2"}, 12, [2, 4, 4, 8, 8, 12, 12]),
        ({"initial_nodes": 12}, 12, [12] * 3),
        ({"initial_nodes": 20}, 12, [12] * 3),
        # By default, the stages of 2, 4, 8, 16 and 32 share half of the rounds.
        ({}, 64, [2] * 4 + [4] * 4 + [8] * 4 + [16] * 4 + [32] * 4 + [64] * 20),
        # The stages of 2, 4 and 8 share seven of 15 rounds; the first has one more.
        ({}, 12, [2] * 3 + [4] * 2 + [8] * 2 + [12] * 8),
        # Two rounds are too few for four stages, so the later ones are omitted.
        ({}, 20, [2, 4, 20, 20]),
        ({}, 20, [20]),
        ({}, 2, [2, 2, 2]),
    ],
)
def test_clients_double_from_stage_to_stage(given, sampled, expected) -> None:
    strategy = SRPFL(Strategy(), **given, num_rounds=len(expected))
    assert schedule(strategy, sampled, len(expected)) == expected


def robust(initial_nodes: int, rule: str = "median", **more) -> Strategy:
    """Return a strategy with SRPFL's participation that samples 12 of 15 clients."""
    strategy = Strategy(fraction_train=0.8, aggregation=rule)
    SRPFL(strategy, initial_nodes=initial_nodes, num_rounds=8, **more)
    strategy._check_clients(15)
    return strategy


# 20 % of 12 sampled clients, rounded up, are 3.
@pytest.mark.parametrize(("rule", "size"), [("median", 7), ("multi-krum", 9)])
def test_robust_rules_need_enough_first_replies(rule, size) -> None:
    robust(size, rule)
    with pytest.raises(SettingsError) as error:
        robust(size - 1, rule)
    assert error.value.code == "initial-nodes"
    assert f"at least {size}" in str(error.value)
    robust(2, "mean")


def test_rules_assume_that_all_byzantine_clients_reply_first() -> None:
    strategy = robust(7, "trimmed-mean")
    strategy._run.participation.sample(1, list(range(15)))
    replies = [{"w": np.array([v])} for v in [1.0] * 4 + [1e6] * 3]
    assert strategy._apply_rule([1.0] * 7, replies, {})["w"].tolist() == [1.0]


def test_stages_do_not_depend_on_the_clients_that_still_owe_a_reply() -> None:
    strategy = Strategy(fraction_train=1.0)
    srpfl = SRPFL(strategy, num_rounds=40)
    grid, counts = Inbox(grid_of(1)), []
    for number in range(1, 21):
        # Ten of 20 clients can be asked.
        nodes = srpfl._run.participation.sample(number, [*range(1, 11)], others=10)
        messages = [Message(RecordDict(), node, "train") for node in nodes]
        srpfl._run.participation.open(Round(strategy, number), messages, grid)
        counts.append(grid._closing.missing)
    assert counts == [2] * 5 + [4] * 5 + [8] * 5 + [math.inf] * 5


def test_resumed_run_with_more_rounds_repeats_no_stage() -> None:
    def of(rounds: int) -> Strategy:
        more = {"num_server_rounds": rounds, "initial_nodes": 2}
        return build_strategy(settings_of("flanp", **more))

    first, longer = of(10), of(40)
    longer._restore(first._snapshot())
    assert schedule(longer, 20, 12) == [2, 2, 4, 8, 16] + [20] * 7
    # The same holds when that run is resumed.
    again = of(80)
    again._restore(longer._snapshot())
    assert schedule(again, 20, 12) == schedule(longer, 20, 12)


def test_automatic_stages_need_the_number_of_rounds() -> None:
    with pytest.raises(SettingsError, match=r"^num_rounds is 0; .*'auto'$"):
        SRPFL(Strategy())._run.participation.wanted(1, 3)


@pytest.mark.parametrize(
    "stages", [[], 0, [3, 1], 2.5, "", "0", "a", "3,,1", "3,0", "-1", "Auto"]
)
def test_invalid_stages_are_rejected(stages) -> None:
    with pytest.raises(SettingsError) as caught:
        SRPFL(Strategy(), rounds_per_stage=stages)
    assert caught.value.code == "rounds-per-stage"


def test_stage_lengths_of_the_theory() -> None:
    # With E[T_(n)] = n, the ratio (2n - n) / (n - n/2) is 2. Each stage has
    # 2 log(2 · 2) / log(1 / 0.9) = 26.3 rounds, rounded up; a = 3/4 gives two.
    arrivals = np.arange(1.0, 17.0)
    assert theory_stages(4, arrivals, 0.1) == [27] * 2
    assert theory_stages(4, arrivals, 0.74) == [3] * 2
    assert theory_stages(4, arrivals, 0.76) == [2] * 2
    with pytest.raises(SettingsError, match="speed-model"):
        SRPFL(Strategy(), rounds_per_stage="theory")
