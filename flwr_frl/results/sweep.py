"""Runs of a command: points of a grid × algorithms × seeds, possibly in parallel."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flwr_frl.common.settings import Settings, SettingsError, converted, defaults
from flwr_frl.common.text import short_name
from flwr_frl.results import seeds
from flwr_frl.results.output import archive_run
from flwr_frl.results.parallel import run_parallel
from flwr_frl.results.results import LOST, NOT_WRITTEN, failure

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

    Attributes
    ----------
    lost : set of str
        Files that could not be written.
    """

    check: Check
    run: RunOne
    count: int | None = None
    jobs: int = 1
    lost: set[str] = field(default_factory=set, init=False)

    def plan(self, algorithms: Sequence[str], given: Settings) -> RunGroup:
        """Return runs of algorithms with checked settings, for each seed.

        ``given`` has the settings that are not defaults, and ``output``.
        """
        output = str(given["output"])
        planned: Sequence[Settings] = [given]
        if self.count is not None:
            default = defaults()["seed"]
            first = int(converted("seed", given.get("seed", default), default))
            planned = seeds.plan(given, self.count, algorithms, first, output)
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
            self.lost.update(summary.pop(NOT_WRITTEN, ()))
        if self.count is None:
            return by_seed[0]
        return seeds.combine(group.folder, group.settings, by_seed, self.lost)


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
