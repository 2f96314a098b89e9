"""Runs of a command: points of a grid × algorithms × seeds, possibly in parallel."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_frl.common.checkpoint import FILE as CHECKPOINT
from flwr_frl.common.files import refuse_links
from flwr_frl.common.messages import EXAMPLE_EPSILON
from flwr_frl.common.settings import (
    Setting,
    Settings,
    SettingsError,
    converted,
    defaults,
    require,
)
from flwr_frl.common.text import short_name
from flwr_frl.results.output import archive_run, refuse_losses
from flwr_frl.results.parallel import run_parallel
from flwr_frl.results.report import (
    read_comparable,
    shared_config,
    write_comparison,
)
from flwr_frl.results.results import LATEST, LOST, failure, objects_in
from flwr_frl.results.tables import OVER_SEEDS

# The folder of a seed is named by this prefix and the seed.
PREFIX = "seed-"
# Their mean would understate the privacy loss, or the failure, of some runs.
LARGEST = ("epsilon", EXAMPLE_EPSILON, LOST)
# Entries without a meaningful standard deviation over seeds.
WITHOUT_DEVIATION = (
    *("rounds", "seconds", "bytes", "bits", "accuracy-std-clients", "evaluated"),
    *LARGEST,
    *LATEST,
)
# Checks the settings of some algorithms and returns all of them.
Check = Callable[[Sequence[str], Settings], Settings]
# Runs an algorithm with checked settings and returns its summary.
RunOne = Callable[[str, Settings], dict[str, Any]]
# The summaries of a group by algorithm, or why there are none.
Outcome = Mapping[str, Any] | SettingsError


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
            require(self.count >= 1, "seeds", self.count, "at least 1")
            default = defaults()["seed"]
            first = int(converted("seed", given.get("seed", default), default))
            planned = [
                in_folder(given, output, f"{PREFIX}{seed}", algorithms) | {"seed": seed}
                for seed in range(first, first + self.count)
            ]
            former = given.get("resume", "")
            begun = not former or any(each["resume"] for each in planned)
            require(begun, "resume", former, "the output of a run of one of the seeds")
        checked = [self.check(algorithms, each) for each in planned]
        return RunGroup(algorithms, checked, Path(output))

    def carry_out(
        self, groups: Sequence[RunGroup], tolerant: bool = False
    ) -> list[Outcome]:
        """Make the runs of some groups and return the outcome of each group.

        Earlier runs are archived before the first run starts. If the command is
        interrupted, its folders therefore hold only runs of this command.

        Parameters
        ----------
        groups : sequence of RunGroup
            The groups.
        tolerant : bool, default False
            If True, a failed run's error is the outcome of its group instead of being
            raised.
        """
        # Read-only settings cannot be sent to another process.
        planned = [
            (self.run, name, dict(settings), tolerant)
            for group in groups
            for settings in group.settings
            for name in group.algorithms
        ]
        for _, name, settings, _ in planned:
            if not settings["resume"]:
                archive_run(Path(str(settings["output"])), short_name(name))
        summaries = iter(run_parallel(_summary, planned, self.jobs))
        return [self._outcome(group, summaries) for group in groups]

    def _outcome(self, group: RunGroup, summaries: Iterator[Any]) -> Outcome:
        names = [short_name(name) for name in group.algorithms]
        by_seed = [{name: next(summaries) for name in names} for _ in group.settings]
        for summary in [summary for seed in by_seed for summary in seed.values()]:
            if isinstance(summary, SettingsError):
                return summary
        if self.count is None:
            return by_seed[0]
        return combine(group.folder, group.settings, by_seed)


def _summary(
    run: RunOne, algorithm: str, settings: Settings, tolerant: bool
) -> dict[str, Any] | SettingsError:
    try:
        summary = run(algorithm, settings)
        if tolerant and (why := failure(short_name(algorithm), summary)):
            return SettingsError(why, LOST)
        return summary
    except SettingsError as error:
        if not tolerant:
            raise
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
    places = (place for run in runs for place in (run, f"{PREFIX}*/{run}"))
    return any(any(folder.glob(place)) for place in places)


def combine(
    output: Path,
    runs: Sequence[Settings],
    by_seed: Sequence[Mapping[str, Mapping[str, Any]]],
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
    refuse_losses(output, write_comparison(output, content, folders))
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
    combined: dict[str, Any] = {}
    for name in summaries[0]:
        values: list[Any] = [summary.get(name) for summary in summaries]
        # Values that are not finite are stored as null.
        if None in values:
            continue
        same = len(set(map(repr, values))) == 1
        reduce = max if name in LARGEST else np.mean
        combined[name] = values[0] if same else float(reduce(values))
        if name not in WITHOUT_DEVIATION and len(values) > 1:
            combined[name + OVER_SEEDS] = float(np.std(values, ddof=1))
    return {**combined, "seeds": len(summaries)}
