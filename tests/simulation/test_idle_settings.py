"""Warnings about settings that have no effect in a run."""

import logging

import pytest
from command_line import cases, run

from flwr_frl import running
from flwr_frl.cli import parse
from flwr_frl.common.run_cache import begin_run


def warnings_of(arguments: list[str], caplog) -> list[str]:
    """Check a command line, and return the warnings."""
    caplog.clear()
    begin_run()
    namespace, settings = parse(arguments)
    running.check(namespace.algorithms, settings, "inline")
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# Arguments, settings after @, and the settings that have no effect
IDLE = """
fedrep --classes-per-client 3 @ partition='dirichlet' => classes-per-client
fedavg @ clip-norm=1.0 => clip-norm
fedavg @ byzantine-fraction=0.1 => byzantine-fraction
fedavg @ server-optimizer-rate=0.1 => server-optimizer-rate
fedavg @ server-optimizer='momentum' server-optimizer-tau=0.1 => server-optimizer-tau
dpsgd @ communication-time=3.0 => communication-time
fedavg fedrep @ nc-weight=0.5 head-epochs=3 => nc-weight
fedrep --task linear @ partition='iid' batch-size=5 => partition batch-size
fedavg @ optimizer='adam' momentum=0.9 => momentum
squarm-sgd @ compressor='sign' compressor-k=0.2 => compressor-k
"""
# All of these settings are read by at least one of the algorithms.
USED = """
fedavg flute @ nc-weight=0.5 seed=3 resume='' => -
fedrep @ partition='dirichlet' dirichlet-alpha=5 => -
srpfl @ srpfl-base='flute' nc-weight=0.5 initial-nodes=3 => -
outsiders:Hooked @ fewest=3 round-timeout=60 => -
dpsgd @ momentum=0.9 => -
"""


@pytest.mark.parametrize(("arguments", "idle"), cases(IDLE + USED))
def test_settings_without_effect_give_a_warning(arguments, idle, caplog):
    names = [line.partition("=")[0] for line in warnings_of(arguments, caplog)]
    assert names == ([] if idle == "-" else idle.split())


@pytest.mark.parametrize(("window", "idle"), [(0, ["emnist-split", "stride"]), (4, [])])
def test_a_stride_without_windows_gives_a_warning(tmp_path, caplog, window, idle):
    file = tmp_path / "rows.csv"
    file.write_text("user,x,label\n" + "a,1.5,0\nb,2.5,0\n" * 12 + "a,3.5,1\n" * 10)
    more = "emnist-split='digits'" if idle else f"window={window}"
    arguments = ["fedavg", "--task", "table", "--data-dir", str(file)]
    warned = warnings_of([*arguments, "--run-config", f"stride=1 {more}"], caplog)
    names = [line.partition("=")[0] for line in warned if " does nothing" in line]
    assert sorted(names) == idle


def test_a_command_warns_once_of_its_settings(tmp_path, caplog):
    settings = {"nc_weight": 0.5}
    words = ("fedavg", "fedper", "--seeds", "2", "--rounds", "1")
    assert run(tmp_path, *words, **settings) == 0
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [line.partition("=")[0] for line in warned] == ["nc-weight"]
