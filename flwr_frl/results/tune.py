"""Grid search: choose settings on validation data, then test the chosen ones once."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from rich.markup import escape
from rich.table import Table

from flwr_frl.common.checkpoint import OTHER_SETTINGS
from flwr_frl.common.settings import Setting, Settings, SettingsError, require
from flwr_frl.common.text import short_name
from flwr_frl.results.output import log_os_errors
from flwr_frl.results.progress import describe
from flwr_frl.results.results import objects_in, read_object, write_json
from flwr_frl.results.seeds import in_folder
from flwr_frl.results.sweep import Outcome, RunGroup, Sweep
from flwr_frl.results.tables import write_tables
from flwr_frl.results.terminal import console

FILE = "tune.json"
# The fraction of the training examples that is held out by default.
VALIDATION_FRACTION = 0.2
# Settings that cannot be chosen by validation accuracy.
FIXED = ("algorithm", "evaluate-on", "output", "resume", "seed", "validation-fraction")

# Values of settings that need validation sets, which the final run does not have.
WITHOUT_VALIDATION: Mapping[str, Setting] = {"patience": 0, "keep-best": False}

# Settings of a point of the grid.
Point = dict[str, Setting]


def points(text: str) -> list[Point]:
    """Parse a grid, ``name=value,value … name=value …``, into its points.

    Raises `SettingsError` if it cannot be parsed.
    """
    axes: dict[str, list[Setting]] = {}
    for part in text.split():
        name, equals, values = part.partition("=")
        if name in axes:
            raise _bad_grid(text, f"{name} is set twice")
        if not (equals and name and values):
            why = f"{part!r} has no name or no value; commas are without spaces"
            raise _bad_grid(text, why)
        if name in FIXED:
            raise _bad_grid(text, f"{name} cannot be tuned")
        axes[name] = [_parse_value(value) for value in values.split(",")]
    if not axes:
        raise _bad_grid(text, "tune needs a setting with values")
    return [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]


def _parse_value(text: str) -> Setting:
    """Parse a value as TOML. Anything else is a string, which needs no quotes."""
    try:
        value: Setting = tomllib.loads(f"value = {text}")["value"]
        return value
    except tomllib.TOMLDecodeError:
        return text


def _bad_grid(text: str, why: str) -> SettingsError:
    return SettingsError(
        f"--grid {text!r} cannot be read: it must be 'name=value,value …' ({why})",
        "grid",
    )


def tune(
    algorithms: Sequence[str],
    grid: Sequence[Point],
    overrides: Settings,
    output: Path,
    sweep: Sweep,
) -> dict[str, dict[str, Any]]:
    """Run all points of a grid, then run and test the best point of each algorithm.

    Points are trained on a part of the training examples and evaluated on the rest
    (``validation-fraction``, 0.2 by default); no test set is used. The point with the
    highest accuracy, or the lowest loss if there are no accuracies, is trained on all
    training examples and tested. The first point wins a tie.

    Parameters
    ----------
    algorithms : sequence of str
        The algorithms. Each is tuned separately.
    grid : sequence of dict
        The points, as `points` returns them.
    overrides : mapping
        Settings of all points. With ``resume``, runs that have a checkpoint continue.
    output : Path
        The output folder, for ``<algorithm>/point-<i>``, ``<algorithm>/test``,
        ``tune.json`` and the tables.
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
    for name, unset in WITHOUT_VALIDATION.items():
        for value in [{**overrides, **point}.get(name, unset) for point in grid]:
            allowed = f"{unset} with tune, whose final run has no validation sets"
            require(value == unset, name, value, allowed)
    fraction = overrides.get("validation-fraction") or VALIDATION_FRACTION
    held_out = {"validation-fraction": fraction, "evaluate-on": "validation"}

    def plan(algorithm: str, settings: Settings, name: str) -> RunGroup:
        place = f"{short_name(algorithm)}/{name}"
        placed = in_folder(settings, str(output), place, [algorithm])
        return sweep.plan([algorithm], placed)

    def plan_test(algorithm: str, point: Point) -> RunGroup:
        final = {**overrides, **point, "validation-fraction": 0.0}
        final["evaluate-on"] = "test"
        try:
            return plan(algorithm, final, "test")
        except SettingsError as error:
            if error.code != OTHER_SETTINGS:
                raise
        # The resumed command had fewer seeds or points.
        text = "%s: another point is picked than before, and its test starts anew"
        log(WARNING, text, algorithm)
        return plan(algorithm, {**final, "resume": ""}, "test")

    # Everything is checked before anything runs.
    planned: dict[str, list[tuple[Point, RunGroup]]] = {}
    for name in algorithms:
        planned[name], distinct = [], []
        for i, point in enumerate(grid):
            runs = plan(name, {**overrides, **point, **held_out}, f"point-{i}")
            # Points that differ only in settings of other algorithms are the same run.
            values = [{**run, "output": "", "resume": ""} for run in runs.settings]
            if values not in distinct:
                distinct.append(values)
                planned[name].append((point, runs))
    tuned: dict[str, dict[str, Any]] = {}
    for name, named_points in planned.items():
        short = short_name(name)
        outcomes = sweep.carry_out([runs for _, runs in named_points], tolerant=True)
        tried = [
            {"settings": point} | _score(outcome, short)
            for (point, _), outcome in zip(named_points, outcomes, strict=True)
        ]
        best = _best(name, tried)
        (test,) = sweep.carry_out([plan_test(name, best)])
        assert not isinstance(test, SettingsError)
        tuned[short] = {
            "validation-fraction": fraction,
            "points": tried,
            "picked": best,
            "test": test[short],
        }
        with log_os_errors(FILE, sweep.lost):
            # Algorithms that were tuned earlier keep their entries.
            earlier = objects_in(read_object(output / FILE))
            write_json(output / FILE, {**earlier, **tuned})
    with log_os_errors("tables", sweep.lost):
        tested = {name: entry["test"] for name, entry in tuned.items()}
        write_tables(output, tested, "test")
    return tuned


def _score(outcome: Outcome, algorithm: str) -> dict[str, Any]:
    # A learning rate that diverges must not end the search.
    if isinstance(outcome, SettingsError):
        return {"failed": str(outcome)}
    name = "accuracy" if "accuracy" in outcome[algorithm] else "loss"
    value = outcome[algorithm].get(name)
    # The summary of a resumed run is read from JSON, with null for such values.
    if value is None or not math.isfinite(value):
        return {"failed": f"there is no finite {name}"}
    return {name: value}


def _best(algorithm: str, tried: Sequence[Mapping[str, Any]]) -> Point:
    scored = [point for point in tried if "failed" not in point]
    if not scored:
        raise SettingsError(
            f"all points of the grid failed with {algorithm}, the first with: "
            f"{tried[0]['failed']}",
            "grid",
        )
    best: Point = max(scored, key=lambda p: p.get("accuracy", -p.get("loss", 0.0)))[
        "settings"
    ]
    return best


def show_points(tuned: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the validation score of each point."""
    table = Table("algorithm", "settings", "validation", "picked")
    for name, entry in tuned.items():
        for point in entry["points"]:
            text = " ".join(f"{n}={v}" for n, v in point["settings"].items())
            score = point.get("failed") or describe(point, "validation")
            picked = "yes" if point["settings"] == entry["picked"] else ""
            table.add_row(name, escape(text), escape(score), picked)
    console().print(table)
