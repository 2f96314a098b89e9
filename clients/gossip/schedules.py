"""Schedules over iterations, written as a setting: learning rates and thresholds."""

from collections.abc import Callable
from functools import lru_cache

from flwr_frl.task.settings import SettingsError

Schedule = Callable[[int], float]


@lru_cache(maxsize=16)
def learning_rate(text: str, base: float) -> Schedule:
    """Return a learning rate as a function of the iteration, from 0.

    ``text`` is ``constant``; ``inverse:A``, base / (t + A), for an A above 0; or
    ``steps:WARMUP:T1,T2,...:FACTOR``: rises linearly over WARMUP iterations, and is
    divided by FACTOR, at least 1, at each of the iterations T1, T2, ... ``base`` is the
    setting ``learning-rate``. Another text is a `SettingsError`.
    """
    kind, *rest = text.split(":")
    try:
        if kind == "constant" and not rest:
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
        f"learning-rate-schedule is {text!r}; it must be constant, inverse:A or "
        "steps:WARMUP:T1,T2,...:FACTOR"
    )


@lru_cache(maxsize=16)
def threshold(text: str) -> Schedule:
    """Return the trigger's threshold c_t as a function of the iteration, from 0.

    ``text`` is ``START``, or ``START:INCREMENT:EVERY`` (raised every EVERY iterations),
    or ``START:INCREMENT:EVERY:UNTIL`` (not raised any more after iteration UNTIL).
    Another text is a `SettingsError`.

    There is no bound on it. Theorem 2 of the dissertation wants c_t below c_0 / η^(1−ε)
    for some c_0, which any schedule that ends is. Its ResNets keep c_t < 1 / η_t; its
    convex run begins with 5,000 at η_0 = 0.01, far above.
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
        f"trigger is {text!r}; it must be START, START:INCREMENT:EVERY or "
        "START:INCREMENT:EVERY:UNTIL"
    )
