"""Schedules of the learning rate over the rounds of a run."""

import math
from collections.abc import Callable
from functools import lru_cache

from flwr_frl.common.settings import SettingsError

# The schedule `step` multiplies the learning rate by the factor at these shares of the
# rounds after the warm-up, as ResNets are trained (He et al., CVPR 2016).
STEP_FACTOR, STEPS_AT = 0.1, (0.5, 0.75)
FORMS = "constant, step, step:EVERY:FACTOR or cosine"

# Maps the number of rounds since the warm-up, and that of all rounds after the warm-up,
# to a factor.
Decay = Callable[[int, int], float]


@lru_cache(maxsize=16)
def decay(text: str) -> Decay:
    """Return the factor of the learning rate after the warm-up.

    Parameters
    ----------
    text : str
        ``constant``; ``step`` for a tenth after one half and a hundredth after three
        quarters of the rounds; ``step:EVERY:FACTOR`` for a multiplication by FACTOR in
        (0, 1] after every EVERY rounds; or ``cosine`` for (1 + cos(π k / n)) / 2 in the
        k-th of n rounds, from 0.

    Raises
    ------
    SettingsError
        If the text is invalid.
    """
    kind, *rest = text.split(":")
    if kind == "constant" and not rest:
        return lambda k, n: 1.0
    if kind == "cosine" and not rest:
        return lambda k, n: (1 + math.cos(math.pi * k / n)) / 2
    if kind == "step" and not rest:
        return lambda k, n: STEP_FACTOR ** sum(k >= share * n for share in STEPS_AT)
    try:
        every, factor = int(rest[0]), float(rest[1])
        if kind == "step" and len(rest) == 2 and every >= 1 and 0 < factor <= 1:
            return lambda k, n: float(factor ** (k // every))
    except (ValueError, IndexError):
        pass
    raise SettingsError(
        f"learning-rate-schedule is {text!r}; expected {FORMS}",
        "learning-rate-schedule",
    )


def rate_factor(text: str, warmup: int, server_round: int, rounds: int) -> float:
    """Return the factor of the learning rate in a round.

    Parameters
    ----------
    text : str
        See `decay`.
    warmup : int
        Number W of first rounds in which the factor rises linearly; it is t / (W + 1)
        in round t.
    server_round : int
        The round t, from 1.
    rounds : int
        Number of rounds of the run, above W.
    """
    if server_round <= warmup:
        return server_round / (warmup + 1)
    # A round after the last one has the factor of the last one.
    after = min(server_round, rounds) - 1 - warmup
    return decay(text)(max(after, 0), max(rounds - warmup, 1))
