"""Rounds: evaluation, reporting, and third-party strategies."""

import logging
import math

import numpy as np
import pytest
from disks import full
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from function_clients import START, averaging, changing, grid_of, honest
from inline_runs import rows_in
from named_tasks import dashed

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import defaults, resolve
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server_app import app, serve, server_settings


def rounds_of(strategy, rounds: range = range(1, 4), **options):
    rows: list[dict] = []
    final = run_rounds(
        strategy,
        grid_of(4),
        to_record(START),
        rounds,
        after_round=lambda r, arrays, metrics: rows.append(
            {"round": r, "b": arrays["b"].numpy().tolist(), **metrics}
        ),
        **options,
    )
    return final, rows


def test_mean_is_added_in_each_round():
    # The mean of 1, 2, 3 and 4 is added three times.
    final, rows = rounds_of(averaging())
    assert final["b"].numpy().tolist() == [7.5] * 4
    assert [row["b"][0] for row in rows] == [2.5, 5.0, 7.5]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(row["accuracy"] == pytest.approx(0.15) for row in rows)
    assert all(row["loss"] == 1.5 for row in rows)
    assert all(row["train-loss"] == 2.0 for row in rows)


def test_flower_s_own_fedavg_runs_as_well():
    strategy = FlowerFedAvg(min_train_nodes=4, min_evaluate_nodes=4)
    final, rows = rounds_of(strategy)
    # Flower weights by examples: the means of 1 to 4 and of 0 to 0.3 are 3 and 0.2.
    np.testing.assert_allclose(final["b"].numpy(), 9)
    assert rows[0]["accuracy"] == pytest.approx(0.2)


def test_flower_s_differential_privacy_wraps_ours():
    for norm, expected in (
        # The norm is never reached: the mean of 1, 2, 3 and 4
        (1e6, 2.5),
        # Clipped to norm 1, every update is 1/√10 in each of ten entries.
        (1.0, 1 / math.sqrt(10)),
    ):
        strategy = DifferentialPrivacyServerSideFixedClipping(averaging(), 0.0, norm, 4)
        final = run_rounds(strategy, grid_of(4), to_record(START), range(1, 4))
        np.testing.assert_allclose(final["b"].numpy(), 3 * expected, rtol=1e-6)


def test_a_wrapper_sends_flower_s_own_messages_to_nodes():
    # Flower's `start` of a wrapper passes the grid of the SuperLink as it is.
    grid = grid_of(4)
    grid.in_process = False
    strategy = DifferentialPrivacyServerSideFixedClipping(averaging(), 0.0, 1e6, 4)
    for configure in (strategy.configure_train, strategy.configure_evaluate):
        messages = list(configure(1, to_record(START), ConfigRecord(), grid))
        assert len(messages) == 4
        assert {type(message) for message in messages} == {Message}


# Complete runs


def settings_of(tmp_path, **overrides):
    usual = {"output": str(tmp_path), "algorithm": "fedavg", "fraction-train": 1.0}
    return resolve(usual | {"num-clients": 4} | dashed(overrides))


@pytest.mark.parametrize(
    ("rounds", "every", "last", "expected"),
    [
        (8, 3, 2, [3, 6, 7, 8]),
        (8, 0, 1, [8]),
        (5, 1, 1, [1, 2, 3, 4, 5]),
        (3, 0, 10, [1, 2, 3]),
        (12, 5, 3, [5, 10, 11, 12]),
    ],
)
def test_evaluated_rounds_follow_the_settings(tmp_path, rounds, every, last, expected):
    settings = settings_of(
        tmp_path, num_server_rounds=rounds, evaluate_every=every, evaluate_last=last
    )
    summary = serve(grid_of(4), settings)
    rows = rows_in(tmp_path)
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    assert [row["round"] for row in rows if "accuracy" in row] == expected
    assert summary["rounds"] == rounds


def test_run_without_valid_replies_ends_with_an_error(tmp_path):
    def fail(content: RecordDict, i: int) -> None:
        raise RuntimeError("out of memory")

    broken = changing(MessageType.TRAIN, fail)
    settings = settings_of(tmp_path, num_server_rounds=9, max_empty_rounds=3)
    with pytest.raises(SettingsError, match="no valid reply in 3 rounds in a row"):
        serve(InlineGrid(broken, 4), settings)
    assert [row["clients"] for row in rows_in(tmp_path)] == [0, 0, 0]
    # Without a limit, the run continues to its end, which is an error as well.
    settings = settings_of(tmp_path, num_server_rounds=5, max_empty_rounds=0)
    with pytest.raises(SettingsError, match="no round had a valid reply; client"):
        serve(InlineGrid(broken, 4), settings)
    assert [row["rejected"] for row in rows_in(tmp_path)] == [4] * 5


def test_run_that_ended_with_an_error_can_be_resumed(tmp_path):
    def at_first(message: Message, context: Context) -> Message:
        training = message.metadata.message_type == MessageType.TRAIN
        if training and message.metadata.group_id != "1":
            raise RuntimeError("out of memory")
        return honest(message, context)

    settings = settings_of(tmp_path, num_server_rounds=9, max_empty_rounds=3)
    with pytest.raises(SettingsError, match="no valid reply in 3 rounds in a row"):
        serve(InlineGrid(at_first, 4), settings)
    assert settings["checkpoint-every"] == 0
    assert len(list(tmp_path.glob("**/checkpoint.safetensors"))) == 1
    resume = str(next(tmp_path.glob("**/checkpoint.safetensors")).parents[1])
    serve(grid_of(4), {**settings, "resume": resume})
    assert [row["clients"] for row in rows_in(tmp_path)] == [4, 0, 0, 4, 4, 4, 4, 4, 4]


# Server settings


@pytest.mark.parametrize(
    "named",
    [
        {"algorithm": "outsiders:Hooked"},
        {"algorithm": "srpfl", "srpfl-base": "outsiders:Fewest"},
    ],
)
def test_server_checks_settings_of_third_party_strategies(named):
    assert server_settings(named) == {**defaults(), **named, "fewest": 2}
    assert server_settings({**named, "fewest": 4})["fewest"] == 4
    with pytest.raises(SettingsError) as caught:
        server_settings({**named, "fewest": 4.5})
    assert caught.value.code == "fewest"


@pytest.mark.parametrize(
    "named",
    [
        {"algorithm": "outsiders:Hooked"},
        {"algorithm": "srpfl", "srpfl-base": "outsiders:Fewest"},
        {"task": "nowhere.at_all:task"},
    ],
)
def test_settings_of_clients_and_tasks_are_not_checked_by_the_server(named):
    # Servers load neither client nor task.
    settings = server_settings({**named, "warm-up": 3, "hearing": "good"})
    assert (settings["warm-up"], settings["hearing"]) == (3, "good")
    # Settings that the server knows are checked.
    with pytest.raises(SettingsError) as caught:
        server_settings({**named, "seed": 0.5})
    assert caught.value.code == "seed"


# Errors in the log of a ServerApp


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SettingsError("seed is 0.5; expected 1"), "error: seed is 0.5; expected 1"),
        (SettingsError("100 % are %d"), "error: 100 % are %d"),
        (ValueError("what is that?"), None),
        (KeyError("seed"), None),
    ],
)
def test_settings_errors_are_logged_in_one_line_and_others_with_traceback(
    error, line, caplog
):
    # Failing more than once changes nothing.
    for _ in range(3):
        with pytest.raises(SettingsError):
            app(None, Context(1, 0, {}, RecordDict(), {"seed": 0.5}))
    caplog.clear()
    try:
        raise error
    except Exception as caught:
        # Flower logs errors like this.
        log(logging.ERROR, "ServerApp of run %d raised", 7, exc_info=caught)
    (record,) = caplog.records
    text = logging.Formatter().format(record)
    if line is not None:
        assert text == line
        return
    first, second, *_, last = text.splitlines()
    assert first == "ServerApp of run 7 raised"
    assert second == "Traceback (most recent call last):"
    assert last == f"{type(error).__name__}: {error}"


def test_app_whose_checkpoint_cannot_be_written_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("flwr_frl.strategies.server.checkpoint.write_atomically", full)
    config = {"algorithm": "fedavg", "num-server-rounds": 1, "output": str(tmp_path)}
    with pytest.raises(SettingsError, match="not written: fedavg/checkpoint") as error:
        app(grid_of(4), Context(1, 0, {}, RecordDict(), config))
    assert error.value.code == "output"
    assert "fedavg" in (tmp_path / "summary.json").read_text()
