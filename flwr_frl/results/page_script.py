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
.charts { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem }
figure { margin: 0; max-width: 100% } figcaption { font-weight: 600 }
.u-legend { max-height: 8rem; overflow: auto; pointer-events: none }
.band { display: none }
.box { overflow: auto; max-height: 30rem; margin: .4rem 0; border: 1px solid #d9dee5 }
table { border-collapse: collapse; min-width: 100%; font-size: .85rem }
.box th { position: sticky; top: 0; background: #f4f6f8 }
.box th, .box td { padding: .3rem .4rem; text-align: left; unicode-bidi: isolate }
.box td { min-width: 5rem }
.box td:first-child { font-weight: 600 }
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

/* A table of texts, the first row being the headings. 2000 rows are shown. */
function table(id, [headings, ...rows]) {
  const row = (tag, texts) => make('tr', {}, ...texts.map(text => make(tag, {}, text)));
  place(id).replaceChildren(make('table', {}, row('th', headings),
    ...rows.slice(0, 2000).map(texts => row('td', texts))));
}

const ERRORS = ['distance', 'error', 'loss'];
const DASHES = { '-': [], '--': [9, 5], ':': [2, 4], '-.': [9, 4, 2, 4] };
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6];
function chart(title, metric, columns, { log = false, width = 560, ...more }) {
  const figure = make('figure', {}, make('figcaption', {}, title));
  const share = metric === 'accuracy';
  const format = digits => value => value == null ? '-'
    : share ? (100 * value).toFixed(digits) + ' %' : String(+value.toPrecision(4));
  // A logarithmic axis has ticks without labels.
  const labels = (_, ticks) => ticks.map(tick => tick == null ? '' : format(0)(tick));
  for (const series of more.series.slice(1)) series.value = (_, y) => format(2)(y);
  figure.chart = new uPlot({
    width: Math.min(width, place('methods').clientWidth), height: 300,
    scales: {
      x: { time: false }, y: share ? { range: [0, 1] } : { distr: log ? 3 : 1 },
    },
    axes: [{ incrs: WHOLE }, { size: 70, values: labels }],
    ...more,
  }, columns, figure);
  return figure;
}
/* A band shows one standard deviation over seeds to either side of the mean. */
function curves(metric, i) {
  const tables = [], series = [{ label: 'round' }], bands = [];
  const drawn = data.methods.filter(({ curves }) => curves[i][0].length);
  const log = ERRORS.includes(metric)
    && drawn.every(({ curves }) => curves[i][1].every(y => y > 1e-20));
  for (const { name: label, colour: stroke, style, curves } of drawn) {
    const [rounds, means, deviations] = curves[i];
    const low = means.map(
      (y, k) => Math.max(y - deviations[k], log ? y / 10 : -Infinity));
    const high = means.map((y, k) => y + deviations[k]);
    tables.push([rounds, means, high, low]);
    const k = series.length, edge = { class: 'band', points: { show: false } };
    series.push(
      { label, stroke, dash: DASHES[style], width: 2 }, edge, edge);
    bands.push({ series: [k + 1, k + 2], fill: stroke + '33' });
  }
  for (const each of series) each.spanGaps = true;
  return tables.length ? chart(
    `${metric} by round`, metric, uPlot.join(tables), { series, bands, log }) : '';
}
function dots(metric) {
  const of = data.methods.map(({ clients }) => new Map(Object.entries(clients)));
  const names = [...new Set(of.flatMap(clients => [...clients.keys()]))];
  names.sort((a, b) => of[0].get(a) - of[0].get(b));
  const series = data.methods.map(({ name: label, colour }) => ({
    label, stroke: colour, paths: () => null,
    points: { show: true, size: 7, fill: colour },
  }));
  const x = { label: 'client', value: (_, i) => names[i - 1] ?? '-' };
  const columns = of.map(clients => names.map(name => clients.get(name) ?? null));
  return names.length ? chart(
    `${metric} of each client, sorted by the first method`, metric,
    [names.map((_, i) => i + 1), ...columns],
    { series: [x, ...series], width: 1150 }) : '';
}

/* The page. When a server has sent it, it fetches itself again. */
let text = place('data').textContent, data;
function draw() {
  const metric = data.methods[0]?.metric;
  place('charts').replaceChildren(curves(metric, 0), curves('train-loss', 1));
  place('dots').replaceChildren(dots(metric));
}
function show() {
  data = JSON.parse(text);
  place('none').textContent = data.methods.length ? '' : 'There are no results yet.';
  for (const name of ['task', 'settings', 'legend'])
    place(name).textContent = data[name] || 'none';
  table('methods', data.table);
  table('clients', data.clients);
  draw();
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
