"""Compare methods by the runs in results folders: one row a method, and paired tests.

`compare` reads the journals of finished runs. The methods of a task are compared with
the best one, or with a baseline, on the same clients and on the same seeds; with
several tasks their mean ranks are compared as well.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from flwr_frl.common.messages import NUM_EXAMPLES, NUM_TEST_EXAMPLES, TESTED_MODEL
from flwr_frl.common.settings import Settings, require
from flwr_frl.common.text import short_name
from flwr_frl.results.results import (
    CLIENTS,
    METRICS,
    PROTOCOLS,
    SUMMARIZED,
    SUMMARY,
    VALIDATED,
    RunResult,
    failure,
    folder_of,
    is_number,
    over_seeds,
    quality,
    read_object,
    read_rows,
    run_result,
    task_title,
    tested_once,
)
from flwr_frl.results.statistics import (
    LEVEL,
    PairedTest,
    Ranking,
    holm,
    paired_test,
    rank,
)
from flwr_frl.results.tables import DETAILS, cells, formatted, legend, terminal


@dataclass(frozen=True)
class MethodResult:
    """The results of a method on a task, over all seeds.

    Parameters
    ----------
    task : str
        The task; with several results folders of one task, also the folder's name.
    method : str
        The algorithm; if it ran in several folders, also the folder's name.
    metric : str
        The metric by which methods are compared, such as ``accuracy``.
    summary : mapping
        The results over seeds, with the entries of ``summary.json``.
    clients : mapping
        Each client's result, a mean over its seeds; empty if clients do not report the
        metric.
    seeds : mapping
        The result of each seed.
    reference : bool
        Whether the other methods are tested against this one.
    on_clients, on_seeds : PairedTest or None
        The test against the reference with clients and with seeds as pairs, corrected
        by Holm over the methods of the task; None for the reference.
    folders : tuple of Path
        The folders of the runs.
    """

    task: str
    method: str
    metric: str
    summary: Mapping[str, Any]
    clients: Mapping[str, float]
    seeds: Mapping[Any, float]
    reference: bool = False
    on_clients: PairedTest | None = None
    on_seeds: PairedTest | None = None
    folders: tuple[Path, ...] = ()

    @property
    def entries(self) -> dict[str, Any]:
        """The summary with the tests, as entries of a table, the main ones first."""
        entries = dict(self.summary)
        if self.on_clients and self.on_clients.pairs:
            difference = formatted(self.metric, self.on_clients.difference)
            entries |= {"difference": difference, **self.on_clients.entries}
        if self.on_seeds and self.on_seeds.p is not None:
            entries["p by seed"] = self.on_seeds.entries["p"]
        # A narrow terminal has no room for the others.
        first = (self.metric, f"{self.metric}-worst-decile", "difference", "p")
        order = (*first, "bytes", "seconds", *SUMMARIZED, *entries)
        return {name: entries.get(name, "") for name in order}

    @property
    def result(self) -> float | None:
        """The mean over clients and seeds; None if there is none."""
        value = self.summary.get(self.metric)
        return value if is_number(value) else None

    @property
    def differs(self) -> bool | None:
        """True if its clients differ significantly from the reference's.

        None if there was no test.
        """
        return self.on_clients.differs if self.on_clients else None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods that were compared on one or more tasks.

    Parameters
    ----------
    rows : tuple of MethodResult
        One for each method and task; the best method of a task comes first.
    baseline : str
        The method against which the others are tested; empty if it is the best one.
    once : str
        The methods because of which only the last rounds are compared (`tested_once`).
    """

    rows: tuple[MethodResult, ...]
    baseline: str = ""
    once: str = ""

    @property
    def tasks(self) -> dict[str, list[MethodResult]]:
        """The rows of each task."""
        names = dict.fromkeys(row.task for row in self.rows)
        return {name: [r for r in self.rows if r.task == name] for name in names}

    @cached_property
    def ranking(self) -> Ranking | None:
        """The mean ranks of methods that ran on all tasks; None if they are too few."""
        results = [
            {row.method: row.result for row in rows if row.result is not None}
            for rows in self.tasks.values()
        ]
        first = results[0] if len(results) > 1 else {}
        methods = [name for name in first if all(name in of for of in results)]
        if len(methods) < 3:
            return None
        sign = 1 if self.rows[0].metric == "accuracy" else -1
        return rank(methods, [[of[name] for name in methods] for of in results], sign)

    @property
    def legend(self) -> str:
        """An explanation of the results and of the tests."""
        text = legend({row.method: row.summary for row in self.rows})
        if self.once:
            text += f" Last rounds are compared because of {self.once}, tested once."
        if any(row.on_clients and row.on_clients.pairs for row in self.rows):
            reference = self.baseline or "the best method"
            text += (
                f" p: Wilcoxon's signed-rank test on the same clients against "
                f"{reference}, corrected by Holm; significant below {LEVEL}."
            )
        return f"{text} {self.ranking}" if self.ranking else text

    def tables(self, without: Sequence[str] = ()) -> dict[str, list[list[str]]]:
        """Return the table of each task without some entries, as `cells`."""
        return {
            name: cells({row.method: row.entries for row in rows}, without)
            for name, rows in self.tasks.items()
        }

    def __repr__(self) -> str:
        """Return the table of each task, and what the tables mean."""
        tables = self.tables(DETAILS).items()
        parts = [f"{name}\n" * (len(tables) > 1) + terminal(t) for name, t in tables]
        return "".join([*parts, self.legend])


class _Folder(NamedTuple):
    """A results folder with its finished runs, one for each method and seed."""

    place: str
    config: Settings
    methods: dict[str, list[RunResult]]


def compare(*folders: str | Path, protocol: str = "", baseline: str = "") -> Comparison:
    """Compare the methods of results folders.

    Folders whose clients have the same numbers of examples in each seed belong to the
    same task. On each task, every method is tested against the best one, or against the
    baseline, with Wilcoxon's signed-rank test: a pair is a client, with its mean over
    the seeds, or a seed, with its mean over the clients. P-values are corrected by
    Holm. With at least two tasks and three methods that ran on all of them, mean ranks
    are compared by the tests of Friedman and Nemenyi.

    Parameters
    ----------
    *folders : str or Path
        Results folders.
    protocol : {"", "mean-last", "last", "best-validation"}, default ""
        The rounds of the results (setting ``result-protocol``); by default that of the
        runs, or ``last`` if a method was tested after its last round only.
    baseline : str, default ""
        The method against which the others are tested, as in the table or as an import
        path; by default the best one.

    Returns
    -------
    Comparison
        One row for each method and task.

    Raises
    ------
    SettingsError
        If a folder has no results.

    Examples
    --------
    >>> print(compare("results"))
    """
    allowed = ", ".join(PROTOCOLS)
    require(protocol in ("", *PROTOCOLS), "result-protocol", protocol, allowed)
    chosen = {"result-protocol": protocol} if protocol else {}
    loaded = [_read(Path(folder), chosen) for folder in folders]
    # Folders are named by what distinguishes their paths.
    base = os.path.commonpath([each.place for each in loaded])
    loaded = [each._replace(place=os.path.relpath(each.place, base)) for each in loaded]
    tasks = dict[str, list[_Folder]]()
    for folder in loaded:
        tasks.setdefault(_data_of(folder), []).append(folder)
    names = [task_title(of_task[0].config) for of_task in tasks.values()]
    rows, baseline = list[MethodResult](), short_name(baseline)
    for name, of_task in zip(names, tasks.values(), strict=True):
        task = f"{name} ({of_task[0].place})" if names.count(name) > 1 else name
        methods = _by_method(of_task).items()
        results = [over_runs(task, method, runs) for method, runs in methods]
        rows += tested(results, baseline)
    once = tested_once((row.method, row.summary) for row in rows)
    if once and not protocol:
        return replace(compare(*folders, protocol="last", baseline=baseline), once=once)
    known = dict.fromkeys(row.method for row in rows)
    allowed = f"one of {', '.join(known)}"
    require(not baseline or baseline in known, "baseline", baseline, allowed)
    return Comparison(tuple(rows), baseline)


def _read(path: Path, chosen: Settings) -> _Folder:
    """Read the finished runs of a results folder.

    The ``chosen`` settings take precedence over those of the runs.
    """
    output = path.resolve()
    content: dict[str, Any] = read_object(output / SUMMARY)
    names: Any = content.get("algorithms")
    config: Any = content.get("config")
    allowed = "a folder of results with a summary.json and finished runs"
    valid = isinstance(config, dict) and isinstance(names, dict)
    require(valid, "compare", str(path), allowed)
    config |= chosen
    seeds = {seed: output / folder_of(seed) for seed in content.get("seeds", ())}
    seeds = seeds or {config["seed"]: output}
    methods = dict[str, list[RunResult]]()
    for name in names:
        rows = {s: read_rows(folder / name / METRICS) for s, folder in seeds.items()}
        # A later run of the algorithm may have ended before its first round.
        if all(rows.values()):
            model = str(names[name].get(TESTED_MODEL, ""))
            methods[name] = [
                run_result(seeds[seed] / name, {**config, "seed": seed}, run, model)
                for seed, run in rows.items()
            ]
    require(bool(methods), "compare", str(path), allowed)
    summaries = [result.summary for runs in methods.values() for result in runs]
    measured = all(not summary.keys().isdisjoint(VALIDATED) for summary in summaries)
    allowed = "a protocol of the runs; these measured no validation results"
    protocol = config["result-protocol"]
    valid = protocol != "best-validation" or measured
    require(valid, "result-protocol", protocol, allowed)
    return _Folder(str(output), config, methods)


def _data_of(folder: _Folder) -> str:
    """Return what identifies the data: the task, and each client's numbers of examples.

    Other settings may differ, such as the learning rates of two folders.
    """
    counts = {
        run.seed: {
            client: [entry.get(n) for n in (NUM_EXAMPLES, NUM_TEST_EXAMPLES)]
            for client, entry in sorted(read_object(run.directory / CLIENTS).items())
        }
        for runs in folder.methods.values()
        for run in runs
    }
    config = folder.config
    return repr(
        (config["task"], task_title(config), config.get("label-column"), counts)
    )


def _by_method(folders: Sequence[_Folder]) -> dict[str, list[RunResult]]:
    """Return the runs of each method; one of two folders is two methods."""
    names = [name for folder in folders for name in folder.methods]
    return {
        name if names.count(name) == 1 else f"{name} ({folder.place})": runs
        for folder in folders
        for name, runs in folder.methods.items()
    }


def over_runs(task: str, method: str, runs: Sequence[RunResult]) -> MethodResult:
    """Return the result of a method on a task over its runs, not yet compared."""
    summaries = [run.summary for run in runs]
    summary = over_seeds(summaries) if len(runs) > 1 else summaries[0]
    metric, of_client = quality(summary), dict[str, list[float]]()
    for run in runs:
        for client, value in run.clients.items():
            of_client.setdefault(client, []).append(value)
    clients = {client: fmean(values) for client, values in of_client.items()}
    values = {run.seed: run.summary.get(metric) for run in runs}
    seeds = {seed: value for seed, value in values.items() if is_number(value)}
    folders = tuple(run.directory for run in runs)
    return MethodResult(task, method, metric, summary, clients, seeds, folders=folders)


def tested(results: Sequence[MethodResult], baseline: str) -> list[MethodResult]:
    """Test the methods of a task against the best one or the baseline; best first.

    Results of other rounds or examples than the reference's are not tested.
    """
    sign = 1 if results[0].metric == "accuracy" else -1

    def key(each: MethodResult) -> tuple[bool, bool, float]:
        # Methods that failed, and those without a result, come last.
        failed = bool(failure(each.method, each.summary))
        return failed, each.result is None, -sign * (each.result or 0.0)

    ordered = sorted(results, key=key)
    named = [each for each in ordered if each.method == baseline]
    reference = (named or ordered)[0]
    others = [each for each in ordered if each is not reference]

    def measured(each: MethodResult) -> tuple[object, object]:
        return each.summary.get("protocol"), each.summary.get("evaluated-on")

    def tests(values: str) -> list[PairedTest]:
        against = getattr(reference, values)
        made = []
        for each in others:
            of_method = getattr(each, values)
            same = measured(each) == measured(reference)
            pairs = [name for name in of_method if same and name in against]
            ours, theirs = ([of[n] for n in pairs] for of in (of_method, against))
            made.append(paired_test(ours, theirs, sign))
        corrected = holm([test.p for test in made])
        return [replace(t, p=p) for t, p in zip(made, corrected, strict=True)]

    of_others = zip(others, tests("clients"), tests("seeds"), strict=True)
    rows = [
        replace(each, reference=False, on_clients=on_clients, on_seeds=on_seeds)
        for each, on_clients, on_seeds in of_others
    ]
    return sorted([replace(reference, reference=True), *rows], key=key)
