"""Speed models: the computation time of each simulated client in a round.

SRPFL, section 5 and appendix C.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from flwr_frl.common.settings import (
    Checked,
    Settings,
    SettingsError,
    build,
    setting,
    unknown,
)

Times = npt.NDArray[np.float64]

FAST_MEAN, STRAGGLER_MEAN = 0.1, 10.0
# Number of draws from which expected arrival times are estimated.
DRAWS = 1000


class SpeedModel:
    """Computation times of M clients, in the order of their names.

    Parameters
    ----------
    name : str
        As `SpeedSettings.speed_model`.
    num_clients : int
        Number of clients M.
    seed, straggler_fraction, redraw
        As in `SpeedSettings`.

    Raises
    ------
    SettingsError
        If the model or file is unknown, or the file has a negative time or too few.
    """

    def __init__(
        self,
        name: str,
        num_clients: int,
        seed: int = 0,
        straggler_fraction: float = 0.1,
        redraw: bool = False,
    ) -> None:
        self.name, self.num_clients, self.seed = name, num_clients, seed
        self.redraw = redraw
        self.num_stragglers = round(straggler_fraction * num_clients)
        self._listed: Times | None = None
        if name not in MODELS:
            if not Path(name).is_file():
                known = ("none", *MODELS)
                raise unknown("speed-model", name, known, others="the path of a file")
            self._listed = read_times(Path(name), num_clients)

    def times(self, server_round: int) -> Times:
        """Return each client's time in a round (from 1), in the model's unit."""
        if self._listed is not None:
            return self._listed
        once = np.random.default_rng([self.seed, 0x59EED])
        each = np.random.default_rng([self.seed, 0x59EED, server_round])
        return MODELS[self.name](self, once, each)

    def expected_arrivals(self, sampled: int) -> Times:
        """Return E[T_(n)], when the n-th of N sampled clients is done, for n = 1 … N.

        Estimated by the mean over 1,000 rounds.
        """
        rng = np.random.default_rng([self.seed, 0xA221])
        total = np.zeros(sampled)
        for server_round in range(1, DRAWS + 1):
            chosen = rng.choice(self.num_clients, sampled, replace=False)
            total += np.sort(self.times(server_round)[chosen])
        return total / DRAWS


def _groups(model: SpeedModel, once: Generator, each: Generator) -> Times:
    means = np.full(model.num_clients, FAST_MEAN)
    means[model.num_clients - model.num_stragglers :] = STRAGGLER_MEAN
    return (each if model.redraw else once).exponential(means)


def _dynamic(model: SpeedModel, once: Generator, each: Generator) -> Times:
    rates = once.uniform(1 / model.num_clients, 1.0, model.num_clients)
    return each.exponential(1 / rates)


def _fixed(model: SpeedModel, once: Generator, each: Generator) -> Times:
    return once.exponential(1.0, model.num_clients)


# Functions of a model, a generator with the same seed in all rounds, and one with a
# different seed in each.
MODELS: dict[str, Callable[[SpeedModel, Generator, Generator], Times]] = {
    "fixed": _fixed,
    "dynamic": _dynamic,
    "groups": _groups,
    "correlated": lambda *arguments: np.sort(_fixed(*arguments)),
}


def read_times(path: Path, num_clients: int) -> Times:
    """Read a time for each client, one number per line; further lines are ignored.

    Raises `SettingsError` if a line is not a number, a time is negative or not finite,
    or there are too few.
    """
    try:
        lines = path.read_text(encoding="utf-8").split()[:num_clients]
        times = np.array([float(line) for line in lines])
        wrong = [line for line in lines if not 0 <= float(line) < math.inf]
    # Undecodable bytes are a ValueError as well.
    except (OSError, ValueError) as error:
        times, wrong = np.zeros(0), [str(error)]
    if wrong or len(times) < num_clients:
        reason = wrong[0] if wrong else f"there are {len(times)}"
        raise SettingsError(
            f"speed-model {str(path)!r}: {reason}; expected a finite number of at "
            f"least 0 a line, for each of {num_clients} clients",
            "speed-model",
        )
    return times


NO_SPEEDS = {"speed-model": ("none",)}


@dataclass(frozen=True)
class SpeedSettings(Checked):
    """Speeds of simulated clients (SRPFL, section 5 and appendix C).

    Parameters
    ----------
    speed_model : str, default "none"
        ``none``: no simulated speeds. ``fixed``: T_i ~ Exp(1), drawn once.
        ``dynamic``: λ_i ~ U[1/M, 1] drawn once, T_i ~ Exp(λ_i) in every round.
        ``groups``: T_i ~ Exp with mean 0.1, or mean 10 for the stragglers, who are the
        last clients, drawn once. ``correlated``: as ``fixed``, but sorted, so that with
        the partition ``class-groups`` speed and labels go together. Or the path of a
        file with one time per line, for each client.
    straggler_fraction : float, default 0.1
        Share of stragglers in ``groups``.
    redraw_speeds : bool, default False
        True if ``groups`` draws new times in every round instead of once.
    communication_time : float, default 0
        Additional time of each round, in the unit of the speeds.
    seed : int, default 0
        Fixes all times.
    """

    speed_model: str = setting(
        "none", form="none, fixed, dynamic, groups, correlated or a file"
    )
    straggler_fraction: float = setting(0.1, ge=0, le=1, unused_if=NO_SPEEDS)
    redraw_speeds: bool = setting(False, unused_if=NO_SPEEDS)
    communication_time: float = setting(0.0, ge=0, unused_if=NO_SPEEDS)
    seed: int = setting(0, ge=0)


def speed_model(settings: Settings, num_clients: int) -> SpeedModel | None:
    """Return the speed model of the settings (`SpeedSettings`); None for ``none``."""
    speeds = build(SpeedSettings, settings)
    if speeds.speed_model == "none":
        return None
    details = speeds.seed, speeds.straggler_fraction, speeds.redraw_speeds
    return SpeedModel(speeds.speed_model, num_clients, *details)
