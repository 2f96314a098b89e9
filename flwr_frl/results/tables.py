"""The table of compared algorithms: on the terminal, in Markdown and in LaTeX."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flwr_frl.common.files import write_atomically
from flwr_frl.common.messages import OF_CLIENTS
from flwr_frl.results.results import LOST, is_number

MARKDOWN, LATEX = "table.md", "table.tex"
# Entries of a summary: heading, number format, and divisor.
COLUMNS: dict[str, tuple[str, str, float]] = {
    "accuracy": ("accuracy", "{:.2%}", 1),
    "accuracy-weighted": ("by examples", "{:.2%}", 1),
    "accuracy-std-clients": ("std over clients", "{:.2%}", 1),
    "accuracy-worst-decile": ("worst tenth", "{:.2%}", 1),
    "accuracy-best-decile": ("best tenth", "{:.2%}", 1),
    "accuracy-newcomers": ("new clients", "{:.2%}", 1),
    "accuracy-global": ("global model", "{:.2%}", 1),
    "balanced-accuracy": ("balanced accuracy", "{:.2%}", 1),
    "macro-f1": ("macro-F1", "{:.4f}", 1),
    "distance": ("distance", "{:.4f}", 1),
    "error": ("error", "{:.4f}", 1),
    "consensus-distance": ("consensus distance", "{:.3g}", 1),
    "consensus-step": ("consensus step", "{:.3g}", 1),
    "loss-point": ("cost", "{:.4g}", 1),
    "constraint": ("largest constraint", "{:.3g}", 1),
    "evaluated": ("clients", "{:.7g}", 1),
    LOST: ("lost replies", "{:.0%}", 1),
    "epsilon": ("ε", "{:.4g}", 1),
    "example-epsilon": ("ε of examples", "{:.4g}", 1),
    "delta": ("δ", "{:g}", 1),
    "rounds": ("rounds", "{:.7g}", 1),
    "seconds": ("seconds", "{:.1f}", 1),
    "seconds-simulated": ("simulated", "{:.1f}", 1),
    "bits": ("Mbit of messages", "{:,.3f}", 1e6),
    "bytes": ("MB", "{:,.1f}", 1e6),
    "loss": ("loss", "{:.4g}", 1),
    "loss-weighted": ("loss by examples", "{:.4g}", 1),
}
# Explains the headings. Completed by the setting `evaluate-on`.
LEGEND = (
    "accuracy: mean over clients and the last rounds, ± standard deviation over seeds; "
    "by examples: mean over all {} examples; std over clients: in the last round; "
    "worst and best tenth: mean over that tenth of the clients; clients: number of "
    "clients in the means, unless a mean shows another"
)
# The suffix of a metric's standard deviation, which is shown with the metric.
OVER_SEEDS = "-std-seeds"

Summaries = Mapping[str, Mapping[str, Any]]


def cells(summaries: Summaries, evaluated_on: str = "test") -> list[list[str]]:
    """Return the rows of the table; the first row has the headings.

    Parameters
    ----------
    summaries : mapping
        The summary of each algorithm.
    evaluated_on : {"test", "validation"}, default "test"
        The examples on which accuracies and losses were measured.
    """
    # All other entries are metrics of the task.
    every = [name for summary in summaries.values() for name in summary]
    hidden = {"seeds"}
    if "accuracy" in every:
        hidden |= {"loss", "loss-weighted"}
    if not any(summary.get(LOST) for summary in summaries.values()):
        hidden.add(LOST)
    present = [
        name
        for name in dict.fromkeys([*COLUMNS, *every])
        if name in every and name not in hidden
        if not name.endswith((OVER_SEEDS, OF_CLIENTS))
    ]
    named = {"accuracy": "validation accuracy"} if evaluated_on == "validation" else {}
    named["loss"] = f"{evaluated_on} loss"
    rows = [["algorithm", *(named.get(n, _look(n)[0]) for n in present)]]
    for algorithm, summary in summaries.items():
        rows.append([algorithm, *(_cell(summary, name) for name in present)])
    return rows


def _look(name: str) -> tuple[str, str, float]:
    return COLUMNS.get(name, (name, "{:.4g}", 1))


def _cell(summary: Mapping[str, Any], name: str) -> str:
    value, (_, form, unit) = summary.get(name), _look(name)
    if not is_number(value):
        return ""
    text = form.format(value / unit)
    if (deviation := summary.get(name + OVER_SEEDS)) is not None:
        text += f" ± {form.format(deviation)}"
    if (clients := summary.get(name + OF_CLIENTS)) is not None:
        text += f" ({clients:.7g} clients)"
    return text


def show(summaries: Summaries, evaluated_on: str) -> None:
    """Print the table."""
    head, *rows = cells(summaries, evaluated_on)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, *column in zip(head, *rows, strict=True):
        # Words are never cut, however narrow the terminal is.
        words = " ".join([heading, *column]).split()
        table.add_column(escape(heading), min_width=max(map(len, words)))
    for row in rows:
        table.add_row(*map(escape, row))
    # Lines of a table that is wider than the terminal are wrapped.
    Console().print(table, crop=False)


def write_tables(output: Path, summaries: Summaries, evaluated_on: str) -> None:
    """Write ``table.md`` and ``table.tex``."""
    rows, legend = cells(summaries, evaluated_on), LEGEND.format(evaluated_on)
    write_atomically(output / MARKDOWN, f"{markdown(rows)}\n{legend}.\n".encode())
    write_atomically(output / LATEX, f"% {legend}.\n{latex(rows)}".encode())


def markdown(rows: list[list[str]]) -> str:
    """Format rows as a Markdown table. The first row has the headings."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    lines = ["| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:])]
    return "\n".join(lines) + "\n"


def latex(rows: list[list[str]]) -> str:
    """Format rows as a LaTeX tabular. The first row has the headings."""
    head, *body = [" & ".join(map(_tex, row)) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    lines = [
        r"% needs \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{columns}}}",
        *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    special = {**{c: "\\" + c for c in "&%$#_{}"}, "±": r"$\pm$"}
    special |= {"ε": r"$\varepsilon$", "δ": r"$\delta$"}
    special |= {"\\": r"\textbackslash{}", "~": r"\~{}", "^": r"\^{}"}
    return "".join(special.get(c, c) for c in text)
