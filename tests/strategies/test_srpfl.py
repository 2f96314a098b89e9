"""SRPFL: stages with growing numbers of clients, around any strategy that samples."""

import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from function_clients import grid_of
from participants import properties_of
from srpfl_runs import settings_of, simulated

from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies import SRPFL, Strategy, build_strategy
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.round import Round
from flwr_frl.strategies.stages import exact_stages, theory_stages


def schedule(strategy: Strategy, sampled: int, rounds: int) -> list[int]:
    wanted = strategy._run.participation.wanted
    return [wanted(r, sampled) for r in range(1, rounds + 1)]


@pytest.mark.parametrize(
    ("given", "sampled", "expected"),
    [
        # n0 = 2, N = 12, and three rounds per stage: 2, 4, 8, then min(16, 12)
        ({"rounds_per_stage": 3}, 12, [2] * 3 + [4] * 3 + [8] * 3 + [12] * 3),
        # One round with 2 clients, two with 4; the last length is reused for 8.
        ({"rounds_per_stage": [1, 2]}, 12, [2, 4, 4, 8, 8, 12, 12]),
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


def test_claimed_examples_cannot_end_rounds_with_a_robust_rule() -> None:
    with pytest.raises(SettingsError) as error:
        robust(7, doubles="examples")
    assert error.value.code == "doubles"
    robust(2, "mean", doubles="examples")


def test_rules_assume_that_all_byzantine_clients_reply_first() -> None:
    strategy = robust(7, "trimmed-mean")
    strategy._run.participation.sample(1, list(range(15)))
    replies = [lambda v=v: {"w": np.array([v])} for v in [1.0] * 4 + [1e6] * 3]
    assert strategy._apply_rule([1.0] * 7, replies, {})["w"].tolist() == [1.0]


@pytest.mark.parametrize("sample_for", ["round", "stage", "run"])
def test_stages_do_not_depend_on_the_clients_that_still_owe_a_reply(sample_for) -> None:
    strategy = Strategy(fraction_train=1.0)
    srpfl = SRPFL(strategy, sample_for=sample_for, num_rounds=40)
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
    longer._restore(first._snapshot()())
    assert schedule(longer, 20, 12) == [2, 2, 4, 8, 16] + [20] * 7
    # The same holds when that run is resumed.
    again = of(80)
    again._restore(longer._snapshot()())
    assert schedule(again, 20, 12) == schedule(longer, 20, 12)


def test_automatic_stages_need_the_number_of_rounds() -> None:
    with pytest.raises(SettingsError, match=r"^num_rounds is 0; .*'auto'$"):
        SRPFL(Strategy())._run.participation.wanted(1, 3)


@pytest.mark.parametrize(
    "stages", [[], 0, [3, 0], [2.5], 2.0, "", "0", "a", "3,,x", "3,0", "-1", "Auto"]
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


@pytest.mark.parametrize("added", [0.0, 2.0])
@pytest.mark.parametrize("a", [0.1, 0.4])
def test_exact_stages_count_the_rounds_between_the_best_doubling_points(a, added):
    # E[T_(n)] of 256 exponential times: cumulative sums of 1/256, 1/255, …, 1
    arrivals = np.cumsum(1 / np.arange(256, 0, -1))

    def after(x: float, n: int) -> float:
        return x * math.sqrt(1 - a) + a / math.sqrt(n / 8 * (1 - a))

    def speed(x: float, n: int) -> float:
        return (x - after(x, n)) / (arrivals[n - 1] + added)

    distance, expected = 1.0, []
    for n in (8, 16, 32, 64, 128):
        # Above this distance, n clients reduce it faster than 2 n (200, 201).
        low, high = 0.0, 1e3
        while high - low > 1e-10:
            middle = (low + high) / 2
            faster = speed(middle, n) > speed(middle, 2 * n)
            low, high = (low, middle) if faster else (middle, high)
        rounds = 0
        while distance > high + 1e-8:
            distance, rounds = after(distance, n), rounds + 1
        expected.append(rounds)
        distance = high
    assert exact_stages(8, arrivals, a, added) == expected
    if (a, added) == (0.1, 0.0):
        assert expected == [0, 21, 22, 25, 56]
    bound = theory_stages(8, arrivals, a)
    assert all(exact <= most for exact, most in zip(expected, bound, strict=True))


def test_exact_stages_of_equally_fast_clients() -> None:
    # Waiting for two, four or eight clients takes as long as for one.
    times = np.array([1.0] * 8 + [5.0] * 8)
    first = times[:8]
    assert exact_stages(1, first, 0.1) == [0, 0, 0]
    *without_rounds, last = exact_stages(1, times, 0.1)
    assert without_rounds == [0, 0, 0]
    assert last > 0
    times[:8] = 0.0
    with pytest.raises(SettingsError, match=r"^communication-time is 0.0; .* above 0"):
        exact_stages(1, times, 0.1)
    assert exact_stages(1, times, 0.1, communication_time=1.0)[-1] > 0


def test_stages_without_rounds_are_omitted() -> None:
    settings = {"rounds_per_stage": "theory-exact", "speed_model": "fixed"}
    strategy = build_strategy(settings_of("srpfl", initial_nodes=1, **settings))
    times = SpeedModel("fixed", 20).expected_arrivals(20)
    lengths = exact_stages(1, times, 0.1)
    assert lengths[0] == 0
    left = [length for length in lengths if length > 0]
    assert strategy._run.participation.lengths == left
    assert strategy._run.participation.wanted(1, 20) == 2 ** (len(lengths) - len(left))


def test_sample_may_be_fixed_during_a_stage() -> None:
    nodes = list(range(100))
    for sample_for in ("round", "stage"):
        strategy = Strategy(fraction_train=0.2)
        srpfl = SRPFL(
            strategy, initial_nodes=5, rounds_per_stage=3, sample_for=sample_for
        )
        samples = [srpfl._run.participation.sample(r, nodes) for r in range(1, 10)]
        distinct = {tuple(sample) for sample in samples}
        assert all(len(sample) == 20 for sample in samples)
        # Stages of 5, 10 and 20 clients: rounds 1 to 3, 4 to 6, and from 7 on
        assert len(distinct) == (9 if sample_for == "round" else 3)
        if sample_for == "stage":
            assert samples[::3] == samples[1::3] == samples[2::3]


def test_examples_may_double_instead_of_clients() -> None:
    settings = settings_of(
        "srpfl",
        num_clients=8,
        fraction_train=1.0,
        num_server_rounds=3,
        initial_nodes=1,
        rounds_per_stage="1",
        doubles="examples",
        partition="dirichlet",
        speed_model="fixed",
    )
    strategy, speeds = build_strategy(settings), SpeedModel("fixed", 8)
    grid, clock = simulated(settings, strategy, 8)
    start = strategy.initialize(grid)
    sizes = np.array(
        [
            int(strategy._run.clients.known[node].properties["num-examples"])
            for node in strategy._identify(grid)
        ]
    )
    assert len(set(sizes)) > 2
    for server_round, n in ((1, 1), (2, 2), (3, 4)):
        config = ConfigRecord()
        messages = strategy.configure_train(server_round, start, config, clock)
        used = list(clock.send_and_receive(messages))
        # The fastest clients take part until they have the share n / 8 of all examples.
        order = np.argsort(speeds.times(server_round))
        cumulative = np.cumsum(sizes[order])
        expected = int((cumulative < sizes.sum() * n // 8).sum()) + 1
        assert len(used) == expected
        strategy.aggregate_train(server_round, used)


def test_examples_may_be_declared_as_floats() -> None:
    strategy = Strategy()
    declared = {0: 120.0, 1: 7, 2: 0}
    nodes = strategy._identify(grid_of(3, properties_of(**{"num-examples": declared})))
    examples_of = SRPFL(strategy)._run.participation.examples_of
    assert [examples_of(node) for node in [*nodes, 99]] == [120, 7, 1, 1]
