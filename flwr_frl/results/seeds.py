"""Runs with several seeds: one folder per seed, and a summary over all of them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_frl.common.checkpoint import FILE as CHECKPOINT
from flwr_frl.common.files import refuse_links
from flwr_frl.common.messages import EXAMPLE_EPSILON
from flwr_frl.common.settings import Setting, Settings, SettingsError, require
from flwr_frl.common.text import short_name
from flwr_frl.results.comparison import (
    read_comparable,
    shared_config,
    write_comparison,
)
from flwr_frl.results.results import LATEST, LOST, objects_in
from flwr_frl.results.tables import OVER_SEEDS

PREFIX = "seed-"
# Their mean would understate the privacy loss, or the failure, of some runs.
LARGEST = ("epsilon", EXAMPLE_EPSILON, LOST)
# Entries without a meaningful standard deviation over seeds.
WITHOUT_DEVIATION = (
    *("rounds", "seconds", "bytes", "bits", "accuracy-std-clients", "evaluated"),
    *LARGEST,
    *LATEST,
)


def plan(
    overrides: Settings, count: int, algorithms: Iterable[str], first: int, output: str
) -> list[dict[str, Setting]]:
    """Return the settings of each of several seeds.

    Parameters
    ----------
    overrides : mapping
        Settings of all seeds. With ``resume``, runs that have a checkpoint continue.
    count : int
        The number of seeds, at least 1.
    algorithms : iterable of str
        The algorithms to run.
    first : int
        The first seed.
    output : str
        The output folder of all seeds.

    Returns
    -------
    list of dict
        For each seed ``overrides`` with ``seed``, ``output`` and ``resume``.

    Raises
    ------
    SettingsError
        If ``count`` is too small or the resumed run had other seeds.
    """
    require(count >= 1, "seeds", count, "at least 1")
    seeds = range(first, first + count)
    resume = str(overrides.get("resume", ""))
    if resume:
        _check_resumed(Path(resume), seeds)
    return [
        {**in_folder(overrides, output, f"{PREFIX}{seed}", algorithms), "seed": seed}
        for seed in seeds
    ]


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
    places = (place for run in runs for place in (run, f"{PREFIX}*/{run}"))
    return any(any(folder.glob(place)) for place in places)


def _check_resumed(resume: Path, seeds: range) -> None:
    numbers = [path.name.removeprefix(PREFIX) for path in resume.glob(f"{PREFIX}*")]
    former = sorted(int(number) for number in numbers if number.isdecimal())
    if not former or not set(former) <= set(seeds):
        found = ", ".join(map(str, former)) or "none"
        raise SettingsError(
            f"resume is {str(resume)!r}, which has seeds {found}; expected the output "
            f"of a run with --seeds, of seeds among {seeds[0]} to {seeds[-1]}",
            "resume",
        )


def combine(
    output: Path,
    runs: Sequence[Settings],
    by_seed: Sequence[Mapping[str, Mapping[str, Any]]],
    lost: set[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Write the summary, tables, plots and page over the runs of several seeds.

    They include earlier algorithms that were run with the same settings and all seeds.

    Parameters
    ----------
    output : Path
        The output folder of all seeds.
    runs : sequence of mapping
        The settings of each seed.
    by_seed : sequence of mapping
        The summaries by algorithm of each seed.
    lost : set of str, optional
        Files that cannot be written are added to it.

    Returns
    -------
    dict
        The summary over the seeds of each algorithm in ``by_seed``.
    """
    folders = [Path(str(run["output"])) for run in runs]
    configs = [shared_config(run) for run in runs]
    # The summary in the folder of a seed also has algorithms of earlier commands.
    earlier = (read_comparable(*pair) for pair in zip(folders, configs, strict=True))
    compared = [
        {**objects_in(content["algorithms"]), **seed}
        for content, seed in zip(earlier, by_seed, strict=True)
    ]
    common = [name for name in compared[0] if all(name in seed for seed in compared)]
    of_all = {name: over_seeds([seed[name] for seed in compared]) for name in common}
    content = {
        "algorithms": of_all,
        "config": {**configs[0], "output": str(output)},
        "seeds": [run["seed"] for run in runs],
    }
    write_comparison(output, content, folders, lost)
    return {name: of_all[name] for name in by_seed[0]}


def over_seeds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of an algorithm's summaries over seeds.

    Parameters
    ----------
    summaries : sequence of mapping
        The summary of each seed.

    Returns
    -------
    dict
        The mean of each entry that all summaries have, or the maximum of `LARGEST`;
        with at least two seeds ``NAME-std-seeds``, the sample standard deviation
        (n - 1), except for `WITHOUT_DEVIATION`; ``seeds``, the number of seeds.
    """
    # Values that are not finite are stored as null.
    common = [
        name
        for name in summaries[0]
        if all(other.get(name) is not None for other in summaries)
    ]
    combined: dict[str, Any] = {}
    for name in common:
        values = [summary[name] for summary in summaries]
        same = len(set(map(repr, values))) == 1
        reduce = max if name in LARGEST else np.mean
        combined[name] = values[0] if same else float(reduce(values))
        if name not in WITHOUT_DEVIATION and len(values) > 1:
            combined[name + OVER_SEEDS] = float(np.std(values, ddof=1))
    return {**combined, "seeds": len(summaries)}
