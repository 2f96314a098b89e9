"""The page as HTML, which holds its data as JSON and a script that shows them.

Style and script are text because Flower bundles only Python files.
"""

import base64
import hashlib
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
:root { color-scheme: light dark; --ground: #fff; --ink: #1d2126; --faint: #667080;
  --line: #d9dee5; --raised: #f4f6f8; --good: #00795a; --bad: #b3261e;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b84f8e; --c4: #c28400;
  --c5: #3aa0dd; --c6: #7a5cc9; --c7: #6b7075 }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e4e7eb;
  --faint: #98a2ae; --line: #333a42; --raised: #1d2226; --good: #4fd1a5;
  --bad: #ff8a80; --c0: #56b4e9; --c1: #ff8c42; --c2: #2fc99a; --c3: #e58fc0;
  --c4: #e6b84a; --c5: #8fd0ff; --c6: #b39ddb; --c7: #aab2bb } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.2rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1rem; margin: 1.6rem 0 .5rem }
p { margin: .3rem 0 } .nothing { color: var(--faint) }
.charts { display: grid; gap: 1rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)) }
figure { margin: 0; max-width: 40rem; min-width: 0 }
figcaption { font-weight: 600; margin: .2rem 0; overflow-wrap: anywhere }
.u-legend { max-height: 6rem; overflow: auto } .u-legend.u-inline { display: block }
.u-legend th, .u-legend td { border: 0; background: none; position: static }
.u-legend th { max-width: 16rem; overflow-wrap: anywhere; white-space: normal }
.key { display: inline-block; width: 2.2rem; margin-right: .4rem;
  vertical-align: middle }
.box { overflow: auto; max-height: 75vh; border: 1px solid var(--line);
  border-radius: 6px }
.box table { border-collapse: separate; border-spacing: 0; width: 100%;
  font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line) }
tr:last-child td { border-bottom: 0 }
th { background: var(--raised); position: sticky; top: 0; font-weight: 600; z-index: 1 }
th button { all: unset; cursor: pointer } th button:focus-visible { outline: 2px solid }
th[aria-sort=ascending] button::after { content: " \\25b2" }
th[aria-sort=descending] button::after { content: " \\25bc" }
.name { text-align: left; unicode-bidi: isolate; max-width: 22rem; overflow: hidden;
  text-overflow: ellipsis }
.why { text-align: left; white-space: normal; min-width: 14rem; unicode-bidi: isolate;
  overflow-wrap: anywhere }
.running, .here { color: var(--good) } .stopped, .bad { color: var(--bad) }
summary { cursor: pointer; padding: .3rem 0; font-weight: 600; overflow-wrap: anywhere }
input { font: inherit; padding: .3rem .5rem; margin: .4rem 0; width: min(100%, 20rem);
  color: inherit; background: var(--raised); border: 1px solid var(--line);
  border-radius: 6px }
@media (max-width: 40rem) { body { padding: .6rem } .wide { display: none }
  .box th, .box td { padding: .3rem .4rem } .why { min-width: 9rem }
  td.name { max-width: 11rem; position: sticky; left: 0; background: var(--ground) } }
"""

# Strangers' names reach the page only as text nodes (`append`, `textContent`).
SCRIPT = """
'use strict';
const main = document.querySelector('main');
const text = document.getElementById('data').textContent;
const live = JSON.parse(text).live;

/* Formats of values */
const plain = value => String(Number(value.toPrecision(4)));
const count = value => value.toLocaleString('en');
const tenths = value => value.toLocaleString('en',
  { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const isShare = name => name.startsWith('accuracy');
const exact = name =>
  isShare(name) ? value => (100 * value).toFixed(2) + ' %' : plain;
const short = name => isShare(name) ? value => plain(100 * value) + ' %' : plain;
function duration(seconds) {
  let rest = Math.round(seconds);
  const units = [['d', 86400], ['h', 3600], ['min', 60], ['s', 1]];
  const parts = units.map(([unit, size]) => {
    const number = Math.floor(rest / size);
    rest -= number * size;
    return number ? `${number} ${unit}` : '';
  });
  const first = parts.findIndex(part => part);
  return parts.slice(first, first + 2).filter(part => part).join(' ') || '0 s';
}
function time(seconds) {
  const date = new Date(seconds * 1000);
  if (!seconds || Number.isNaN(Number(date))) return '-';
  const iso = date.toISOString();
  return make('time', { dateTime: iso, title: date.toLocaleString() },
    iso.slice(0, 19).replace('T', ' ') + ' UTC');
}
function ages() {
  for (const element of document.querySelectorAll('time')) {
    const date = new Date(element.dateTime);
    const s = Math.max(0, Math.round((Date.now() - date) / 1000));
    element.textContent = s < 100 ? s + ' s ago'
      : s < 6000 ? Math.round(s / 60) + ' min ago'
      : s < 172800 ? Math.round(s / 3600) + ' h ago' : date.toLocaleDateString();
  }
}

/* Elements. Those with a key are made once and stay in their place, so that focus,
   scrolling and the order of a table outlast an update. */
const kept = new Map();
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
function once(key, create) {
  if (!kept.has(key)) kept.set(key, create());
  return kept.get(key);
}
function place(parent, children) {
  const old = parent.childNodes;
  if (old.length !== children.length || children.some((child, i) => child !== old[i]))
    parent.replaceChildren(...children);
  return parent;
}

/* Tables. A column has a heading, a class, the value by which it sorts, and what it
   shows: text or an element. */
const column = (heading, kind, value, show = String) => ({ heading, kind, value,
  show: item => value(item) == null ? '-' : show(value(item), item) });
function table(columns, kind) {
  const head = make('tr'), body = make('tbody');
  const search = make('input', { type: 'search', placeholder: 'find by name' });
  search.setAttribute('aria-label', 'find by name');
  let items = [], by = -1, up = true;
  function show() {
    const find = search.value.toLowerCase(), { value } = columns[by] ?? {};
    const order = (x, y) => (x == null) - (y == null)
      || (up ? 1 : -1) * ((x > y) - (x < y));
    const rows = items.filter(
      item => columns[0].value(item).toLowerCase().includes(find));
    if (value) rows.sort((a, b) => order(value(a), value(b)));
    body.replaceChildren(...rows.map(item => make('tr', {}, ...columns.map(
      column => make('td', { className: column.kind }, column.show(item))))));
    [...head.cells].forEach((cell, i) => cell.setAttribute('aria-sort',
      i !== by ? 'none' : up ? 'ascending' : 'descending'));
    search.hidden = items.length <= 12;
    if (live) ages();
  }
  columns.forEach(({ heading, kind }, i) => {
    const onclick = () => { up = by !== i || !up; by = i; show(); };
    const button = make('button', { textContent: heading, onclick });
    head.append(make('th', { className: kind }, button));
  });
  search.oninput = show;
  const box = make('div', { className: 'box' },
    make('table', { className: kind }, make('thead', {}, head), body));
  return Object.assign(make('div', {}, search, box),
    { fill(data) { items = data; show(); } });
}

/* Charts. A curve has a name, a colour and a dash, and its points as two lists. */
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [1, 5]];
const BORDERS = ['solid', 'dashed', 'dotted', 'dashed', 'dotted'];
const WHOLE = Array.from({ length: 30 },
  (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
const colour = name =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function draw(figure) {
  const { curves, across, form, bars } = figure, width = figure.clientWidth;
  figure.chart?.destroy();
  figure.chart = null;
  figure.querySelector('.nothing').hidden = curves.length > 0;
  if (!width || !curves.length) return;
  const values = curves.flatMap(curve => curve.points[1]);
  // uPlot has no logarithmic ticks below 1e-24.
  const log = figure.log && Math.min(...values) > 1e-20;
  const grid = { stroke: colour('--line'), width: 1 };
  const decades = (_, ticks) =>
    ticks.map(tick => !log || Number.isInteger(Math.log10(tick)) ? tick : null);
  const axis = { stroke: colour('--faint'), grid, ticks: grid, labelSize: 20 };
  const look = ({ name, hue, dash }) => ({
    label: name,
    stroke: colour(`--c${hue % 8}`),
    fill: bars && colour(`--c${hue % 8}`),
    dash: DASHES[dash % 5],
    width: 2,
    spanGaps: true,
    paths: bars && uPlot.paths.bars({ size: [0.8, 100] }),
    points: bars && { show: false },
    value: (_, value) => value == null ? '-' : form(value),
  });
  figure.chart = new uPlot({
    width, height: 300,
    scales: {
      x: { time: false, range: bars && [-0.5, values.length - 0.5] },
      y: { distr: log ? 3 : 1, range: bars && [0, 1.05 * Math.max(...values)] },
    },
    axes: [
      { ...axis, label: across, size: 34, values: (_, ticks) => ticks.map(plain),
        ...(across === 'round' || bars ? { incrs: WHOLE } : {}) },
      { ...axis, size: 72, grid: { ...grid, filter: decades },
        values: (_, ticks) => ticks.map(tick => tick == null ? '' : form(tick)) },
    ],
    series: [
      { label: across, value: (_, value) => value == null ? '-' : plain(value) },
      ...curves.map(look),
    ],
    legend: { markers: { dash: (_, i) => BORDERS[curves[i - 1].dash % 5] } },
  }, uPlot.join(curves.map(curve => curve.points)), figure);
}
/* Also draws a chart when the element around it is opened. */
const sizes = new ResizeObserver(entries => {
  for (const { target } of entries)
    if (target.chart?.width !== target.clientWidth) draw(target);
});
matchMedia('(prefers-color-scheme: dark)').onchange = () =>
  document.querySelectorAll('figure').forEach(draw);
function chart(caption, curves, options) {
  const figure = once(`chart ${options.other} ${caption}`, () => {
    const figure = make('figure', {}, make('figcaption', {}, caption),
      make('p', { className: 'nothing' }, 'nothing yet'));
    sizes.observe(figure);
    return figure;
  });
  curves = curves.filter(curve => curve.points[0].length);
  Object.assign(figure, { across: 'round', ...options, curves });
  draw(figure);
  return figure;
}

/* The page */
const points = (curves, name) => Object.hasOwn(curves, name) ? curves[name] : [[], []];
const latest = (run, name) => points(run.series, name)[1].at(-1);
const span = (className, text) => make('span', { className }, text);
function progress(round, run) {
  const parts = [count(round) + (run.rounds ? ` of ${count(run.rounds)}` : '')];
  if (run.state) parts.push(' ', span(run.state, run.state));
  if (run.state && run.left != null) parts.push(`, ${duration(run.left)} left`);
  return make('span', {}, ...parts);
}
function named(name, run) {
  const key = span('key', '');
  key.style.borderTop = `3px ${BORDERS[run.dash % 5]} var(--c${run.hue % 8})`;
  return make('span', {}, key, name);
}
/* Each algorithm has a colour, and its runs have different dashes. */
function addLooks(runs) {
  const hues = new Map(), dashes = new Map();
  for (const run of runs) {
    const algorithm = run.name.split('/').at(-1);
    if (!hues.has(algorithm)) hues.set(algorithm, hues.size);
    run.hue = hues.get(algorithm);
    run.dash = dashes.get(algorithm) ?? Math.floor(run.hue / 8);
    dashes.set(algorithm, run.dash + 1);
  }
}
function tableOfRuns(runs) {
  const measures = [...new Set(runs.map(run => run.quality))].sort().join(', ');
  const element = once(`runs ${measures}`, () => table([
    column('run', 'name', run => run.name, named),
    column(`latest ${measures}`, '', run => latest(run, run.quality),
      (value, run) => exact(run.quality)(value)),
    column('round', '', run => run.round, progress),
    column('training loss', '', run => latest(run, 'train-loss'), plain),
    column('MB down', '', run => run.down, tenths),
    column('MB up', '', run => run.up, tenths),
    column('time', '', run => latest(run, 'seconds'), duration),
    column('written', '', run => run.written, time),
  ], 'runs'));
  element.fill(runs);
  return element;
}
const group = (key, figures) =>
  place(once(key, () => make('div', { className: 'charts' })), figures);
const SHOWN = ['round', 'seconds', 'train-loss', 'bytes-down', 'bytes-up', 'traffic',
  'updates'];
function byRound(runs, quality, log) {
  const curves = name =>
    runs.map(run => ({ ...run, points: points(run.series, name) }));
  const more = [...new Set(runs.flatMap(run => Object.keys(run.series)))].sort();
  const others = more.filter(name => name !== quality && !SHOWN.includes(name)
    && new Set(curves(name).flatMap(curve => curve.points[1])).size > 1);
  const parts = [group('by round', [
    chart(`${quality}, mean over clients`, curves(quality),
      { form: short(quality), log }),
    chart('training loss', curves('train-loss'), { form: plain }),
    chart('traffic so far, down and up, in MB', curves('traffic'), { form: plain }),
  ])];
  if (others.length) parts.push(place(once('more', () => make('details')), [
    once('more metrics', () => make('summary', {}, 'More metrics')),
    group('others', others.map(
      name => chart(name, curves(name), { form: short(name), other: true }))),
  ]));
  return parts;
}
const COSTS = { 'seconds-simulated': 'simulated time', updates: 'client updates',
  traffic: 'MB, down and up' };
function byCost(runs, quality, log) {
  const figures = Object.entries(COSTS).map(([cost, across]) => chart(
    `${quality}, mean over clients, by ${across}`,
    runs.filter(run => run.quality === quality)
      .map(run => ({ ...run, points: points(run.costs, cost) })),
    { across, form: short(quality), log }));
  for (const run of runs.filter(run => run.staleness.length)) {
    const updates = run.clients.map(client => client.updates ?? 0);
    for (const [values, kind, across] of [
      [run.staleness, 'staleness', 'staleness'],
      [updates.sort((x, y) => x - y), 'client',
        'clients, from the fewest updates to the most'],
    ]) {
      const total = values.reduce((x, y) => x + y, 0);
      const shares = [values.map((_, i) => i), values.map(value => value / total)];
      if (total > 0) figures.push(chart(
        `${run.name}: share of the updates by ${kind}`, [{ ...run, points: shares }],
        { across, form: value => (100 * value).toFixed(1) + ' %', bars: true }));
    }
  }
  return group('by cost', figures);
}
const seen = (_, client) => client.node ? span('here', 'connected')
  : time(client['last-seen']);
const bad = value => value ? span('bad', count(value)) : '0';
function clientsOf(run, isNewest) {
  const { name, measure, clients } = run;
  const some = (what, test) => {
    const number = clients.filter(test).length;
    return number ? `, ${count(number)} ${what}` : '';
  };
  const summary = once(`about ${name}`, () => make('summary'));
  summary.textContent = `${name}: ${count(clients.length)} `
    + (clients.length === 1 ? 'client' : 'clients')
    + some('connected', client => client.node)
    + some('never counted', client => client['last-round'] === 0)
    + some('with rejected replies', client => client.rejected)
    + some('with missing replies', client => client.unanswered);
  const get = key => client => client[key];
  const rows = once(`clients ${measure} ${name}`, () => table([
    column('client', 'name', get('client')),
    column('last seen', '', client => client['last-seen'] ?? 0, seen),
    column('last round', '', get('last-round'), count),
    column(measure, '', get('quality'), exact(measure)),
    column('examples', '', get('num-examples'), count),
    column('test examples', 'wide', get('num-test-examples'), count),
    column('rejected', '', get('rejected'), bad),
    column('unanswered', '', get('unanswered'), bad),
    column('node', 'wide', get('node')),
    column('last problem', 'why', get('reason')),
  ], 'clients'));
  rows.fill(clients);
  const details = once(`details ${name}`, () => make('details', { open: isNewest }));
  return place(details, [summary, rows]);
}
function show({ runs, quality }) {
  const heading = title => once(title, () => make('h2', {}, title));
  const nothing = text => once(text, () => make('p', { className: 'nothing' }, text));
  if (!runs.length) {
    place(main, [nothing('No run has written anything here yet.')]);
    return;
  }
  addLooks(runs);
  const log = !['accuracy', 'loss-point'].includes(quality);
  const newest = Math.max(...runs.map(run => run.written));
  const clients = runs.filter(run => run.clients.length)
    .map(run => clientsOf(run, run.written === newest));
  const parts =
    [tableOfRuns(runs), heading('By round'), ...byRound(runs, quality, log)];
  if (runs.some(run => Object.hasOwn(run.series, 'seconds-simulated')))
    parts.push(heading('By cost'), byCost(runs, quality, log));
  place(main, [...parts, heading('Clients'),
    ...(clients.length ? clients : [nothing('No client has connected yet.')])]);
}
let shown = text;
async function update() {
  const state = document.getElementById('connection');
  try {
    const answer = await fetch('data.json', { cache: 'no-cache' });
    if (!answer.ok) throw new Error(answer.status);
    const text = await answer.text();
    if (text !== shown) show(JSON.parse(text));
    shown = text;
    state.textContent = '';
  } catch {
    state.textContent = 'connection lost; this is the last state that was received';
  }
  ages();
  setTimeout(update, document.hidden ? 10000 : 2000);
}
show(JSON.parse(text));
if (live) setTimeout(update, 2000);
"""


def write_page(output: Path) -> None:
    """Write ``report.html`` about all runs in a results folder."""
    write_atomically(output / PAGE, document(read_folder(output)).encode())


def document(data: Mapping[str, Any]) -> str:
    """Return the page as HTML that loads nothing from elsewhere.

    Parameters
    ----------
    data : mapping
        The result of `read_folder`. If it also has ``live``, the page fetches later
        data from ``data.json`` beside it.
    """
    folder = escape(data["folder"])
    style, library = uplot.STYLE + STYLE, f"/*{uplot.LICENCE}*/{uplot.SCRIPT}"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; "
        f"script-src '{_hash(library)}' '{_hash(SCRIPT)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # A name with ``<`` could end the script element.
    text = to_json(data).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{folder}: federated runs</title>
<style>{style}</style>
</head>
<body>
<h1>{folder}</h1>
<p class="bad" id="connection" role="status"></p>
<main><noscript>This page needs JavaScript.</noscript></main>
<script type="application/json" id="data">{text}</script>
<script>{library}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def to_json(data: Mapping[str, Any]) -> str:
    """Serialize the data of the page."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
