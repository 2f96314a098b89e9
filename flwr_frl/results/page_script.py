"""Style and script of the results page, which shows what `page_data` has read.

They are text because Flower bundles only Python files.
"""

STYLE = """
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: #1d2126;
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem }
p { margin: .4rem 0; color: #59626d; overflow-wrap: anywhere }
#connection { color: #b3261e }
input { font: inherit; max-width: 100% }
summary { cursor: pointer; margin: .6rem 0 }
.charts { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem }
figure { margin: 0; max-width: 100% } figcaption { font-weight: 600 }
.u-legend { max-height: 8rem; overflow: auto; pointer-events: none }
.band { display: none }
.box { overflow: auto; max-height: 30rem; margin: .4rem 0; border: 1px solid #d9dee5 }
.box table { border-collapse: collapse; min-width: 100%; font-size: .85rem;
  font-variant-numeric: tabular-nums }
.box th { position: sticky; top: 0; z-index: 1; background: #f4f6f8 }
.box tr > :first-child { position: sticky; left: 0 }
.box th:first-child { z-index: 2 } .box td:first-child { background: white }
.box th button { all: unset; cursor: pointer }
.box th button:focus-visible { outline: 2px solid }
.box th[aria-sort=ascending]::after { content: " ▲" }
.box th[aria-sort=descending]::after { content: " ▼" }
.box th, .box td { padding: .3rem .4rem; text-align: left; unicode-bidi: isolate }
.box td { white-space: nowrap }
.box td.long { white-space: normal; min-width: 20rem; overflow-wrap: anywhere }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
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
const get = (values, name) => Object.hasOwn(values, name) ? values[name] : null;

/* A table that can be sorted and filtered, of which 2000 rows are shown. Its rows are
   texts; the first one has the headings. `onFilter` receives the names of the rows. */
function table(id, decorate = String, onFilter = () => {}) {
  const head = make('tr'), body = make('tbody');
  const filter = make('input', { type: 'search', placeholder: 'filter by name' });
  let headings = [], rows = [], by = 0, sign = 0;
  const compare = new Intl.Collator('en', { numeric: true }).compare;
  function order(x, y) {
    const [a, b] = [x, y].map(text => parseFloat(text.replaceAll(',', '')));
    return (x === '') - (y === '') || sign * (a - b || compare(x, y));
  }
  function sort(i) {
    sign = by === i && sign === 1 ? -1 : 1;
    by = i;
    show();
    head.children[i].firstChild.focus();
  }
  function show() {
    const wanted = filter.value.toLowerCase();
    const shown = rows.filter(([name]) => name.toLowerCase().includes(wanted));
    if (sign) shown.sort((x, y) => order(x[by], y[by]));
    head.replaceChildren(...headings.map((textContent, i) => make('th',
      { ariaSort: by !== i || !sign ? 'none' : sign > 0 ? 'ascending' : 'descending' },
      make('button', { textContent, onclick: () => sort(i) }))));
    body.replaceChildren(...shown.slice(0, 2000).map(([name, ...texts]) => make(
      'tr', {}, make('td', {}, decorate(name)),
      ...texts.map(text => make(
        'td', { className: text.length > 40 ? 'long' : '' }, text)))));
    onFilter(shown.map(([name]) => name));
  }
  filter.oninput = show;
  place(id).append(filter, make('div', { className: 'box' },
    make('table', {}, make('thead', {}, head), body)));
  return data => { [headings, ...rows] = data; show(); };
}
const fillMethods = table('methods', name => {
  const swatch = make('span', { className: 'swatch' });
  swatch.style.background = data.methods.find(method => method.name === name).colour;
  return make('b', {}, swatch, name);
}, names => {
  methods = data.methods.filter(({ name }) => names.includes(name));
  draw();
});
const fillClients = table('clients');

/* Charts of the methods that the table shows */
const ERRORS = ['distance', 'error', 'loss'];
const DASHES = { '-': [], '--': [9, 5], ':': [2, 4], '-.': [9, 4, 2, 4] };
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6];
function chart(title, metric, xLabel, columns, { log = false, width = 560, ...more }) {
  const figure = make('figure', {}, make('figcaption', {}, title));
  const share = metric.includes('accuracy');
  const format = digits => value => value == null ? '-'
    : share ? (100 * value).toFixed(digits) + ' %' : String(+value.toPrecision(4));
  for (const series of more.series.slice(1)) series.value = (_, y) => format(2)(y);
  figure.chart = new uPlot({
    width: Math.min(width, place('methods').clientWidth), height: 300,
    scales: {
      x: { time: false }, y: share ? { range: [0, 1] } : { distr: log ? 3 : 1 },
    },
    axes: [{ label: xLabel, incrs: WHOLE }, { size: 70, values: (_, ticks) => ticks.map(
      tick => tick == null ? '' : format(0)(tick)) }],
    ...more,
  }, columns, figure);
  return figure;
}
/* A band shows one standard deviation over seeds to either side of the mean. */
function curves(metric) {
  const tables = [], series = [{ label: 'round' }], bands = [];
  const drawn = methods.filter(({ curves }) => get(curves, metric));
  const log = ERRORS.includes(metric)
    && drawn.every(({ curves }) => curves[metric][1].every(y => y > 1e-20));
  for (const { name: label, colour: stroke, style, curves } of drawn) {
    const [rounds, means, deviations] = curves[metric];
    const low = means.map(
      (y, i) => Math.max(y - deviations[i], log ? y / 10 : -Infinity));
    const high = means.map((y, i) => y + deviations[i]);
    tables.push([rounds, means, high, low]);
    const i = series.length, edge = { class: 'band', points: { show: false } };
    series.push(
      { label, stroke, dash: DASHES[style], width: 2 }, edge, edge);
    bands.push({ series: [i + 1, i + 2], fill: stroke + '33' });
  }
  for (const each of series) each.spanGaps = true;
  return tables.length
    ? chart(metric, metric, 'round', uPlot.join(tables), { series, bands, log }) : '';
}
function dots() {
  const { metric, clients } = methods[0] ?? { clients: {} };
  const names = [...new Set(methods.flatMap(({ clients }) => Object.keys(clients)))];
  names.sort((a, b) => get(clients, a) - get(clients, b));
  const series = methods.map(({ name: label, colour }) => ({
    label, stroke: colour, paths: () => null,
    points: { show: true, size: 7, fill: colour },
  }));
  const x = { label: 'client', value: (_, i) => names[i - 1] ?? '-' };
  const columns = methods.map(method => names.map(name => get(method.clients, name)));
  return names.length ? chart(
    `${metric} of each client`, metric, 'clients, sorted by the first method',
    [names.map((_, i) => i + 1), ...columns],
    { series: [x, ...series], width: 1150 }) : '';
}
function draw() {
  const others = methods.flatMap(({ curves }) => Object.keys(curves)).sort();
  const metrics = new Set(
    [...methods.map(({ metric }) => metric), 'train-loss', ...others]);
  const figures = [...metrics].map(curves);
  place('charts').replaceChildren(...figures.slice(0, 2));
  place('more').replaceChildren(...figures.slice(2));
  place('dots').replaceChildren(dots());
}

/* The page. When a server has sent it, it fetches itself again. */
let text = place('data').textContent, data, methods = [];
function show() {
  data = JSON.parse(text);
  place('none').textContent = data.methods.length ? '' : 'There are no results yet.';
  for (const name of ['task', 'settings', 'legend'])
    place(name).textContent = data[name] || 'none';
  fillMethods(data.table);
  fillClients(data.clients);
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
window.onresize = draw;
show();
if (location.protocol.startsWith('http')) setTimeout(update, 3000);
"""
