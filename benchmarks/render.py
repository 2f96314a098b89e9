"""The tables and the plot of a page, for `benchmarks.run`.

A table of a config has ``metrics`` and, optionally, ``title``, ``text``, ``rows`` and
``cells``, ``sort`` (the best first, by the first metric) and ``notes`` (columns of text
that the config's ``derive`` has added). With one metric, its columns are the cells;
with several, there is a table for each cell. Entries are means ± standard deviations
over the seeds. A plot has the metrics ``y``, ``x`` and ``log``; its panels are the
metrics and cells, and its lines the rows. A ``function`` draws another.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import DIFFERENCES, RESULTS, markdown
from benchmarks.runs import load

Runs = Sequence[dict[str, Any]]


class Metric(NamedTuple):
    """How a metric is shown: label, factor and digits (-1: three significant ones)."""

    label: str
    scale: float = 1.0
    digits: int = -1


PERCENT = (
    *("accuracy", "accuracy-worst-decile", "accuracy-global", "accuracy-newcomers"),
    *("accuracy-fresh", "accuracy-initial", "auroc", "best-round", "success"),
    *("accuracy-old-received", "accuracy-old-trained"),
)
METRICS = {
    **{n: Metric(f"{n.replace('-', ' ')} (%)", 100, 2) for n in PERCENT},
    "bytes": Metric("MB", 1e-6, 1),
    "bytes-up": Metric("MB up", 1e-6, 2),
    "cpu-seconds": Metric("seconds of one core", 1, 0),
}


def metric(name: str) -> Metric:
    """Return how a metric is shown."""
    return METRICS.get(name) or Metric(name.replace("-", " "))


def values(runs: Runs, name: str) -> list[float]:
    """Return a metric of the runs that have it, in the units of tables."""
    found = [run[name] for run in runs if run.get(name) is not None]
    return [metric(name).scale * float(np.mean(value)) for value in found]


def spread(numbers: Sequence[float], digits: int = -1, total: int = 0) -> str:
    """Return mean ± standard deviation, and how many of the seeds have a number."""
    there = [number for number in numbers if not np.isnan(number)]
    if not there:
        return "never" if numbers else ""
    form = f",.{digits}f" if digits >= 0 else ",.3g"
    text = format(np.mean(there), form)
    if len(there) > 1:
        text += f" ± {format(np.std(there, ddof=1), form)}"
    total = max(total, len(numbers))
    return text + (f" ({len(there)} of {total} seeds)" if len(there) < total else "")


def cell_text(runs: Runs, name: str) -> str:
    """Return a cell: a metric's mean over the seeds, and the number that failed."""
    failed = [run["failed"] for run in runs if "failed" in run]
    if failed and len(failed) == len(runs):
        return f"failed ({failed[0]})"
    return spread(values(runs, name), metric(name).digits, len(runs))


def order(rows: Iterable[str], score: Any) -> list[str]:
    """Return the rows, the highest score first; those without one last."""
    scores = {row: score(row) for row in rows}
    return sorted(scores, key=lambda row: -scores[row])


def body(config: Any, data: dict[str, Any]) -> str:
    """Return the page below its heading, and draw its plot."""
    results = data["results"]
    parts = [config.text.replace("{differences}", DIFFERENCES).strip()]
    parts += [text for table in config.tables for text in tables(config, table, data)]
    for title, (heads, *lines) in data.pop("extra", {}).items():
        parts.append(f"## {title}\n\n{markdown(heads, lines)}")
    commits = sorted(
        {
            commit
            for cells in results.values()
            for runs in cells.values()
            for run in runs
            for commit in run.get("commit", "").split(", ")
        }
    )
    if config.plot:
        if function := config.plot.get("function"):
            load(function)(config, data)
        else:
            plot(config, results)
        parts.append(f"![{config.title}]({config.name}.png)")
    parts += [f"Runs are at commits {', '.join(commits)}.", settings_text(config)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def settings_text(config: Any) -> str:
    """Return the settings that runs have in common."""
    shown = {n: v for n, v in config.common.items() if n != "data-dir"}
    return "Settings: " + ", ".join(f"`{n}={v}`" for n, v in shown.items()) + "."


def tables(config: Any, table: dict[str, Any], data: dict[str, Any]) -> list[str]:
    """Return the headings, texts and tables of an entry of ``tables``."""
    results, names = data["results"], table.get("metrics", [config.metric])
    rows = [row for row in table.get("rows", config.rows) if row in results]
    cells = [
        cell
        for cell in table.get("cells", config.cells)
        if any(cell in results[row] for row in rows)
    ]
    if not cells:
        return []
    parts = [f"## {table['title']}"] if "title" in table else []
    parts += [table["text"]] if "text" in table else []
    if len(names) == 1 and len(cells) > 1:
        return [*parts, by_cell(config, table, data, rows, cells, names[0])]
    for cell in cells:
        level = "###" if "title" in table else "##"
        parts += [f"{level} {cell}"] if len(cells) > 1 else []
        parts.append(by_metric(config, table, data, rows, cell, names))
    return parts


def text_of(config: Any, row: str) -> str:
    """Return a row's label."""
    named = config.rows[row].get("text")
    is_algorithm = config.function == "" and not named
    return f"`{row}`" if is_algorithm else named or row


def own_metric(config: Any, cell: str, name: str) -> str:
    """Return the metric of a cell; some cells have another main metric."""
    own = config.cells[cell].get("metric", name)
    return str(own if name == config.metric else name)


def sign(name: str) -> int:
    """Return -1 if lower values are better."""
    from benchmarks.run import ERRORS

    return -1 if name in ERRORS else 1


def by_cell(
    config: Any, table: Any, data: Any, rows: list[str], cells: list[str], name: str
) -> str:
    """Return a table of one metric, with a column for each cell."""
    results = data["results"]

    def mean(row: str) -> float:
        found = [values(results[row].get(c, []), name) for c in cells]
        return float(np.mean([np.mean(v) for v in found])) if all(found) else -np.inf

    if table.get("sort"):
        rows = order(rows, lambda row: sign(name) * mean(row))
    lines = [
        [
            text_of(config, row),
            *([f"{mean(row):.2f}"] if table.get("sort") else []),
            *(
                cell_text(results[row].get(c, []), own_metric(config, c, name))
                for c in cells
            ),
        ]
        for row in rows
    ]
    label = metric(name).label
    heads = [label, *(["mean"] if table.get("sort") else []), *cells]
    return markdown(heads, lines)


def by_metric(
    config: Any, table: Any, data: Any, rows: list[str], cell: str, names: list[str]
) -> str:
    """Return a cell's table, with a column for each metric and each note."""
    names = [own_metric(config, cell, name) for name in names]
    results = {row: data["results"][row].get(cell, []) for row in rows}
    rows = [row for row in rows if results[row]]
    if table.get("sort"):

        def first(row: str) -> float:
            found = values(results[row], names[0])
            return sign(names[0]) * float(np.mean(found)) if found else -np.inf

        rows = order(rows, first)
    notes = data.get("notes", {}) if table.get("notes") else {}
    own = {row: notes.get(row, {}).get(cell, {}) for row in rows}
    titles = list(dict.fromkeys(title for each in own.values() for title in each))
    lines = [
        [
            text_of(config, row),
            *(cell_text(results[row], name) for name in names),
            *(own[row].get(title, "") for title in titles),
        ]
        for row in rows
    ]
    return markdown(["", *(metric(name).label for name in names), *titles], lines)


def curves_of(runs: Runs, name: str) -> list[list[list[float]]]:
    """Return a metric's curves, of the runs that have one."""
    found = [run["curve"].get(name, [[]]) for run in runs if "curve" in run]
    return [curve for curve in found if curve[0]]


def plot(config: Any, results: dict[str, Any]) -> None:
    """Draw curves: means over the seeds, with their range, by metric and cell."""
    from matplotlib.figure import Figure

    about = config.plot
    rows = [row for row in about.get("rows", results) if row in results]
    cells = about.get("cells", list(config.cells))
    panels = [
        (cell, name)
        for cell in cells
        for name in about["y"]
        if any(curves_of(results[row].get(cell, []), name) for row in rows)
    ]
    columns = about.get("columns", len(about["y"]) if len(about["y"]) > 1 else 3)
    columns = min(columns, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 3 * height + 0.6), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False)
    for axes, (cell, name) in zip(grid.flat, panels, strict=False):
        for i, row in enumerate(rows):
            found = curves_of(results[row].get(cell, []), name)
            if not found:
                continue
            x = found[0][0]
            # Seeds whose curves have other points are left out.
            y = np.array([curve[1] for curve in found if len(curve[1]) == len(x)])
            axes.plot(x, y.mean(axis=0), color=f"C{i}", lw=1.3, label=row)
            low, high = y.min(axis=0), y.max(axis=0)
            axes.fill_between(x, low, high, color=f"C{i}", alpha=0.15, lw=0)
        axes.set(title=cell if name == "time" else f"{cell}: {name}")
        axes.set(xlabel=about.get("x", "round"))
        if "x" in about.get("log", ""):
            axes.set_xscale("log")
        if "y" in about.get("log", ""):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=6,
        fontsize=8,
    )
    figure.savefig(RESULTS / f"{config.name}.png", dpi=110)
