"""Runs of a command: points of a grid × algorithms × seeds, possibly in parallel.

`tune` chooses settings on validation data and tests the chosen ones once.
"""

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from flwr_frl.common.checkpoint import FILE as CHECKPOINT
from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.files import refuse_links
from flwr_frl.common.settings import Setting, Settings, converted, defaults
from flwr_frl.common.text import short_name
from flwr_frl.results.comparison import write_comparison
from flwr_frl.results.output import archive_run
from flwr_frl.results.processes import run_parallel
from flwr_frl.results.results import (
    SUMMARY,
    failure,
    folder_of,
    over_seeds,
    read_object,
    write_json,
)

TUNED = "tune.json"
# Settings that `tune` sets itself, or that need validation sets in the final run.
FIXED = ("algorithm", "evaluate-on", "output", "resume", "seed", "validation-fraction")
# The fraction of the training examples that is held out by default.
VALIDATION_FRACTION = 0.2
# Settings that `tune` tries.
Point = dict[str, Setting]
# Checks the settings of some algorithms and returns all of them.
Check = Callable[[Sequence[str], Settings], Settings]
# Runs an algorithm with checked settings and returns its summary.
RunOne = Callable[[str, Settings], dict[str, Any]]
# The summary of each algorithm of a group, or why it has none.
Outcome = Mapping[str, Mapping[str, Any] | SettingsError]


class RunGroup(NamedTuple):
    """Runs of some algorithms with the same settings and different seeds.

    Parameters
    ----------
    algorithms : sequence of str
        The algorithms.
    settings : sequence of mapping
        The checked settings of each seed.
    folder : Path
        The output folder of all seeds.
    """

    algorithms: Sequence[str]
    settings: Sequence[Settings]
    folder: Path


@dataclass(frozen=True)
class Sweep:
    """Make groups of runs: for some seeds, in parallel.

    Parameters
    ----------
    check : callable
        Checks the settings of some algorithms and returns all of them.
    run : callable
        Runs an algorithm and returns its summary; a picklable function if runs are
        parallel.
    count : int, optional
        The number of seeds. By default each run is made once, directly in the output
        folder.
    jobs : int, default 1
        The number of parallel runs.
    """

    check: Check
    run: RunOne
    count: int | None = None
    jobs: int = 1

    def plan(self, algorithms: Sequence[str], given: Settings) -> RunGroup:
        """Return runs of algorithms with checked settings, for each seed.

        ``given`` has the settings that are not defaults, and ``output``. With
        ``resume``, runs that have a checkpoint continue.
        """
        output, planned = str(given["output"]), [given]
        if self.count is not None:
            valid = isinstance(self.count, int) and self.count >= 1
            require(valid, "seeds", self.count, "an integer, at least 1")
            default = defaults()["seed"]
            first = int(converted("seed", given.get("seed", default), default))
            planned = [
                in_folder(given, output, folder_of(seed), algorithms) | {"seed": seed}
                for seed in range(first, first + self.count)
            ]
            former = given.get("resume", "")
            begun = not former or any(each["resume"] for each in planned)
            require(begun, "resume", former, "the output of a run of one of the seeds")
        checked = [self.check(algorithms, each) for each in planned]
        return RunGroup(algorithms, checked, Path(output))

    def carry_out(self, groups: Sequence[RunGroup]) -> list[Outcome]:
        """Make the runs of some groups and return the outcome of each group.

        Earlier runs are archived before the first run starts. If the command is
        interrupted, its folders therefore hold only runs of this command. A run that
        fails does not end the others; its error is the outcome of its algorithm.
        """
        planned = [
            (self.run, name, settings)
            for group in groups
            for settings in group.settings
            for name in group.algorithms
        ]
        for _, name, settings in planned:
            if not settings["resume"]:
                archive_run(Path(str(settings["output"])), short_name(name))
        summaries = iter(run_parallel(_summary, planned, self.jobs))
        return [self._outcome(group, summaries) for group in groups]

    def _outcome(self, group: RunGroup, summaries: Iterator[Any]) -> Outcome:
        names = [short_name(name) for name in group.algorithms]
        by_seed = [{name: next(summaries) for name in names} for _ in group.settings]
        outcome: dict[str, Any] = by_seed[0]
        if self.count is not None:
            seeds = [int(each["seed"]) for each in group.settings]
            outcome = combine(group.folder, seeds)
        for seed in by_seed:
            outcome |= {n: e for n, e in seed.items() if isinstance(e, SettingsError)}
        return {name: outcome[name] for name in names}


def _summary(
    run: RunOne, algorithm: str, settings: Settings
) -> dict[str, Any] | SettingsError:
    try:
        return run(algorithm, settings)
    except SettingsError as error:
        return error


def in_folder(
    settings: Settings, output: str, name: str, algorithms: Iterable[str]
) -> dict[str, Setting]:
    """Return the settings of runs in the folder ``name`` of ``output``.

    Runs that have begun in the folder of the same name in ``resume`` continue.
    """
    folder, resume = Path(output, name), str(settings.get("resume", ""))
    below = [Path(output, parent) for parent in Path(name).parents if parent.name]
    refuse_links("output", *below, folder)
    begun = resume and have_begun(Path(resume, name), algorithms)
    former = str(Path(resume, name)) if begun else ""
    return {**settings, "output": str(folder), "resume": former}


def have_begun(folder: Path, algorithms: Iterable[str]) -> bool:
    """Return True if a run of one of the algorithms, of any seed, has a checkpoint."""
    runs = (f"{short_name(name)}/{CHECKPOINT}" for name in algorithms)
    places = (place for run in runs for place in (run, f"{folder_of('*')}/{run}"))
    return any(any(folder.glob(place)) for place in places)


def combine(output: Path, seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Write the summary, the plot and the page over the runs of several seeds.

    They include algorithms of earlier commands, which were run with the same settings
    and all seeds.

    Parameters
    ----------
    output : Path
        The output folder of all seeds.
    seeds : sequence of int
        The seeds.

    Returns
    -------
    dict
        The summary over the seeds of each algorithm.
    """
    contents = [read_object(output / folder_of(seed) / SUMMARY) for seed in seeds]
    compared = [content.get("algorithms", {}) for content in contents]
    common = [name for name in compared[0] if all(name in seed for seed in compared)]
    if not common:
        return {}
    of_all = {name: over_seeds([seed[name] for seed in compared]) for name in common}
    config = {**contents[0]["config"], "output": str(output)}
    content = {"algorithms": of_all, "config": config, "seeds": list(seeds)}
    write_comparison(output, content)
    return of_all


def points_of(text: str) -> list[Point]:
    """Return all combinations of a grid, ``name=value,value … name=value,value …``.

    Raises `SettingsError` if the grid cannot be parsed.
    """
    axes: dict[str, list[Setting]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        valid = bool(name and values) and name not in axes and name not in FIXED
        require(valid, "grid", text, f"'name=value,value …', not {part!r}")
        axes[name] = [_parse_value(value) for value in values.split(",")]
    require(bool(axes), "grid", text, "settings with values: 'name=value,value …'")
    every = product(*axes.values())
    return [dict(zip(axes, chosen, strict=True)) for chosen in every]


def _parse_value(text: str) -> Setting:
    """Parse a value as TOML. Anything else is a string, which needs no quotes."""
    try:
        value: Setting = tomllib.loads(f"value = {text}")["value"]
        return value
    except tomllib.TOMLDecodeError:
        return text


def tune(
    algorithms: Sequence[str],
    points: Sequence[Point],
    overrides: Settings,
    output: Path,
    sweep: Sweep,
) -> dict[str, dict[str, Any]]:
    """Try points, then run and test the best point of each algorithm.

    Points are trained on a part of the training examples and evaluated on the rest
    (``validation-fraction``, 0.2 by default); no test set is used. The point with the
    highest accuracy, or the lowest loss if there are no accuracies, is trained on all
    training examples and tested. The first point wins a tie.

    Parameters
    ----------
    algorithms : sequence of str
        The algorithms. Each is tuned separately.
    points : sequence of dict
        The settings to choose from.
    overrides : mapping
        Settings of all points. With ``resume``, runs that have a checkpoint continue.
    output : Path
        The output folder, for ``<algorithm>/point-<i>``, ``<algorithm>/test-<i>``
        and ``tune.json``.
    sweep : Sweep
        Makes the runs.

    Returns
    -------
    dict
        The content of ``tune.json``, by algorithm: ``points`` with their ``settings``
        and their ``accuracy`` or ``loss``, or why they ``failed``; the settings
        ``picked``; and ``test``, the summary.

    Raises
    ------
    SettingsError
        If a setting is invalid or all points of an algorithm failed.
    """
    allowed = "unset with tune, which evaluates on validation and then on test data"
    chosen = overrides.get("evaluate-on")
    require(chosen is None, "evaluate-on", chosen, allowed)
    fraction = overrides.get("validation-fraction") or VALIDATION_FRACTION
    held_out = {"validation-fraction": fraction, "evaluate-on": "validation"}
    whole: Settings = {"validation-fraction": 0.0, "evaluate-on": "test"}

    def plan(algorithm: str, settings: Settings, name: str) -> RunGroup:
        place = f"{short_name(algorithm)}/{name}"
        placed = in_folder({**overrides, **settings}, str(output), place, [algorithm])
        return sweep.plan([algorithm], placed)

    # Everything is checked before anything runs.
    planned = dict[str, list[RunGroup]]()
    for name in algorithms:
        plan(name, {**points[0], **whole, "resume": ""}, "test-0")
        planned[name] = [
            plan(name, {**point, **held_out}, f"point-{i}")
            for i, point in enumerate(points)
        ]

    def objective(score: Mapping[str, float]) -> float:
        return score.get("accuracy", -score.get("loss", 0.0))

    tuned = dict[str, dict[str, Any]]()
    for name, groups in planned.items():
        short = short_name(name)
        scores = [_score(short, each[short]) for each in sweep.carry_out(groups)]
        valid = [i for i, score in enumerate(scores) if "failed" not in score]
        why = f"a point that {name} can run; first failure: {scores[0].get('failed')}"
        require(bool(valid), "grid", points, why)
        best = max(valid, key=lambda i: objective(scores[i]))
        group = plan(name, {**points[best], **whole}, f"test-{best}")
        (outcome,) = sweep.carry_out([group])
        if isinstance(test := outcome[short], SettingsError):
            raise test
        tried = zip(points, scores, strict=True)
        tuned[short] = {
            "validation-fraction": fraction,
            "points": [{"settings": point} | score for point, score in tried],
            "picked": points[best],
            "test": test,
        }
        # Algorithms that were tuned earlier keep their entries.
        write_json(output / TUNED, {**read_object(output / TUNED), **tuned})
    return tuned


def _score(
    algorithm: str, summary: Mapping[str, Any] | SettingsError
) -> dict[str, Any]:
    # A learning rate that diverges must not end the search.
    if isinstance(summary, SettingsError):
        return {"failed": str(summary)}
    if why := failure(algorithm, summary):
        return {"failed": why}
    name = "accuracy" if "accuracy" in summary else "loss"
    value = summary.get(name)
    # The summary of a resumed run is read from JSON, with null for such values.
    if value is None or not math.isfinite(value):
        return {"failed": f"there is no finite {name}"}
    return {name: value}
