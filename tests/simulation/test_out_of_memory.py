"""A run that is out of memory ends with a one-line error and a checkpoint."""

import pytest
from command_line import assert_same_rows, config, rows_of, run

TASK = """
from pathlib import Path

import torch
from cohort_tasks import dense as plain

ALLOWED = Path(__file__).with_suffix(".allowed")


def dense(num_clients=5):
    task = plain()
    steps = []

    def loss(outputs, targets):
        # 4 calls before the run; then five clients with a batch each, or three
        # batches of clients of equal forms: round 3, or 4.
        if torch.is_grad_enabled():
            steps.append(0)
            if len(steps) > 4 + 10 and not ALLOWED.exists():
                torch.empty(2**58)
        return torch.nn.functional.cross_entropy(outputs, targets)

    object.__setattr__(task, "loss", loss)
    return task
"""


@pytest.mark.parametrize(("cohort", "rounds"), [("off", 2), ("5", 3)])
def test_a_run_that_is_out_of_memory_can_be_resumed(
    tmp_path, write_module, capsys, cohort, rounds
):
    name = write_module("hungry", TASK)
    arguments = ("fedrep", "--clients", "5", "--fraction", "1", "--rounds", "4")
    settings = f"head-epochs=0 evaluate-every=1 batch-size=13 cohort='{cohort}'"
    task = ("--task", f"{name}:dense")
    assert run(tmp_path / "out", *arguments, *task, *config(settings)) == 2
    stderr = capsys.readouterr().err
    line = stderr.splitlines()[-1]
    assert line.startswith("error: device 'cpu' is out of memory: ")
    advice = "lower batch-size or cohort, or train on another device"
    assert line.endswith(f"; {advice}")
    assert "Traceback" not in stderr
    assert [row["round"] for row in rows_of(tmp_path / "out")] == [1, 2, 3][:rounds]
    # The checkpoint is enough to resume the run with fewer clients at a time.
    (tmp_path / "modules" / f"{name}.allowed").touch()
    fewer = settings.replace(f"'{cohort}'", "'2'")
    again = f"{fewer} resume='{tmp_path / 'out'}'"
    assert run(tmp_path / "out", *arguments, *task, *config(again)) == 0
    plain = ("--task", "cohort_tasks:dense")
    assert run(tmp_path / "whole", *arguments, *plain, *config(settings)) == 0
    assert_same_rows(rows_of(tmp_path / "out"), rows_of(tmp_path / "whole"), 1e-5)
