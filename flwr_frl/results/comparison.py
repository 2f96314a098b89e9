"""The files that compare the runs of a folder: summary, plot and page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr_frl.common.settings import Settings, facts
from flwr_frl.results.figures import plot
from flwr_frl.results.page import write_page
from flwr_frl.results.results import (
    PAGE,
    PLOT,
    SUMMARY,
    folder_of,
    log_os_errors,
    read_object,
    write_json,
)

# Settings of a single run, which the summary's ``config`` leaves out.
PER_RUN = ("algorithm", "resume", "page", "tracker", "tracker-uri")


def read_comparable(settings: Settings) -> dict[str, Any]:
    """Read the ``summary.json`` that a run with these settings joins.

    Returns a summary without algorithms if the file is missing or damaged, if its runs
    had other settings, or if it is over several seeds.
    """
    config = {name: value for name, value in settings.items() if name not in PER_RUN}
    content = read_object(Path(str(settings["output"])) / SUMMARY)
    former = content.get("config"), content.get("algorithms")
    single = "seeds" not in content and all(isinstance(p, dict) for p in former)
    if single and _comparable(content["config"]) == _comparable(config):
        return content
    return {"algorithms": {}, "config": config}


def _comparable(config: Settings) -> dict[str, Any]:
    return {name: v for name, v in config.items() if name not in facts("always")}


def write_comparison(output: Path, summary: Mapping[str, Any]) -> set[str]:
    """Write the summary, the plot and the page of an output folder.

    A file that cannot be written is logged, and the others are written nevertheless.

    Parameters
    ----------
    output : Path
        The output folder.
    summary : mapping
        The content of ``summary.json``.

    Returns
    -------
    set of str
        The files that could not be written.
    """
    lost = set[str]()
    folders = [output]
    if "seeds" in summary:
        folders = [output / folder_of(seed) for seed in summary["seeds"]]
    runs = {
        name: [folder / name for folder in folders] for name in summary["algorithms"]
    }
    writers: dict[str, Callable[[], object]] = {
        SUMMARY: lambda: write_json(output / SUMMARY, summary),
        PLOT: lambda: plot(output, runs),
        PAGE: lambda: write_page(output),
    }
    for name, write in writers.items():
        with log_os_errors(name, lost):
            write()
    return lost
