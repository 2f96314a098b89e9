"""Settings of a node that trains by local SGD and exchanges messages."""

import math
from dataclasses import dataclass
from typing import ClassVar

from flwr_frl.common.settings import setting
from flwr_frl.task.compression.per_tensor import CompressionSettings
from flwr_frl.task.training import SGD


@dataclass(frozen=True)
class GossipSettings(SGD):
    """Local SGD of a node.

    Parameters
    ----------
    learning_rate_schedule : str, default "constant"
        η_t at iteration t: ``constant``; ``theory`` for (1 − β) √(n / T) with the
        momentum β (theorems 1 and 2), n = ``num-clients`` and T iterations;
        ``inverse:A`` for base / (t + A); or ``steps:WARMUP:T1,T2,...:FACTOR`` for a
        linear warm-up over WARMUP iterations and a division by FACTOR at each of the
        iterations T1, T2, ….
    averaged_output : bool, default False
        Use the mean of a node's models of all iterations as its model, as the theorems
        do, instead of the last one.
    num_clients : int, default 20
        Number of nodes n, for ``theory``.
    num_server_rounds : int, default 30
        Rounds, of ``local-steps`` iterations each.
    """

    learning_rate_schedule: str = setting(
        "constant",
        form="constant, theory, inverse:A or steps:WARMUP:T1,T2,...:FACTOR",
        safe=True,
    )
    averaged_output: bool = setting(False)
    num_clients: int = setting(20, ge=1, le=1_000_000)
    num_server_rounds: int = setting(30, ge=1)
    # Number of iterations H between two exchanges.
    local_steps: ClassVar[int] = 1
    # Threshold c_t of the trigger; 0 sends every non-zero difference.
    trigger: ClassVar[str] = "0"

    @property
    def base_rate(self) -> float:
        """The learning rate that the schedule modifies."""
        if self.learning_rate_schedule != "theory":
            return self.learning_rate
        iterations = self.num_server_rounds * self.local_steps
        return (1 - self.momentum) * math.sqrt(self.num_clients / iterations)


@dataclass(frozen=True)
class CompressedGossipSettings(GossipSettings, CompressionSettings):
    """Local SGD of a node, and the compression of its messages."""
