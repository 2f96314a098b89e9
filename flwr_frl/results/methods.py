"""Compare methods by the runs in results folders: one row a method, and paired tests.

`compare` compares the runs of folders, and the page those of one, also before they have
finished. Methods are compared with the best one, or with a baseline, on the same
clients and on the same seeds.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from flwr_frl.common.errors import require
from flwr_frl.common.messages import NUM_EXAMPLES, NUM_TEST_EXAMPLES
from flwr_frl.common.text import short_name
from flwr_frl.results.results import (
    PROTOCOLS,
    SUMMARIZED,
    failure,
    is_number,
    over_seeds,
    quality,
    task_title,
    tested_once,
)
from flwr_frl.results.runs import Methods, StoredRun, compared_runs, counted
from flwr_frl.results.statistics import LEVEL, PairedTest, holm, paired_test
from flwr_frl.results.tables import cells, formatted, legend, terminal


@dataclass(frozen=True)
class MethodResult:
    """The results of a method over all seeds.

    Parameters
    ----------
    method : str
        The algorithm; if it ran in several folders, also the folder's name.
    runs : sequence of StoredRun
        Its runs, one for each seed.
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
        by Holm over the methods; None for the reference.
    """

    method: str
    runs: Sequence[StoredRun]
    metric: str
    summary: Mapping[str, Any]
    clients: Mapping[str, float]
    seeds: Mapping[Any, float]
    reference: bool = False
    on_clients: PairedTest | None = None
    on_seeds: PairedTest | None = None

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
    """Methods that were compared.

    Parameters
    ----------
    rows : tuple of MethodResult
        One for each method, the best one first.
    baseline : str
        The method against which the others are tested; empty if it is the best one.
    once : str
        The methods because of which only the last rounds are compared (`tested_once`).
    """

    rows: tuple[MethodResult, ...]
    baseline: str = ""
    once: str = ""

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
        return text

    @property
    def table(self) -> list[list[str]]:
        """The rows of the table; the first one has the headings."""
        return cells({row.method: row.entries for row in self.rows})

    def __repr__(self) -> str:
        """Return the table, and what it means."""
        return terminal(self.table) + self.legend


def compare(*folders: str | Path, protocol: str = "", baseline: str = "") -> Comparison:
    """Compare the methods of results folders.

    Every method is tested against the best one, or against the baseline, with
    Wilcoxon's signed-rank test: a pair is a client, with its mean over the seeds, or a
    seed, with its mean over the clients. P-values are corrected by Holm.

    Parameters
    ----------
    *folders : str or Path
        Results folders. Their clients must have the same numbers of examples.
    protocol : {"", "mean-last", "last"}, default ""
        The rounds of the results (setting ``result-protocol``); by default that of the
        runs, or ``last`` if a method was tested after its last round only.
    baseline : str, default ""
        The method against which the others are tested, as in the table or as an import
        path; by default the best one.

    Returns
    -------
    Comparison
        One row for each method.

    Raises
    ------
    SettingsError
        If a folder has no results, or those of other clients or examples.

    Examples
    --------
    >>> print(compare("results"))
    """
    allowed = ", ".join(PROTOCOLS)
    require(protocol in ("", *PROTOCOLS), "result-protocol", protocol, allowed)
    places = [Path(folder).resolve() for folder in folders]
    baseline = short_name(baseline)
    comparison = compared(partial(_runs_of, places), protocol, baseline, every=True)
    known = [row.method for row in comparison.rows]
    allowed = f"one of {', '.join(known)}"
    require(baseline in ("", *known), "baseline", baseline, allowed)
    return comparison


def _runs_of(places: Sequence[Path], protocol: str) -> Methods:
    """Return the runs of each method; a method of two folders is two methods."""
    folders = {place: compared_runs(place, protocol) for place in places}
    first = _data_of(folders[places[0]])
    for place, methods in folders.items():
        allowed = f"a folder with the seeds, clients and examples of {str(places[0])!r}"
        require(_data_of(methods) == first, "compare", str(place), allowed)
    # Folders are named by what distinguishes their paths.
    base = os.path.commonpath(places)
    number = Counter(name for methods in folders.values() for name in methods)
    return {
        name if number[name] == 1 else f"{name} ({os.path.relpath(place, base)})": of
        for place, methods in folders.items()
        for name, of in methods.items()
    }


def _data_of(methods: Methods) -> object:
    """Return what identifies the data: the task, and each client's numbers of examples.

    Other settings may differ, such as the learning rates of two folders.
    """
    runs = [run for of in methods.values() for run in of]
    settings = runs[0].settings
    counts = {
        run.settings["seed"]: {
            client: [entry.get(n) for n in (NUM_EXAMPLES, NUM_TEST_EXAMPLES)]
            for client, entry in run.final.items()
        }
        for run in runs
    }
    task = settings["task"], task_title(settings), settings.get("label-column")
    return task, counts


def compared(
    read: Callable[[str], Methods],
    protocol: str = "",
    baseline: str = "",
    every: bool = False,
) -> Comparison:
    """Compare the methods whose runs ``read`` returns for a protocol.

    A run that has not finished counts if there are no others, or with ``every``. If a
    method was tested once, and others in several rounds, the last rounds of all methods
    are compared, unless there is a ``protocol``.
    """
    results, ended = [], []
    for name, runs in read(protocol).items():
        counting = runs if every else counted(runs)
        results.append(method_result(name, runs, counting))
        if every or all(run.finished for run in counting):
            ended.append((name, results[-1].summary))
    once = "" if protocol else tested_once(ended)
    if once:
        return replace(compared(read, "last", baseline, every), once=once)
    return Comparison(tuple(tested(results, baseline)), baseline)


def method_result(
    method: str, runs: Sequence[StoredRun], counting: Sequence[StoredRun]
) -> MethodResult:
    """Return the result of a method over those of its runs that count."""
    summaries = [run.summary for run in counting]
    summary = over_seeds(summaries) if len(runs) > 1 else summaries[0]
    metric, of_client = quality(summary), dict[str, list[float]]()
    for run in counting:
        for client, value in run.clients.items():
            of_client.setdefault(client, []).append(value)
    clients = {client: fmean(values) for client, values in of_client.items()}
    values = {run.settings["seed"]: run.summary.get(metric) for run in counting}
    seeds = {seed: value for seed, value in values.items() if is_number(value)}
    return MethodResult(method, runs, metric, summary, clients, seeds)


def tested(results: Sequence[MethodResult], baseline: str) -> list[MethodResult]:
    """Test methods against the best one or the baseline; the best one comes first.

    Results of other rounds or examples than the reference's are not tested.
    """
    if not results:
        return []
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
