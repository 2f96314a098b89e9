"""Schedules over iterations: learning rates and thresholds, parsed from settings."""

from collections.abc import Callable
from functools import lru_cache

from flwr_frl.common.settings import SettingsError

Schedule = Callable[[int], float]


@lru_cache(maxsize=16)
def learning_rate(text: str, base: float) -> Schedule:
    """Return the learning rate η_t as a function of the iteration t, from 0.

    Parameters
    ----------
    text : str
        ``constant`` or ``theory``; ``inverse:A`` for base / (t + A) with A > 0; or
        ``steps:WARMUP:T1,T2,...:FACTOR`` for a linear warm-up over WARMUP iterations
        and a division by FACTOR ≥ 1 at each of the iterations T1, T2, ....
    base : float
        The setting ``learning-rate``, or the theory's learning rate.

    Raises
    ------
    SettingsError
        If the text is invalid.
    """
    kind, *rest = text.split(":")
    try:
        if text in ("constant", "theory"):
            return lambda t: base
        if kind == "inverse":
            (shift,) = map(float, rest)
            if shift > 0:
                return lambda t: base / (t + shift)
        if kind == "steps":
            warmup, factor = int(rest[0]), float(rest[2])
            milestones = [int(m) for m in rest[1].split(",")]
            if warmup >= 0 and factor >= 1 and len(rest) == 3:
                return lambda t: (
                    base
                    * min(1.0, (t + 1) / max(warmup, 1))
                    * factor ** -sum(t >= m for m in milestones)
                )
    except (ValueError, IndexError):
        pass
    raise SettingsError(
        f"learning-rate-schedule is {text!r}; expected constant, theory, inverse:A or "
        "steps:WARMUP:T1,T2,...:FACTOR"
    )


@lru_cache(maxsize=16)
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
    SettingsError
        If the text is invalid.
    """
    try:
        start, *rest = map(float, text.split(":"))
        increment, every, until = (*rest, float("inf"))[:3] if rest else (0, 1, 0)
        valid = start >= 0 and 0 <= increment < float("inf") and every >= 1
        if len(rest) in (0, 2, 3) and valid and until >= 0:
            return lambda t: start + increment * (min(t, until) // every)
    except ValueError:
        pass
    raise SettingsError(
        f"trigger is {text!r}; expected START, START:INCREMENT:EVERY or "
        "START:INCREMENT:EVERY:UNTIL"
    )
