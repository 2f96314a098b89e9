"""Runs of a benchmark. Each is carried out once; finished runs are reused.

A run is a call of a function with settings, by default a simulation. It is finished if
its result is in the output folder, or on a page with the same settings. A table can
therefore be computed on several machines, or on one that loses its files.
"""

import contextlib
import logging
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord
from rich.console import Console
from rich.progress import track

from benchmarks.common import provenance, rounded
from flwr_frl import simulate
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import Setting, Settings, defaults
from flwr_frl.common.text import short_name
from flwr_frl.results.processes import signals_as_ctrl_c
from flwr_frl.results.results import METRICS, read_json, read_rows, write_json
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.loop import run_rounds

RESULT = "result.json"
# Settings that do not affect results
INDIFFERENT = ("data-dir", "evaluate-every", "output")
DEFAULTS = defaults()
Numbers = dict[str, Any]


class Job(NamedTuple):
    """A run to be carried out.

    Parameters
    ----------
    place : Path
        Folder of the run.
    settings : dict
        Settings, including ``algorithm``.
    function : str
        ``module:function``, called with the settings and the place; returns numbers.
    curves : tuple of str
        Metrics of which a simulation's result has the values by round.
    measure : str, default ""
        Function of a job and a simulation's result that returns further numbers.
    """

    place: Path
    settings: dict[str, Setting]
    function: str
    curves: tuple[str, ...] = ()
    measure: str = ""

    @property
    def run_folder(self) -> Path:
        """Return the folder that a simulation writes."""
        return self.place / short_name(str(self.settings["algorithm"]))


def load(path: str) -> Any:
    """Return an object by its path, ``module:name`` in this package."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"benchmarks.{module}"), name)


def finished(job: Job) -> Numbers | None:
    """Return the stored result of a run with these settings, or None."""
    path = job.place / RESULT
    if not path.is_file():
        return None
    found: Numbers = read_json(path)
    return found if found.pop("settings") == job.settings else None


def of_page(path: Path) -> Numbers:
    """Return the content of a page's JSON; it is empty if there is no page yet."""
    return read_json(path) if path.is_file() else {}


def kept(run: Numbers | None) -> Numbers | None:
    """Return a page's run if it can be reused: not failed, from a clean commit."""
    if run is None or "failed" in run or run["commit"].endswith("-dirty"):
        return None
    return run


def essential(settings: Mapping[str, Setting]) -> Any:
    """Return the settings that affect results, including those with defaults."""
    given = {**DEFAULTS, **settings}
    # Pages have rounded numbers.
    return rounded({n: v for n, v in given.items() if n not in INDIFFERENT})


class Rounds:
    """An algorithm that advances some rounds at a time, in this process.

    Parameters
    ----------
    settings : mapping
        All settings of the run.
    grid : InlineGrid, optional
        The grid, by default one with all clients.
    """

    def __init__(self, settings: Settings, grid: InlineGrid | None = None) -> None:
        clients = int(settings["num-clients"])
        self.grid: Any = grid or InlineGrid(make_app(settings), clients)
        self.strategy: Any = build_strategy(settings)
        self.arrays = self.strategy.initialize(self.grid)
        self.done = 0

    def run(
        self,
        count: int = 1,
        evaluated: Callable[[int], bool] = lambda server_round: False,
        after_round: Callable[[int, ArrayRecord, Numbers], object] | None = None,
    ) -> ArrayRecord:
        """Run some rounds, by default without evaluations; return the arrays."""
        numbers = range(self.done + 1, self.done + count + 1)
        self.done += count
        more: Any = {"evaluated": evaluated, "after_round": after_round}
        self.arrays = run_rounds(self.strategy, self.grid, self.arrays, numbers, **more)
        return self.arrays


def simulated(job: Job) -> Numbers:
    """Carry out a simulation; return its summary, curves and further measures."""
    settings = {**job.settings, "output": str(job.place)}
    found = simulate(str(settings.pop("algorithm")), "inline", **settings).summary
    if job.curves:
        rows = read_rows(job.run_folder / METRICS)
        found["curve"] = {
            name: [[row[key] for row in rows if name in row] for key in ("round", name)]
            for name in job.curves
        }
    return found | (load(job.measure)(job, found) if job.measure else {})


def carry_out(job: Job) -> Numbers:
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
            if job.function:
                result = load(job.function)(job.settings, job.place)
            else:
                result = simulated(job)
        except Exception as error:
            # The other runs continue, and the page reports the one that failed.
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"}
    found = {
        **result,
        "cpu-seconds": time.process_time() - cpu,
        "commit": provenance()["commit"],
        **_gpu(),
    }
    write_json(job.place / RESULT, {**found, "settings": job.settings})
    return found


def _gpu() -> dict[str, str]:
    """Return the name of the GPU that runs use; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name()}


def carry_out_all(jobs: Iterable[Job], count: int) -> None:
    """Carry out runs in turn, with a progress bar and a line for each."""
    console = Console(file=sys.stdout)
    for job in track(jobs, "runs", count, console=console):
        found = carry_out(job)
        status = found.get("failed", "done")
        name = "/".join(job.place.parts[-3:])
        console.print(
            f"{time.strftime('%H:%M:%S')} {name}: {status}, "
            f"{found['cpu-seconds']:.0f} s of a core",
            highlight=False,
            soft_wrap=True,
        )


@signals_as_ctrl_c()
def exit_status(make_and_write: Callable[[], None]) -> int:
    """Carry out runs and write a page; return 130 after Ctrl-C, 2 on wrong settings.

    Parameters
    ----------
    make_and_write : callable
        Carries out the runs and writes the page.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        make_and_write()
    except KeyboardInterrupt:
        return 130
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
