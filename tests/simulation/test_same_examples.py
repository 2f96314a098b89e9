"""Runs of custom tasks that split their data at random, in several processes.

Each command and each call of `load_run` builds its task anew, as another process does.
"""

import numpy as np
import pytest
from command_line import assert_same_rows, json_of, rows_of, run

from flwr_frl.common.run_cache import begin_run
from flwr_frl.predict import load_run
from flwr_frl.task.tasks import build_task

TASK = """
import random

import numpy as np
import torch
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

def split(order):
    x = torch.arange(40)[torch.as_tensor(np.array(order))][:, None] / 40
    sets = ExampleSet(x[:30], x[:30] ** 2), ExampleSet(x[30:], x[30:] ** 2)
    train, test = ([each] * 3 for each in sets)
    build = lambda: SplitModel(nn.Linear(1, 2), nn.Linear(2, 1))
    return ExampleTask(build, train, test, loss=nn.functional.mse_loss)

def by_python():
    return split(random.sample(range(40), 40))

def by_numpy():
    return split(np.random.permutation(40))

def by_torch():
    return split(torch.randperm(40))
"""
FLAGS = ("--clients", "3", "--fraction", "1")


@pytest.mark.parametrize("by", ["python", "numpy", "torch"])
def test_a_random_split_is_drawn_from_the_seed_in_every_process(
    by, tmp_path, write_module
):
    path = f"{write_module('splits', TASK)}:by_{by}"
    flags, parts = (*FLAGS, "--task", path), tmp_path / "parts"
    assert run(tmp_path / "whole", "fedrep", *flags, "--rounds", "3") == 0
    np.random.rand()
    assert run(parts, "fedrep", *flags, "--rounds", "2") == 0
    resume = str(parts)
    assert run(parts, "fedrep", *flags, "--rounds", "3", resume=resume) == 0
    rows = rows_of(parts, "fedrep")
    assert_same_rows(rows, rows_of(tmp_path / "whole", "fedrep"), 1e-12)
    begin_run()
    predictor = load_run(parts / "fedrep", "000001", task=path)
    test = build_task({"task": path}, 3).test_examples(1)
    outputs = predictor(test.inputs).outputs
    loss = np.square(outputs - test.targets.numpy()).mean()
    of_run = json_of(parts / "fedrep" / "clients.json")["000001"]["loss"]
    assert loss == pytest.approx(of_run, rel=1e-5)
    # Another seed gives another split.
    begin_run()
    assert run(tmp_path / "other", "fedrep", *flags, "--rounds", "1", seed=1) == 0
    other = rows_of(tmp_path / "other", "fedrep")
    assert other[0]["loss"] != rows[0]["loss"]
