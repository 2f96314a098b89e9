"""Files in which the runs of an output folder are compared."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_frl.common.settings import Settings, facts
from flwr_frl.common.text import short_name
from flwr_frl.results.journal import RunFolder, write_csv
from flwr_frl.results.output import log_os_errors
from flwr_frl.results.page.document import write_page
from flwr_frl.results.plot import plot
from flwr_frl.results.results import (
    METRICS_CSV,
    PAGE,
    PLOT,
    SUMMARY,
    read_object,
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
    content = read_object(output / SUMMARY)
    former = content.get("config"), content.get("algorithms")
    single = "seeds" not in content and all(isinstance(p, dict) for p in former)
    if single and _comparable(content["config"]) == _comparable(config):
        return content
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
    summaries, config = summary["algorithms"], summary["config"]
    evaluated_on, places = str(config["evaluate-on"]), folders or (output,)
    seeds = summary.get("seeds", [config["seed"]])
    runs = [
        RunFolder(name, seed, evaluated_on, place / name)
        for seed, place in zip(seeds, places, strict=True)
        for name in summaries
    ]
    writers: dict[str, Callable[[], object]] = {
        SUMMARY: lambda: write_json(output / SUMMARY, summary),
        METRICS_CSV: lambda: write_csv(output / METRICS_CSV, runs),
        "tables": lambda: write_tables(output, summaries, evaluated_on),
        PLOT: lambda: plot(output, list(summaries), places),
        PAGE: lambda: write_page(output),
    }
    for name, write in writers.items():
        with log_os_errors(name, lost):
            write()
