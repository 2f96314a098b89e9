"""The files that compare runs: summary and page; table and figures.

A run writes summary and page, and a command the others at its end.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.common.algorithms import title
from flwr_frl.common.files import write_atomically
from flwr_frl.common.settings import Settings, facts
from flwr_frl.results.figures import WIDTH, figure_of, image_of
from flwr_frl.results.methods import Comparison, tested
from flwr_frl.results.page import write_page
from flwr_frl.results.results import PAGE, PLOT, SUMMARY, read_object, write_json
from flwr_frl.results.tables import chosen_cells, latex

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


def write_paper(output: Path, comparison: Comparison) -> None:
    """Write ``table.tex``, ``references.bib`` and figures.

    Figures need matplotlib. Table and figures as PDF and SVG fit into a column.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "table.tex", table(comparison).encode())
    text = references([row.method for row in comparison.rows])
    write_atomically(output / "references.bib", text.encode())
    if find_spec("matplotlib") is None:
        text = "no %s: matplotlib is missing (pip install 'flwr-frl[plot]'); see %s"
        log(INFO, text, PLOT, PAGE)
    else:
        write_figures(output, comparison)


def write_figures(output: Path, comparison: Comparison) -> None:
    """Write the curves of all methods."""
    rows = {row.method: [run.rows for run in row.runs] for row in comparison.rows}
    column, name = figure_of(rows, WIDTH), comparison.rows[0].metric
    figures = {PLOT: figure_of(rows), **{f"{name}.{kind}": column for kind in KINDS}}
    for name, figure in figures.items():
        write_atomically(output / name, image_of(figure, name.rpartition(".")[2]))


def table(comparison: Comparison) -> str:
    """Return the LaTeX table of the methods with the main result and `COLUMNS`.

    The best result is bold, and so are results that do not differ from it
    significantly, whatever the baseline.
    """
    rows = comparison.rows
    entries = {title(row.method): row.entries for row in rows}
    present = {n for of in entries.values() for n, v in of.items() if v != ""}
    columns = [n for n in (rows[0].metric, *COLUMNS) if n in present]
    best = [
        row.method for row in tested(rows, "") if row.reference or row.differs is False
    ]
    bold = set[tuple[int, int]]()
    if columns[:1] == [rows[0].metric]:
        # The main result is the second column.
        bold = {(i, 1) for i, row in enumerate(rows, 1) if row.method in best}
    return f"% {comparison.legend}\n{latex(chosen_cells(entries, columns, 1), bold)}"


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
