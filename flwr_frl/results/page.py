"""The web page of a results folder, during and after the runs.

A run writes it as ``report.html``, a file that holds its data as JSON and a script that
shows them. ``python -m flwr_frl.results.page results`` serves the page of any folder at
http://127.0.0.1:8765/, where it updates itself. The served page is read-only. By
default only this machine can reach it; from another machine, use
``ssh -L 8765:127.0.0.1:8765 SERVER``.

Style and script are text because Flower bundles only Python files.
"""

import contextlib
import ipaddress
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging import WARNING
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flwr.common import log

from flwr_frl.common.command_line import Parser, exit_code
from flwr_frl.common.files import write_atomically
from flwr_frl.common.settings import Settings, SettingsError, require
from flwr_frl.results import uplot
from flwr_frl.results.results import (
    METRICS,
    PAGE,
    STATUS,
    Row,
    is_number,
    quality,
    read_object,
    read_rows,
)

# The most points of a curve.
MOST_POINTS = 200
LOOPBACK, PORT = "127.0.0.1", 8765

STYLE = """
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: #1d2126;
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.2rem; overflow-wrap: anywhere } h2 { font-size: 1rem }
#connection { color: #b3261e }
#charts { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem }
figure { margin: 0; max-width: 100% } figcaption { font-weight: 600 }
.u-legend { max-height: 6rem; overflow: auto }
.box { overflow: auto; max-height: 22rem; margin: .4rem 0; border: 1px solid #d9dee5 }
.box table { border-collapse: collapse; font-variant-numeric: tabular-nums }
.box th { position: sticky; top: 0; background: #f4f6f8 }
.box th button { all: unset; cursor: pointer }
.box th, .box td { padding: .3rem .6rem; text-align: left; max-width: 22rem;
  overflow-wrap: break-word; unicode-bidi: isolate }
"""

# Strangers' names reach the page only as text nodes (`append`, `textContent`).
SCRIPT = """
'use strict';
const place = id => document.getElementById(id);
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/* Formats of values */
function number(value, name = '') {
  if (value == null) return '-';
  const share = name.startsWith('accuracy');
  return Number((share ? 100 * value : value).toPrecision(4)) + (share ? ' %' : '');
}
const whole = value => value == null ? '-' : value.toLocaleString('en');
const duration = seconds => seconds == null ? '-'
  : Math.floor(seconds / 3600)
    + new Date(1000 * (seconds % 3600)).toISOString().slice(13, 19);
const time = seconds => seconds ? new Date(1000 * seconds).toLocaleString() : '-';

/* A table that can be sorted and searched, of which 2000 rows are shown. A column has a
   heading, the value by which it sorts, and a function that returns what it shows. */
function table(id, columns) {
  const head = make('tr'), body = make('tbody');
  const find = make('input', { type: 'search', placeholder: 'find by name' });
  let items = [], by = null, sign = 1;
  function show() {
    const rows = items.filter(
      item => columns[0].value(item).toLowerCase().includes(find.value.toLowerCase()));
    const order = (x, y) => (x == null) - (y == null) || sign * ((x > y) - (x < y));
    if (by) rows.sort((a, b) => order(by.value(a), by.value(b)));
    const cells = item => columns.map(
      ({ value, shown }) => make('td', {}, shown(value(item), item)));
    body.replaceChildren(
      ...rows.slice(0, 2000).map(item => make('tr', {}, ...cells(item))));
  }
  for (const column of columns) {
    const onclick = () => { sign = by === column ? -sign : 1; by = column; show(); };
    const button = make('button', { textContent: column.heading, onclick });
    head.append(make('th', {}, button));
  }
  find.oninput = show;
  place(id).append(find, make('div', { className: 'box' },
    make('table', {}, make('thead', {}, head), body)));
  return data => { items = data; show(); };
}
const column = (heading, value, shown = String) => ({ heading, value, shown });
const latest = (run, name) => points(run, name, 'round')[1].at(-1);
const fillRuns = table('runs', [
  column('run', run => run.name, (name, run) => {
    const element = make('b', {}, name);
    element.style.color = run.colour;
    return element;
  }),
  column('latest result', run => latest(run, run.quality),
    (value, run) => `${run.quality} ${number(value, run.quality)}`),
  column('round', run => latest(run, 'round'),
    (round, run) => `${whole(round)} of ${whole(run.rounds)} ${run.state}`),
  column('training loss', run => latest(run, 'train-loss'), value => number(value)),
  column('MB', run => latest(run, 'MB'), value => number(value)),
  column('time', run => latest(run, 'seconds'), duration),
  column('time left', run => run.left, duration),
]);
const fillClients = table('clients', [
  column('client', client => `${client.run}: ${client.client}`),
  column('last seen', client => client['last-seen'],
    (seconds, client) => client.node ? 'connected' : time(seconds)),
  column('last round', client => client['last-round'], whole),
  column('latest result', client => client.quality,
    (value, client) => number(value, client.measure)),
  column('examples', client => client['num-examples'], whole),
  column('test examples', client => client['num-test-examples'], whole),
  column('updates', client => client.updates, whole),
  column('rejected', client => client.rejected, whole),
  column('unanswered', client => client.unanswered, whole),
  column('node', client => client.node, node => node ?? '-'),
  column('last problem', client => client.reason, reason => reason ?? ''),
]);

/* Charts */
const ACROSS = ['round', 'seconds', 'seconds-simulated', 'updates', 'MB'];
const COSTS = [...ACROSS, 'bytes-down', 'bytes-up', 'bytes-evaluate'];
const ERRORS = ['distance', 'error', 'loss'];
function points(run, name, across) {
  const get = key => Object.hasOwn(run.columns, key) ? run.columns[key] : [];
  const x = get(across), y = get(name);
  const kept = [...y.keys()].filter(i => x[i] != null && y[i] != null);
  return [kept.map(i => x[i]), kept.map(i => y[i])];
}
function chart(name, runs, across) {
  const curves = runs.map(run => ({ ...run, points: points(run, name, across) }))
    .filter(curve => curve.points[0].length);
  if (!curves.length) return '';
  const figure = make('figure', {}, make('figcaption', {}, name));
  const log = ERRORS.includes(name)
    && curves.every(curve => curve.points[1].every(value => value > 1e-20));
  const format = value => value == null ? '' : number(value, name);
  figure.chart = new uPlot({
    width: Math.min(560, place('charts').clientWidth), height: 280,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [{ label: across }, { size: 76, values: (_, ticks) => ticks.map(format) }],
    series: [{ label: across }, ...curves.map(({ name: label, colour: stroke }) => (
      { label, stroke, width: 2, spanGaps: true, value: (_, y) => format(y) }))],
  }, uPlot.join(curves.map(curve => curve.points)), figure);
  return figure;
}
function draw({ runs }) {
  const names = [...new Set(runs.flatMap(run => Object.keys(run.columns)))].sort();
  const varies = name => !COSTS.includes(name)
    && new Set(runs.flatMap(run => points(run, name, 'round')[1])).size > 1;
  const metrics = new Set(
    [...runs.map(run => run.quality), 'train-loss', ...names.filter(varies)]);
  const across = place('across').value;
  place('charts').replaceChildren(
    ...[...metrics].map(name => chart(name, runs, across)));
}

/* The page. When a server has sent it, it fetches itself again. */
let text = place('data').textContent, data;
function show() {
  data = JSON.parse(text);
  const { runs } = data;
  const methods = [...new Set(runs.map(run => run.name.split('/').at(-1)))];
  for (const run of runs) {
    const method = methods.indexOf(run.name.split('/').at(-1));
    run.colour = `hsl(${(210 + 137.5 * method) % 360} 70% 40%)`;
  }
  place('none').hidden = runs.length > 0;
  fillRuns(runs);
  fillClients(runs.flatMap(run => run.clients.map(
    client => ({ ...client, run: run.name, measure: run.quality }))));
  draw(data);
}
async function update() {
  try {
    const answer = await fetch(location.pathname);
    if (!answer.ok) throw new Error(answer.status);
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
    const newer = page.getElementById('data').textContent;
    if (newer !== text) { text = newer; show(); }
    place('connection').textContent = '';
  } catch {
    place('connection').textContent =
      'connection lost; this is the last state that was received';
  }
  setTimeout(update, document.hidden ? 30000 : 3000);
}
place('across').append(...ACROSS.map(name => make('option', {}, name)));
place('across').onchange = window.onresize = () => draw(data);
show();
if (location.protocol.startsWith('http')) setTimeout(update, 3000);
"""

# Nothing is loaded from elsewhere, and nothing is sent.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the data of the page, as JSON values.

    Parameters
    ----------
    folder : Path
        The results folder. It may be empty, half-written or about to be deleted.

    Returns
    -------
    dict
        ``folder``, the folder's name, and ``runs``, sorted by depth and name. A run has
        its ``name``, ``state``, ``rounds`` and remaining seconds (``left``);
        ``quality``, its main metric; the ``columns`` of its rows, by metric; and its
        ``clients``. A damaged run is left out.
    """
    runs = list[dict[str, Any]]()
    for place, folders, files in os.walk(folder):
        # Clients' states are many.
        folders[:] = [name for name in folders if name != "clients"]
        if METRICS not in files and STATUS not in files:
            continue
        try:
            read = [Path(place, name) for name in (METRICS, STATUS) if name in files]
            about = [path.stat() for path in read]
            run = _run(place, tuple((s.st_mtime_ns, s.st_size) for s in about))
        except Exception as error:
            log(WARNING, "the page does not show %s: %r", place, error)
            continue
        path = Path(place).relative_to(folder).as_posix()
        runs.append({"name": path if path != "." else folder.absolute().name, **run})
    return {
        # The name only: the page may be sent to others, who need not know the path.
        "folder": folder.absolute().name,
        "runs": sorted(runs, key=lambda run: (run["name"].count("/"), run["name"])),
    }


@lru_cache(maxsize=1024)
def _run(place: str, changed: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Return a run; it is read again when its files have ``changed``."""
    rows, status = read_rows(Path(place, METRICS)), read_object(Path(place, STATUS))
    counts = {
        kind: Counter(name for row in rows for name in row.get(f"{kind}-clients", ()))
        for kind in ("rejected", "unanswered")
    }
    columns = _columns(rows)
    return {
        "state": status.get("state", ""),
        "rounds": status.get("rounds"),
        "left": status.get("left"),
        "quality": quality(columns),
        "columns": columns,
        "clients": [
            {**client, **{kind: of[client["client"]] for kind, of in counts.items()}}
            for client in status.get("clients", [])
        ],
    }


def _columns(rows: list[Row]) -> dict[str, list[float | None]]:
    """Return the numbers of some rows by metric, and the costs so far.

    A long run is thinned to at most `MOST_POINTS` rows; evaluated rows come first.
    """
    updates, megabytes = 0, 0.0
    for row in rows:
        updates += row.get("clients", 0) + row.get("dropped", 0)
        megabytes += (row.get("bytes-down", 0) + row.get("bytes-up", 0)) / 1e6
        row |= {"updates": updates, "MB": megabytes}
    step = len(rows) // MOST_POINTS + 1
    # The last row is always shown.
    parts = [
        rows[i : min(i + step, len(rows) - 1)] for i in range(0, len(rows) - 1, step)
    ]
    kept = [max(part, key=lambda row: "evaluated" in row) for part in parts]
    kept += rows[-1:]
    names = sorted({name for row in kept for name, v in row.items() if is_number(v)})
    return {n: [r[n] if is_number(r.get(n)) else None for r in kept] for n in names}


def document(folder: Path) -> str:
    """Return the page of a results folder as HTML."""
    data = read_folder(folder)
    title = escape(data["folder"])
    # A name with ``<`` could end the script element.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}: federated runs</title>
<style>{uplot.STYLE}{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p id="connection" role="status"></p>
<p id="none">No run has written anything here yet.</p>
<div id="runs"></div>
<h2>Clients</h2>
<div id="clients"></div>
<h2>Curves by <select id="across"></select></h2>
<div id="charts"></div>
<script type="application/json" id="data">{text}</script>
<script>/*{uplot.LICENCE}*/{uplot.SCRIPT}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def write_page(output: Path) -> None:
    """Write ``report.html`` about all runs in a results folder."""
    write_atomically(output / PAGE, document(output).encode())


class PageServer(ThreadingHTTPServer):
    """Serve the page of one results folder.

    Parameters
    ----------
    folder : Path
        The folder. It may be created and deleted while it is served.
    port : int
        The port, 0 to 65535; 0 picks a free port.
    host : str, default "127.0.0.1"
        An address of this machine.

    Raises
    ------
    SettingsError
        If the address cannot be listened on.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int, host: str = LOOPBACK) -> None:
        self.folder, self.host = folder, host
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise SettingsError(
                f"page is {port}, but {host}:{port} cannot be listened on ({error}); "
                "set another port or host",
                "page",
            ) from None
        self.url = f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a browser closes before it has read the page."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    # Seconds after which an idle connection is closed.
    timeout = 30

    def do_GET(self) -> None:
        """Send the page, whatever the path."""
        if not self._is_local_name():
            self.send_error(403, "unknown host name")
            return
        body = document(self.server.folder).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def _is_local_name(self) -> bool:
        """Return True if the ``Host`` header is an address or a name of this server.

        A foreign name that resolves to this server would let a foreign page read this
        one (DNS rebinding).
        """
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        try:
            known = ("localhost", self.server.host)
            return name in known or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def served_for(settings: Settings) -> Iterator[None]:
    """Serve the page of a run while the context lasts, if ``page`` is set."""
    if not settings["page"]:
        yield
        return
    server = PageServer(Path(str(settings["output"])), int(settings["page"]))
    # The thread checks every 0.1 s whether it should end.
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    log(WARNING, "the page is at %s", server.url)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing one line for invalid input."""
    return exit_code(lambda: _serve(arguments))


def _serve(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m flwr_frl.results.page", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the results folder")
    text = "the port to listen on (default %(default)s); 0 picks a free port"
    parser.add_argument("--port", type=int, default=PORT, help=text)
    text = "the address to listen on (default %(default)s); 0.0.0.0 is all addresses"
    parser.add_argument("--host", default=LOOPBACK, help=text)
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    require(folder.is_dir(), "DIR", str(folder), "a folder of results")
    with PageServer(folder, options.port, options.host) as server:
        print(f"{server.url} shows {folder}; stop with Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
