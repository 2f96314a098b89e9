"""A small grid over named settings: the validation sets pick, the test sets judge."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from flwr_frl.strategies.algorithms import short_name
from flwr_frl.strategies.report.output import said
from flwr_frl.strategies.report.results import write_json
from flwr_frl.strategies.report.seeds import PREFIX, combine
from flwr_frl.strategies.report.tables import write_tables
from flwr_frl.strategies.report.terminal import console
from flwr_frl.task.checkpoint import FILE as CHECKPOINT
from flwr_frl.task.files import refuse_links
from flwr_frl.task.settings import Setting, Settings, SettingsError

FILE = "tune.json"
# Where the settings say nothing.
VALIDATION_FRACTION = 0.2
# What a choice by validation accuracy must not be about.
FIXED = ("algorithm", "evaluate-on", "output", "resume", "seed", "validation-fraction")

Point = dict[str, Setting]
# Checked settings, one mapping for each seed.
Prepared = Sequence[Settings]
# A summary, or why there is none.
Found = Mapping[str, Any] | SettingsError


class Runs(NamedTuple):
    """The runs of a point: of an algorithm, one for each seed, in a folder."""

    algorithm: str
    settings: Prepared
    place: Path


def points(text: str) -> list[Point]:
    """Return the points of a grid, ``name=value,value … name=value …``.

    Raises `SettingsError` if it cannot be read.
    """
    axes: dict[str, list[Setting]] = {}
    for part in text.split():
        name, equals, values = part.partition("=")
        if not equals or not name or not values or name in axes:
            raise _unreadable(text, f"what is {part!r}?")
        if name in FIXED:
            raise _unreadable(text, f"{name} cannot be tuned")
        axes[name] = [_value(value) for value in values.split(",")]
    if not axes:
        raise _unreadable(text, "it names no setting")
    return [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]


def _value(value: str) -> Setting:
    """Return a value as a run config has it; what is no number is a word."""
    try:
        found: Setting = tomllib.loads(f"value = {value}")["value"]
        return found
    except tomllib.TOMLDecodeError:
        return value


def _unreadable(text: str, why: str) -> SettingsError:
    return SettingsError(
        f"--grid {text!r} cannot be read: it must be 'name=value,value …' ({why})"
    )


def tune(
    algorithms: Sequence[str],
    grid: Sequence[Point],
    given: Settings,
    output: Path,
    prepare: Callable[[str, Settings], Prepared],
    carry_out: Callable[[Sequence[Runs]], Sequence[Found]],
) -> dict[str, dict[str, Any]]:
    """Try all points of a grid; run the best of each algorithm once more, and test it.

    A point is trained without ``validation-fraction`` of the training examples (0.2
    where the settings say none) and evaluated on them; nobody looks at a test set. The
    point with the highest accuracy (or lowest loss, where there are no accuracies), the
    first of equals, then trains on all training examples and is tested.

    Parameters
    ----------
    algorithms : sequence of str
        Each is tuned by itself.
    grid : sequence of dict
        The points, as of `points`.
    given : mapping
        What is set for all points; with ``resume``, runs that had begun go on.
    output : Path
        Gets ``<algorithm>/point-<i>``, ``<algorithm>/test``, ``tune.json`` and the
        tables.
    prepare : callable
        Of an algorithm and settings; checks them before anything runs.
    carry_out : callable
        Of the runs of some points; returns what each came to.

    Returns
    -------
    dict
        What ``tune.json`` has of each algorithm: ``points`` with their ``settings`` and
        their ``accuracy`` (or ``loss``), or why they ``failed``; ``picked``; and
        ``test``, the summary.

    Raises
    ------
    SettingsError
        If a setting is bad, or no point of an algorithm could be run.
    """
    if "evaluate-on" in given:
        raise SettingsError(
            f"evaluate-on is {given['evaluate-on']!r}; it must not be set with tune, "
            "which evaluates on validation data and in the end on test data"
        )
    fraction = given.get("validation-fraction") or VALIDATION_FRACTION
    held_out = {"validation-fraction": fraction, "evaluate-on": "validation"}
    prepared: list[tuple[Point, Runs]] = []
    for name in algorithms:
        different: list[Prepared] = []
        for i, point in enumerate(grid):
            place = output / short_name(name) / f"point-{i}"
            own = _placed({**given, **point, **held_out}, place, name)
            runs = prepare(name, own)
            elsewhere = [{**run, "output": "", "resume": ""} for run in runs]
            # What only other algorithms of the command read makes no other run.
            if elsewhere not in different:
                different.append(elsewhere)
                prepared.append((point, Runs(name, runs, place)))
    found: dict[str, dict[str, Any]] = {}
    for algorithm in algorithms:
        own_points = [(p, r) for p, r in prepared if r.algorithm == algorithm]
        scores = map(_score, carry_out([runs for _, runs in own_points]))
        tried = [
            {"settings": point} | score
            for (point, _), score in zip(own_points, scores, strict=True)
        ]
        best = _best(algorithm, tried)
        place = output / short_name(algorithm) / "test"
        own = {**given, **best, "validation-fraction": 0.0, "evaluate-on": "test"}
        runs = prepare(algorithm, _placed(own, place, algorithm))
        (test,) = carry_out([Runs(algorithm, runs, place)])
        if isinstance(test, SettingsError):
            raise test
        found[short_name(algorithm)] = {
            "validation-fraction": fraction,
            "points": tried,
            "picked": best,
            "test": test,
        }
        with said(output / FILE):
            write_json(output / FILE, found)
    with said(f"tables in {output}"):
        write_tables(output, {name: own["test"] for name, own in found.items()}, "test")
    return found


def _placed(settings: Settings, place: Path, algorithm: str) -> Settings:
    """Return settings that write to a place, and go on with what has begun there."""
    refuse_links("output", place.parent, place)
    own = f"{short_name(algorithm)}/{CHECKPOINT}"
    begun = [*place.glob(own), *place.glob(f"{PREFIX}*/{own}")]
    resume = str(place) if settings.get("resume") and begun else ""
    return {**settings, "output": str(place), "resume": resume}


def over_seeds(runs: Runs, found: Sequence[Found]) -> Found:
    """Return the summary over seeds of what each came to; or the first failure."""
    summaries = []
    name = short_name(runs.algorithm)
    for own in found:
        if isinstance(own, SettingsError):
            return own
        summaries.append({name: dict(own)})
    return combine(runs.place, runs.settings, summaries)[name]


def _score(found: Found) -> dict[str, Any]:
    # A step size with which nothing converges is no reason to end here.
    if isinstance(found, SettingsError):
        return {"failed": str(found)}
    name = "accuracy" if "accuracy" in found else "loss"
    return {name: found[name]} if name in found else {"failed": "no evaluation"}


def _best(algorithm: str, tried: Sequence[Mapping[str, Any]]) -> Point:
    scored = [own for own in tried if "failed" not in own]
    if not scored:
        raise SettingsError(
            f"no point of the grid could be run with {algorithm}; the first failed as "
            f"{tried[0]['failed']}"
        )

    def quality(own: Mapping[str, Any]) -> float:
        return float(own["accuracy"] if "accuracy" in own else -own["loss"])

    best: Point = max(scored, key=quality)["settings"]
    return best


def show_points(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what each point came to."""
    table = Table("algorithm", "settings", "validation", "picked")
    for name, own in found.items():
        for point in own["points"]:
            text = " ".join(f"{n}={v}" for n, v in point["settings"].items())
            score = point.get("failed", "")
            if "accuracy" in point:
                score = f"{point['accuracy']:.2%}"
            elif "loss" in point:
                score = f"loss {point['loss']:.4g}"
            picked = "yes" if point["settings"] == own["picked"] else ""
            table.add_row(name, escape(text), escape(score), picked)
    console().print(table)
