"""Files in which the runs of an output folder are compared."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_frl.common.settings import Settings, facts
from flwr_frl.common.text import short_name
from flwr_frl.results import newcomers
from flwr_frl.results.journal import join_csv
from flwr_frl.results.output import log_os_errors
from flwr_frl.results.page.document import write_page
from flwr_frl.results.plot import plot
from flwr_frl.results.results import (
    MALFORMED,
    METRICS_CSV,
    PAGE,
    PLOT,
    SUMMARY,
    read_json,
    write_json,
)
from flwr_frl.results.tables import write_tables

# Settings of a single run, which the summary's ``config`` leaves out.
PER_RUN = ("algorithm", "resume", "page", "tracker", "tracker-uri")


def shared_config(settings: Settings) -> dict[str, Any]:
    """Return the settings without those of a single run."""
    return {name: value for name, value in settings.items() if name not in PER_RUN}


def read_comparable(output: Path, config: Settings) -> dict[str, Any]:
    """Read ``summary.json``, which a run with settings ``config`` joins.

    Returns a summary without algorithms if the file is missing or damaged, if its runs
    had other settings, or if it is over several seeds.
    """
    try:
        content: dict[str, Any] = read_json(output / SUMMARY)
        same = _comparable(content["config"]) == _comparable(config)
        single = "seeds" not in content
        if same and single and isinstance(content["algorithms"], dict):
            return content
    except MALFORMED:
        pass
    return {"algorithms": {}, "config": config}


def read_summary(settings: Settings, rounds: int) -> dict[str, Any] | None:
    """Read the summary of a run with these settings from ``summary.json``.

    Returns None if the file has no summary of this algorithm over ``rounds`` rounds,
    for example because the run had other metrics.
    """
    found = read_comparable(Path(str(settings["output"])), shared_config(settings))
    summary = found["algorithms"].get(short_name(str(settings["algorithm"])))
    same = isinstance(summary, dict) and summary.get("rounds") == rounds
    return summary if same else None


def _comparable(config: Settings) -> dict[str, Any]:
    return {name: v for name, v in config.items() if name not in facts("always")}


def write_comparison(
    output: Path,
    summary: Mapping[str, Any],
    folders: Sequence[Path] = (),
    lost: set[str] | None = None,
) -> None:
    """Write the summary, ``metrics.csv``, tables, plots and page of an output folder.

    A file that cannot be written is logged, and the others are written nevertheless.

    Parameters
    ----------
    output : Path
        The output folder.
    summary : mapping
        The content of ``summary.json``.
    folders : sequence of Path
        The folders of several seeds. By default the runs are in ``output``.
    lost : set of str, optional
        Files that cannot be written are added to it.
    """
    summaries, names = summary["algorithms"], list(summary["algorithms"])
    evaluated_on = str(summary["config"]["evaluate-on"])
    with log_os_errors(SUMMARY, lost):
        write_json(output / SUMMARY, summary)
    with log_os_errors(METRICS_CSV, lost):
        runs = (folder / name for folder in folders or (output,) for name in names)
        join_csv(output / METRICS_CSV, (run / METRICS_CSV for run in runs))
    with log_os_errors("tables", lost):
        write_tables(output, summaries, evaluated_on)
    with log_os_errors(PLOT, lost):
        plot(output, names, folders, evaluated_on)
    with log_os_errors(newcomers.PLOT, lost):
        newcomers.plot(output, names, folders)
    with log_os_errors(PAGE, lost):
        write_page(output)
