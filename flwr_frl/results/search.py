"""Ranges of settings, and points in them that Optuna proposes, for `tune`."""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_frl.common.files import refuse_links
from flwr_frl.common.settings import Setting, need, reading, require

# Settings of a point.
Point = dict[str, Setting]
# File of a study, in the folder of its algorithm.
STUDY = "study.log"
# Share of a range's length, on its scale, within which a number is at an end.
END = 0.05


class Range(NamedTuple):
    """A range of numbers, with a logarithmic scale from a ratio of 10 on."""

    low: float
    high: float
    is_integer: bool

    @property
    def is_log(self) -> bool:
        """Whether the scale is logarithmic."""
        return 0 < 10 * self.low <= self.high

    def end(self, value: Any) -> str:
        """Return ``"smallest"`` or ``"largest"`` if a number is at that end, or ""."""
        scale = math.log if self.is_log else float
        low, high = scale(self.low), scale(self.high)
        place = (scale(value) - low) / (high - low)
        return "smallest" if place <= END else "largest" if place >= 1 - END else ""


class Ranges(NamedTuple):
    """Settings of which some are chosen in ranges, the others among values.

    Parameters
    ----------
    text : str
        The grid as it was given.
    axes : mapping of str to Range or sequence
        The ranges and values by setting.
    trials : int
        Number of points of each algorithm.
    """

    text: str
    axes: Mapping[str, Range | Sequence[Setting]]
    trials: int

    @property
    def ends(self) -> list[Point]:
        """The points of all first and of all last values, to check the settings."""
        lists = {n: a[:2] if isinstance(a, Range) else a for n, a in self.axes.items()}
        return [{n: each[i] for n, each in lists.items()} for i in (0, -1)]


def search(
    ranges: Ranges,
    score: Callable[[Sequence[Point]], Sequence[float | None]],
    jobs: int,
    folder: Path,
    former: Path | None,
    seed: int,
) -> None:
    """Try points that Optuna's TPE proposes.

    Parameters
    ----------
    ranges : Ranges
        The ranges, and the number of points.
    score : callable
        Tries points and returns their scores, None for those that failed. Higher ones
        are better.
    jobs : int
        Number of points that are tried at once.
    folder : Path
        Folder of the study. If ``former`` has a study, it is resumed, and its points
        are tried first.
    former : Path or None
        Folder of the study to resume, if there is one.
    seed : int
        Seed of the sampler.
    """
    need("optuna", "tune", "tune with ranges")
    import optuna
    from optuna import distributions
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = folder / STUDY
    refuse_links("output", folder, file)
    folder.mkdir(parents=True, exist_ok=True)
    if former is None or not (former / STUDY).is_file():
        file.unlink(missing_ok=True)
    elif former.resolve() != folder.resolve():
        shutil.copyfile(former / STUDY, file)
    with reading(file, "resume"):
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(file))),
            study_name=folder.name,
            direction="maximize",
            load_if_exists=True,
        )
    text = study.user_attrs.get("grid", ranges.text)
    allowed = f"{text!r}, that of the study that is resumed"
    require(text == ranges.text, "grid", ranges.text, allowed)
    study.set_user_attr("grid", text)
    space: dict[str, Any] = {}
    for name, axis in ranges.axes.items():
        if isinstance(axis, Range):
            kind: Any = distributions.FloatDistribution
            kind = distributions.IntDistribution if axis.is_integer else kind
            space[name] = kind(axis.low, axis.high, log=axis.is_log)
        else:
            space[name] = distributions.CategoricalDistribution(axis)
    batch: list[Any] = study.trials
    while batch or len(study.trials) < ranges.trials:
        before, left = len(study.trials), ranges.trials - len(study.trials)
        # A resumed study continues as if it had not been interrupted.
        state = np.random.SeedSequence([seed, before]).generate_state(1)
        study.sampler = optuna.samplers.TPESampler(seed=int(state[0]))
        batch = batch or [study.ask(space) for _ in range(min(jobs, left))]
        for trial, value in zip(batch, score([t.params for t in batch]), strict=True):
            failed = optuna.trial.TrialState.FAIL if value is None else None
            # The finished trials of a resumed study keep their values.
            study.tell(trial.number, value, failed, skip_if_finished=True)
        batch = []
