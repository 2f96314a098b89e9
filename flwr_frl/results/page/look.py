"""The page's style and script, as text because Flower bundles only Python files.

The page is complete without the script, which sorts and searches tables, shows ages
instead of times, and updates a page that is served.
"""

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
p { margin: .3rem 0 } .faint, .nothing { color: var(--faint) }
.charts { display: grid; gap: 1rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)) }
figure { margin: 0; max-width: 40rem } figcaption { font-weight: 600; margin: .2rem 0 }
svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--faint); text-anchor: end }
svg .below { text-anchor: middle }
.grid { stroke: var(--line); fill: none } .axis { stroke: var(--faint); fill: none }
.curve { stroke: currentColor; stroke-width: 2; fill: none; stroke-linejoin: round }
.dot, .bar { fill: currentColor }
.c0 { color: var(--c0) } .c1 { color: var(--c1) } .c2 { color: var(--c2) }
.c3 { color: var(--c3) } .c4 { color: var(--c4) } .c5 { color: var(--c5) }
.c6 { color: var(--c6) } .c7 { color: var(--c7) }
.key { width: 2.2rem; height: .7rem; display: inline-block; margin-right: .4rem }
.box { overflow: auto; max-height: 75vh; border: 1px solid var(--line);
  border-radius: 6px }
table { border-collapse: separate; border-spacing: 0; width: 100%;
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
  svg text { font-size: 17px }
  th, td { padding: .3rem .4rem } .why { min-width: 9rem }
  td.name { max-width: 11rem; position: sticky; left: 0; background: var(--ground) } }
"""

SCRIPT = """
'use strict';
const views = {};
const value = cell => cell.dataset.v === undefined
  ? cell.textContent.toLowerCase() : Number(cell.dataset.v);
function show(table) {
  const { by, up, find } = views[table.id], body = table.tBodies[0];
  const order = ([, x], [, y]) => Number.isNaN(x) - Number.isNaN(y)
    || (up ? 1 : -1) * ((x > y) - (x < y));
  const rows = [...body.rows].map(row => [row, value(row.cells[by])]).sort(order);
  for (const [row] of rows) row.hidden =
    !row.cells[0].textContent.toLowerCase().includes(find.toLowerCase());
  body.append(...rows.map(([row]) => row));
  [...table.tHead.rows[0].cells].forEach((cell, i) => cell.setAttribute('aria-sort',
    i !== by ? 'none' : up ? 'ascending' : 'descending'));
  table.parentElement.previousElementSibling.hidden = rows.length <= 12;
}
function prepare() {
  for (const table of document.querySelectorAll('table.sorts')) {
    const view = views[table.id] ??= { by: 0, up: true, find: '' };
    [...table.tHead.rows[0].cells].forEach((cell, i) => {
      const button = document.createElement('button');
      button.textContent = cell.textContent;
      button.onclick = () => {
        view.up = view.by !== i || !view.up;
        view.by = i;
        show(table);
      };
      cell.replaceChildren(button);
    });
    const search = document.createElement('input');
    search.type = 'search';
    search.placeholder = 'find a client';
    search.setAttribute('aria-label', 'find a client');
    search.value = view.find;
    search.oninput = () => { view.find = search.value; show(table); };
    table.parentElement.before(search);
    show(table);
  }
}
function ages() {
  for (const time of document.querySelectorAll('time')) {
    const then = new Date(time.dateTime);
    const s = Math.round((Date.now() - then) / 1000);
    time.title = then.toLocaleString();
    if (document.body.dataset.live) time.textContent =
      s < 100 ? Math.max(0, s) + ' s ago' : s < 6000 ? Math.round(s / 60) + ' min ago'
      : s < 172800 ? Math.round(s / 3600) + ' h ago' : then.toLocaleDateString();
  }
}
/* Only the changing parts are replaced, so that sorting and focus are kept. */
function renew(fresh) {
  const old = document.querySelector('main'), next = fresh.querySelector('main');
  if (next.dataset.digest === old.dataset.digest) return;
  const parts = main => [...main.querySelectorAll('[data-part]')];
  const ids = main => JSON.stringify(parts(main).map(part => part.id));
  if (ids(old) !== ids(next)) {
    old.replaceWith(next);
    prepare();
    return;
  }
  old.dataset.digest = next.dataset.digest;
  for (const part of parts(next))
    document.getElementById(part.id).replaceChildren(...part.childNodes);
  for (const table of document.querySelectorAll('table.sorts')) show(table);
}
async function update() {
  const state = document.getElementById('connection');
  try {
    const answer = await fetch(location.href, { cache: 'no-cache' });
    if (!answer.ok) throw new Error(answer.status);
    renew(new DOMParser().parseFromString(await answer.text(), 'text/html'));
    state.textContent = '';
  } catch {
    state.textContent = 'connection lost; this is the last state that was received';
  }
  ages();
  setTimeout(update, document.hidden ? 10000 : 2000);
}
prepare();
ages();
if (document.body.dataset.live) setTimeout(update, 2000);
"""
