"""The page as HTML: a table of runs, their curves, and tables of their clients."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from flwr_frl.common.files import write_atomically
from flwr_frl.common.text import one_line
from flwr_frl.results.page.charts import (
    COLOURS,
    Curve,
    Format,
    bars,
    chart,
    line,
)
from flwr_frl.results.page.folder import (
    TRAFFIC,
    UPDATES,
    Results,
    RunView,
    number,
    shown,
)
from flwr_frl.results.page.look import SCRIPT, STYLE
from flwr_frl.results.progress import duration
from flwr_frl.results.results import PAGE, quality

NOTHING = "-"
# Metrics that the table of runs or a separate chart shows.
SHOWN_ELSEWHERE = (
    *("round", "seconds", "train-loss", "bytes-down", "bytes-up"),
    *(TRAFFIC, UPDATES),
)
# Columns that accuracy is drawn against, with the label of the axis.
COSTS = {
    "seconds-simulated": "simulated time",
    UPDATES: "client updates",
    TRAFFIC: "MB, down and up",
}
# Columns of the table of clients: CSS class by heading. The heading ``quality`` is
# replaced by the name of the metric.
CLIENT_COLUMNS = {
    "client": "name",
    "last seen": "",
    "last round": "",
    "quality": "",
    "examples": "",
    "test examples": "wide",
    "rejected": "",
    "unanswered": "",
    "node": "wide",
    "last problem": "why",
}

# The colour and the dash of each run's curves.
Looks = Mapping[str, tuple[int, int]]


def write_page(output: Path) -> None:
    """Write ``report.html`` about all runs in a results folder."""
    write_atomically(output / PAGE, page(Results(output)).encode())


def page(results: Results, live: bool = False) -> str:
    """Return the page as HTML that loads nothing from elsewhere.

    Parameters
    ----------
    results : Results
        The results folder.
    live : bool, default False
        Whether the page is served and updates itself.
    """
    # The name only: the page may be sent to others, who need not know the path.
    folder = escape(shown(results.folder.absolute().name))
    body = results.drawn(_body)
    digest = hashlib.sha256(body.encode()).hexdigest()[:16]
    policy = (
        f"default-src 'none'; style-src '{_hash(STYLE)}'; "
        f"script-src '{_hash(SCRIPT)}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{folder}: federated runs</title>
<style>{STYLE}</style>
</head>
<body{' data-live="1"' if live else ""}>
<h1>{folder}</h1>
<p class="bad" id="connection" role="status"></p>
<main data-digest="{digest}">
{body}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _body(runs: Sequence[RunView]) -> str:
    if not runs:
        return '<p class="nothing">No run has written anything here yet.</p>'
    looks = _looks(runs)
    newest = max(runs, key=lambda run: run.written)
    clients = [_clients(run, run is newest) for run in runs if run.clients]
    none = '<p class="nothing">No client has connected yet.</p>'
    parts = [_runs(runs, looks), _charts(runs, looks), "<h2>Clients</h2>"]
    return "\n".join([*parts, *(clients or [none])])


def _looks(runs: Sequence[RunView]) -> Looks:
    """Give each algorithm a colour, and its runs different dashes."""
    colours: dict[str, int] = {}
    dashes: dict[str, int] = {}
    looks = {}
    for run in runs:
        colour = colours.setdefault(run.algorithm, len(colours))
        # Algorithms with the same colour start with different dashes.
        dash = dashes.get(run.algorithm, colour // COLOURS)
        dashes[run.algorithm] = dash + 1
        looks[run.name] = colour, dash
    return looks


def _table(
    about: str, columns: Mapping[str, str], rows: Iterable[Sequence[str]], body: str
) -> str:
    """Return a table in a box that scrolls; ``columns`` has CSS classes by heading."""
    heads = (
        f'<th class="{kind}">{escape(head)}</th>' for head, kind in columns.items()
    )
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="box"><table {about}><thead><tr>{"".join(heads)}</tr></thead>'
        f'<tbody id="{body}" data-part>{lines}</tbody></table></div>'
    )


def _cell(html: str, kind: str = "", value: float | None = None) -> str:
    """Return a cell; it is sorted by its value, or else by its text."""
    data = "" if value is None else f' data-v="{value!r}"'
    return f'<td class="{kind}"{data}>{html}</td>'


def _number(value: object, form: Format, kind: str = "") -> str:
    finite = number(value)
    if finite is None:
        # Cells without a number are sorted to the end.
        return _cell(NOTHING, kind, float("nan"))
    return _cell(escape(form(finite)), kind, finite)


def _runs(runs: Sequence[RunView], looks: Looks) -> str:
    def cells(run: RunView) -> list[str]:
        curves = {name: [y for _, y in points] for name, points in run.series.items()}
        latest = {name: values[-1] for name, values in curves.items() if values}
        sums = {name: sum(values) / 1e6 for name, values in curves.items() if values}
        measure, megabytes = quality(run.series), "{:,.1f}".format
        key = (
            f'<svg class="key" viewBox="0 0 36 10">{line("M0 5H36", *looks[run.name])}'
        )
        return [
            _cell(f"{key}</svg>{escape(run.name)}", "name"),
            _number(latest.get(measure), _form(measure)),
            _cell(_progress(run)),
            _number(latest.get("train-loss"), _plain),
            _number(sums.get("bytes-down"), megabytes),
            _number(sums.get("bytes-up"), megabytes),
            _number(latest.get("seconds"), duration),
            _cell(_time(run.written)),
        ]

    measures = ", ".join(sorted({quality(run.series) for run in runs}))
    heads = [f"latest {measures}", "round", "training loss", "MB down", "MB up"]
    columns = {"run": "name", **dict.fromkeys([*heads, "time", "written"], "")}
    # If the id of a part changes, the script replaces the page's whole content.
    body = f"latest-{escape(measures)}"
    return _table('id="runs"', columns, map(cells, runs), body)


def _progress(run: RunView) -> str:
    text = f"{run.last_round:,}" + (f" of {run.rounds:,.0f}" if run.rounds else "")
    if run.state:
        text += f' <span class="{run.state}">{run.state}</span>'
        text += f", {duration(run.left)} left" if run.left is not None else ""
    return text


def _time(seconds: float | None) -> str:
    if not seconds:
        return NOTHING
    try:
        when = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return NOTHING
    iso = when.isoformat(timespec="seconds")
    return f'<time datetime="{iso}">{when:%Y-%m-%d %H:%M:%S} UTC</time>'


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _form(measure: str, percent: str = ".2f") -> Format:
    is_share = measure.startswith("accuracy")
    return (lambda value: f"{100 * value:{percent}} %") if is_share else _plain


def _charts(runs: Sequence[RunView], looks: Looks) -> str:
    def draw(name: str, title: str, logarithmic: bool = False) -> str:
        curves = [Curve(r.name, *looks[r.name], r.series.get(name, [])) for r in runs]
        svg = chart(shown(name), curves, _form(name, ".4g"), logarithmic)
        return f"<figure><figcaption>{escape(shown(title))}</figcaption>{svg}</figure>"

    values: dict[str, set[float]] = {}
    for name, points in (entry for run in runs for entry in run.series.items()):
        values.setdefault(name, set()).update(y for _, y in points)
    measure = quality(values)
    is_error = measure not in ("accuracy", "loss-point")
    main = [
        draw(measure, f"{measure}, mean over clients", is_error),
        draw("train-loss", "training loss"),
        draw(TRAFFIC, "traffic so far, down and up, in MB"),
    ]
    more = sorted(values.keys() - {measure, *SHOWN_ELSEWHERE})
    others = "".join(draw(name, name) for name in more if len(values[name]) > 1)
    text = f'<div class="charts" id="charts" data-part>{"".join(main)}</div>'
    if others:
        text += (
            "<details><summary>More metrics</summary>"
            f'<div class="charts" id="more" data-part>{others}</div></details>'
        )
    return f"<h2>By round</h2>{text}{_costs(runs, looks, measure)}"


def _costs(runs: Sequence[RunView], looks: Looks, measure: str) -> str:
    """Return charts of a metric by its cost, and of staleness, of simulated runs."""
    if not any("seconds-simulated" in run.series for run in runs):
        return ""
    is_error = measure not in ("accuracy", "loss-point")
    figures = []
    for cost, label in COSTS.items():
        curves = []
        for run in runs:
            across = dict(run.series.get(cost, []))
            points = [
                (across[n], value)
                for n, value in run.series.get(measure, [])
                if n in across
            ]
            curves.append(Curve(run.name, *looks[run.name], points))
        form = _form(measure, ".4g")
        svg = chart(f"{shown(measure)} by {label}", curves, form, is_error, label)
        caption = f"{shown(measure)}, mean over clients, by {label}"
        figures.append(f"<figure><figcaption>{escape(caption)}</figcaption>{svg}")
    for run in runs:
        counts = sorted(number(c.get("updates")) or 0.0 for c in run.clients)
        for values, kind, label in (
            (run.staleness, "staleness", "staleness"),
            (counts, "client", "clients, from the fewest updates to the most"),
        ):
            total = sum(values) if run.staleness else 0.0
            if total > 0:
                title = f"{run.name}: share of the updates by {kind}"
                shares = [value / total for value in values]
                svg = bars(title, shares, "{:.1%}".format, label)
                figures.append(f"<figure><figcaption>{escape(title)}</figcaption>{svg}")
    drawn = "".join(f"{figure}</figure>" for figure in figures)
    return f'<h2>By cost</h2><div class="charts" id="costs" data-part>{drawn}</div>'


def _clients(run: RunView, is_open: bool) -> str:
    counts = {
        "connected": sum(bool(c.get("node")) for c in run.clients),
        "never counted": sum(c.get("last-round") == 0 for c in run.clients),
        "with rejected replies": sum(c["rejected"] > 0 for c in run.clients),
        "with missing replies": sum(c["unanswered"] > 0 for c in run.clients),
    }
    total = f"{len(run.clients):,} client{'s' * (len(run.clients) != 1)}"
    parts = [total, *(f"{n:,} {what}" for what, n in counts.items() if n)]
    columns = {
        run.measure if n == "quality" else n: k for n, k in CLIENT_COLUMNS.items()
    }
    form, name = _form(run.measure), escape(run.name)
    rows = (_client(client, form) for client in run.clients)
    about = f'class="sorts" id="clients-{name}"'
    return (
        f'<details{" open" if is_open else ""}><summary id="about-{name}" data-part>'
        f"{name}: {', '.join(parts)}</summary>"
        f"{_table(about, columns, rows, f'rows-{name}')}</details>"
    )


def _client(client: Mapping[str, Any], form: Format) -> list[str]:
    last_seen, node = number(client.get("last-seen")), client.get("node")
    kind, seen = ("here", "connected") if node else ("", _time(last_seen))
    integer = "{:,.0f}".format
    counts = (client["rejected"], client["unanswered"])
    return [
        _cell(escape(shown(client.get("client", "?"))), "name"),
        _cell(seen, kind, last_seen or 0.0),
        _number(client.get("last-round"), integer),
        _number(client.get("quality"), form),
        _number(client.get("num-examples"), integer),
        _number(client.get("num-test-examples"), integer, "wide"),
        *(_number(count, integer, "bad" if count else "") for count in counts),
        _cell(escape(shown(node or "")), "wide"),
        _cell(escape(one_line(client.get("reason") or "")), "why"),
    ]
