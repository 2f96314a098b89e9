"""Classes and functions that declare settings."""

from dataclasses import dataclass
from typing import Annotated

from flwr_frl.common.settings import Checked, setting

RATE, COUNT = setting(gt=0, le=1), setting(ge=1)


@dataclass(frozen=True)
class SGDOptimizer(Checked):
    step_size: float = setting(0.5, gt=0, le=1)
    # Not settings.
    plain: int = 3
    described: Annotated[int, "an integer"] = 4


@dataclass(frozen=True)
class MoreSteps(SGDOptimizer):
    step_size: float = setting(0.25, gt=0, le=1)
    num_steps: Annotated[int, COUNT] = 7


def function(
    num_clients: int,
    *,
    rate: Annotated[float, RATE] = 0.5,
    max_size: Annotated[int, COUNT] = 8,
) -> tuple[int, float, int]:
    return num_clients, rate, max_size
