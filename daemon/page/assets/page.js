'use strict';
// The sections of a daemon.
(() => {
  const { on, el, keyed, bits, age, state, grid, follow, connect } = fared;
  const $ = (id) => document.getElementById(id);

  // bars draws weights in proportion to the largest; the text next to them has the same content.
  const bars = (weights, pending) => {
    const top = Math.max(1, ...weights);
    const box = el('div', { class: pending ? 'bars pending' : 'bars', 'aria-hidden': 'true' });
    weights.forEach((w, i) => {
      const fill = el('i');
      fill.style.width = `${w ? Math.max(6, 100 * w / top) : 0}%`;
      box.append(el('span', { class: `bar c${i % 8}` }, fill));
    });
    return box;
  };

  const view = { text: '', ratio: '', offset: 0, limit: 50 };
  on('head', ([[, h]]) => {
    const d = h.dataplane;
    const fields = [['router ID', `${h.router_id}, AS ${h.as}`], ['role', h.role], ['version', h.version], ['running for', age(h.started_ms)],
      ['sessions established', `${h.established} of ${h.sessions}`], ['destinations reachable', `${h.reachable} of ${h.destinations}`],
      ['data plane', d.connected ? `${d.name || 'connected'}, ${d.pending} changes pending, ${d.refused} refused` : `not connected: ${d.problem || d.address}`],
      ['loopbacks', h.loopbacks.join(', ')]];
    $('head').replaceChildren(...fields.map(([k, v]) => el('div', {}, el('dt', {}, k), el('dd', {}, v))));
    const notes = h.notes.concat(h.converged ? [] : ['start: waiting for every session\'s routes'], d.connected && d.problem ? [d.problem] : []);
    $('notes').replaceChildren(...notes.map((n) => el('li', {}, n)));
  });
  on('problem', ([[, text]]) => { if (text) { $('link').textContent = `the daemon does not answer: ${text}`; $('link').className = 'bad'; } });
  on('planes', (rows, changed) => keyed($('planes'), rows, changed, (key, p) => el('tr', {},
    el('th', { scope: 'row' }, p.plane), el('td', {}, state(p.state)), el('td', {}, bits(p.bps)),
    el('td', {}, el('ul', {}, ...(p.sub_ports || []).map((s) => el('li', {}, `${s.device} `, state(s.state), ` ${bits(s.bps)} ${s.source}${s.reason ? `: ${s.reason}` : ''}${s.damped_until_ms ? `, damped until ${new Date(s.damped_until_ms).toLocaleTimeString()}` : ''}`)))))));
  on('sessions', (rows, changed) => keyed($('sessions'), rows, changed, (key, s) => el('tr', {},
    el('th', { scope: 'row' }, s.name), el('td', {}, `${s.peer || 'unknown'} AS ${s.as}`), el('td', {}, state(s.state)), el('td', {}, age(s.since_ms)),
    el('td', {}, s.bfd ? state(s.bfd) : el('span', { class: 'dim' }, 'off'), s.bfd_ms ? ` ${s.bfd_ms} ms` : ''), el('td', {}, `${s.used} of ${s.received}`), el('td', {}, s.reason || ''))));
  on('ratios', (rows, changed) => keyed($('ratios'), rows, changed, (key, r) => el('tr', {},
    el('td', { class: 'ratio' }, el('button', { type: 'button', 'data-do': 'ratio', click: () => choose({ ratio: r.ratio, offset: 0 }) }, r.ratio || 'none')),
    el('td', {}, bars(r.weights || [], r.pending === r.count)), el('td', {}, `${r.count}`), el('td', { class: r.pending ? 'bad' : '' }, `${r.pending}`))));
  on('destinations', (rows, changed) => keyed($('destinations'), rows, changed, (key, d) => el('tr', {},
    el('th', { scope: 'row' }, el('button', { type: 'button', 'data-do': 'explain', 'aria-label': `explain the weights of ${d.destination}`, click: () => explain(d) }, d.destination)),
    el('td', { class: 'ratio' }, d.ratio), el('td', {}, bars(d.planes.map((p) => p.weight), !d.in_effect)),
    el('td', {}, d.in_effect ? el('span', { class: 'good' }, 'in effect') : el('span', { class: 'bad' }, d.reachable ? 'not in effect' : 'unreachable')),
    el('td', {}, [d.reason, d.note, ...(d.reason ? [] : d.planes.filter((p) => p.reason).map((p) => `${p.plane}: ${p.reason}`))].filter(Boolean).join('; ')))));
  on('selection', ([[, s]]) => {
    const last = Math.min(s.offset + s.limit, s.total);
    $('range').textContent = s.total ? `${Math.min(s.offset + 1, s.total)} to ${last} of ${s.total}` : 'no destination';
    $('previous').disabled = s.offset === 0;
    $('next').disabled = last >= s.total;
    if (s.offset > 0 && s.offset >= s.total) choose({ offset: 0 });
  });
  on('timeline', (rows, changed, first) => {
    keyed($('timeline'), rows, changed, (key, x) => el('li', { class: x.bad ? 'worse' : '' },
      el('time', { datetime: new Date(x.time_ms).toISOString() }, new Date(x.time_ms).toLocaleString()), ' ', el('strong', {}, x.title),
      el('ul', {}, ...x.lines.map((l) => el('li', { class: l.bad ? 'bad' : '' }, el('span', { class: 'when' }, l.after), l.text)), ...(x.more ? [el('li', { class: 'dim' }, `and ${x.more} more events`)] : []))));
    // The cause of changed weights may arrive after them and then is the title.
    if (!first && rows.length && changed.has(rows[0][0]) && $('news').textContent !== rows[0][1].title) $('news').textContent = rows[0][1].title;
  });

  const choose = (change) => {
    Object.assign(view, change);
    $('all').hidden = !view.ratio;
    connect();
  };
  let typing;
  $('text').addEventListener('input', () => { clearTimeout(typing); typing = setTimeout(() => choose({ text: $('text').value.trim(), offset: 0 }), 150); });
  $('find').addEventListener('submit', (e) => e.preventDefault());
  $('all').addEventListener('click', () => { choose({ ratio: '', offset: 0 }); $('text').focus(); });
  $('previous').addEventListener('click', () => choose({ offset: Math.max(0, view.offset - view.limit) }));
  $('next').addEventListener('click', () => choose({ offset: view.offset + view.limit }));
  $('node').addEventListener('change', () => choose({ offset: 0 }));
  $('choice').hidden = $('node').options.length < 2;

  const explain = async (d) => {
    $('why-title').textContent = `Why ${d.destination} has the weights ${d.ratio}`;
    $('why-text').replaceChildren('asking the daemon');
    $('why').showModal();
    try {
      const answer = await fetch(`explain?${new URLSearchParams({ node: $('node').value, destination: d.destination, source: (d.sources || [])[0] || '' })}`);
      if (!answer.ok) throw new Error(await answer.text());
      const x = await answer.json();
      const value = (n) => (n === null ? 'none' : bits(n));
      $('why-text').replaceChildren(
        el('h3', {}, 'Rules'), el('ul', {}, ...x.rules.map((r) => el('li', {}, r))),
        el('h3', {}, 'Planes'), grid(['plane', 'path bandwidth', 'rule', 'nodes'], x.planes.map((p) => [p.plane, bits(p.bps), p.rule,
          p.nodes.map((n) => `${n.node}: min(${n.devices.join(' + ')} = ${bits(n.local_bps)}, advertised ${value(n.advertised_bps)}) = ${bits(n.bps)}`).join('; ')])),
        el('h3', {}, 'Routes'), grid(['session', 'node', 'advertised', 'AS path', 'communities', 'unused because'], x.routes.map((r) => [r.session, r.node, value(r.advertised_bps), r.as_path.join(' '), r.communities.join('; '), r.reason || ''])),
        el('h3', {}, 'Slots'), grid(['source', 'slot', 'plane', 'sub-port', 'source port', 'share'], x.slots.map((s) => [s.source, `${s.slot}`, s.plane, s.device, `${s.port}`, `${(s.share_ppb / 1e7).toFixed(2)} %`])));
    } catch (e) {
      $('why-text').replaceChildren(el('p', { class: 'bad' }, e.message));
    }
  };
  follow(() => `events?${new URLSearchParams({ node: $('node').value, ...view })}`);
})();
