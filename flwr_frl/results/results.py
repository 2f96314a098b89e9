"""Reading and writing results: rows of ``metrics.jsonl``, summaries, JSON files."""

import contextlib
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from logging import ERROR
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from flwr.common import log

from flwr_frl.common.errors import require
from flwr_frl.common.files import write_atomically
from flwr_frl.common.messages import (
    CLASS_COUNTS,
    EXAMPLE_EPSILON,
    OF_CLIENTS,
    TESTED_MODEL,
)
from flwr_frl.common.settings import Settings
from flwr_frl.common.text import several, short_name

Row = dict[str, Any]

# Files of a run's folder, and of the results folder that contains it.
METRICS, CLIENTS, STATUS = "metrics.jsonl", "clients.json", "status.json"
NEWCOMERS = "newcomers.json"
SUMMARY, PLOT, PAGE = "summary.json", "accuracy.png", "report.html"
# Tasks that tables and pages name by their file or folder.
OWN_DATA = ("table", "linear-table", "image-folder", "text-folder")
# The entry of a row with the metrics of each client that was evaluated.
CLIENT_METRICS = "client-metrics"
# Metrics by which runs are compared, the preferred one first.
QUALITY = ("accuracy", "distance", "error", "loss-point", "loss")
# Metrics that a summary averages over the last rounds.
SUMMARIZED = (
    *("accuracy", "accuracy-weighted", "accuracy-global", "loss", "loss-weighted"),
    *("distance", "error", "consensus-distance", "loss-point", "constraint"),
)
# Entries of a client that are not averaged. All others are metrics of the task.
NOT_SUMMARIZED = (
    *("num-examples", "num-test-examples", "last-round", "evaluated-in"),
    *("global-nc2", "local-nc2", "error-best", "error-phase-1", "error-scratch"),
    *("iterations", CLASS_COUNTS, EXAMPLE_EPSILON),
)
# Metrics of which a summary has the latest value.
LATEST = ("seconds-simulated", "epsilon", "delta", "consensus-step")
# The suffix of a summary's main metric in the last evaluated round.
LAST_ROUND = "-last"
# The entry of a summary with `lost_share`, and the code of an error about it.
LOST = "lost-replies"
# The suffix of a metric's standard deviation over seeds.
OVER_SEEDS = "-std-seeds"
# Entries of which a summary over seeds has the maximum. Their mean would understate the
# privacy loss, or the failure, of some runs.
LARGEST = ("epsilon", EXAMPLE_EPSILON, LOST)
# Entries without a meaningful standard deviation over seeds.
WITHOUT_DEVIATION = (
    *("rounds", "seconds", "bytes", "bits", "accuracy-std-clients", "evaluated"),
    *LARGEST,
    *LATEST,
)
# Rounds of the result of a run: values of the setting `result-protocol`.
PROTOCOLS = ("mean-last", "last")
# Text of a result of one round
ONE_ROUND = "last evaluated round"


def task_title(settings: Settings) -> str:
    """Return the name of a run's task, or that of the file or folder of its data.

    A task with an import path has the name of its function, which fits into a table.
    """
    name, data = str(settings["task"]), Path(str(settings.get("data-dir", "")))
    if name in OWN_DATA and data.name:
        return data.stem
    function = short_name(name)
    return function if function.isidentifier() else name


def quality(names: Container[str]) -> str:
    """Return the first metric of `QUALITY` in ``names``; ``accuracy`` if none is."""
    return next((name for name in QUALITY if name in names), "accuracy")


def folder_of(seed: object) -> str:
    """Return the name of the folder with the runs of one of several seeds."""
    return f"seed-{seed}"


def read_journal(path: Path) -> Iterator[Row]:
    """Yield the rows of a ``metrics.jsonl``, up to a damaged line.

    A crash may have cut off the last line. A missing file has no rows.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row: Row = json.loads(line)
            except (ValueError, RecursionError):
                return
            yield row


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a ``metrics.jsonl`` without clients' metrics."""
    return [without_clients(row) for row in read_journal(path)]


def without_clients(row: Row) -> Row:
    """Return a row without the metrics of each client, which may be many."""
    return {name: value for name, value in row.items() if name != CLIENT_METRICS}


def client_means(
    directory: Path, metric: str, rounds: Container[int]
) -> dict[str, float]:
    """Return each client's mean of a metric over some rounds of a run."""
    values: dict[str, list[float]] = {}
    for row in read_journal(directory / METRICS):
        for client, metrics in row.get(CLIENT_METRICS, {}).items():
            if row["round"] in rounds and is_number(value := metrics.get(metric)):
                values.setdefault(client, []).append(value)
    return {client: sum(each) / len(each) for client, each in values.items()}


def result_rows(rows: Sequence[Row], protocol: str, last: int) -> list[Row]:
    """Return the rows whose mean is the result of a run.

    Parameters
    ----------
    rows : sequence of dict
        The rows of the run so far, at least one.
    protocol : {"mean-last", "last"}
        With ``mean-last`` the last ``last`` rounds, and at least the last evaluated
        one; with ``last`` the last evaluated round. No round is ever chosen by its
        result.
    last : int
        The setting ``evaluate-last``.
    """
    tested = [row for row in rows if row.get("evaluated")] or rows[-1:]
    if protocol == "mean-last":
        after = min(rows[-1]["round"] - last, tested[-1]["round"] - 1)
        return [row for row in rows if row["round"] > after]
    return [tested[-1]]


def protocol_text(final: Sequence[Row]) -> str:
    """Describe the rounds of a result, such as ``mean of last 10 rounds``."""
    rounds = [row["round"] for row in final if row.get("evaluated")]
    if len(rounds) <= 1:
        return ONE_ROUND
    consecutive = rounds[-1] - rounds[0] < len(rounds)
    return f"mean of last {len(rounds)} {'rounds' if consecutive else 'evaluations'}"


def tested_once(results: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the methods with one tested round if others have means of several.

    If there are any, the last rounds of all methods are compared, in every table.
    ``results`` has the name and the summary of each finished method.
    """
    # A run whose rows could not be written has no result.
    protocols = [(m, s["protocol"]) for m, s in results if "protocol" in s]
    once = dict.fromkeys(method for method, text in protocols if text == ONE_ROUND)
    return several([*once]) if any(text != ONE_ROUND for _, text in protocols) else ""


def summarize(
    rows: Sequence[Row],
    clients: Mapping[str, Mapping[str, Any]],
    final: Sequence[Row],
    means: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Summarize a run by means over some of its rounds, usually the last ones.

    Parameters
    ----------
    rows : sequence of dict
        Rows of ``metrics.jsonl``.
    clients : mapping
        The final metrics of each client.
    final : sequence of dict
        The rows to average over, as `result_rows` returns them.
    means : mapping, optional
        The mean accuracy of each client over these rounds. From it follow
        ``accuracy-worst-decile`` and ``accuracy-best-decile``, the means of the worst
        and the best tenth of the clients, rounded up.

    Returns
    -------
    dict
        Means of `SUMMARIZED` and of the task's metrics, each with ``NAME-clients`` if
        some clients lack it; ``evaluated``, the mean number of clients in an
        evaluation; ``NAME-last``, the first metric of `QUALITY` in the last round
        that has it; ``accuracy-std-clients``, ``lost-replies`` (`lost_share`),
        ``rounds``, ``seconds``, total ``bytes`` and ``bits``, the values of `LATEST`,
        and the largest ``example-epsilon`` of a client.
    """
    summary: dict[str, Any] = {}
    of_clients = {name for metrics in clients.values() for name in metrics}
    task_metrics = sorted(of_clients.difference(SUMMARIZED, NOT_SUMMARIZED))
    for name in (*SUMMARIZED, *task_metrics):
        # A client's metric may have the name of one of the row's lists.
        with_it = [row for row in final if is_number(row.get(name))]
        if with_it:
            summary[name] = float(np.mean([row[name] for row in with_it]))
        key = name + OF_CLIENTS
        if any(key in row for row in with_it):
            counts = [row[key if key in row else "evaluated"] for row in with_it]
            summary[key] = float(np.mean(counts))
    name = quality(summary)
    if measured := [row[name] for row in rows if is_number(row.get(name))]:
        summary[name + LAST_ROUND] = measured[-1]
    if tested := [row["evaluated"] for row in final if row.get("evaluated")]:
        summary["evaluated"] = float(np.mean(tested))
    if found := [c["accuracy"] for c in clients.values() if "accuracy" in c]:
        summary["accuracy-std-clients"] = float(np.std(found))
    if spent := [c[EXAMPLE_EPSILON] for c in clients.values() if EXAMPLE_EPSILON in c]:
        summary[EXAMPLE_EPSILON] = max(spent)
    if means:
        of_tenths = extreme_tenths(means)
        summary["accuracy-worst-decile"], summary["accuracy-best-decile"] = of_tenths
    if bits := [row["bits"] for row in rows if "bits" in row]:
        summary["bits"] = sum(bits)
    return summary | {
        LOST: lost_share(rows, len(clients)),
        "rounds": rows[-1]["round"],
        "seconds": rows[-1]["seconds"],
        **{n: rows[-1][n] for n in LATEST if n in rows[-1]},
        "bytes": sum(row["bytes-down"] + row["bytes-up"] for row in rows),
    }


def extreme_tenths(means: Mapping[str, float]) -> tuple[float, float]:
    """Return the means of the worst and the best tenth of the clients, rounded up."""
    tenth, ranked = math.ceil(len(means) / 10), np.sort(list(means.values()))
    return float(np.mean(ranked[:tenth])), float(np.mean(ranked[-tenth:]))


def run_result(
    directory: Path,
    settings: Settings,
    rows: Sequence[Row],
    tested: str,
    clients: Mapping[str, Mapping[str, Any]],
    joined: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the result of a run by its protocol.

    Parameters
    ----------
    directory : Path
        The run's folder with its journal.
    settings : mapping
        The settings, with ``result-protocol``, ``evaluate-last`` and ``evaluate-on``.
    rows : sequence of dict
        The rows of the journal, at least one.
    tested : str
        The model that the clients tested.
    clients, joined : mapping
        The contents of ``clients.json`` and ``newcomers.json``.

    Returns
    -------
    summary, clients
        The entries of ``summary.json``; and each client's result, its mean of the first
        metric of `QUALITY`.
    """
    protocol, last = str(settings["result-protocol"]), int(settings["evaluate-last"])
    final = result_rows(rows, protocol, last)
    metric = quality({n for row in final for n, v in row.items() if is_number(v)})
    rounds = {row["round"] for row in final}
    means = client_means(directory, metric, rounds)
    summary = summarize(rows, clients, final, means if metric == "accuracy" else None)
    summary |= {"protocol": protocol_text(final), TESTED_MODEL: tested}
    summary["evaluated-on"] = settings["evaluate-on"]
    return summary | summarize_newcomers(joined), means


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
        the different values of texts;
        with at least two seeds ``NAME-std-seeds``, the sample standard deviation
        (n - 1), except for `WITHOUT_DEVIATION`; ``seeds``, the number of seeds.
    """
    combined: dict[str, Any] = {}
    for name in summaries[0]:
        values: list[Any] = [summary.get(name) for summary in summaries]
        # Values that are not finite are stored as null.
        if None in values:
            continue
        if isinstance(values[0], str):
            combined[name] = " or ".join(dict.fromkeys(values))
            continue
        same = len(set(map(repr, values))) == 1
        reduce = max if name in LARGEST else np.mean
        combined[name] = values[0] if same else float(reduce(values))
        if name not in WITHOUT_DEVIATION and len(values) > 1:
            combined[name + OVER_SEEDS] = float(np.std(values, ddof=1))
    return {**combined, "seeds": len(summaries)}


def summarize_newcomers(joined: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return ``accuracy-newcomers``, the mean over the newcomers.

    Without accuracies it is ``error-newcomers`` or ``loss-newcomers``. ``joined`` is
    the content of ``newcomers.json``.
    """
    for name in ("accuracy", "error", "loss"):
        if values := [each[name] for each in joined.values() if name in each]:
            return {f"{name}-newcomers": float(np.mean(values))}
    return {}


def lost_share(rows: Sequence[Row], num_clients: int) -> float:
    """Return the share of the replies of the last rounds that were lost.

    A reply is lost if it was rejected, or did not arrive although the round waited for
    it. The last rounds are those in which as many replies were due as there are
    clients: one round if all take part. Of training and evaluation, the larger share.
    """
    trained, tested = list[tuple[int, int]](), list[tuple[int, int]]()
    for row in reversed(rows):
        unanswered = len(row.get("unanswered-clients", ()))
        trained.append((row.get("clients", 0), row.get("rejected", 0) + unanswered))
        came = row.get("evaluated", 0) - row.get("evaluated-before", 0)
        lost = row.get("evaluation-rejected", 0) + row.get("evaluation-unanswered", 0)
        tested.append((came, lost))
    shares = [0.0]
    for rounds in trained, tested:
        due = lost = 0
        for valid, missing in rounds:
            due, lost = due + valid + missing, lost + missing
            if due >= num_clients:
                break
        shares.append(lost / max(1, due))
    return max(shares)


def failure(algorithm: str, summary: Mapping[str, Any]) -> str:
    """Return why a finished run counts as failed: most of its last replies were lost.

    Empty if it does not.
    """
    share = summary.get(LOST) or 0.0
    if share <= 0.5:
        return ""
    return (
        f"{algorithm} lost {share:.0%} of the replies of its last rounds, so its "
        "results are not those of all clients; the log has the reasons"
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a value of a row is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; it is empty if the file is missing or damaged."""
    try:
        value = read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(path, (strict_json(value, indent=2) + "\n").encode())


@contextlib.contextmanager
def log_os_errors(what: object, lost: set[str] | None = None) -> Iterator[None]:
    """Log an `OSError` as one line ("... not written") instead of raising it.

    If writing fails, ``what`` is added to ``lost``; if it succeeds, it is removed.
    """
    lost = set() if lost is None else lost
    try:
        yield
        lost.discard(str(what))
    except OSError as error:
        log(ERROR, "%s not written: %s", what, error)
        lost.add(str(what))


def refuse_losses(output: object, lost: set[str]) -> None:
    """Raise `SettingsError` if files of an output folder could not be written."""
    files = ", ".join(sorted(lost))
    allowed = f"writable; not written: {files}; the log shows the reasons"
    require(not lost, "output", str(output), allowed)


def strict_json(value: object, indent: int | None = None) -> str:
    """Serialize a value as standard JSON: NaN and infinities become null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return json.dumps(finite, indent=indent)


def describe(row: Row) -> str:
    """Return the training loss and the quality in a row, as part of a line."""
    parts = []
    if row.get("train-loss") is not None:
        parts.append(f"train loss {row['train-loss']:.4g}")
    name = quality(row)
    if row.get(name) is not None:
        form = "{:.2%}" if name == "accuracy" else "{:.4g}"
        label = "evaluation loss" if name == "loss" else name
        parts.append(f"{label} {form.format(row[name])}")
    return ", ".join(parts)
