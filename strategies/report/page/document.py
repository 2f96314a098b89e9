"""One page over runs: curves, how far each is, and a table of its clients."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from flwr_frl.strategies.report.page.charts import DASHES, Curve, Point, bars, curves
from flwr_frl.strategies.report.page.folder import (
    Client,
    Results,
    RunView,
    shown,
)
from flwr_frl.strategies.report.page.look import SCRIPT, STYLE
from flwr_frl.strategies.report.results import PAGE, quality
from flwr_frl.strategies.report.watch import duration
from flwr_frl.task.files import write_atomically

# With more clients than this, how good they are is drawn as well.
MANY = 30
NOTHING = "-"
# What of a row is shown already.
ELSEWHERE = ("round", "seconds", "train-loss", "bytes-down", "bytes-up")


def write_page(output: Path) -> None:
    """Write ``report.html`` over all that is in a results folder."""
    write_atomically(output / PAGE, page(Results(output)).encode())


def page(results: Results, live: bool = False) -> str:
    """Return the whole page as HTML.

    Parameters
    ----------
    results : Results
        The folder.
    live : bool, default False
        Whether it is served, and brings itself up to date.

    Returns
    -------
    str
        HTML that loads nothing from anywhere else.
    """
    # Its name alone: the page is sent to others, who need not know where it lies.
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
    details = [_clients(run, run is newest) for run in runs if run.clients]
    return "\n".join(
        [
            _table_of_runs(runs, looks),
            _charts(runs, looks),
            "<h2>Clients</h2>",
            *(details or ['<p class="nothing">None has been heard of yet.</p>']),
        ]
    )


def _looks(runs: Sequence[RunView]) -> dict[str, tuple[int, int]]:
    """Return each run's colour, that of its algorithm, and its kind of dashes."""
    colours: dict[str, int] = {}
    many: dict[str, int] = {}
    looks = {}
    for run in runs:
        colour = colours.setdefault(run.algorithm, len(colours))
        # Where colours come again, dashes differ.
        dash = many.get(run.algorithm, colour // 8)
        many[run.algorithm] = dash + 1
        looks[run.name] = colour, dash
    return looks


# The runs.


def _table_of_runs(runs: Sequence[RunView], looks: dict[str, tuple[int, int]]) -> str:
    rows = []
    for run in runs:
        colour, dash = looks[run.name]
        key = (
            f'<svg class="key c{colour % 8}" viewBox="0 0 36 10"><path class="curve" '
            f'd="M0 5H36" stroke-dasharray="{DASHES[dash % len(DASHES)]}"/></svg>'
        )
        measure = quality(run.series)
        rows.append(
            f'<tr><td class="name">{key}{escape(run.name)}</td>'
            f"<td>{_latest(run, measure, _form(measure))}</td>"
            f"<td>{_progress(run)}</td>"
            f"<td>{_latest(run, 'train-loss', _plain)}</td>"
            f"<td>{_bytes(run, 'bytes-down')}</td><td>{_bytes(run, 'bytes-up')}</td>"
            f"<td>{_latest(run, 'seconds', duration)}</td>"
            f"<td>{_when(run.written)}</td></tr>"
        )
    measures = {quality(run.series) for run in runs}
    head = (
        '<th class="name">run</th>'
        f"<th>latest {escape(', '.join(sorted(measures)))}</th>"
        "<th>round</th><th>training loss</th>"
        "<th>MB down</th><th>MB up</th><th>took</th><th>written</th>"
    )
    return (
        '<div class="box"><table id="runs"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _values(run: RunView, name: str) -> list[Point]:
    return run.series.get(name, [])


def _latest(run: RunView, name: str, form: Callable[[float], str]) -> str:
    values = _values(run, name)
    return escape(form(values[-1][1])) if values else NOTHING


def _bytes(run: RunView, name: str) -> str:
    values = _values(run, name)
    return f"{sum(value for _, value in values) / 1e6:,.1f}" if values else NOTHING


def _progress(run: RunView) -> str:
    text = f"{run.last_round:,}" + (f" of {run.rounds:,.0f}" if run.rounds else "")
    if not run.state:
        return text
    text += f' <span class="{run.state}">{run.state}</span>'
    if run.left is not None:
        text += f", {duration(run.left)} left"
    return text


def _when(seconds: float | None) -> str:
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


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _short_percent(value: float) -> str:
    return f"{100 * value:.4g} %"


def _form(measure: str) -> Callable[[float], str]:
    return _percent if measure.startswith("accuracy") else _plain


def _axis(measure: str) -> Callable[[float], str]:
    return _short_percent if measure.startswith("accuracy") else _plain


# The curves.


def _charts(runs: Sequence[RunView], looks: dict[str, tuple[int, int]]) -> str:
    def of(values: Callable[[RunView], Sequence[Point]]) -> list[Curve]:
        return [Curve(run.name, *looks[run.name], values(run)) for run in runs]

    measure = quality({name for run in runs for name in run.series})
    wide = measure not in ("accuracy", "loss-point")
    figures = {
        measure + ", mean over clients": curves(
            measure, of(lambda run: _values(run, measure)), _axis(measure), wide
        ),
        "training loss": curves(
            "training loss", of(lambda run: _values(run, "train-loss")), _plain
        ),
        "bytes so far, down and up, in MB": curves(
            "bytes so far", of(lambda run: run.traffic), lambda value: f"{value:,.4g}"
        ),
    }
    every = {name for run in runs for name in run.series}
    more = {}
    for name in sorted(every.difference(ELSEWHERE, (measure,))):
        found = of(lambda run, name=name: _values(run, name))  # type: ignore[misc]
        if len({value for curve in found for _, value in curve.points}) > 1:
            more[name] = curves(shown(name), found, _axis(name))
    text = f'<h2>By round</h2><div class="charts">{_figures(figures)}</div>'
    if more:
        text += (
            '<details id="more"><summary>more by round</summary>'
            f'<div class="charts">{_figures(more)}</div></details>'
        )
    return text


def _figures(drawn: Mapping[str, str]) -> str:
    return "".join(
        f"<figure><figcaption>{escape(shown(title))}</figcaption>{svg}</figure>"
        for title, svg in drawn.items()
    )


# The clients.


def _clients(run: RunView, is_open: bool) -> str:
    form = _form(run.measure)
    columns = {
        "client": "name",
        "last seen": "",
        "last round": "",
        run.measure: "",
        "examples": "",
        "for tests": "wide",
        "rejected": "",
        "unanswered": "",
        "node": "wide",
        "the last reason": "why",
    }
    head = "".join(
        f'<th class="{kind}">{escape(name)}</th>' for name, kind in columns.items()
    )
    rows = "".join(_client(client, form) for client in run.clients)
    qualities = [c.quality for c in run.clients if c.quality is not None]
    drawn = ""
    if len(qualities) > MANY:
        drawn = (
            '<div class="charts"><figure><figcaption>clients by '
            f"{escape(run.measure)}</figcaption>"
            f"{bars(run.measure, qualities, _axis(run.measure))}</figure></div>"
        )
    name = escape(run.name, quote=True)
    return (
        f'<details id="of-{name}"{" open" if is_open else ""}>'
        f"<summary>{escape(run.name)}: {_about(run.clients)}</summary>{drawn}"
        f'<div class="box"><table class="sorts" id="clients-{name}"><thead><tr>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _about(clients: Sequence[Client]) -> str:
    """Return how many clients there are, and how many of them are in trouble."""
    counts = {
        "here": sum(bool(c.node) for c in clients),
        "never counted": sum(c.last_round == 0 for c in clients),
        "with a rejected reply": sum(c.rejected > 0 for c in clients),
        "that did not answer": sum(c.unanswered > 0 for c in clients),
    }
    parts = [f"{count:,} {name}" for name, count in counts.items() if count]
    plural = "s" * (len(clients) != 1)
    return ", ".join([f"{len(clients):,} client{plural}", *parts])


def _client(client: Client, form: Callable[[float], str]) -> str:
    if client.node:
        seen = f'<td class="here" data-v="{client.last_seen or 0}">here</td>'
    else:
        seen = f'<td data-v="{client.last_seen or 0}">{_when(client.last_seen)}</td>'
    return (
        f'<tr><td class="name">{escape(client.name)}</td>{seen}'
        + _cell(client.last_round, "{:,.0f}".format)
        + _cell(client.quality, form)
        + _cell(client.examples, "{:,.0f}".format)
        + _cell(client.test_examples, "{:,.0f}".format, "wide")
        + _cell(client.rejected, "{:,}".format, "bad" * (client.rejected > 0))
        + _cell(client.unanswered, "{:,}".format, "bad" * (client.unanswered > 0))
        + f'<td class="wide">{escape(client.node)}</td>'
        + f'<td class="why">{escape(client.reason)}</td></tr>'
    )


def _cell(value: float | None, form: Callable[[float], str], kind: str = "") -> str:
    text = escape(form(value)) if value is not None else NOTHING
    own = f' class="{kind}"' if kind else ""
    # What is no number is sorted to the end.
    return f'<td{own} data-v="{"NaN" if value is None else repr(value)}">{text}</td>'
