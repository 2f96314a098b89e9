"""Several seeds of the same comparison: one folder a seed, and one table."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_frl.strategies.algorithms import short_name
from flwr_frl.strategies.report.output import said
from flwr_frl.strategies.report.page.document import write_page
from flwr_frl.strategies.report.plot import plot
from flwr_frl.strategies.report.report import OWN
from flwr_frl.strategies.report.results import LATEST, SUMMARY, TIDY, write_json
from flwr_frl.strategies.report.tables import OVER_SEEDS, write_tables
from flwr_frl.strategies.report.tidy import join
from flwr_frl.strategies.server import newcomers
from flwr_frl.task.checkpoint import FILE as CHECKPOINT
from flwr_frl.task.files import refuse_links
from flwr_frl.task.messages import EXAMPLE_EPSILON
from flwr_frl.task.settings import Setting, Settings, SettingsError, require

PREFIX = "seed-"
# What no run of them exceeds; a mean would be less than some run has told.
LARGEST = ("epsilon", EXAMPLE_EPSILON)
# What is no mean over clients, so that a deviation of it says nothing.
COUNTS = (
    *("rounds", "seconds", "bytes", "bits", "accuracy-std-clients"),
    *LARGEST,
    *LATEST,
)


def plan(
    given: Settings, count: int, algorithms: Iterable[str], first: int, output: str
) -> list[dict[str, Setting]]:
    """Return what is set for each of several seeds.

    Parameters
    ----------
    given : mapping
        What is set for all; with ``resume``, the runs that had begun go on.
    count : int
        How many seeds.
    algorithms : iterable of str
        What will run.
    first : int
        The first seed.
    output : str
        The folder of all.

    Returns
    -------
    list of dict
        For each seed, with ``seed``, ``output`` and ``resume``.

    Raises
    ------
    SettingsError
        If there are no seeds, or what is resumed has others.
    """
    require(count >= 1, "seeds", count, "at least 1")
    seeds = range(first, first + count)
    resume = str(given.get("resume", ""))
    if resume:
        _check_resumed(Path(resume), seeds)
    planned = []
    for seed in seeds:
        refuse_links("output", folder(output, seed))
        former = Path(resume) / f"{PREFIX}{seed}"
        begun = any(
            (former / short_name(name) / CHECKPOINT).is_file() for name in algorithms
        )
        own: dict[str, Setting] = {"seed": seed, "output": str(folder(output, seed))}
        own["resume"] = str(former) if resume and begun else ""
        planned.append({**given, **own})
    return planned


def folder(output: str | Path, seed: int) -> Path:
    """Return where a seed's runs are."""
    return Path(output) / f"{PREFIX}{seed}"


def _check_resumed(resume: Path, seeds: range) -> None:
    numbers = [path.name.removeprefix(PREFIX) for path in resume.glob(f"{PREFIX}*")]
    found = sorted(int(number) for number in numbers if number.isdecimal())
    wanted = f"seeds {seeds[0]} to {seeds[-1]}"
    if not found:
        raise SettingsError(
            f"resume is {str(resume)!r}; with --seeds it must be the output of a run "
            f"with --seeds, and there is no folder {PREFIX}{seeds[0]}"
        )
    if other := [seed for seed in found if seed not in seeds]:
        raise SettingsError(
            f"resume: {str(resume)!r} has seed {other[0]}, and this run is of "
            f"{wanted}; --seed and --seeds must have it among theirs"
        )


def combine(
    output: Path,
    runs: Sequence[Settings],
    of_seeds: Sequence[Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Write the summary, tables, plot and tidy file of several seeds' runs.

    Parameters
    ----------
    output : Path
        The folder of all.
    runs : sequence of mapping
        Each seed's settings.
    of_seeds : sequence of dict
        Each seed's summaries by algorithm.

    Returns
    -------
    dict
        Each algorithm's summary.
    """
    folders = [Path(str(run["output"])) for run in runs]
    names = list(of_seeds[0])
    summaries = {n: over_seeds([own[n] for own in of_seeds]) for n in names}
    config = {n: v for n, v in runs[0].items() if n not in OWN}
    whole = {
        "algorithms": summaries,
        "config": {**config, "output": str(output)},
        "seeds": [run["seed"] for run in runs],
    }
    evaluated_on = str(config["evaluate-on"])
    with said(f"what {output} has of all seeds together is"):
        write_json(output / SUMMARY, whole)
        join(output / TIDY, (place / n / TIDY for place in folders for n in names))
        write_tables(output, summaries, evaluated_on)
        plot(output, names, folders, evaluated_on)
        newcomers.plot(output, names, folders)
        write_page(output)
    return summaries


def over_seeds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of one algorithm's summaries over seeds.

    ``NAME-std-seeds``, ``accuracy-std-seeds`` say, is the standard deviation of a mean
    as of a sample (n − 1), of two seeds and more; ``seeds`` is how many there are. An ε
    is the largest of them. What not all of them have is left out.
    """
    # What is not finite is written as null.
    common = [
        name
        for name in summaries[0]
        if all(other.get(name) is not None for other in summaries)
    ]
    found: dict[str, Any] = {}
    for name in common:
        values = [summary[name] for summary in summaries]
        same = len(set(map(repr, values))) == 1
        combined = max if name in LARGEST else np.mean
        found[name] = values[0] if same else float(combined(values))
        if name not in COUNTS and len(values) > 1:
            found[name + OVER_SEEDS] = float(np.std(values, ddof=1))
    return {**found, "seeds": len(summaries)}
