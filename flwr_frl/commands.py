"""The commands of the command line: compare algorithms, or tune their settings."""

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.common.checkpoint import FILE as CHECKPOINT
from flwr_frl.common.settings import (
    Settings,
    SettingsError,
    converted,
    defaults,
    expand_home,
    require,
)
from flwr_frl.common.text import short_name
from flwr_frl.results import seeds, tune
from flwr_frl.results.output import archive_run, locked
from flwr_frl.results.page.serving import served_for
from flwr_frl.results.parallel import run_parallel
from flwr_frl.results.results import (
    LOST,
    NOT_WRITTEN,
    SUMMARY,
    failure,
    is_written,
    not_written,
)
from flwr_frl.results.tables import show
from flwr_frl.results.terminal import console
from flwr_frl.results.tune import RunGroup
from flwr_frl.running import check, read_by, run

DEFAULT_ALGORITHMS = ("fedavg", "fedrep", "flute")


@dataclass(frozen=True)
class Runner:
    """Make the runs of a command: with a backend, for some seeds, in parallel.

    Parameters
    ----------
    backend : {"auto", "ray", "inline"}
        The backend of each run.
    count : int, optional
        The number of seeds. By default each run is made once, directly in the output
        folder.
    jobs : int
        The number of parallel runs.

    Attributes
    ----------
    lost : set of str
        Files that could not be written.
    """

    backend: str
    count: int | None
    jobs: int
    lost: set[str] = field(default_factory=set, init=False)

    def prepare(self, algorithms: Sequence[str], given: Settings) -> RunGroup:
        """Return runs of algorithms with checked settings, for each seed."""
        output, logged = output_of(given), set[str]()
        planned: list[Any] = [given]
        if self.count is not None:
            default = defaults()["seed"]
            first = int(converted("seed", given.get("seed", default), default))
            planned = seeds.plan(given, self.count, algorithms, first, output)
        checked = [check(algorithms, each, self.backend, logged) for each in planned]
        return RunGroup(tuple(algorithms), checked, Path(output))

    def carry_out(
        self, groups: Sequence[RunGroup], tolerant: bool = False
    ) -> list[tune.Outcome]:
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
        planned = [
            (name, settings, self.backend, tolerant)
            for group in groups
            for settings in group.settings
            for name in group.algorithms
        ]
        for algorithm, settings, *_ in planned:
            output, name = Path(str(settings["output"])), short_name(algorithm)
            if not settings["resume"] and (output / name / CHECKPOINT).is_file():
                with locked(output / name):
                    archive_run(output, name)
        summaries = iter(run_parallel(_summary, planned, self.jobs))
        return [self._outcome(group, summaries) for group in groups]

    def _outcome(self, group: RunGroup, summaries: Any) -> tune.Outcome:
        names = [short_name(name) for name in group.algorithms]
        by_seed = [{n: next(summaries) for n in names} for _ in group.settings]
        of_all = [summary for of_seed in by_seed for summary in of_seed.values()]
        if failed := [one for one in of_all if isinstance(one, SettingsError)]:
            return failed[0]
        for summary in of_all:
            self.lost.update(summary.pop(NOT_WRITTEN, ()))
        if self.count is None:
            return by_seed[0]
        return seeds.combine(group.folder, group.settings, by_seed, self.lost)


def _summary(
    algorithm: str, settings: Settings, backend: str, tolerant: bool
) -> dict[str, Any] | SettingsError:
    try:
        summary = run(algorithm, settings, backend).summary
        if tolerant and (why := failure(short_name(algorithm), summary)):
            return SettingsError(why, LOST)
        return summary
    except SettingsError as error:
        if not tolerant:
            raise
        return error


def output_of(given: Settings) -> str:
    """Return the output folder, by default that of the resumed run, if any."""
    return str(given.get("output", given.get("resume") or defaults()["output"]))


def execute(namespace: Namespace, overrides: Settings) -> int:
    """Make the runs that a command line asks for, and show their results.

    Parameters
    ----------
    namespace : Namespace
        The arguments.
    overrides : mapping
        The settings among them.

    Returns
    -------
    int
        0 on success, 1 if results could not be written, 3 if a run lost most replies of
        its last rounds, 130 if interrupted.

    Raises
    ------
    SettingsError
        If something is invalid.
    """
    if not namespace.verbose:
        logging.getLogger("flwr").setLevel(WARNING)
    backend, jobs, grid = namespace.backend, namespace.jobs, namespace.grid
    require(jobs >= 1, "jobs", jobs, "at least 1")
    allowed = "1 with ray, which uses all cores for each run; set --backend inline"
    require(jobs == 1 or backend != "ray", "jobs", jobs, allowed)
    runner = Runner("inline" if jobs > 1 else backend, namespace.seeds, jobs)
    overrides = expand_home(overrides)
    names, output = list(dict.fromkeys(namespace.algorithms)), output_of(overrides)
    tuning = names[:1] == ["tune"]
    allowed = "'tune' before the algorithms, as in: tune fedrep --grid …"
    require(tuning or not grid, "grid", grid, allowed)
    algorithms, chosen = names[tuning:], overrides.get("algorithm")
    if algorithms and chosen not in (None, *algorithms):
        text = "algorithm=%s does nothing: the command names %s"
        log(WARNING, text, chosen, ", ".join(algorithms))
    algorithms = algorithms or ([str(chosen)] if chosen else list(DEFAULT_ALGORITHMS))
    summaries: Mapping[str, Any]
    try:
        if tuning:
            file, evaluated_on = tune.FILE, "test"
            summaries = _tune(algorithms, grid, overrides, runner)
        else:
            group = runner.prepare(algorithms, overrides)
            file, evaluated_on = SUMMARY, str(group.settings[0]["evaluate-on"])
            with served_for({**group.settings[0], "output": output}):
                (outcome,) = runner.carry_out([group])
            assert not isinstance(outcome, SettingsError)
            summaries = outcome
    except KeyboardInterrupt:
        hint = f"; continue with --run-config 'resume=\"{output}\"'"
        begun = tuning or seeds.have_begun(Path(output), algorithms)
        print(f"interrupted{hint if begun else ''}", file=sys.stderr)
        return 130
    show(summaries, evaluated_on)
    if not is_written(Path(output).resolve() / file, summaries):
        runner.lost.add(file)
    if runner.lost:
        print(f"error: {not_written(output, runner.lost)}", file=sys.stderr)
        return 1
    files = "metrics, clients, summary, tables and plot"
    if tuning:
        files = f"{tune.FILE} and tables"
    console().print(f"{files}: {output}", soft_wrap=True, markup=False)
    reasons = [failure(name, summary) for name, summary in summaries.items()]
    for reason in filter(None, reasons):
        print(f"error: {reason}", file=sys.stderr)
    return 3 if any(reasons) else 0


def _tune(
    algorithms: Sequence[str], grid: str, overrides: Settings, runner: Runner
) -> dict[str, Any]:
    """Tune algorithms on a grid and return the summaries of the best points."""
    former, output = str(overrides.get("resume", "")), output_of(overrides)
    exists = not former or Path(former).is_dir()
    require(exists, "resume", former, "a folder of results")

    def prepare(name: str, settings: Settings) -> RunGroup:
        return runner.prepare([name], read_by(name, algorithms, settings))

    with served_for({**defaults(), **overrides, "output": output}):
        points, folder = tune.points(grid), Path(output).resolve()
        tuned = tune.tune(
            algorithms, points, overrides, folder, prepare, runner.carry_out
        )
    tune.show_points(tuned)
    return {name: entry["test"] for name, entry in tuned.items()}
