'use strict';
// fared has the tables of the stream. on(name, draw) calls draw(rows, changed, previous) after each change of a table: rows are [key, value] in order,
// changed is the set of the keys with new values.
const fared = (() => {
  const $ = (id) => document.getElementById(id);
  const tables = new Map();
  const watchers = new Map();
  const on = (name, draw) => watchers.set(name, draw);

  // el returns an element: attributes, then children, which are elements or texts. Texts never become markup.
  const el = (tag, attributes, ...children) => {
    const e = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes || {})) {
      if (k === 'click') e.addEventListener('click', v);
      else if (v !== undefined && v !== false) e.setAttribute(k, v === true ? '' : v);
    }
    e.append(...children.filter((c) => c !== undefined));
    return e;
  };

  // keyed brings the children of a parent to the given rows, and makes only the changed ones again. The focus stays on the control with the same
  // data-do in a row that is made again.
  const keyed = (parent, rows, changed, make) => {
    const old = new Map([...parent.children].map((c) => [c.dataset.key, c]));
    const active = document.activeElement;
    let at = parent.firstElementChild;
    for (const [key, value] of rows) {
      let row = old.get(key);
      if (!row || changed.has(key)) {
        const made = make(key, value);
        made.dataset.key = key;
        if (row) {
          const control = row.contains(active) && active.dataset.do;
          if (at === row) at = made;
          row.replaceWith(made);
          if (control) made.querySelector(`[data-do="${control}"]`)?.focus();
        }
        row = made;
      }
      old.delete(key);
      if (row === at) at = at.nextElementSibling;
      else parent.insertBefore(row, at);
    }
    for (const row of old.values()) row.remove();
  };

  const bits = (n) => {
    for (const [unit, size] of [['T', 1e12], ['G', 1e9], ['M', 1e6], ['k', 1e3]]) if (n >= size) return `${+(n / size).toFixed(2)} ${unit}bit/s`;
    return `${n} bit/s`;
  };
  const since = (ms) => {
    const s = Math.max(0, Math.floor((Date.now() - ms) / 1000));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min`;
    if (s < 172800) return `${Math.floor(s / 3600)} h`;
    return `${Math.floor(s / 86400)} d`;
  };
  const age = (ms) => el('time', { 'data-since': ms, datetime: new Date(ms).toISOString() }, since(ms));
  const stateClass = (s) => ({ up: 'good', dark: 'bad', silent: 'bad', established: 'good', down: 'bad', failed: 'bad', idle: 'bad' })[s] || 'dim';
  const state = (s) => el('span', { class: stateClass(s) }, s);

  // follow shows the tables of the stream at the address that a function returns, and connects to it again whenever it is called.
  let stream, address;
  const follow = (to) => { address = to; connect(); };
  const connect = () => {
    stream?.close();
    stream = undefined;
    if (document.hidden) return; // a hidden page costs nothing; it connects when it is shown
    const s = new EventSource(address());
    stream = s;
    let first = true;
    s.onopen = () => { first = true; };
    s.onerror = () => { $('link').textContent = 'not connected: the page shows the last known state'; $('link').className = 'bad'; if (s.readyState === 2) setTimeout(() => stream === s && connect(), 3000); };
    s.onmessage = (m) => {
      if ($('link').textContent !== 'live') { $('link').textContent = 'live'; $('link').className = 'good'; }
      apply(JSON.parse(m.data), first);
      first = false;
    };
  };
  const apply = (message, first) => {
    for (const [name, delta] of Object.entries(message)) {
      const t = first || !tables.has(name) ? { order: [], rows: new Map() } : tables.get(name);
      const changed = new Set(Object.keys(delta.rows || {}));
      for (const k of changed) t.rows.set(k, delta.rows[k]);
      if (delta.order) {
        t.order = delta.order;
        const keep = new Set(t.order);
        for (const k of t.rows.keys()) if (!keep.has(k)) t.rows.delete(k);
      }
      tables.set(name, t);
      watchers.get(name)?.(t.order.map((k) => [k, t.rows.get(k)]), changed, first);
    }
  };

  document.addEventListener('visibilitychange', connect);
  setInterval(() => { for (const t of document.querySelectorAll('[data-since]')) { const text = since(+t.dataset.since); if (t.textContent !== text) t.textContent = text; } }, 1000);
  $('close').addEventListener('click', () => $('why').close());
  const grid = (names, rows) => el('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': names.join(', ') }, el('table', {}, el('thead', {}, el('tr', {}, ...names.map((n) => el('th', { scope: 'col' }, n)))),
    el('tbody', {}, ...rows.map((r) => el('tr', {}, ...r.map((c) => el('td', {}, c)))))));
  return { on, el, keyed, bits, age, state, grid, follow, connect };
})();
