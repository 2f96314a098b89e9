"""Runs of a table. Each run is carried out once; finished runs are reused.

A run is finished if its result is in the output folder, or on the table's page with the
same settings. A table can therefore be computed on several machines, or on one that
loses its files.
"""

import contextlib
import logging
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks.common import provenance
from flwr_frl import simulate
from flwr_frl.common.settings import Setting, SettingsError, defaults
from flwr_frl.results.results import read_json, write_json
from flwr_frl.results.terminal import signals_as_ctrl_c

RESULT = "result.json"
# Settings that do not affect accuracies
INDIFFERENT = ("data-dir", "evaluate-every", "output")
DEFAULTS = defaults()


class Job(NamedTuple):
    """A run to be carried out: its folder, algorithm and settings."""

    place: Path
    algorithm: str
    settings: dict[str, Setting]


def finished(job: Job) -> dict[str, Any] | None:
    """Return the stored result of a run with these settings, or None."""
    path = job.place / RESULT
    if not path.is_file():
        return None
    found: dict[str, Any] = read_json(path)
    return found if found.pop("settings") == job.settings else None


def of_page(path: Path) -> dict[str, Any]:
    """Return the content of a page's JSON; it is empty if there is no page yet."""
    return read_json(path) if path.is_file() else {}


def kept(run: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a page's run if it can be reused: not failed, from a clean commit."""
    if run is None or "failed" in run or run["commit"].endswith("-dirty"):
        return None
    return run


def alike(one: Mapping[str, Setting], other: Mapping[str, Setting]) -> bool:
    """Return whether runs with these settings have the same accuracies."""

    def whole(settings: Mapping[str, Setting]) -> dict[str, Setting]:
        given = {**DEFAULTS, **settings}
        return {n: v for n, v in given.items() if n not in INDIFFERENT}

    return whole(one) == whole(other)


def carry_out(job: Job) -> dict[str, Any]:
    """Carry out a run; the files of an interrupted run are deleted first."""
    shutil.rmtree(job.place, ignore_errors=True)
    job.place.mkdir(parents=True)
    cpu, result = time.process_time(), {}
    with (
        (job.place / "log.txt").open("w", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            settings = {**job.settings, "output": str(job.place)}
            result = simulate(job.algorithm, "inline", **settings).summary
        except Exception as error:
            # The other runs continue, and the page reports the one that failed.
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"}
    found = {
        **result,
        "cpu-seconds": time.process_time() - cpu,
        "commit": provenance()["commit"],
        **_gpu(),
        "settings": job.settings,
    }
    write_json(job.place / RESULT, found)
    return found


def _gpu() -> dict[str, str]:
    """Return the name of the GPU that runs use; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name()}


def carry_out_all(
    title: str, jobs: Iterable[Job], waiting: Callable[[], list[Job]] | None = None
) -> None:
    """Carry out runs in turn, with a progress bar and a line for each.

    Parameters
    ----------
    title : str
        Title of the progress bar.
    jobs : iterable of Job
        The runs. The next one is requested after the previous one has finished.
    waiting : callable, optional
        Returns the missing runs, from which the remaining time is estimated.
    """
    console = Console(file=sys.stdout)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(
        *columns, console=console, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        bar = progress.add_task(title, total=waiting and len(waiting()), left="")
        took: dict[str, list[float]] = {}
        for job in jobs:
            name = f"{job.place.parent.name}/{job.place.name}"
            progress.update(bar, description=name)
            began = time.monotonic()
            found = carry_out(job)
            took.setdefault(job.algorithm, []).append(time.monotonic() - began)
            left = _remaining(waiting(), took) if waiting else ""
            progress.update(bar, advance=1, left=left)
            status = found.get("failed") or f"{found.get('accuracy', np.nan):.2%}"
            seconds = took[job.algorithm][-1]
            console.print(
                f"{time.strftime('%H:%M:%S')} {name}: {status}, {seconds:.0f} s "
                f"({found['cpu-seconds']:.0f} s of a core); {left}",
                highlight=False,
                soft_wrap=True,
            )


def _remaining(jobs: list[Job], took: dict[str, list[float]]) -> str:
    """Estimate the remaining time from the runs so far."""
    overall = float(np.mean([np.mean(own) for own in took.values()]))
    seconds = sum(float(np.mean(took.get(job.algorithm, overall))) for job in jobs)
    return f"{len(jobs)} runs and {seconds / 60:.0f} min left"


@signals_as_ctrl_c()
def exit_status(make_and_write: Callable[[], None]) -> int:
    """Carry out runs and write a page; return 130 after Ctrl-C, 2 on wrong settings.

    Parameters
    ----------
    make_and_write : callable
        Carries out the runs and writes the page.
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        make_and_write()
    except KeyboardInterrupt:
        return 130
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
