"""Settings of a node: local SGD, and schedules over its iterations."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from flwr_frl.common.compression import CompressionSettings
from flwr_frl.common.settings import checked_by, setting
from flwr_frl.task.training.sgd import SGD

Schedule = Callable[[int], float]


def learning_rate(text: str, base: float = 1.0) -> Schedule:
    """Return the learning rate η_t as a function of the iteration t, from 0.

    Parameters
    ----------
    text : str
        ``constant`` or ``theory``; ``inverse:A`` for base / (t + A) with A > 0; or
        ``steps:WARMUP:T1,T2,...:FACTOR`` for a linear warm-up over WARMUP iterations
        and a division by FACTOR ≥ 1 at each of the iterations T1, T2, ....
    base : float, default 1
        The setting ``learning-rate``, or the theory's learning rate.

    Raises
    ------
    ValueError
        If the text is invalid.
    """
    match text.split(":"):
        case ["constant" | "theory"]:
            return lambda t: base
        case ["inverse", shift] if float(shift) > 0:
            return lambda t: base / (t + float(shift))
        case ["steps", first, listed, last] if int(first) >= 0 and float(last) >= 1:
            warmup, factor = max(int(first), 1), float(last)
            milestones = [int(m) for m in listed.split(",")]
            return lambda t: (
                base
                * min(1.0, (t + 1) / warmup)
                * factor ** -sum(t >= m for m in milestones)
            )
    raise ValueError(text)


def threshold(text: str) -> Schedule:
    """Return the trigger's threshold c_t as a function of the iteration t, from 0.

    It has no upper bound. Theorem 2 of the dissertation requires c_t < c_0 / η^(1−ε)
    for some c_0, which every eventually constant schedule satisfies. In the
    dissertation's ResNet experiments c_t < 1 / η_t; its convex experiment starts with
    c_0 = 5,000 at η_0 = 0.01, which is far above 1 / η_0.

    Parameters
    ----------
    text : str
        ``START``; ``START:INCREMENT:EVERY``, which adds INCREMENT every EVERY
        iterations; or ``START:INCREMENT:EVERY:UNTIL``, the same until iteration UNTIL.

    Raises
    ------
    ValueError
        If the text is invalid.
    """
    start, *rest = map(float, text.split(":"))
    increment, every, until = (*rest, math.inf)[:3] if rest else (0, 1, 0)
    valid = start >= 0 and 0 <= increment < math.inf and every >= 1
    if len(rest) in (0, 2, 3) and valid and until >= 0:
        return lambda t: start + increment * (min(t, until) // every)
    raise ValueError(text)


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
    num_clients : int, default 20
        Number of nodes n, for ``theory``.
    num_server_rounds : int, default 30
        Rounds, of ``local-steps`` iterations each.
    """

    learning_rate_schedule: Annotated[str, checked_by(learning_rate)] = setting(
        "constant",
        form="constant, theory, inverse:A or steps:WARMUP:T1,T2,...:FACTOR",
        safe=True,
    )
    num_clients: int = setting(20, ge=1, le=1_000_000)
    num_server_rounds: int = setting(30, ge=1)
    # Number of iterations H between two exchanges.
    local_steps: ClassVar[int] = 1
    # Threshold c_t of the trigger; 0 sends every non-zero difference.
    trigger: ClassVar[str] = "0"

    def rate(self) -> Schedule:
        """Return the learning rate η_t as a function of the iteration t."""
        base = self.learning_rate
        if self.learning_rate_schedule == "theory":
            iterations = self.num_server_rounds * self.local_steps
            base = (1 - self.momentum) * math.sqrt(self.num_clients / iterations)
        return learning_rate(self.learning_rate_schedule, base)


@dataclass(frozen=True)
class CompressedGossipSettings(GossipSettings, CompressionSettings):
    """Local SGD of a node, and the compression of its messages."""
