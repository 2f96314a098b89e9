"""Grid search: choose settings on validation data, then test the chosen ones once."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flwr_frl.common.settings import Setting, Settings, SettingsError, require
from flwr_frl.common.text import short_name
from flwr_frl.results.output import log_os_errors, refuse_losses
from flwr_frl.results.results import describe, objects_in, read_object, write_json
from flwr_frl.results.sweep import Outcome, RunGroup, Sweep, in_folder
from flwr_frl.results.tables import write_tables

FILE = "tune.json"
# The fraction of the training examples that is held out by default.
VALIDATION_FRACTION = 0.2
# Settings that the search sets itself, or that need validation sets in the final run.
FIXED = (
    *("algorithm", "evaluate-on", "output", "resume", "seed", "validation-fraction"),
    *("patience", "keep-best"),
)

# Settings of a point of the grid.
Point = dict[str, Setting]


def points(text: str) -> list[Point]:
    """Parse a grid, ``name=value,value … name=value …``, into its points.

    Raises `SettingsError` if it cannot be parsed.
    """
    axes: dict[str, list[Setting]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        valid = bool(name and values) and name not in axes and name not in FIXED
        require(valid, "grid", text, f"'name=value,value …', not {part!r}")
        axes[name] = [_parse_value(value) for value in values.split(",")]
    require(bool(axes), "grid", text, "settings with values: 'name=value,value …'")
    return [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]


def _parse_value(text: str) -> Setting:
    """Parse a value as TOML. Anything else is a string, which needs no quotes."""
    try:
        value: Setting = tomllib.loads(f"value = {text}")["value"]
        return value
    except tomllib.TOMLDecodeError:
        return text


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
        The output folder, for ``<algorithm>/point-<i>``, ``<algorithm>/test-<i>``,
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
    fraction = overrides.get("validation-fraction") or VALIDATION_FRACTION
    held_out = {"validation-fraction": fraction, "evaluate-on": "validation"}
    whole: Settings = {"validation-fraction": 0.0, "evaluate-on": "test"}

    def plan(algorithm: str, settings: Settings, name: str) -> RunGroup:
        place = f"{short_name(algorithm)}/{name}"
        placed = in_folder({**overrides, **settings}, str(output), place, [algorithm])
        return sweep.plan([algorithm], placed)

    # Everything is checked before anything runs.
    planned: dict[str, list[RunGroup]] = {}
    for name in algorithms:
        plan(name, {**grid[0], **whole, "resume": ""}, "test-0")
        planned[name] = [
            plan(name, {**point, **held_out}, f"point-{i}")
            for i, point in enumerate(grid)
        ]
    tuned, lost = dict[str, dict[str, Any]](), set[str]()
    for name, groups in planned.items():
        short = short_name(name)
        outcomes = sweep.carry_out(groups, tolerant=True)
        scores = [_score(each, short) for each in outcomes]
        finite = [i for i, score in enumerate(scores) if "failed" not in score]
        why = (
            f"a point that {name} can run; the first failed: {scores[0].get('failed')}"
        )
        require(bool(finite), "grid", list(grid), why)
        best = max(
            finite, key=lambda i: scores[i].get("accuracy", -scores[i].get("loss", 0.0))
        )
        (test,) = sweep.carry_out([plan(name, {**grid[best], **whole}, f"test-{best}")])
        assert not isinstance(test, SettingsError)
        tuned[short] = {
            "validation-fraction": fraction,
            "points": [{"settings": grid[i]} | each for i, each in enumerate(scores)],
            "picked": grid[best],
            "test": test[short],
        }
        with log_os_errors(FILE, lost):
            # Algorithms that were tuned earlier keep their entries.
            earlier = objects_in(read_object(output / FILE))
            write_json(output / FILE, {**earlier, **tuned})
    with log_os_errors("tables", lost):
        tested = {name: entry["test"] for name, entry in tuned.items()}
        write_tables(output, tested, "test")
    refuse_losses(output, lost)
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


def show_points(tuned: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the validation score of each point."""
    table = Table("algorithm", "settings", "validation", "picked")
    for name, entry in tuned.items():
        for point in entry["points"]:
            text = " ".join(f"{n}={v}" for n, v in point["settings"].items())
            score = point.get("failed") or describe(point, "validation")
            picked = "yes" if point["settings"] == entry["picked"] else ""
            table.add_row(name, escape(text), escape(score), picked)
    Console().print(table)
