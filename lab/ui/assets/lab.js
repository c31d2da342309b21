'use strict';
// The drawing of a lab: a click on a cable cuts it, or mends it again.
(() => {
  const { el } = fared;
  const $ = (id) => document.getElementById(id);
  const cables = new Map(); // by data-cables: the element and its state
  let last = 0;

  const press = async (key) => {
    const { state } = cables.get(key);
    if (state === 'changing') return;
    const answer = await fetch('lab/cables', { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ cables: key.split(' ').map(Number), cut: state === 'up' }) });
    if (!answer.ok) $('lab-news').textContent = await answer.text();
  };
  for (const path of document.querySelectorAll('[data-cables]')) {
    const key = path.dataset.cables;
    cables.set(key, { path, state: 'up' });
    path.addEventListener('click', () => press(key));
    path.addEventListener('keydown', (e) => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); press(key); } });
  }
  const show = (key, c, state) => {
    if (c.state === state) return;
    c.state = state;
    c.path.setAttribute('class', `cable ${state}`);
    c.path.setAttribute('aria-pressed', String(state === 'cut'));
  };
  const stream = new EventSource('lab/events');
  stream.onmessage = (m) => {
    const s = JSON.parse(m.data);
    for (const [key, c] of cables) show(key, c, s.cables[key.split(' ')[0]] || 'up');
    $('lab-planes').replaceChildren(...(s.planes || []).map((p) => el('tr', {}, el('th', { scope: 'row' }, p.plane),
      el('td', { class: p.up < p.cables ? 'bad' : '' }, `${p.up} of ${p.cables}`), el('td', {}, p.rate < 0 ? 'none are sent' : String(Math.round(p.rate))))));
    $('lab-steps').replaceChildren(...(s.steps || []).map((x) => el('li', { class: x.ok ? '' : 'bad', value: String(x.number) },
      `${x.text}: ${x.ok ? `every weight in effect after ${x.ms.toFixed(1)} ms` : `WRONG: ${(x.wrong || []).join('; ')}`}`)));
    const newest = (s.steps || [])[0];
    if (newest && newest.number !== last) {
      if (last) $('lab-news').textContent = newest.text;
      last = newest.number;
    }
  };
})();
