"""Write a comparison for a paper: a LaTeX table, references and figures.

Table and figures fit into a column.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr_frl.common.algorithms import title
from flwr_frl.common.files import write_atomically
from flwr_frl.results.figures import WIDTH, figure_of, image_of, rank_diagram, rows_of
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
    """Write the curves of each task, and the diagram of mean ranks if there is one."""
    figures = {}
    for name, rows in comparison.tasks.items():
        of_methods = rows_of({row.method: row.folders for row in rows})
        ending = f"-{name}" if len(comparison.tasks) > 1 else ""
        figures[rows[0].metric + ending] = figure_of(of_methods, WIDTH)
    if comparison.ranking:
        figures["ranks"] = rank_diagram(comparison.ranking)
    for name, figure in figures.items():
        for kind in ("pdf", "svg"):
            plain = re.sub(r"\W+", "-", name).strip("-")
            write_atomically(output / f"{plain}.{kind}", image_of(figure, kind))


def table(comparison: Comparison, columns: Sequence[str] = ()) -> str:
    """Return the LaTeX table: methods by metrics or, with several tasks, by tasks.

    The best result of a task is bold, and so are results that do not differ from it
    significantly. With a baseline, only the best result is.
    """
    tasks, ranking = list(comparison.tasks), comparison.ranking
    ranked = dict(zip(ranking.methods, ranking.ranks, strict=True)) if ranking else {}
    # By mean rank, if there are ranks
    methods = list(dict.fromkeys([*ranked, *(row.method for row in comparison.rows)]))
    summaries = dict[str, Mapping[str, Any]]()
    if len(tasks) == 1:
        columns = columns or [comparison.rows[0].metric, *COLUMNS]
        summaries |= {row.method: row.summary for row in comparison.rows}
    else:
        columns = [*tasks, *(["mean rank"] if ranked else [])]
        for method in methods:
            in_tasks = {
                row.task: row for row in comparison.rows if row.method == method
            }
            results = {
                task: cell(row.summary, row.metric, 1) for task, row in in_tasks.items()
            }
            rank = f"{ranked[method]:.2f}" if method in ranked else ""
            summaries[method] = {**results, "mean rank": rank}
    head, *rows = chosen_cells(summaries, columns, comparison.evaluated_on, 1)
    if len(tasks) > 1:
        # The unit is beside the metric, not in the heading of every task.
        head[0] = heading(comparison.rows[0].metric)
        rows = [[name, *(text.replace("%", "") for text in row)] for name, *row in rows]
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
