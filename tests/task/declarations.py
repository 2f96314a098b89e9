"""Classes and functions that declare settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flwr_frl.common.settings import (
    Checked,
    Range,
)

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


RATE, COUNT = Range("(0, 1]"), Range("[1, inf)")


@dataclass(frozen=True)
class SGDOptimizer(Checked):
    step_size: Annotated[float, RATE] = 0.5
    # Not settings, since neither has a range.
    plain: int = 3
    described: Annotated[int, "an integer"] = 4


@dataclass(frozen=True)
class MoreSteps(SGDOptimizer):
    step_size: Annotated[float, RATE] = 0.25
    num_steps: Annotated[int, COUNT] = 7


def function(
    num_clients: int,
    *,
    rate: Annotated[float, RATE] = 0.5,
    max_size: Annotated[int, COUNT] = 8,
) -> tuple[int, float, int]:
    return num_clients, rate, max_size
