"""A small part of ``benchmarks/hostile.py``."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import messages
import numpy as np
import pytest
import replies
import secure

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a small model, which is fast to copy and tests the same code."""
    monkeypatch.setattr(replies, "MODEL", "mlp-2")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "flwr")


# The full harness tests all algorithms. Setting them up takes most of the time.
FEW = ("fedrep", "flute", "scaffold", "dpsgd")


def test_no_hostile_reply_has_a_forbidden_effect() -> None:
    outcome = replies.run(200, 0, (*FEW, "fedproto", "feddbe"))
    assert outcome.fell == []
    assert outcome.tried == 200
    assert outcome.refused > 100


@pytest.mark.parametrize("algorithm", ["fedbuff", "fedasync"])
def test_renamed_clients_do_not_end_asynchronous_runs(algorithm: str) -> None:
    outcome = replies.Outcome()
    for seed in range(8):
        replies.attack_names(algorithm, np.random.default_rng(seed), outcome)
    assert outcome.fell == []


def test_no_hostile_message_has_a_forbidden_effect(tmp_path: Path) -> None:
    outcome = messages.run(60, 0, tmp_path, FEW)
    assert outcome.fell == []
    assert outcome.tried == 60
    assert outcome.refused > 10


def test_no_hostile_reply_ends_secure_aggregation() -> None:
    outcome = secure.run(9, 0)
    assert outcome.fell == []
    assert outcome.refused > 5


KILLS = """
import sys
from pathlib import Path
import kills

outcome = kills.run(12, 0, Path(sys.argv[1]), ("fedrep", "flute", "fedbuff"))
print(outcome.tried, outcome.fell)
"""


@pytest.mark.e2e
def test_killed_runs_end_with_the_results_of_undisturbed_runs(tmp_path: Path) -> None:
    # The harness forks, which is impossible after torch has used an accelerator.
    paths = (Path(__file__).parent, ROOT)
    result = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.stdout.splitlines()[-1:] == ["12 []"], result.stdout + result.stderr
