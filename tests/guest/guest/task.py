"""Tables of sensor values, in which the target depends on the device."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import nn

from flwr_frl.common.settings import setting
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

SENSORS = 6


def sensors(
    num_clients: int,
    *,
    seed: Annotated[int, setting(ge=0)] = 0,
    readings: Annotated[int, setting(ge=2)] = 60,
    noise: Annotated[float, setting(ge=0)] = 0.05,
    data_dir: Annotated[str, setting(form="a directory with readings.csv")] = "",
) -> ExampleTask:
    """Return the task: six sensors, one value to predict, squared error and R².

    Parameters
    ----------
    num_clients : int
        Number of devices that share the task; 0 on a device with its own file.
    seed : int, default 0
        Fixes the readings and the initial model.
    readings : int, default 60
        Number of readings of each device.
    noise : float, default 0.05
        Standard deviation of the noise in the value to predict.
    data_dir : str, default ""
        Directory of a device's ``readings.csv``; each line has six sensors and a value.
    """
    if num_clients == 0:
        tables = [np.loadtxt(Path(data_dir) / "readings.csv", delimiter=",", ndmin=2)]
    else:
        tables = [draw(i, seed, readings, noise) for i in range(num_clients)]
    sets = [as_examples(table) for table in tables]
    return ExampleTask(
        model=lambda: SplitModel(
            nn.Sequential(nn.Linear(SENSORS, 16), nn.Tanh()), nn.Linear(16, 1)
        ),
        train=[train for train, _ in sets],
        test=[test for _, test in sets],
        loss=nn.functional.mse_loss,
        seed=seed,
        metrics={"r2": r2},
    )


def r2(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the fraction of the targets' variance that the outputs explain."""
    return 1 - (outputs - targets).square().mean() / targets.var(unbiased=False)


def draw(client: int, seed: int, readings: int, noise: float) -> np.ndarray:
    """Return a device's table: two common features, weighted by each device."""
    shared = np.random.default_rng([seed, 1]).standard_normal((SENSORS, 2))
    rng = np.random.default_rng([seed, 2, client])
    weights = rng.standard_normal(2)
    x = rng.standard_normal((readings, SENSORS))
    y = np.tanh(x @ shared) @ weights + noise * rng.standard_normal(readings)
    return np.column_stack([x, y])


def as_examples(table: np.ndarray) -> tuple[ExampleSet, ExampleSet]:
    """Split a table: every fourth reading is a test example."""
    x = torch.from_numpy(table[:, :-1]).float()
    y = torch.from_numpy(table[:, -1:]).float()
    test = torch.arange(len(x)) % 4 == 3
    return ExampleSet(x[~test], y[~test]), ExampleSet(x[test], y[test])
