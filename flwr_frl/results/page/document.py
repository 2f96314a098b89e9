"""The page as HTML, which holds its data as JSON and a script that shows them.

Style and script are text because Flower bundles only Python files.
"""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from flwr_frl.common.files import write_atomically
from flwr_frl.results.page import uplot
from flwr_frl.results.page.folder import read_folder
from flwr_frl.results.results import PAGE

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
    find.hidden = items.length <= 12;
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
  column('round', run => run.round,
    (round, run) => `${whole(round)} of ${whole(run.rounds)} ${run.state}`),
  column('training loss', run => latest(run, 'train-loss'), value => number(value)),
  column('MB', run => latest(run, 'traffic'), value => number(value)),
  column('time', run => latest(run, 'seconds'), duration),
  column('time left', run => run.left, duration),
  column('written', run => run.written, time),
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
const ACROSS = ['round', 'seconds', 'seconds-simulated', 'updates', 'traffic'];
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
  figure.chart = new uPlot({
    width: Math.min(560, place('charts').clientWidth),
    height: 280,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [
      { label: across === 'traffic' ? 'MB sent and received' : across },
      { size: 76, values: (_, ticks) =>
        ticks.map(tick => tick == null ? '' : number(tick, name)) },
    ],
    series: [{ label: across }, ...curves.map(curve => ({
      label: curve.name, stroke: curve.colour, width: 2, spanGaps: true,
      value: (_, value) => number(value, name) }))],
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
  const { runs } = data, methods = [];
  for (const run of runs) {
    const method = run.name.split('/').at(-1);
    if (!methods.includes(method)) methods.push(method);
    run.colour = `hsl(${(210 + 137.5 * methods.indexOf(method)) % 360} 70% 40%)`;
  }
  place('none').hidden = runs.length > 0;
  fillRuns(runs);
  fillClients(runs.flatMap(run => run.clients.map(
    client => ({ ...client, run: run.name, measure: run.measure }))));
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


def write_page(output: Path) -> None:
    """Write ``report.html`` about all runs in a results folder."""
    write_atomically(output / PAGE, document(read_folder(output)).encode())


def document(data: Mapping[str, Any]) -> str:
    """Return the page with the result of `read_folder` as HTML."""
    folder = escape(data["folder"])
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # A name with ``<`` could end the script element.
    text = text.replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{folder}: federated runs</title>
<style>{uplot.STYLE}{STYLE}</style>
</head>
<body>
<h1>{folder}</h1>
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
