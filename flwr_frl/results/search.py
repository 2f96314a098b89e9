"""The points that `tune` tries: all of a grid, or random ones in ranges."""

import math
import tomllib
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from flwr_frl.common.settings import Setting, defaults, require
from flwr_frl.results.results import is_number

# Settings of a point.
Point = dict[str, Setting]
# Settings that `tune` sets itself, or that need validation sets in the final run.
FIXED = (
    *("algorithm", "evaluate-on", "output", "resume", "seed", "validation-fraction"),
    *("patience", "keep-best"),
)
# Number of points of each algorithm if there are ranges.
TRIALS = 20


class Range(NamedTuple):
    """A range of numbers, with a logarithmic scale from a ratio of 10 on."""

    low: float
    high: float
    is_integer: bool

    def draw(self, rng: np.random.Generator) -> Setting:
        """Draw a number uniformly on the scale of the range."""
        # All integers of the range are equally probable.
        margin = 0.5 if self.is_integer else 0.0
        low, high = self.low - margin, self.high + margin
        if 0 < 10 * self.low <= self.high:
            drawn = math.exp(rng.uniform(math.log(low), math.log(high)))
        else:
            drawn = rng.uniform(low, high)
        return round(drawn) if self.is_integer else drawn


def points_of(text: str, trials: int | None = None, seed: int = 0) -> list[Point]:
    """Return the points of a grid, ``name=value,value … name=low..high …``.

    Without ranges they are all combinations. With ranges they are random; a larger
    number of trials adds points to those of a smaller one.

    Parameters
    ----------
    text : str
        The grid.
    trials : int, optional
        Number of points if there are ranges, by default `TRIALS`.
    seed : int, default 0
        Seed of the random points.

    Raises
    ------
    SettingsError
        If the grid cannot be parsed.
    """
    axes: dict[str, Range | list[Setting]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        valid = bool(name and values) and name not in axes and name not in FIXED
        require(valid, "grid", text, f"'name=value,value …', not {part!r}")
        axes[name] = _parse_axis(name, values)
    require(bool(axes), "grid", text, "settings with values: 'name=value,value …'")
    if not any(isinstance(axis, Range) for axis in axes.values()):
        allowed = "unset unless --grid has a range, such as learning-rate=0.001..0.1"
        require(trials is None, "trials", trials, allowed)
        every = product(*axes.values())
        return [dict(zip(axes, chosen, strict=True)) for chosen in every]
    trials = TRIALS if trials is None else trials
    require(trials >= 1, "trials", trials, "an integer, at least 1")
    rng = np.random.default_rng(seed)
    return [{n: _drawn(axis, rng) for n, axis in axes.items()} for _ in range(trials)]


def _drawn(axis: Range | Sequence[Setting], rng: np.random.Generator) -> Setting:
    if isinstance(axis, Range):
        return axis.draw(rng)
    return axis[int(rng.integers(len(axis)))]


def _parse_axis(name: str, text: str) -> Range | list[Setting]:
    low, high = map(_parse_value, (*text.split(".."), "")[:2])
    if not (is_number(low) and is_number(high)):
        return [_parse_value(value) for value in text.split(",")]
    require(low < high, "grid", text, "a range whose first end is the smaller")
    integers = isinstance(low, int) and isinstance(high, int)
    return Range(low, high, integers and not isinstance(defaults().get(name), float))


def _parse_value(text: str) -> Setting:
    """Parse a value as TOML. Anything else is a string, which needs no quotes."""
    try:
        value: Setting = tomllib.loads(f"value = {text}")["value"]
        return value
    except tomllib.TOMLDecodeError:
        return text
