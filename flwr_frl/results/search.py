"""Ranges of settings, and points in them that Optuna proposes, for `tune`."""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from flwr_frl.common.settings import Setting, Settings, defaults, need, require
from flwr_frl.results.results import is_number

# Settings of a point.
Point = dict[str, Setting]
# Settings that the search sets itself, or that need validation sets in the final run.
FIXED = (
    *("algorithm", "evaluate-on", "output", "resume", "seed", "validation-fraction"),
    *("patience", "keep-best", "end-after"),
)
# Settings that determine the evaluated rounds of a point.
ROUNDS = frozenset(("num-server-rounds", "evaluate-every"))
# Number of points of each algorithm if there are ranges.
TRIALS = 20


class Range(NamedTuple):
    """A range of numbers, with a logarithmic scale from a ratio of 10 on."""

    low: float
    high: float
    is_integer: bool

    @property
    def is_log(self) -> bool:
        """Whether the scale is logarithmic."""
        return 0 < 10 * self.low <= self.high


class Attempt(NamedTuple):
    """Training of a point up to a round; a later attempt continues it.

    Parameters
    ----------
    number : int
        Number of the point, from 0.
    point : dict
        Its settings.
    after : int
        The round; 0 for all rounds.
    """

    number: int
    point: Point
    after: int = 0


class Space(NamedTuple):
    """Settings to choose from.

    Parameters
    ----------
    axes : mapping of str to Range or sequence
        The range or the values of each setting.
    budget : int
        Number of points of each algorithm.
    """

    axes: Mapping[str, Range | Sequence[Setting]]
    budget: int

    @property
    def has_ranges(self) -> bool:
        """Whether points are proposed; otherwise all are tried."""
        return any(isinstance(axis, Range) for axis in self.axes.values())

    @property
    def corners(self) -> list[Point]:
        """All points or, with ranges, those of all first and last values."""
        if not self.has_ranges:
            every = product(*self.axes.values())
            return [dict(zip(self.axes, chosen, strict=True)) for chosen in every]
        lists = {n: a[:2] if isinstance(a, Range) else a for n, a in self.axes.items()}
        return [{n: each[i] for n, each in lists.items()} for i in (0, -1)]

    def half_time(self, settings: Settings) -> int:
        """Return the last evaluated round of the first half; 0 if there is none.

        ``settings`` are those of a point. Points of a grid, and points whose rounds are
        chosen, are not compared before their ends.
        """
        every = int(settings.get("evaluate-every", 0))
        if not (self.has_ranges and every and ROUNDS.isdisjoint(self.axes)):
            return 0
        half = int(settings["num-server-rounds"]) // 2
        return half - half % every


def space_of(text: str, trials: int | None = None) -> Space:
    """Parse a grid, ``name=value,value … name=low..high …``.

    ``trials`` is the number of points if there are ranges, by default `TRIALS`. Raises
    `SettingsError` if the grid cannot be parsed.
    """
    axes: dict[str, Range | list[Setting]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        valid = bool(name and values) and name not in axes and name not in FIXED
        require(valid, "grid", text, f"'name=value,value …', not {part!r}")
        axes[name] = [_parse_value(value) for value in values.split(",")]
        low, high = map(_parse_value, (*values.split(".."), "")[:2])
        if is_number(low) and is_number(high):
            require(low < high, "grid", part, "a range whose first end is the smaller")
            integers = isinstance(low, int) and isinstance(high, int)
            integers = integers and not isinstance(defaults().get(name), float)
            axes[name] = Range(low, high, integers)
    require(bool(axes), "grid", text, "settings with values: 'name=value,value …'")
    space = Space(axes, TRIALS if trials is None else trials)
    if space.has_ranges:
        require(space.budget >= 1, "trials", trials, "an integer, at least 1")
        return space
    allowed = "unset unless --grid has a range, such as learning-rate=0.001..0.1"
    require(trials is None, "trials", trials, allowed)
    return space._replace(budget=len(space.corners))


def _parse_value(text: str) -> Setting:
    """Parse a value as TOML. Anything else is a string, which needs no quotes."""
    try:
        value: Setting = tomllib.loads(f"value = {text}")["value"]
        return value
    except tomllib.TOMLDecodeError:
        return text


def search(
    space: Space,
    score: Callable[[Sequence[Attempt]], Sequence[float | None]],
    jobs: int,
    seed: int,
    rounds: int,
    half_time: int,
) -> None:
    """Try all points of a space or, with ranges, those that Optuna's TPE proposes.

    A proposed point is pruned if its score at half time is below the median of the
    points that were trained for all rounds, once there are five (`MedianPruner`).
    Points are proposed until the rounds of ``space.budget`` points are used; points
    that were pruned leave rounds for others.

    A search proposes the same points again if it has the same seed, jobs and scores.

    Parameters
    ----------
    space : Space
        The settings to choose from.
    score : callable
        Makes attempts and returns the points' scores: None for points that failed, and
        NaN for those that were not evaluated in that round. Higher ones are better.
    jobs : int
        Number of proposed points that are tried at once.
    seed : int
        Seed of the sampler.
    rounds : int
        Number of rounds of a point.
    half_time : int
        Round after which points may be pruned; 0 prunes none.
    """
    if not space.has_ranges:
        score([Attempt(i, point) for i, point in enumerate(space.corners)])
        return
    need("optuna", "tune", "tune with ranges")
    import optuna
    from optuna import distributions

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    ways: dict[str, Any] = {}
    for name, axis in space.axes.items():
        if isinstance(axis, Range):
            kind: Any = distributions.FloatDistribution
            kind = distributions.IntDistribution if axis.is_integer else kind
            ways[name] = kind(axis.low, axis.high, log=axis.is_log)
        else:
            ways[name] = distributions.CategoricalDistribution(axis)
    states, used = optuna.trial.TrialState, 0
    while used <= (space.budget - 1) * rounds:
        # A sampler of each batch, as more trials must not change the first ones.
        state = np.random.SeedSequence([seed, len(study.trials)]).generate_state(1)
        study.sampler = optuna.samplers.TPESampler(seed=int(state[0]))
        count = min(jobs, space.budget - math.ceil(used / rounds))
        batch = [study.ask(ways) for _ in range(count)]
        used += count * rounds
        for after in (half_time, 0) if half_time else (0,):
            values = score([Attempt(t.number, t.params, after) for t in batch])
            pairs, batch = list(zip(batch, values, strict=True)), []
            for trial, value in pairs:
                if value is None:
                    study.tell(trial, state=states.FAIL)
                    continue
                if after == 0:
                    study.tell(trial, value)
                    continue
                if not math.isnan(value):
                    trial.report(value, after)
                if trial.should_prune():
                    study.tell(trial, state=states.PRUNED)
                    used -= rounds - after
                else:
                    batch.append(trial)
