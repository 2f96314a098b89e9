"""The page as HTML: a table of runs, their curves, and tables of their clients."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from flwr_frl.strategies.report.page.charts import COLOURS, DASHES, Curve, chart
from flwr_frl.strategies.report.page.folder import (
    TRAFFIC,
    Results,
    RunView,
    number,
    shown,
)
from flwr_frl.strategies.report.page.look import SCRIPT, STYLE
from flwr_frl.strategies.report.progress import duration
from flwr_frl.strategies.report.results import PAGE, quality
from flwr_frl.strategies.server.checks import one_line
from flwr_frl.task.files import write_atomically

NOTHING = "-"
# Metrics that the table of runs or a chart of its own shows.
SHOWN_ELSEWHERE = (
    *("round", "seconds", "train-loss", "bytes-down", "bytes-up"),
    TRAFFIC,
)

# Formats a number.
Format = Callable[[float], str]
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


def _runs(runs: Sequence[RunView], looks: Looks) -> str:
    rows = []
    for run in runs:
        colour, dash = looks[run.name]
        key = (
            f'<svg class="key c{colour % COLOURS}" viewBox="0 0 36 10"><path '
            f'class="curve" d="M0 5H36" '
            f'stroke-dasharray="{DASHES[dash % len(DASHES)]}"/></svg>'
        )
        measure = quality(run.series)
        cells = [
            _latest(run, measure, _form(measure)),
            _progress(run),
            _latest(run, "train-loss", _plain),
            _megabytes(run, "bytes-down"),
            _megabytes(run, "bytes-up"),
            _latest(run, "seconds", duration),
            _time(run.written),
        ]
        data = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr><td class="name">{key}{escape(run.name)}</td>{data}</tr>')
    measures = ", ".join(sorted({quality(run.series) for run in runs}))
    headings = [f"latest {escape(measures)}", "round", "training loss", "MB down"]
    headings += ["MB up", "time", "written"]
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return (
        '<div class="box" id="all-runs" data-part><table id="runs"><thead><tr>'
        '<th class="name">run</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _latest(run: RunView, name: str, form: Format) -> str:
    points = run.series.get(name)
    return escape(form(points[-1][1])) if points else NOTHING


def _megabytes(run: RunView, name: str) -> str:
    points = run.series.get(name)
    return f"{sum(value for _, value in points) / 1e6:,.1f}" if points else NOTHING


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

    names = {name for run in runs for name in run.series}
    measure = quality(names)
    is_error = measure not in ("accuracy", "loss-point")
    main = [
        draw(measure, f"{measure}, mean over clients", is_error),
        draw("train-loss", "training loss"),
        draw(TRAFFIC, "traffic so far, down and up, in MB"),
    ]
    varying = [
        name
        for name in sorted(names.difference(SHOWN_ELSEWHERE, (measure,)))
        if len({y for run in runs for _, y in run.series.get(name, [])}) > 1
    ]
    more = "".join(draw(name, name) for name in varying)
    text = f'<div class="charts" id="charts" data-part>{"".join(main)}</div>'
    if more:
        text += (
            "<details><summary>More metrics</summary>"
            f'<div class="charts" id="more" data-part>{more}</div></details>'
        )
    return f"<h2>By round</h2>{text}"


def _clients(run: RunView, is_open: bool) -> str:
    columns = {
        "client": "name",
        "last seen": "",
        "last round": "",
        run.measure: "",
        "examples": "",
        "test examples": "wide",
        "rejected": "",
        "unanswered": "",
        "node": "wide",
        "last problem": "why",
    }
    head = "".join(
        f'<th class="{c}">{escape(name)}</th>' for name, c in columns.items()
    )
    form = _form(run.measure)
    rows = "".join(_client(client, form) for client in run.clients)
    name = escape(run.name)
    return (
        f'<details{" open" if is_open else ""}><summary id="about-{name}" data-part>'
        f"{name}: {_count_clients(run.clients)}</summary>"
        f'<div class="box"><table class="sorts" id="clients-{name}"><thead><tr>{head}'
        f'</tr></thead><tbody id="rows-{name}" data-part>{rows}</tbody></table></div>'
        "</details>"
    )


def _count_clients(clients: Sequence[Mapping[str, Any]]) -> str:
    counts = {
        "connected": sum(bool(c.get("node")) for c in clients),
        "never counted": sum(c.get("last-round") == 0 for c in clients),
        "with rejected replies": sum(c["rejected"] > 0 for c in clients),
        "with missing replies": sum(c["unanswered"] > 0 for c in clients),
    }
    parts = [f"{count:,} {name}" for name, count in counts.items() if count]
    plural = "s" * (len(clients) != 1)
    return ", ".join([f"{len(clients):,} client{plural}", *parts])


def _client(client: Mapping[str, Any], form: Format) -> str:
    last_seen, node = number(client.get("last-seen")), client.get("node")
    kind, seen = ("here", "connected") if node else ("", _time(last_seen))
    counts = [
        _cell(client[name], "{:,}".format, "bad" if client[name] else "")
        for name in ("rejected", "unanswered")
    ]
    return "".join(
        [
            f'<tr><td class="name">{escape(shown(client.get("client", "?")))}</td>',
            f'<td class="{kind}" data-v="{last_seen or 0}">{seen}</td>',
            _cell(client.get("last-round"), "{:,.0f}".format),
            _cell(client.get("quality"), form),
            _cell(client.get("num-examples"), "{:,.0f}".format),
            _cell(client.get("num-test-examples"), "{:,.0f}".format, "wide"),
            *counts,
            f'<td class="wide">{escape(shown(node or ""))}</td>',
            f'<td class="why">{escape(one_line(client.get("reason") or ""))}</td></tr>',
        ]
    )


def _cell(value: object, form: Format, kind: str = "") -> str:
    finite = number(value)
    text = NOTHING if finite is None else escape(form(finite))
    # Cells without a number are sorted to the end.
    data = "NaN" if finite is None else repr(finite)
    return f'<td class="{kind}" data-v="{data}">{text}</td>'
