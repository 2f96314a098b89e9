"""Write a comparison for a paper: a LaTeX table, references and figures.

Table and figures fit into a column.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from flwr_frl.common.algorithms import title
from flwr_frl.common.files import write_atomically
from flwr_frl.results.figures import WIDTH, figure_of, image_of, rows_of
from flwr_frl.results.methods import Comparison
from flwr_frl.results.tables import cell, chosen_cells, heading, latex

# Columns of the table after the main result
COLUMNS = ("accuracy-worst-decile", "bytes", "seconds")
# BibTeX entries, each with the algorithms that it describes as keywords. A Flower
# bundle has no file of this kind.
REFERENCES = Path(__file__).with_name("references.bib")


def write_paper(
    output: Path, comparison: Comparison, columns: Sequence[str] = ()
) -> None:
    """Write ``table.tex``, ``references.bib`` and figures as PDF and SVG.

    Figures need matplotlib.

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
    if find_spec("matplotlib") is not None:
        write_figures(output, comparison)


def write_figures(output: Path, comparison: Comparison) -> None:
    """Write the curves of each task."""
    figures = {}
    for name, rows in comparison.tasks.items():
        of_methods = rows_of({row.method: row.folders for row in rows})
        ending = f"-{name}" if len(comparison.tasks) > 1 else ""
        figures[rows[0].metric + ending] = figure_of(of_methods, WIDTH)
    for name, figure in figures.items():
        for kind in ("pdf", "svg"):
            plain = re.sub(r"\W+", "-", name).strip("-")
            write_atomically(output / f"{plain}.{kind}", image_of(figure, kind))


def table(comparison: Comparison, columns: Sequence[str] = ()) -> str:
    """Return the LaTeX table: methods by metrics or, with several tasks, by tasks.

    The best result of a task is bold, and so are results that do not differ from it
    significantly. With a baseline, only the best result is.
    """
    tasks = list(comparison.tasks)
    methods = list(dict.fromkeys(row.method for row in comparison.rows))
    metric = comparison.rows[0].metric
    if len(tasks) == 1:
        columns = columns or [metric, *COLUMNS]
        summaries = {row.method: row.summary for row in comparison.rows}
        head, *rows = chosen_cells(summaries, columns, comparison.evaluated_on, 1)
    else:
        results = {
            (row.method, row.task): cell(row.summary, metric, 1).replace("%", "")
            for row in comparison.rows
        }
        # The unit is beside the metric, not in the heading of every task.
        head = [heading(metric), *tasks]
        rows = [
            [name, *(results.get((name, t), "") for t in tasks)] for name in methods
        ]
    bold = {
        (methods.index(row.method) + 1, tasks.index(row.task) + 1)
        for best, *others in comparison.tasks.values()
        for row in (best, *others)
        if row is best or (not comparison.baseline and row.differs is False)
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
