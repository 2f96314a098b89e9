"""Tables of results for the terminal and LaTeX.

A table is a list of rows of cells; the first row has the headings.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flwr_frl.common.messages import OF_CLIENTS, TESTED_MODEL
from flwr_frl.results.results import LAST_ROUND, LOST, ONE_ROUND, OVER_SEEDS, is_number

# Heading, number format and divisor of entries of a summary. Others have their name and
# four digits.
COLUMNS: dict[str, tuple[str, str, float]] = {
    "accuracy": ("accuracy", "{:.2%}", 1),
    "accuracy-last": ("last round", "{:.2%}", 1),
    "accuracy-std-clients": ("std over clients", "{:.2%}", 1),
    "accuracy-worst-decile": ("worst tenth", "{:.2%}", 1),
    "accuracy-newcomers": ("new clients", "{:.2%}", 1),
    "accuracy-global": ("global model", "{:.2%}", 1),
    "balanced-accuracy": ("balanced accuracy", "{:.2%}", 1),
    "loss-point": ("cost", "{:.4g}", 1),
    LOST: ("lost replies", "{:.0%}", 1),
    "epsilon": ("ε", "{:.4g}", 1),
    "example-epsilon": ("ε of examples", "{:.4g}", 1),
    "delta": ("δ", "{:g}", 1),
    "rounds": ("rounds", "{:.7g}", 1),
    "seconds": ("seconds", "{:.1f}", 1),
    "seconds-simulated": ("simulated", "{:.1f}", 1),
    "bits": ("Mbit of messages", "{:,.3f}", 1e6),
    "bytes": ("MB", "{:,.1f}", 1e6),
    "loss-weighted": ("loss by examples", "{:.4g}", 1),
}
# Entries that no table shows
DETAILS = "accuracy-weighted", "accuracy-best-decile", "evaluated", "rounds"
Summaries = Mapping[str, Mapping[str, Any]]


def cells(summaries: Summaries) -> list[list[str]]:
    """Return the rows of a table of summaries.

    Parameters
    ----------
    summaries : mapping
        The summary of each algorithm. Entries may also be text.
    """
    every = dict.fromkeys(name for summary in summaries.values() for name in summary)
    hidden = {"protocol", "seeds", "evaluated-on", TESTED_MODEL, *DETAILS}
    if any(is_number(summary.get("accuracy")) for summary in summaries.values()):
        hidden |= {"loss", "loss-weighted"}
    # Results of the last round would be shown twice.
    if {summary.get("protocol") for summary in summaries.values()} == {ONE_ROUND}:
        hidden |= {name for name in every if name.endswith(LAST_ROUND)}
    if not any(summary.get(LOST) for summary in summaries.values()):
        hidden.add(LOST)
    beside = (OVER_SEEDS, OF_CLIENTS)
    shown = [n for n in every if n not in hidden and not n.endswith(beside)]
    present = [n for n in shown if any(cell(s, n) for s in summaries.values())]
    return chosen_cells(summaries, present)


def chosen_cells(
    summaries: Summaries, columns: Sequence[str], places: int = 2
) -> list[list[str]]:
    """Return the rows of a table with some entries of summaries, as `cells`.

    Percentages have ``places`` decimal places.
    """
    rows = [["algorithm", *(_look(name)[0] for name in columns)]]
    for algorithm, summary in summaries.items():
        rows.append([algorithm, *(cell(summary, name, places) for name in columns)])
    return rows


def legend(summaries: Summaries) -> str:
    """Explain the results and the headings of a table in one line.

    Algorithms are named if their rounds, protocols or models differ.
    """
    names = ("evaluated-on", "protocol", "rounds", TESTED_MODEL)
    examples, protocol, rounds, model = (_stated(summaries, name) for name in names)
    lengths = f"rounds: {rounds}; " if "(" in rounds else ""
    return (
        f"Results: mean over the clients on {examples} examples; {protocol}; "
        f"{lengths}tested model: {model}; ±: standard deviation over seeds; "
        "worst tenth: mean over that tenth of the clients; MB: arrays sent for "
        "training, in both directions, without evaluation."
    )


def _stated(summaries: Summaries, name: str) -> str:
    """Return an entry of summaries, with the algorithms if it is not that of all."""
    of = dict[str, list[str]]()
    for algorithm, summary in summaries.items():
        of.setdefault(cell(summary, name) or "not reported", []).append(algorithm)
    if len(of) == 1:
        return next(iter(of))
    return ", ".join(f"{text} ({', '.join(names)})" for text, names in of.items())


def _look(name: str) -> tuple[str, str, float]:
    return COLUMNS.get(name, (name, "{:.4g}", 1))


def formatted(name: str, value: float, places: int = 2) -> str:
    """Return the value of an entry as it is shown."""
    _, form, unit = _look(name)
    return form.replace(".2%", f".{places}%").format(value / unit)


def cell(summary: Mapping[str, Any], name: str, places: int = 2) -> str:
    """Return an entry of a summary with its deviation over seeds, as text."""
    value = summary.get(name)
    if not is_number(value):
        return value or ""
    text = formatted(name, value, places)
    if (deviation := summary.get(name + OVER_SEEDS)) is not None:
        text += f" ± {formatted(name, deviation, places)}"
    if (clients := summary.get(name + OF_CLIENTS)) is not None:
        text += f" ({clients:.7g} clients)"
    return text


def terminal(rows: Sequence[Sequence[str]]) -> str:
    """Format rows for a terminal, without the last columns if it is too narrow."""
    console, columns = Console(), list(zip(*rows, strict=True))
    # With two spaces between columns, and a margin
    widths = [max(map(cell_len, column)) + 2 for column in columns]
    while console.is_terminal and sum(widths) > console.width - 2 and len(widths) > 2:
        widths.pop()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns[: len(widths)]:
        table.add_column(escape(column[0]))
    for row in rows[1:]:
        table.add_row(*map(escape, row[: len(widths)]))
    # Lines are never wrapped.
    console.width = max(console.width, sum(widths) + 2)
    with console.capture() as captured:
        console.print(table)
    left_out = ", ".join(rows[0][len(widths) :])
    return captured.get() + (f"In a wider terminal: {left_out}.\n" if left_out else "")


def latex(rows: Sequence[Sequence[str]], bold: Container[tuple[int, int]] = ()) -> str:
    """Format rows as a LaTeX tabular. Signs of percent move to the headings.

    Parameters
    ----------
    rows : sequence of sequence of str
        The rows.
    bold : container of (int, int)
        Row and column of each cell in bold.
    """
    columns = [[_tex(row[0]) for row in rows]]
    for j, (heading, *column) in enumerate(list(zip(*rows, strict=True))[1:], 1):
        unit = " (%)" if any("%" in cell for cell in column) else ""
        body = [_tex(cell.replace("%", "")) or "--" for cell in column]
        body = [
            rf"\textbf{{{cell}}}" if (i, j) in bold else cell
            for i, cell in enumerate(body, 1)
        ]
        columns.append([_tex(heading + unit), *body])
    head, *lines = [" & ".join(row) + r" \\" for row in zip(*columns, strict=True)]
    kinds = "l" + "r" * (len(columns) - 1)
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"{\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\begin{{tabular}}{{{kinds}}}",
            *(r"\toprule", head, r"\midrule", *lines, r"\bottomrule"),
            r"\end{tabular}}",
            "",
        ]
    )


def _tex(text: str) -> str:
    special = {**{c: "\\" + c for c in "&%$#_{}"}, "±": r"$\pm$"}
    special |= {"ε": r"$\varepsilon$", "δ": r"$\delta$"}
    special |= {"\\": r"\textbackslash{}", "~": r"\~{}", "^": r"\^{}"}
    return "".join(special.get(c, c) for c in text)
