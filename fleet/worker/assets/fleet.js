'use strict';
// The page of a fleet.
(() => {
  const { on, el, keyed, bits, age, state, grid, follow } = fared;
  const $ = (id) => document.getElementById(id);
  const canvas = $('drawing');

  // The drawing has a square for each node. cells has their places by name; a changed block draws its squares alone.
  const cells = new Map();
  const marked = new Map(); // names at fault, and how sure
  let blocks = [];
  let layout = '';
  const color = (letter) => {
    if (letter === '.') return '#2e9e6b';
    if (letter === 'd') return '#5b7fd6';
    if (letter === '?') return '#9a9a9a';
    return `hsl(${40 - 4 * Number(letter)} 75% ${58 - 2 * Number(letter)}%)`;
  };
  const draw = (name) => {
    const c = cells.get(name);
    if (!c) return;
    const g = canvas.getContext('2d');
    g.clearRect(c.x, c.y, c.size, c.size);
    g.fillStyle = color(c.letter);
    g.fillRect(c.x + 1, c.y + 1, c.size - 2, c.size - 2);
    if (!marked.has(name)) return;
    g.strokeStyle = `rgb(213 94 0 / ${0.3 + 0.7 * marked.get(name)})`;
    g.lineWidth = 3;
    g.strokeRect(c.x + 1.5, c.y + 1.5, c.size - 3, c.size - 3);
  };
  const arrange = () => {
    const width = Math.max(320, canvas.clientWidth);
    const size = Math.max(8, Math.min(18, Math.floor((width - 90) / 64)));
    const each = Math.max(1, Math.floor((width - 90) / size));
    const rows = [];
    for (const b of blocks) {
      let row = rows.at(-1);
      if (row?.name !== b.row) rows.push(row = { name: b.row, nodes: [] });
      b.names.forEach((n, i) => row.nodes.push([n, b.states[i]]));
    }
    cells.clear();
    let y = 0;
    const labels = [];
    for (const row of rows) {
      labels.push([row.name, y]);
      row.nodes.forEach(([n, letter], i) => cells.set(n, { x: 90 + (i % each) * size, y: y + Math.floor(i / each) * size, size, letter }));
      y += Math.ceil(row.nodes.length / each) * size + 4;
    }
    canvas.width = width;
    canvas.height = Math.max(y, 1);
    canvas.style.height = `${canvas.height * canvas.clientWidth / width}px`;
    const g = canvas.getContext('2d');
    g.font = '12px system-ui, sans-serif';
    g.fillStyle = getComputedStyle(document.body).color;
    for (const [text, top] of labels) g.fillText(text, 0, top + 12);
    for (const n of cells.keys()) draw(n);
  };
  on('nodes', (rows, changed) => {
    blocks = rows.map(([, b]) => b);
    const next = rows.map(([key]) => key).join();
    if (next !== layout || !cells.size) {
      layout = next;
      arrange();
      return;
    }
    for (const [key, b] of rows) {
      if (!changed.has(key)) continue;
      b.names.forEach((n, i) => {
        const c = cells.get(n);
        if (c && c.letter !== b.states[i]) { c.letter = b.states[i]; draw(n); }
      });
    }
  });
  addEventListener('resize', arrange);
  const at = (e) => {
    const box = canvas.getBoundingClientRect();
    const x = (e.clientX - box.left) * canvas.width / box.width;
    const y = (e.clientY - box.top) * canvas.height / box.height;
    for (const [n, c] of cells) if (x >= c.x && x < c.x + c.size && y >= c.y && y < c.y + c.size) return n;
    return '';
  };
  canvas.addEventListener('mousemove', (e) => { $('over').textContent = at(e) || '\u00a0'; });
  canvas.addEventListener('click', (e) => { const n = at(e); if (n) show(n); });
  $('find').addEventListener('submit', (e) => { e.preventDefault(); if ($('name').value.trim()) show($('name').value.trim()); });

  const link = (name) => el('button', { type: 'button', 'data-do': 'show', click: () => show(name) }, name);
  const server = (group) => link(group.split('.')[0].split('/')[0]);
  on('head', ([[, h]]) => {
    const fields = [['fabric', h.fabric], ['servers that report', `${h.servers_reporting} of ${h.servers}`], ['switches that report', `${h.switches_reporting} of ${h.switches}`],
      ['parts at fault', `${h.faults}`], ['pairs by planes', h.pairs_by_planes.map((n, p) => [p, n]).filter(([, n]) => n).map(([p, n]) => `${p}: ${n}`).join(', ') || '-'], ...h.problems.map((text) => ['drains', text])];
    $('head').replaceChildren(...fields.map(([k, v]) => el('div', {}, el('dt', {}, k), el('dd', {}, v))));
  });
  on('faults', (rows, changed, first) => {
    const before = [...marked.keys()];
    marked.clear();
    for (const [, f] of rows) for (const n of f.nodes) marked.set(n, Math.max(marked.get(n) || 0, f.confidence_ppb / 1e9));
    for (const n of new Set([...before, ...marked.keys()])) draw(n);
    keyed($('faults'), rows, changed, (key, f) => el('tr', {}, el('th', { scope: 'row' }, f.nodes.length ? link(f.nodes[0]) : '', ` ${[f.part].concat(f.alternatives || []).join(' or ')}`), el('td', {}, f.kind),
      el('td', { class: 'bad' }, f.loss_ppb ? `${f.fault} ${(f.loss_ppb / 1e7).toPrecision(2)} %` : f.fault, f.side ? ` ${f.side}` : ''), el('td', {}, `${Math.floor(f.confidence_ppb / 1e7)} %`), el('td', {}, age(f.since_ms)), el('td', {}, (f.evidence || []).join('; '))));
    if (!first && rows.length) $('news').textContent = `${rows.length} parts at fault`;
  });
  on('pairs', (rows, changed) => keyed($('pairs'), rows, changed, (key, p) => el('tr', {}, el('th', { scope: 'row' }, server(p.from), ` ${p.from}`), el('td', {}, p.first === p.last ? p.first : `${p.first} to ${p.last}`), el('td', {}, `${p.planes}`), el('td', {}, bits(p.bps)))));
  on('probes', (rows, changed) => keyed($('probes'), rows, changed, (key, p) => el('tr', {}, el('th', { scope: 'row' }, server(p.from), ` ${p.from}`), el('td', {}, p.to), el('td', {}, p.plane), el('td', {}, `${p.lost} of ${Math.round(p.probes)}`))));
  on('drains', (rows, changed) => keyed($('drains'), rows, changed, (key, d) => el('tr', {}, el('th', { scope: 'row' }, d.part), el('td', {}, d.queued ? 'queued' : `${d.drained} of ${d.sub_ports}`), el('td', {}, d.by), el('td', {}, d.reason))));
  on('timeline', (rows, changed) => keyed($('timeline'), rows, changed, (key, m) => el('li', { class: m.bad ? 'worse' : '' }, el('time', { datetime: new Date(m.time_ms).toISOString() }, new Date(m.time_ms).toLocaleString()), ` ${m.text}`)));

  const show = async (name) => {
    $('why-title').textContent = name;
    $('why-text').replaceChildren('asking the worker');
    if (!$('why').open) $('why').showModal();
    try {
      const answer = await fetch(`node?${new URLSearchParams({ name })}`);
      if (!answer.ok) throw new Error(await answer.text());
      const n = await answer.json();
      $('why-text').replaceChildren(el('p', { class: n.reporting ? '' : 'bad' }, `${n.id}, ${n.reporting ? 'reports' : 'does not report'}`),
        el('h3', {}, 'Sub-ports'), grid(['device', 'plane', 'peer', 'state', 'for', 'note'], n.ports.map((p) => [p.device, p.plane, p.peer, state(p.state), p.since_ms ? age(p.since_ms) : '', p.note])),
        el('h3', {}, 'Bandwidths'), grid(['from', 'to', 'planes', 'bandwidth'], n.paths.map((p) => [p.from, p.first === p.last ? p.first : `${p.first} to ${p.last}`, `${p.planes}`, bits(p.bps)])),
        el('h3', {}, 'Lost probes'), grid(['from', 'to', 'plane', 'lost'], n.probes.map((p) => [p.from, p.to, p.plane, `${p.lost} of ${Math.round(p.probes)}`])));
    } catch (e) {
      $('why-text').replaceChildren(el('p', { class: 'bad' }, e.message));
    }
  };
  follow(() => 'events');
})();
