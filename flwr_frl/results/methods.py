"""Compare methods by the runs in results folders: one row a method, and paired tests.

`compare` reads the journals of finished runs. The methods of a task are compared with
the best one, or with a baseline, on the same clients and on the same seeds.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from flwr_frl.common.messages import NUM_EXAMPLES, NUM_TEST_EXAMPLES, TESTED_MODEL
from flwr_frl.common.settings import Settings, SettingsError, defaults, require
from flwr_frl.common.text import several
from flwr_frl.results.results import (
    CLIENTS,
    METRICS,
    ONE_ROUND,
    PROTOCOLS,
    SUMMARY,
    VALIDATED,
    RunResult,
    is_number,
    over_seeds,
    quality,
    read_object,
    read_rows,
    run_result,
)
from flwr_frl.results.statistics import LEVEL, OF_TESTS, PairedTest, holm, paired_test
from flwr_frl.results.tables import DETAILS, cells, formatted, html, legend, terminal

# Settings that two runs must share to be compared.
COMMON = ("evaluate-on", "result-protocol", "evaluate-last")


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
        """The summary with the tests, as entries of a table."""
        entries = {n: v for n, v in self.summary.items() if n.startswith(self.metric)}
        if self.reference:
            entries |= dict.fromkeys([*OF_TESTS, "p"], "")
        if self.on_clients and self.on_clients.pairs:
            difference = formatted(self.metric, self.on_clients.difference)
            entries |= {"difference": difference, **self.on_clients.entries}
        if self.on_seeds and self.on_seeds.p is not None:
            entries["p by seed"] = self.on_seeds.entries["p"]
        return entries | {n: v for n, v in self.summary.items() if n not in entries}

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


@dataclass(frozen=True)
class Comparison:
    """Methods that were compared on one or more tasks.

    Parameters
    ----------
    rows : tuple of MethodResult
        One for each method and task; the best method of a task comes first.
    evaluated_on : {"test", "validation"}
        The examples of all evaluations.
    baseline : str
        The method against which the others are tested; empty if it is the best one.
    """

    rows: tuple[MethodResult, ...]
    evaluated_on: str
    baseline: str = ""

    @property
    def tasks(self) -> dict[str, list[MethodResult]]:
        """The rows of each task."""
        names = dict.fromkeys(row.task for row in self.rows)
        return {name: [r for r in self.rows if r.task == name] for name in names}

    @property
    def legend(self) -> str:
        """An explanation of the results and of the tests."""
        text = legend({row.method: row.summary for row in self.rows}, self.evaluated_on)
        if any(row.on_clients for row in self.rows):
            reference = self.baseline or "the best method"
            text += (
                f" p: Wilcoxon's signed-rank test on the same clients against "
                f"{reference}, corrected by Holm; significant below {LEVEL}."
            )
        return text

    def tables(self, without: Sequence[str] = ()) -> dict[str, list[list[str]]]:
        """Return the table of each task without some entries, as `cells`."""
        return {
            name: cells({r.method: r.entries for r in rows}, self.evaluated_on, without)
            for name, rows in self.tasks.items()
        }

    def text(self, without: Sequence[str] = DETAILS) -> str:
        """Return the tables for a terminal without some entries, and the legend."""
        tables = self.tables(without).items()
        parts = [f"{name}\n" * (len(tables) > 1) + terminal(t) for name, t in tables]
        return "".join([*parts, self.legend])

    def __str__(self) -> str:
        """Return the tables with the tests, and what they mean."""
        return self.text()

    def _repr_html_(self) -> str:
        tables = "".join(map(html, self.tables().values()))
        return f"{tables}<p>{escape(self.legend)}</p>"


class _Run(NamedTuple):
    """A finished run, with its own folder and the place of the results folder."""

    method: str
    directory: Path
    config: Settings
    place: str
    tested: str


def compare(*runs: Any, protocol: str = "", baseline: str = "") -> Comparison:
    """Compare the methods of results folders.

    Folders whose clients have the same numbers of examples in each seed belong to the
    same task. On each task, every method is tested against the best one, or against the
    baseline, with Wilcoxon's signed-rank test: a pair is a client, with its mean over
    the seeds, or a seed, with its mean over the clients. P-values are corrected by
    Holm.

    Parameters
    ----------
    *runs : str, Path or Run
        Results folders, folders of single runs, or runs of `simulate`.
    protocol : {"", "mean-last", "last", "best-validation"}, default ""
        The rounds of the results (setting ``result-protocol``); by default that of the
        runs, or ``last`` if a method was tested after its last round only.
    baseline : str, default ""
        The method against which the others are tested; by default the best one.

    Returns
    -------
    Comparison
        One row for each method and task.

    Raises
    ------
    SettingsError
        If a folder has no results, the runs were not evaluated by the same protocol, or
        no two methods ran on the same clients.

    Examples
    --------
    >>> print(compare("results"))
    """
    allowed = ", ".join(PROTOCOLS)
    require(protocol in ("", *PROTOCOLS), "result-protocol", protocol, allowed)
    chosen = {"result-protocol": protocol} if protocol else {}
    found = [group for each in runs for group in _groups(each, chosen)]
    require(bool(found), "compare", found, "at least one folder of results")
    # Folders are named by what distinguishes their paths.
    base = os.path.commonpath([run.place for group in found for run in group])
    found = [
        [run._replace(place=os.path.relpath(run.place, base)) for run in group]
        for group in found
    ]
    every = [run for group in found for run in group]
    for name in COMMON[:1] if protocol else COMMON:
        values = sorted({str(run.config[name]) for run in every})
        require(len(values) == 1, name, values, "the same value in all compared runs")
    tasks = dict[str, list[list[_Run]]]()
    for group in found:
        tasks.setdefault(_data_of(group), []).append(group)
    methods = [_by_method(groups) for groups in tasks.values()]
    if len(found) > 1 and all(len(each) < 2 for each in methods):
        raise SettingsError(
            f"compare is {several([group[0].place for group in found])}, whose clients "
            "or seeds are not the same; expected two methods on the same clients",
            "clients",
        )
    firsts = [groups[0][0] for groups in tasks.values()]
    names = [str(run.config["task"]) for run in firsts]
    titles = [
        f"{name} ({run.place})" if names.count(name) > 1 else name
        for name, run in zip(names, firsts, strict=True)
    ]

    def results(chosen: Settings) -> list[list[MethodResult]]:
        return [
            [
                over_runs(title, method, [_result(run, chosen) for run in runs])
                for method, runs in each.items()
            ]
            for title, each in zip(titles, methods, strict=True)
        ]

    of_tasks = results(chosen)
    protocols = {row.summary["protocol"] for each in of_tasks for row in each}
    if not protocol and ONE_ROUND in protocols and len(protocols) > 1:
        # Methods that are tested once must not be compared with means of ten rounds.
        of_tasks = results({"result-protocol": "last"})
    rows = [row for each in of_tasks for row in tested(each, baseline)]
    known = dict.fromkeys(row.method for row in rows)
    allowed = f"one of {', '.join(known)}"
    require(not baseline or baseline in known, "baseline", baseline, allowed)
    return Comparison(tuple(rows), str(every[0].config["evaluate-on"]), baseline)


def _groups(runs: Any, chosen: Settings) -> list[list[_Run]]:
    """Return the runs of each folder among folders, a `Run` or `Runs`."""
    if isinstance(runs, Mapping):
        return [group for run in runs.values() for group in _groups(run, chosen)]
    folders = runs.folders.values() if hasattr(runs, "folders") else [Path(runs)]
    return [[each for folder in folders for each in _read(folder, chosen)]]


def _read(place: Path, chosen: Settings) -> Iterator[_Run]:
    """Yield the finished runs of a results folder, or the run with this folder.

    The ``chosen`` settings take precedence over those of the runs.
    """
    place = place.resolve()
    is_run = (place / METRICS).is_file()
    output = place.parent if is_run else place
    content: dict[str, Any] = read_object(output / SUMMARY)
    names: Any = content.get("algorithms")
    config: Any = content.get("config")
    allowed = "a folder of results with a summary.json, or the folder of a finished run"
    valid = isinstance(config, dict) and isinstance(names, dict) and bool(names)
    valid = valid and (not is_run or place.name in names)
    require(valid, "compare", str(place), allowed)
    # Earlier versions lacked some settings, which had the defaults.
    config = {**defaults(), **config, **chosen}
    for seed in content.get("seeds", [config["seed"]]):
        folder = output / f"seed-{seed}" if "seeds" in content else output
        for name in [place.name] if is_run else names:
            tested = str(names[name].get(TESTED_MODEL, ""))
            of_run = {**config, "seed": seed}
            yield _Run(name, folder / name, of_run, str(output), tested)


def _data_of(runs: Sequence[_Run]) -> str:
    """Return what identifies the data: the task, and each client's numbers of examples.

    Other settings may differ, such as the learning rates of two folders.
    """
    counts = {
        run.config["seed"]: {
            client: [entry.get(n) for n in (NUM_EXAMPLES, NUM_TEST_EXAMPLES)]
            for client, entry in sorted(read_object(run.directory / CLIENTS).items())
        }
        for run in runs
    }
    return repr((runs[0].config["task"], counts))


def _by_method(groups: Sequence[Sequence[_Run]]) -> dict[str, list[_Run]]:
    """Return the runs of each method; one of two folders is two methods."""
    names = [name for runs in groups for name in {run.method for run in runs}]
    methods = dict[str, list[_Run]]()
    for run in (run for runs in groups for run in runs):
        alone = names.count(run.method) == 1
        name = run.method if alone else f"{run.method} ({run.place})"
        methods.setdefault(name, []).append(run)
    return methods


def _result(run: _Run, chosen: Settings) -> RunResult:
    rows, config = read_rows(run.directory / METRICS), {**run.config, **chosen}
    protocol = config["result-protocol"]
    require(bool(rows), "compare", str(run.directory), "a run with a metrics.jsonl")
    result = run_result(run.directory, config, rows, run.tested)
    allowed = "a protocol of the runs; these measured no validation results"
    measured = any(name in result.summary for name in VALIDATED)
    valid = protocol != "best-validation" or measured
    require(valid, "result-protocol", protocol, allowed)
    return result


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

    Results of other rounds than the reference's are not tested.
    """
    sign = 1 if results[0].metric == "accuracy" else -1
    # Methods without a result come last.
    ordered = sorted(
        results, key=lambda each: (each.result is None, -sign * (each.result or 0.0))
    )
    named = [each for each in ordered if each.method == baseline]
    reference = (named or ordered)[0]
    others = [each for each in ordered if each is not reference]

    def tests(values: str) -> list[PairedTest]:
        against = getattr(reference, values)
        made = []
        for each in others:
            of_method = getattr(each, values)
            same = each.summary.get("protocol") == reference.summary.get("protocol")
            pairs = [name for name in of_method if same and name in against]
            ours, theirs = ([of[n] for n in pairs] for of in (of_method, against))
            made.append(paired_test(ours, theirs, sign))
        corrected = holm([test.p for test in made])
        return [replace(t, p=p) for t, p in zip(made, corrected, strict=True)]

    compared = {
        each.method: replace(each, on_clients=on_clients, on_seeds=on_seeds)
        for each, on_clients, on_seeds in zip(
            others, tests("clients"), tests("seeds"), strict=True
        )
    }
    compared[reference.method] = replace(reference, reference=True)
    return [compared[each.method] for each in ordered]
