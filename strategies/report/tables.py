"""The table of a comparison: on the terminal, as Markdown and as LaTeX."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from flwr_frl.strategies.report.terminal import console
from flwr_frl.task.files import write_atomically

MARKDOWN, LATEX = "table.md", "table.tex"
# Metrics of a summary: the heading, the form of a number, and what it is divided by.
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
    "epsilon": ("ε", "{:.4g}", 1),
    "example-epsilon": ("ε of examples", "{:.4g}", 1),
    "delta": ("δ", "{:g}", 1),
    "rounds": ("rounds", "{}", 1),
    "seconds": ("seconds", "{:.1f}", 1),
    "seconds-simulated": ("simulated", "{:.1f}", 1),
    "bits": ("Mbit of messages", "{:,.3f}", 1e6),
    "bytes": ("MB", "{:,.1f}", 1e6),
}
LOSSES = {
    "loss": ("loss", "{:.4g}", 1.0),
    "loss-weighted": ("by examples", "{:.4g}", 1.0),
}
# What the headings mean.
LEGEND = (
    "accuracy: mean over clients and the last rounds, ± standard deviation over seeds; "
    "by examples: mean over all {} examples; std over clients: in the last round; "
    "worst and best tenth: mean over that tenth of the clients"
)
# Ends the name of a metric's deviation, which is said beside the metric.
OVER_SEEDS = "-std-seeds"

Summaries = Mapping[str, Mapping[str, Any]]


def legend(evaluated_on: str) -> str:
    """Return what the headings mean, as `cells` takes it."""
    return LEGEND.format(evaluated_on)


def cells(summaries: Summaries, evaluated_on: str = "test") -> list[list[str]]:
    """Return the table's rows, of which the first has the headings.

    Parameters
    ----------
    summaries : mapping
        Each algorithm's part of ``summary.json``.
    evaluated_on : {"test", "validation"}
        What accuracies and losses are of.
    """
    columns = dict(COLUMNS)
    if not any("accuracy" in summary for summary in summaries.values()):
        columns |= LOSSES
    # Metrics of the task's own.
    for summary in summaries.values():
        own = [n for n in summary if n not in (*columns, *LOSSES, "seeds")]
        own = [n for n in own if not n.endswith(OVER_SEEDS)]
        columns |= {name: (name, "{:.4g}", 1.0) for name in own}
    present = [n for n in columns if any(n in s for s in summaries.values())]
    headings = [columns[name][0] for name in present]
    if evaluated_on == "validation" and "accuracy" in present:
        headings[present.index("accuracy")] = "validation accuracy"
    if "loss" in present:
        headings[present.index("loss")] = f"{evaluated_on} loss"
    rows = [["algorithm", *headings]]
    for algorithm, summary in summaries.items():
        row = [algorithm]
        for name in present:
            value = summary.get(name)
            _, form, unit = columns[name]
            text = ""
            if isinstance(value, int | float):
                text = form.format(value if unit == 1 else value / unit)
                if (spread := summary.get(name + OVER_SEEDS)) is not None:
                    text += f" ± {form.format(spread)}"
            row.append(text)
        rows.append(row)
    return rows


def show(summaries: Summaries, evaluated_on: str) -> None:
    """Print the final table."""
    head, *rows = cells(summaries, evaluated_on)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, *column in zip(head, *rows, strict=True):
        # No word is cut, however narrow the terminal.
        words = " ".join([heading, *column]).split()
        table.add_column(escape(heading), min_width=max(map(len, words)))
    for row in rows:
        table.add_row(*map(escape, row))
    terminal = console()
    # Wider than the terminal, its lines go on in the next one.
    terminal.print(table, crop=False)


def write_tables(output: Path, summaries: Summaries, evaluated_on: str) -> None:
    """Write ``table.md`` and ``table.tex``."""
    rows = cells(summaries, evaluated_on)
    said = legend(evaluated_on)
    text = f"{markdown(rows)}\n{said}.\n"
    write_atomically(output / MARKDOWN, text.encode())
    write_atomically(output / LATEX, f"% {said}.\n{latex(rows)}".encode())


def markdown(rows: list[list[str]]) -> str:
    """Return rows, of which the first has the headings, as a Markdown table."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    lines = ["| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:])]
    return "\n".join(lines) + "\n"


def latex(rows: list[list[str]]) -> str:
    r"""Return rows, of which the first has the headings, as a LaTeX tabular."""
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
