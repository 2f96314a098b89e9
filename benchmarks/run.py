"""The runner of all benchmarks that are grids of runs: rows, cells and seeds.

``python -m benchmarks.run NAME`` reads ``configs/NAME.toml``, carries out the runs that
are missing, and writes ``results/NAME.md``, ``.json`` and, if the config has a plot,
``.png``. A run has the settings of ``common``, of its cell, of its row, and those that
validation has chosen (``tune``), in this order. The fields are those of `Config`. A
config can also have a ``base`` (another config, which it changes), ``only`` (the rows
of the base that it has) and ``axes`` (lists of settings whose combinations are cells;
``values`` has further entries of the cells by value).
"""

import argparse
import math
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import common, render
from benchmarks.runs import (
    Job,
    Numbers,
    carry_out,
    carry_out_all,
    essential,
    exit_status,
    finished,
    kept,
    load,
    of_page,
)
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import Setting, Settings
from flwr_frl.results.processes import run_parallel
from flwr_frl.results.results import write_json
from flwr_frl.results.sweep import points_of

CONFIGS = Path(__file__).parent / "configs"
# Entries of rows and cells that are no settings
RESERVED = (
    *("against", "base", "cells", "communication", "data", "grid", "grid-as", "metric"),
    *("only", "seeds", "stored", "text", "tuning-seeds", "without"),
)
# Metrics of which lower values are better
ERRORS = ("error", "rmse", "validation")
# First seed of the runs by which settings are chosen
TUNING_SEED = 1000
MOST_RATES = 4
# Settings of `--small`
SMALL = ("num-server-rounds", "iterations")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A benchmark.

    Parameters
    ----------
    name, title, text : str
        Name of the page, and its heading and text.
    needs : list of str
        Folders that the command must be given.
    rows, cells : dict
        Settings by row and by cell. A row's ``algorithm`` is its name if it is not
        given. A setting of a row can be a table by cell. A row's ``cells`` and a cell's
        ``only`` are their partners, ``without`` those that are left out; ``seeds``,
        ``data`` and ``metric`` replace the config's.
    common : dict
        Settings of all runs.
    seeds : int
        Number of seeds, from 0. ``seeds_from`` names a function that returns others.
    function : str
        Name of the function that carries out a run; by default, it is a simulation.
    curves, measure : sequence of str, str
        As in `Job`.
    metric : str
        The main metric, by which settings are chosen.
    tune : dict
        ``grid`` (a string, or one for each of several stages), overridden by a row's
        ``grid``; ``cell``, if one is for all; ``diverged`` (the largest error);
        ``extend`` (the factor by which a grid is extended if its end is the best); and
        ``settings`` of these runs. ``stored`` is a file of chosen settings, which
        ``--anew`` writes if there are grids.
    data : str
        The entry of ``sources`` with the runs' data: a function of the folders and the
        arguments given there that returns settings.
    derive : str
        Function of the config and its results that returns further content of the page.
    reuse : list of str
        Other pages whose runs are reused.
    tables, plot : list of dict, dict
        See `benchmarks.render`.
    """

    name: str
    title: str
    text: str
    needs: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, Any]]
    cells: dict[str, dict[str, Any]] = field(default_factory=lambda: {"all": {}})
    common: dict[str, Setting] = field(default_factory=dict)
    seeds: int = 1
    seeds_from: str = ""
    function: str = ""
    curves: list[str] = field(default_factory=list)
    measure: str = ""
    metric: str = "accuracy"
    tune: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    derive: str = ""
    reuse: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    plot: dict[str, Any] = field(default_factory=dict)


def table_of(name: str) -> dict[str, Any]:
    """Return the content of a config's file, on top of that of its ``base``."""
    table = tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))
    if base := table.pop("base", ""):
        inherited = table_of(base)
        for part in ("common", "tune"):
            table[part] = {**inherited.get(part, {}), **table.get(part, {})}
        table = {**inherited, **table}
    if only := table.pop("only", ()):
        table["rows"] = {name: table["rows"][name] for name in only}
    return table


def read(name: str) -> Config:
    """Return the config of this name."""
    table = table_of(name)
    about = table.pop("values", {})
    if axes := table.pop("axes", {}):
        own, cells = table.get("cells", {}), {}
        for values in product(*axes.values()):
            cell = ", ".join(map(str, values))
            cells[cell] = dict(zip(axes, values, strict=True))
            for value in values:
                cells[cell] |= about.get(str(value), {})
            cells[cell] |= own.get(cell, {})
        table["cells"] = cells
    return Config(name=name, **table)


def reduced(config: Config) -> Config:
    """Return a config of few short runs, which only shows that its command works."""
    rows = dict(list(config.rows.items())[:2])
    pairs = [(r, c) for c in config.cells for r in rows if paired(config, r, c)]
    cells = {c: {**config.cells[c], "seeds": 1, "tuning-seeds": 1} for _, c in pairs}
    first = next(iter(cells))
    left_out = "grid", "seeds"
    rows = {r: {n: own[n] for n in own if n not in left_out} for r, own in rows.items()}
    small = {n: 1 for n in SMALL if n in config.common}
    small |= {} if config.function else {SMALL[0]: 1}
    cell = cells[first] | {n: 1 for n in SMALL if n in cells[first]}
    rows = {r: own | {n: 1 for n in SMALL if n in own} for r, own in rows.items()}
    common = config.common | small
    tune = {name: value for name, value in config.tune.items() if name != "grid"}
    changed = {"rows": rows, "cells": {first: cell}, "common": common, "tune": tune}
    return replace(config, **changed, seeds=1)


def paired(config: Config, row: str, cell: str) -> bool:
    """Return whether a cell has a row."""
    of_row, of_cell = config.rows[row], config.cells[cell]
    return (
        cell in of_row.get("cells", [cell])
        and row in of_cell.get("only", [row])
        and row not in of_cell.get("without", [])
    )


class Bench:
    """The runs of a config, finished or missing.

    Parameters
    ----------
    config : Config
        The benchmark.
    output : Path
        Folder of the runs.
    folders : dict of str to Path
        Given folders: ``data-dir`` and ``model``.
    anew : bool, default False
        Whether runs on pages are repeated.
    only : tuple of str, default ()
        The rows whose runs are carried out, by default all. Those named are carried
        out anew; other rows are those of the page.
    """

    def __init__(
        self,
        config: Config,
        output: Path,
        folders: dict[str, Path],
        anew: bool = False,
        only: tuple[str, ...] = (),
    ) -> None:
        self.config, self.folders, self.only = config, folders, only
        self.output = output.absolute()
        self._sources: dict[str, dict[str, Setting]] = {}
        self.page = {} if anew else of_page(common.RESULTS / f"{config.name}.json")
        self.known = [] if anew else list(self._on_pages())
        # Settings that were chosen earlier, by row
        self.stored: dict[str, dict[str, Setting]] = {}
        tune, tuned = config.tune, any("grid" in r for r in config.rows.values())
        if (file := tune.get("stored")) and not (anew and tuned):
            found = of_page(common.RESULTS / file)["algorithms"]
            self.stored = {row: entry["picked"] for row, entry in found.items()}

    def _on_pages(self) -> Iterator[tuple[Settings, Numbers]]:
        """Yield the runs on the page and on those of `reuse`, with their settings."""
        others = [of_page(common.RESULTS / f"{n}.json") for n in self.config.reuse]
        for page in (self.page, *others):
            for row, cells in page.get("own", {}).items():
                if page is self.page and row in self.only:
                    continue
                for cell, own in cells.items():
                    settings = {**page["common"], **own}
                    for run in page["results"][row][cell]:
                        yield essential({**settings, "seed": run["seed"]}), run

    def source(self, cell: str) -> dict[str, Setting]:
        """Return the settings of a cell's data, which is prepared on first use."""
        name = self.config.cells[cell].get("data", self.config.data)
        if name not in self._sources:
            folder = self.folders.get("data-dir")
            settings: dict[str, Setting] = {}
            if name and (about := dict(self.config.sources[name])):
                self.output.mkdir(parents=True, exist_ok=True)
                function = load(about.pop("function"))
                settings = function(self.folders, self.output, **about)
            elif folder:
                settings = {"data-dir": str(folder.absolute())}
            self._sources[name] = settings
        return self._sources[name]

    def settings(self, row: str, cell: str) -> dict[str, Setting]:
        """Return the settings of runs, without those that are chosen."""
        own: dict[str, Setting] = {}
        for table in (self.config.cells[cell], self.config.rows[row]):
            for name, value in table.items():
                if isinstance(value, dict):
                    own |= {name: value[cell]} if cell in value else {}
                elif name not in RESERVED:
                    own[name] = value
        given = {"algorithm": row, **self.config.common, **own}
        return given | self.source(cell)

    def seeds(self, row: str, cell: str) -> list[int]:
        """Return the seeds of a row in a cell."""
        tables = self.config.rows[row], self.config.cells[cell]
        counts = (table["seeds"] for table in tables if "seeds" in table)
        count = next(counts, self.config.seeds)
        if self.config.seeds_from:
            settings = self.settings(row, cell)
            found: list[int] = load(self.config.seeds_from)(settings, count)
            return found
        return list(range(count))

    def job(self, row: str, cell: str, seed: int, chosen: Settings) -> Job:
        """Return a run; with a tuning seed, it is evaluated on validation sets."""
        settings = {**self.settings(row, cell), **chosen, "seed": seed}
        if seed >= TUNING_SEED:
            settings |= self.config.tune["settings"]
        parts = cell, row, "-".join(str(value) for value in (*chosen.values(), seed))
        place = self.output.joinpath(*(part.replace("/", "-") for part in parts))
        config = self.config
        own = tuple(config.curves), config.measure
        return Job(place, settings, config.function, *own)

    def result(self, job: Job) -> Numbers | None:
        """Return a run's result from the output folder or a page; None if missing."""
        if (found := finished(job)) is not None:
            return found
        wanted = essential(job.settings)
        same = (kept(run) for settings, run in self.known if settings == wanted)
        return next(filter(None, same), None)

    def metric(self, cell: str) -> str:
        """Return a cell's main metric."""
        return str(self.config.cells[cell].get("metric", self.config.metric))

    def value(self, job: Job, cell: str) -> float:
        """Return a finished run's main metric, lower with errors; -inf if diverged."""
        value = (self.result(job) or {}).get(self.metric(cell))
        if value is None or not math.isfinite(value):
            return -math.inf
        if self.metric(cell) not in ERRORS:
            return float(value)
        return -value if value <= self.config.tune.get("diverged", value) else -math.inf

    def choose(self, row: str, cell: str) -> tuple[dict[str, Setting] | None, Any]:
        """Return the settings chosen by validation, and the runs that it still needs.

        The settings are None if runs are missing, or if all those tried have diverged.
        Points with a diverged run, of any seed, are excluded.
        """
        tune, about = self.config.tune, self.config.rows[row]
        known = self.page.get("chosen", {}).get(row, {}).get(cell)
        if known is not None and row not in self.only:
            return known, []
        row = about.get("grid-as", row)
        if row in self.stored and about.get("stored", True):
            return self.stored[row], []
        grid = self.config.rows[row].get("grid", tune.get("grid", []))
        cell = tune.get("cell", cell)
        count = self.config.cells[cell].get("tuning-seeds", 1)
        seeds = range(TUNING_SEED, TUNING_SEED + count)
        chosen: dict[str, Setting] = {}
        for stage in [grid] if isinstance(grid, str) else grid:
            # A grid by cell, or for all cells
            tried = points_of(self.config.cells[cell].get("grid", stage))
            while True:
                jobs = [
                    [self.job(row, cell, seed, {**chosen, **p}) for seed in seeds]
                    for p in tried
                ]
                if missing := self.missing([job for each in jobs for job in each]):
                    return None, missing
                scores = []
                for point, each in zip(tried, jobs, strict=True):
                    final = [
                        self.job(row, cell, seed, {**chosen, **point})
                        for seed in self.seeds(row, cell)
                    ]
                    done = [job for job in final if finished(job) is not None]
                    ends = [self.value(job, cell) for job in done]
                    own = [self.value(job, cell) for job in each]
                    diverged = -math.inf in ends
                    scores.append(-math.inf if diverged else sum(own) / len(own))
                best = scores.index(max(scores))
                if not (beyond := self.beyond(tried, best)):
                    break
                tried = sorted([*tried, beyond], key=lambda p: next(iter(p.values())))
            if math.isinf(scores[best]):
                return None, []
            chosen |= tried[best]
        return chosen, []

    def beyond(self, tried: list[dict[str, Any]], best: int) -> dict[str, Any] | None:
        """Return a further point if the best one is at an end of a grid of rates."""
        factor = self.config.tune.get("extend")
        if not factor or len(tried) >= MOST_RATES or 0 < best < len(tried) - 1:
            return None
        ((name, value),) = tried[best].items()
        return {name: value * factor if best else value / factor}

    def missing(self, jobs: list[Job]) -> list[Job]:
        """Return the runs that are not finished."""
        return [job for job in jobs if self.result(job) is None]

    def pairs(self) -> list[tuple[str, str]]:
        """Return all rows with their cells."""
        rows, cells = self.config.rows, self.config.cells
        return [(r, c) for c in cells for r in rows if paired(self.config, r, c)]

    def waiting(self) -> list[Job]:
        """Return the missing runs that can be carried out now, seed by seed."""
        jobs: list[tuple[int, Job]] = []
        for row, cell in self.pairs():
            if self.only and row not in self.only:
                continue
            chosen, tuning = self.choose(row, cell)
            jobs += [(-1, job) for job in tuning]
            if chosen is not None:
                for number, seed in enumerate(self.seeds(row, cell)):
                    job = self.job(row, cell, seed, chosen)
                    jobs += [(number, job) for job in self.missing([job])]
        found = [job for _, job in sorted(jobs, key=lambda pair: pair[0])]
        # Rows that adopt another row's settings share the runs of its choice.
        return list({job.place: job for job in found}.values())

    def make(self, parallel: int) -> None:
        """Carry out all missing runs. A run can change which settings are the best."""
        tuned = bool(self.config.tune)
        while jobs := self.waiting():
            if parallel > 1:
                run_parallel(carry_out, [(job,) for job in jobs], parallel)
            else:
                carry_out_all(jobs[:1] if tuned else jobs, len(jobs))

    def content(self) -> dict[str, Any]:
        """Return the page's JSON: settings, choices and the results of finished runs.

        ``results`` has a list of runs for each row and cell.
        """
        results: dict[str, dict[str, list[Numbers]]] = {}
        own: dict[str, dict[str, Settings]] = {}
        picked: dict[str, dict[str, Settings]] = {}
        for row, cell in self.pairs():
            chosen, _ = self.choose(row, cell)
            if chosen is None:
                continue
            if self.config.tune:
                picked.setdefault(row, {})[cell] = chosen
            jobs = [self.job(row, cell, seed, chosen) for seed in self.seeds(row, cell)]
            runs = [
                {"seed": job.settings["seed"], **found}
                for job in jobs
                if (found := self.result(job)) is not None
            ]
            if runs:
                results.setdefault(row, {})[cell] = runs
                own.setdefault(row, {})[cell] = {
                    name: value
                    for name, value in jobs[0].settings.items()
                    if name not in ("data-dir", "seed")
                    and (name, value) not in self.config.common.items()
                }
        data: dict[str, Any] = {"common": self.config.common, "own": own}
        data |= {"chosen": picked, "results": results}
        if self.config.derive:
            data |= load(self.config.derive)(self.config, results)
        # Pages do not have the clients of several seeds, which are only compared.
        for name in data.keys() & self.page.keys() & {"notes", "against-fedavg"}:
            for row, cells in self.page[name].items():
                data[name][row] = {**cells, **data[name].get(row, {})}
        lists = [runs for cells in results.values() for runs in cells.values()]
        for run in (run for runs in lists if len(runs) > 1 for run in runs):
            run.pop("clients", None)
        seconds = sum(run.get("cpu-seconds", 0) for runs in lists for run in runs)
        return data | ({"seconds": seconds} if seconds else {})

    def write(self) -> None:
        """Write the page of all finished runs."""
        data = self.content()
        if not data["results"]:
            raise SettingsError(f"{self.config.name} has no finished runs")
        tune = self.config.tune
        if "stored" in tune and not self.stored and data["chosen"]:
            found = {
                row: {"picked": next(iter(cells.values()))}
                for row, cells in data["chosen"].items()
            }
            about = {"by": self.config.name, "cell": tune["cell"], "algorithms": found}
            write_json(common.RESULTS / tune["stored"], about)
        body = render.body(self.config, data)
        common.write(self.config.name, self.config.title, body, data)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(p.stem for p in CONFIGS.glob("*.toml")))
    parser.add_argument("--data-dir", type=Path, help="folder of the data")
    parser.add_argument("--model", type=Path, help="folder of a model")
    parser.add_argument("--output", type=Path, help="default: results/NAME")
    parser.add_argument("--seeds", type=int, help="number of seeds")
    parser.add_argument("--only", nargs="+", default=(), metavar="ROW")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--anew", action="store_true", help="repeat the page's runs")
    parser.add_argument(
        "--small",
        action="store_true",
        help="only try the command: one short run of two rows, and no page",
    )
    options = parser.parse_args()
    config = read(options.name)
    if options.seeds:
        config = replace(config, seeds=options.seeds)
    if options.cells:
        config = replace(config, cells={c: config.cells[c] for c in options.cells})
    if options.small:
        config = reduced(config)
    output = options.output or Path("results") / options.name
    given = {"data-dir": options.data_dir, "model": options.model}
    folders = {name: folder for name, folder in given.items() if folder}
    missing = set(config.needs) - folders.keys()
    if missing and not options.page:
        parser.error(f"{config.name} needs --{', --'.join(sorted(missing))}")
    anew = options.anew or options.small

    def make_and_write() -> None:
        bench = Bench(config, output, folders, anew, tuple(options.only))
        try:
            if not options.page:
                bench.make(options.jobs)
        finally:
            if options.small:
                print(render.body(replace(config, plot={}), bench.content()))
            else:
                bench.write()

    return exit_status(make_and_write)


if __name__ == "__main__":
    sys.exit(main())
