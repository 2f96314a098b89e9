"""The files that compare runs: summary and page; table and figures.

A run writes summary and page, and a command the others at its end.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.common import log

from flwr_frl.common.algorithms import title
from flwr_frl.common.files import write_atomically
from flwr_frl.common.settings import Settings, facts, require
from flwr_frl.results.figures import WIDTH, figure_of, image_of, rank_diagram
from flwr_frl.results.methods import Comparison, tested
from flwr_frl.results.page import write_page
from flwr_frl.results.results import (
    METRICS,
    PAGE,
    PLOT,
    SUMMARY,
    read_object,
    read_rows,
    write_json,
)
from flwr_frl.results.tables import cell, chosen_cells, heading, latex

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Settings of a single run, which the summary's ``config`` leaves out.
PER_RUN = ("algorithm", "resume", "tracker", "tracker-uri")

# Formats of figures for a paper
KINDS = ("pdf", "svg")
# Columns of the table after the main result
COLUMNS = ("accuracy-worst-decile", "bytes", "seconds")
# BibTeX entries, each with the algorithms that it describes as keywords. A Flower
# bundle has no file of this kind.
REFERENCES = Path(__file__).with_name("references.bib")


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


def write_comparison(output: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary, the content of ``summary.json``, and the page of a folder."""
    write_json(output / SUMMARY, summary)
    write_page(output)


def write_paper(
    output: Path, comparison: Comparison, columns: Sequence[str] = ()
) -> None:
    """Write ``table.tex``, ``references.bib`` and figures.

    Figures need matplotlib. Table and figures as PDF and SVG fit into a column.

    Parameters
    ----------
    output : Path
        The folder.
    comparison : Comparison
        The comparison.
    columns : sequence of str
        Entries of ``summary.json`` in the table of a single task; by default the main
        result and `COLUMNS`.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "table.tex", table(comparison, columns).encode())
    text = references([row.method for row in comparison.rows])
    write_atomically(output / "references.bib", text.encode())
    if find_spec("matplotlib") is None:
        text = "no %s: matplotlib is missing (pip install 'flwr-frl[plot]'); see %s"
        log(INFO, text, PLOT, PAGE)
    else:
        write_figures(output, comparison)


def write_figures(output: Path, comparison: Comparison) -> None:
    """Write the curves of each task, and the diagram of mean ranks if there is one."""
    figures = dict[str, "Figure"]()
    for name, rows in comparison.tasks.items():
        of_methods = {
            row.method: [read_rows(folder / METRICS) for folder in row.folders]
            for row in rows
        }
        plain = re.sub(r"\W+", "-", name).strip("-")
        ending = f"-{plain}" if len(comparison.tasks) > 1 else ""
        figures[f"accuracy{ending}.png"] = figure_of(of_methods)
        column = figure_of(of_methods, WIDTH)
        figures |= {f"{rows[0].metric}{ending}.{kind}": column for kind in KINDS}
    if comparison.ranking:
        diagram = rank_diagram(comparison.ranking)
        figures |= {f"ranks.{kind}": diagram for kind in KINDS}
    for name, figure in figures.items():
        write_atomically(output / name, image_of(figure, name.rpartition(".")[2]))


def table(comparison: Comparison, columns: Sequence[str] = ()) -> str:
    """Return the LaTeX table: methods by metrics or, with several tasks, by tasks.

    The best result of a task is bold, and so are results that do not differ from it
    significantly, whatever the baseline. Raises `SettingsError` if a single task has no
    entries of these names.
    """
    tasks, metric = list(comparison.tasks), comparison.rows[0].metric
    ranking = comparison.ranking
    ranks = dict(zip(ranking.methods, ranking.ranks, strict=True)) if ranking else {}
    methods = list(dict.fromkeys([*ranks, *(row.method for row in comparison.rows)]))
    if len(tasks) == 1:
        entries = {row.method: row.entries for row in comparison.rows}
        present = {n for of in entries.values() for n, v in of.items() if v != ""}
        columns = columns or [n for n in (metric, *COLUMNS) if n in present]
        allowed = f"some of {', '.join(sorted(present))}"
        require(present.issuperset(columns), "columns", ",".join(columns), allowed)
        head, *rows = chosen_cells(entries, columns, 1)
    else:
        results = {
            (row.method, row.task): cell(row.summary, metric, 1).replace("%", "")
            for row in comparison.rows
        }
        columns = [*tasks, "mean rank"] if ranks else tasks
        results |= {(name, "mean rank"): f"{rank:.2f}" for name, rank in ranks.items()}
        # The unit is beside the metric, not in the heading of every task.
        head = [heading(metric), *columns]
        rows = [
            [name, *(results.get((name, n), "") for n in columns)] for name in methods
        ]
    named = [metric] if len(tasks) == 1 else tasks
    bold = {
        (methods.index(row.method) + 1, columns.index(column) + 1)
        for column, of_task in zip(named, comparison.tasks.values(), strict=True)
        for row in tested(of_task, "")
        if column in columns and (row.reference or row.differs is False)
    }
    titled = [[title(method), *cells] for method, *cells in rows]
    return f"% {comparison.legend}\n{latex([head, *titled], bold)}"


def references(methods: Sequence[str]) -> str:
    """Return the BibTeX entries of some methods."""
    text = REFERENCES.read_text(encoding="utf-8") if REFERENCES.is_file() else ""
    names = {method.partition(" ")[0] for method in methods}
    chosen = []
    for entry in text.split("\n\n"):
        keywords = re.search(r"keywords = {(.*)}", entry)
        if keywords and not names.isdisjoint(keywords[1].split(", ")):
            chosen.append(f"{entry.strip()}\n")
    return "\n".join(chosen)
