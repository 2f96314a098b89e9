"""SRPFL: stages of more and more clients, around any strategy that samples."""

import json
import math

import algorithm_runs
import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import SRPFL, BaseStrategy, LGFedAvg, build_strategy
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.strategies.grids.arrivals import RealArrivals
from flwr_frl.strategies.grids.simulated_arrivals import SimulatedArrivals
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.grids.stages import exact_stages, theory_stages
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.strategies.server_app import run
from flwr_frl.strategies.srpfl import FirstReplies
from flwr_frl.task.settings import SettingsError


def schedule(strategy: SRPFL | BaseStrategy, sampled: int, rounds: int) -> list[int]:
    return [strategy.participation.nodes(r, sampled) for r in range(1, rounds + 1)]


def test_doubling_by_hand() -> None:
    # n0 = 2, N = 12, three rounds a stage: 2, 4, 8, then min(16, 12).
    strategy = SRPFL(BaseStrategy(), initial_nodes=2, rounds_per_stage=3)
    assert schedule(strategy, 12, 12) == [2] * 3 + [4] * 3 + [8] * 3 + [12] * 3


def test_listed_stages_by_hand() -> None:
    # One round of 2, two of 4, and the last length again for 8.
    strategy = SRPFL(BaseStrategy(), initial_nodes=2, rounds_per_stage=[1, 2])
    assert schedule(strategy, 12, 7) == [2, 4, 4, 8, 8, 12, 12]


@pytest.mark.parametrize(
    ("sampled", "rounds", "expected"),
    [
        # 2, 4, 8, 16 and 32 share 20 rounds.
        (64, 40, [2] * 4 + [4] * 4 + [8] * 4 + [16] * 4 + [32] * 4 + [64] * 20),
        # 2, 4 and 8 share seven of 15: one more for the first.
        (12, 15, [2] * 3 + [4] * 2 + [8] * 2 + [12] * 8),
        # Two rounds for four stages: the later ones are left out.
        (20, 4, [2, 4, 20, 20]),
        (20, 1, [20]),
        (2, 3, [2, 2, 2]),
    ],
)
def test_automatic_stages_by_hand(sampled, rounds, expected) -> None:
    strategy = SRPFL(BaseStrategy(), num_rounds=rounds)
    assert schedule(strategy, sampled, rounds) == expected


def test_a_resumed_run_with_more_rounds_begins_no_stage_again() -> None:
    def of(rounds: int) -> BaseStrategy:
        more = {"num_server_rounds": rounds, "initial_nodes": 2}
        return build_strategy(settings_of("flanp", **more))

    first, longer = of(10), of(40)
    longer.restore(first.snapshot()())
    assert schedule(longer, 20, 12) == [2, 2, 4, 8, 16] + [20] * 7
    # And so it is when that one is resumed.
    again = of(80)
    again.restore(longer.snapshot()())
    assert schedule(again, 20, 12) == schedule(longer, 20, 12)


def test_automatic_stages_need_the_number_of_rounds() -> None:
    with pytest.raises(SettingsError, match=r"^num_rounds is None; .*'auto'$"):
        SRPFL(BaseStrategy()).participation.nodes(1, 3)


def test_everybody_at_once() -> None:
    assert schedule(SRPFL(BaseStrategy(), initial_nodes=12), 12, 3) == [12] * 3
    assert schedule(SRPFL(BaseStrategy(), initial_nodes=20), 12, 3) == [12] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_nodes": 0},
        {"initial_nodes": -3},
        {"rounds_per_stage": []},
        {"rounds_per_stage": 0},
        {"rounds_per_stage": [3, 0]},
    ],
)
def test_wrong_values_are_refused_in_one_line(wrong) -> None:
    with pytest.raises(SettingsError) as caught:
        SRPFL(BaseStrategy(), **wrong)
    assert "\n" not in str(caught.value)
    assert "at least 1" in str(caught.value)


@pytest.mark.parametrize("setting", ["", "0", "a", "3,,x", "3,0", "-1", "Auto"])
def test_wrong_stage_settings_are_refused(setting: str) -> None:
    with pytest.raises(SettingsError, match="rounds-per-stage"):
        SRPFL(BaseStrategy(), rounds_per_stage=setting)


def test_stages_of_the_theory_by_hand() -> None:
    # E[T_(n)] = n: later/earlier is 2n - n to n - n/2, so 2, and each stage has
    # 2 log(4) / log(1 / 0.9) = 26.3 rounds, rounded up; with a = 3/4 it is two.
    arrivals = np.arange(1.0, 17.0)
    assert theory_stages(4, arrivals, 0.1) == [27] * 2
    assert theory_stages(4, arrivals, 0.74) == [3] * 2
    assert theory_stages(4, arrivals, 0.76) == [2] * 2
    with pytest.raises(SettingsError, match="speed-model"):
        SRPFL(BaseStrategy(), rounds_per_stage="theory")


@pytest.mark.parametrize("added", [0.0, 2.0])
@pytest.mark.parametrize("a", [0.1, 0.4])
def test_exact_stages_count_the_rounds_between_the_best_doubling_points(a, added):
    # E[T_(n)] of 256 exponential times: sums of 1/256, 1/255, …, 1.
    arrivals = np.cumsum(1 / np.arange(256, 0, -1))

    def after(x: float, n: int) -> float:
        return x * math.sqrt(1 - a) + a / math.sqrt(n / 8 * (1 - a))

    def speed(x: float, n: int) -> float:
        return (x - after(x, n)) / (arrivals[n - 1] + added)

    distance, expected = 1.0, []
    for n in (8, 16, 32, 64, 128):
        # Above this distance n clients reduce it faster than 2 n (200, 201).
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


def test_stages_without_rounds_are_left_out() -> None:
    settings = {"rounds_per_stage": "theory-exact", "speed_model": "fixed"}
    strategy = build_strategy(settings_of("srpfl", initial_nodes=1, **settings))
    times = SpeedModel("fixed", 20).expected_arrivals(20)
    lengths = exact_stages(1, times, 0.1)
    assert lengths[0] == 0
    left = [length for length in lengths if length > 0]
    assert strategy.participation.lengths == tuple(left)
    assert strategy.participation.nodes(1, 20) == 2 ** (len(lengths) - len(left))


def test_a_sample_can_stay_for_a_stage() -> None:
    nodes = list(range(100))
    for sample_for in ("round", "stage"):
        strategy = BaseStrategy(fraction_train=0.2)
        srpfl = SRPFL(strategy, 5, 3, sample_for=sample_for)
        samples = [srpfl.participation.sample(r, nodes) for r in range(1, 10)]
        distinct = {tuple(sample) for sample in samples}
        assert all(len(sample) == 20 for sample in samples)
        # Stages of 5, 10 and 20: rounds 1 to 3, 4 to 6, and 7 on.
        assert len(distinct) == (9 if sample_for == "round" else 3)
        if sample_for == "stage":
            assert samples[::3] == samples[1::3] == samples[2::3]


def test_examples_can_double_from_stage_to_stage() -> None:
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
            int(strategy.clients.known[node].properties["num-examples"])
            for node in strategy.identify(grid)
        ]
    )
    assert len(set(sizes)) > 2
    for server_round, n in ((1, 1), (2, 2), (3, 4)):
        config = ConfigRecord()
        messages = strategy.configure_train(server_round, start, config, clock)
        used = list(clock.send_and_receive(messages))
        # The fastest clients until they have the share n / 8 of all examples.
        order = np.argsort(speeds.times(server_round))
        cumulative = np.cumsum(sizes[order])
        expected = int((cumulative < sizes.sum() * n // 8).sum()) + 1
        assert len(used) == expected
        strategy.aggregate_train(server_round, used)


def test_the_contraction_is_a_setting() -> None:
    theory = {"rounds_per_stage": "theory", "speed_model": "fixed"}
    by_default = build_strategy(settings_of("srpfl", **theory))
    given = build_strategy(settings_of("srpfl", contraction=0.5, **theory))
    times = SpeedModel("fixed", 20).expected_arrivals(20)
    for strategy, a in ((by_default, 0.1), (given, 0.5)):
        # Stages of 5 and 10, before all 20; the first ratio has E[T_(2)] in it.
        ratios = [
            2 * (times[2 * n - 1] - times[n - 1]) / (times[n - 1] - times[n // 2 - 1])
            for n in (5, 10)
        ]
        expected = [math.ceil(2 * math.log(r) / math.log(1 / (1 - a))) for r in ratios]
        assert strategy.participation.lengths == tuple(expected)
    assert given.participation.lengths != by_default.participation.lengths


@pytest.mark.parametrize("wrong", [0.0, 1.0, -0.1, math.nan])
def test_a_wrong_contraction_is_refused_in_one_line(wrong: float) -> None:
    with pytest.raises(SettingsError, match=r"^contraction is .* in \(0, 1\)$"):
        SRPFL(BaseStrategy(), contraction=wrong)


def settings_of(algorithm: str, **more):
    small = {"num_clients": 20, "fraction_train": 1.0, "num_server_rounds": 4}
    small |= {"speed_model": "fixed", "initial_nodes": 5, "model": "mlp-2"}
    small |= {"batch_size": 50, "evaluate_last": 1, "evaluate_every": 0}
    return algorithm_runs.settings_of(algorithm, **{**small, **more})


def simulated(settings, strategy, clients: int = 20):
    inner = InlineGrid(make_app(settings), clients)
    grid = SimulatedArrivals(inner, SpeedModel("fixed", clients), 1.0, lambda n: n - 1)
    return inner, grid


@pytest.mark.parametrize("algorithm", ["srpfl", "srpfl-flute"])
def test_only_the_fastest_train(algorithm: str, tmp_path) -> None:
    settings = settings_of(algorithm, output=str(tmp_path), rounds_per_stage="2")
    inner = InlineGrid(make_app(settings), 20)
    trained: list[list[int]] = []
    send = inner.send_and_receive

    def spy(messages, *, timeout=None):
        messages = list(messages)
        if messages and messages[0].metadata.message_type == "train":
            trained.append([m.metadata.dst_node_id - 1 for m in messages])
        return send(messages, timeout=timeout)

    inner.send_and_receive = spy
    summary = run(inner, settings)
    times = SpeedModel("fixed", 20).times(1)
    fastest = np.argsort(times)
    assert [sorted(t) for t in trained] == [sorted(fastest[:n]) for n in (5, 5, 10, 10)]
    # The clock: twice the fifth fastest, twice the tenth.
    expected = 2 * times[fastest[4]] + 2 * times[fastest[9]]
    assert summary["seconds-simulated"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stages", "counts", "said"),
    [
        ("auto", [5, 10, 20, 20], []),
        ("1,2", [5, 10, 10, 20], []),
        ("2", [5, 5, 10, 10], ["round 4, the last one, waits for 10 of 20"]),
    ],
)
def test_a_run_that_ends_before_its_last_stage_says_so(
    stages: str, counts: list[int], said: list[str], tmp_path, caplog
) -> None:
    more = {} if stages == "auto" else {"rounds_per_stage": stages}
    settings = settings_of("flanp", output=str(tmp_path), **more)
    run(InlineGrid(make_app(settings), 20), settings)
    lines = (tmp_path / "flanp" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clients"] for line in lines] == counts
    found = [m for m in caplog.messages if "before its last stage" in m]
    assert len(found) == len(said)
    assert all(words in line for line, words in zip(found, said, strict=True))


def test_more_initial_nodes_than_clients_are_refused(tmp_path) -> None:
    settings = settings_of("srpfl", output=str(tmp_path), initial_nodes=21)
    with pytest.raises(SettingsError, match="at most 20"):
        run(InlineGrid(make_app(settings), 20), settings)


@pytest.mark.parametrize(
    "base", ["fedavg", "flwr_frl.strategies.fedavg:FedAvg", "flute"]
)
def test_the_setting_says_what_is_wrapped(base: str, tmp_path) -> None:
    options = {
        "output": str(tmp_path),
        "num_server_rounds": 3,
        "rounds_per_stage": "2",
    }
    settings = settings_of("srpfl", srpfl_base=base, **options)
    strategy = build_strategy(settings)
    assert isinstance(strategy.participation, FirstReplies)
    wrapped = {**settings, "algorithm": base}
    assert type(strategy) is type(build_strategy(wrapped))
    assert client_class(settings) is client_class(wrapped)
    # The same as under its own name.
    named = {"flute": "srpfl-flute"}.get(base, "flanp")
    rows = []
    for algorithm in ("srpfl", named):
        chosen = {**settings, "algorithm": algorithm}
        run(InlineGrid(make_app(chosen), 20), chosen)
        lines = (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()
        rows.append([{**json.loads(line), "seconds": 0} for line in lines])
    assert rows[0] == rows[1]
    assert [row["clients"] for row in rows[0]] == [5, 5, 10]


def test_the_setting_is_nothing_to_those_that_say_what_they_wrap() -> None:
    strategy = build_strategy(settings_of("lg-srpfl", srpfl_base="flute"))
    assert type(strategy) is LGFedAvg


@pytest.mark.parametrize(
    "base", ["srpfl", "flanp", "flwr_frl.strategies.srpfl:LGSRPFL"]
)
def test_srpfl_over_srpfl_is_refused_in_one_line(base: str) -> None:
    line = f"^srpfl-base is {base!r}; expected an algorithm that wraps no other one$"
    settings = {**settings_of("srpfl"), "srpfl-base": base}
    for ask in (build_strategy, client_class, settings_owners):
        with pytest.raises(SettingsError, match=line):
            ask(settings)


@pytest.mark.parametrize("base", ["dpsgd", "representation-transfer"])
def test_a_base_in_which_nobody_is_sampled_is_refused_in_one_line(base: str) -> None:
    line = f"^srpfl-base is {base!r}; expected an algorithm that samples clients$"
    with pytest.raises(SettingsError, match=line):
        build_strategy(settings_of("srpfl", srpfl_base=base))


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ("fedrap", "unknown algorithm 'fedrap'; did you mean 'fedrep'"),
        ("", "unknown algorithm ''; known: "),
        ("nowhere:Strategy", "algorithm 'nowhere:Strategy' cannot be imported: "),
        ("outsiders:Homeless", "algorithm 'outsiders:Homeless' is no strategy; "),
    ],
)
def test_a_base_that_is_none(base: str, line: str) -> None:
    with pytest.raises(SettingsError, match=f"^{line}") as caught:
        build_strategy(settings_of("srpfl", srpfl_base=base))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("real", [False, True])
def test_inside_differential_privacy(real: bool) -> None:
    settings = settings_of("fedavg")
    base = build_strategy(settings)
    private = DifferentialPrivacyServerSideFixedClipping(
        SRPFL(base, initial_nodes=5, rounds_per_stage=2),
        noise_multiplier=0.0,
        clipping_norm=1e-3,
        num_sampled_clients=5,
    )
    inner, grid = simulated(settings, base)
    if real:
        # Replies are looked at before they are clipped.
        grid = RealArrivals(inner)
    start = base.initialize(inner)
    counts = []
    end = run_rounds(
        private,
        grid,
        start,
        range(1, 3),
        evaluated=lambda _: False,
        after_round=lambda r, a, metrics: counts.append(metrics["clients"]),
    )
    assert counts == [5, 5]
    moved = sum(np.sum((end[n].numpy() - start[n].numpy()) ** 2) for n in start) ** 0.5
    # Two rounds, each clipped to a norm of 1e-3.
    assert 0 < moved <= 2.01e-3


def test_a_grid_that_closes_no_round_early_is_named_once(caplog) -> None:
    settings = settings_of("fedavg")
    strategy = SRPFL(build_strategy(settings), initial_nodes=5, rounds_per_stage=1)
    inner, _ = simulated(settings, strategy)
    start = strategy.strategy.initialize(inner)
    for server_round in (1, 2):
        messages = strategy.configure_train(server_round, start, ConfigRecord(), inner)
        assert len(messages) == 20
    said = "SRPFL waits for all clients: this grid closes no round early"
    assert caplog.messages.count(said) == 1


def test_over_flowers_own_fedavg() -> None:
    settings = settings_of("fedavg")
    strategy = SRPFL(FlowerFedAvg(), initial_nodes=5, rounds_per_stage=1)
    inner, grid = simulated(settings, strategy)
    start = build_strategy(settings).initialize(inner)
    messages = strategy.configure_train(1, start, ConfigRecord(), grid)
    replies = grid.send_and_receive(messages)
    assert len(replies) == 5
    arrays, _ = strategy.aggregate_train(1, replies)
    assert set(arrays) == set(start)
    # Evaluation is not cut short.
    messages = strategy.configure_evaluate(1, arrays, ConfigRecord(), grid)
    assert len(grid.send_and_receive(messages)) == 20
    assert isinstance(messages[0].content, RecordDict)
