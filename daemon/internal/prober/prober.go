package prober

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/proof"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/beat"
)

const (
	// rate is the number of probes a second, rateOfMany that toward more than few destinations.
	rate, rateOfMany, few = 24, 50, 64
	// follow is the least interval at which views are read, followMany that with more than many destinations.
	follow, followMany, many = 50 * time.Millisecond, time.Second, 1024
	// behind is the pause before a change is read: the work for the change itself comes first.
	behind = 10 * time.Millisecond
	// maxPayload bounds probes with the MTU.
	maxPayload = 9500
	// answerPaths is the number of slots that are tried for an answer whose source port is in use.
	answerPaths = 4
	// mostWaiting is the number of packets to a loopback that are handled at once.
	mostWaiting = 1024
)

// SubPort is a sub-port of the server.
type SubPort struct{ Device, Plane string }

// Config configures a prober.
type Config struct {
	Reader *status.Reader
	// Planes and SubPorts are those of the whole server, in the configured order.
	Planes   []string
	SubPorts []SubPort
	Port     uint16
	// Rate is the number of probes a second; 0 means the default, which follows the number of destinations.
	Rate float64
	// Services are the UDP ports to which packets of queue pairs go; none of them is checked if there is none.
	Services []uint16
	// Ports returns the source ports of a pair's slots toward a UDP port, or false if they are not known to land on the
	// slots.
	Ports func(port uint16, src, dst netip.Addr, v *status.Vector, buf []uint16) ([]uint16, bool)
	// Inactive returns why nothing can be proved, "" if there is no reason.
	Inactive func() string
	// Direct reports whether packets from Port to Port that are sent out of a sub-port's device go to its next hop,
	// whatever the weights (Forwarding.direct_probe_port).
	Direct func() bool
	// AvoidAfter returns the time after which a plane that loses all probes toward a destination is avoided; 0: never.
	AvoidAfter func() time.Duration
	// Avoid begins and ends avoidances. They end with Run.
	Avoid func([]proof.Avoidance)
	// Keys returns the keys: the first one is that of own probes. None disables authentication.
	Keys func() [][]byte
	// Event records the begin and the end of a finding.
	Event func(Event)
	// Wrong receives the devices of the sub-ports with findings whenever they change.
	Wrong func(devices []string)
	Log   *slog.Logger
}

// Event is the begin or the end of a finding.
type Event struct {
	Subject, Detail string
	End             bool
}

// Prober proves slots. Use New.
type Prober struct {
	c        Config
	planes   map[string]int
	subPorts map[string]int // by device

	mu       sync.Mutex // guards everything below
	core     *proof.Core
	view     *status.View
	due      time.Time // of the next view, zero without a change
	wake     time.Time // of the next tick
	alarm    *alarm    // while Run runs
	devices  devices
	limit    limiter
	sockets  map[netip.Addr]*socket
	inactive string
	dropped  [reasons]uint64
	reported map[proof.Finding]bool
	wrong    []string // devices with findings
	events   []Event
	pings    int
	in       inbox
	out      []byte // a packet to send
	ports    []uint16
	answers  []reply // from the loopback whose packets are being read
	post     outbox
}

// reply is an answer that leaves by a sub-port, whatever the weights, once the packets of its loopback have been read.
type reply struct {
	packet  proof.Packet
	to      netip.Addr
	subPort int
	key     []byte
}

// reason is why a packet was dropped.
type reason int

const (
	dropFormat reason = iota
	dropKey
	dropStranger
	dropLimit
	dropUnanswered // no slot leads back
	reasons
)

var reasonNames = [reasons]string{"format", "key", "stranger", "limit", "no-slot"}

// New returns a prober.
func New(c Config) *Prober {
	p := &Prober{c: c, planes: map[string]int{}, subPorts: map[string]int{}, sockets: map[netip.Addr]*socket{}, reported: map[proof.Finding]bool{}}
	for i, name := range c.Planes {
		p.planes[name] = i
	}
	cfg := proof.Config{Planes: c.Planes, Rate: c.Rate, Services: len(c.Services), Phase: beat.Phase(), Random: rand.New(rand.NewPCG(nonce(), nonce())), Nonce: nonces()}
	if cfg.Rate == 0 {
		cfg.Rate = rate
	}
	for i, sp := range c.SubPorts {
		p.subPorts[sp.Device] = i
		p.devices.names = append(p.devices.names, sp.Device)
		cfg.SubPorts = append(cfg.SubPorts, proof.SubPort{Device: sp.Device, Plane: p.planes[sp.Plane]})
	}
	p.core = proof.New(cfg)
	return p
}

// nonce returns 64 random bits that nobody can guess.
func nonce() uint64 {
	var b [8]byte
	_, _ = crand.Read(b[:]) // never fails
	return binary.NativeEndian.Uint64(b[:])
}

// nonces returns a function that returns such bits, and gets many of them at once. One goroutine at a time may call it.
func nonces() func() uint64 {
	var some [256]byte
	next := len(some)
	return func() uint64 {
		if next == len(some) {
			_, _ = crand.Read(some[:]) // never fails
			next = 0
		}
		n := binary.NativeEndian.Uint64(some[next:])
		clear(some[next : next+8])
		next += 8
		return n
	}
}

// Run proves slots until ctx ends. One goroutine waits and works: a second one would wake a second thread.
func (p *Prober) Run(ctx context.Context) error {
	defer p.close()
	select {
	case <-p.c.Reader.Started():
	case <-ctx.Done():
		return nil
	}
	alarm := newAlarm()
	p.mu.Lock()
	p.alarm, p.due = alarm, time.Now()
	p.mu.Unlock()
	var followers sync.WaitGroup
	defer followers.Wait()
	defer context.AfterFunc(ctx, p.ring)()
	for ctx.Err() == nil {
		if now := time.Now(); p.viewDue(now) {
			changed := p.c.Reader.Changed()
			view, err := p.c.Reader.View(ctx)
			if err != nil {
				<-ctx.Done() // the loop has ended first
				return nil
			}
			next := now.Add(p.show(now, view))
			followers.Go(func() { p.follow(ctx, changed, next) })
		}
		events, avoidances := p.tick()
		for _, e := range events {
			p.c.Event(e)
		}
		if len(avoidances) > 0 {
			p.c.Avoid(avoidances)
		}
		if ctx.Err() == nil { // otherwise tick may have stopped the ring
			alarm.wait()
		}
	}
	return nil
}

// viewDue reports whether a view is to be read now, and resets that.
func (p *Prober) viewDue(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.due.IsZero() || now.Before(p.due) {
		return false
	}
	p.due = time.Time{}
	return true
}

// follow waits for a change, and lets Run read the view after it, not before next.
func (p *Prober) follow(ctx context.Context, changed <-chan struct{}, next time.Time) {
	select {
	case <-ctx.Done():
		return
	case <-changed:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.due = time.Now().Add(behind); p.due.Before(next) {
		p.due = next
	}
	if p.wake.IsZero() || p.due.Before(p.wake) {
		p.setWake(p.due)
	}
}

// ring makes Run call tick.
func (p *Prober) ring() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.setWake(time.Now())
}

// setWake sets the time of the next tick, zero if there is none. The caller holds mu.
func (p *Prober) setWake(at time.Time) {
	if p.wake = at; p.alarm != nil {
		p.alarm.set(at)
	}
}

// show takes a view's peers, and returns the time until the next view may be taken.
func (p *Prober) show(now time.Time, view *status.View) time.Duration {
	why := p.c.Inactive()
	var peers []proof.Peer
	var sources [][]netip.Addr
	if why == "" {
		peers, sources = p.peers(view)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.view, p.inactive = view, why
	p.listen(sources)
	if p.c.Rate == 0 {
		if p.core.SetRate(rate); len(peers) > few {
			p.core.SetRate(rateOfMany)
		}
	}
	p.core.SetPeers(now, sources, peers)
	if len(peers) > many {
		return followMany
	}
	return follow
}

// peers returns the reachable destinations of a view with the slots that carry shares in effect.
func (p *Prober) peers(view *status.View) (peers []proof.Peer, sources [][]netip.Addr) {
	layout := view.Layout()
	type key struct {
		vector uint32
		group  int
	}
	paths := map[key][]proof.Path{}
	for g := range layout.Groups {
		var all []netip.Addr
		for _, s := range layout.Groups[g].Sources {
			all = append(all, s.Addr())
		}
		sources = append(sources, all)
	}
	for k, d := range view.DestinationsSince(nil, nil) {
		v := view.Find(d.Vector)
		if v == nil || !v.Reachable {
			continue
		}
		if !d.InEffect { // its slots change now
			peers = append(peers, proof.Peer{ID: proof.ID{Group: k.Source, Address: k.Addr()}})
			continue
		}
		at, ok := paths[key{d.Vector, k.Source}]
		if !ok {
			at = p.paths(&layout.Groups[k.Source], v)
			paths[key{d.Vector, k.Source}] = at
		}
		if len(at) > 0 {
			peers = append(peers, proof.Peer{ID: proof.ID{Group: k.Source, Address: k.Addr()}, Paths: at})
		}
	}
	return peers, sources
}

// paths returns the slots of a vector that carry shares in effect.
func (p *Prober) paths(g *status.LayoutGroup, v *status.Vector) (out []proof.Path) {
	for i, s := range v.Slots {
		if s.Share == 0 || !v.Planes[s.Plane].InEffect {
			continue
		}
		path := proof.Path{Slot: i, Plane: p.planes[g.Planes[s.Plane].Name], SubPort: -1}
		if s.SubPort >= 0 {
			path.SubPort = p.subPorts[g.Planes[s.Plane].SubPorts[s.SubPort]]
		}
		out = append(out, path)
	}
	return out
}

// tick reads the packets that wait, sends the due probes, sets the time of the next call, and returns the events to
// record, and the avoidances that begin or end.
func (p *Prober) tick() (events []Event, avoidances []proof.Avoidance) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for local, s := range p.sockets {
		p.drain(local, s)
	}
	now := time.Now()
	p.core.SetAvoid(now, p.c.Direct(), p.c.AvoidAfter())
	sends, wake, idle := p.core.Tick(now)
	for i := range sends {
		p.send(&sends[i])
	}
	p.report()
	events, p.events = p.events, nil
	switch {
	case p.core.Pending() && len(sends) > 0:
		wake = now
	case idle && !wake.IsZero():
		wake = now.Add(beat.Until(now, time.Second)) // with other periodic work
	}
	if !p.due.IsZero() && (wake.IsZero() || p.due.Before(wake)) {
		wake = p.due
	}
	p.setWake(wake)
	return events, p.core.TakeAvoidances()
}

// source returns the source port of a slot toward a port. The caller holds mu.
func (p *Prober) source(port uint16, src, dst netip.Addr, group, slot int) (uint16, bool) {
	if p.view == nil {
		return 0, false
	}
	v := p.view.VectorOf(status.Key{Prefix: netip.PrefixFrom(dst, dst.BitLen()), Source: group})
	if v == nil || slot >= len(v.Slots) {
		return 0, false
	}
	ports, ok := p.c.Ports(port, src, dst, v, p.ports[:0])
	p.ports = ports
	if !ok || slot >= len(ports) {
		return 0, false
	}
	return ports[slot], true
}

// portOf returns the port to which a packet is sent.
func (p *Prober) portOf(service int) uint16 {
	if service == 0 {
		return p.c.Port
	}
	return p.c.Services[service-1]
}

// foreign is the payload of packets to services. For RoCEv2 it is a base transport header of no standard transport,
// without an ICRC: whoever receives it drops it (InfiniBand Architecture, volume 1, annex A17).
var foreign = []byte{0xff, 0, 0xff, 0xff, 0, 0xff, 0xff, 0xff, 15: 0}

// send sends a probe or a packet to a service. The caller holds mu.
func (p *Prober) send(s *proof.Send) {
	if s.Path.Direct() {
		fault := proof.None
		s.Size = proof.MinSize
		if err := p.sendDirect(s.Source, s.Address, s.Path.SubPort, &s.Packet, p.key()); err != nil {
			fault = faultOf(err)
		}
		p.core.Left(time.Now(), time.Time{}, s.Nonce, "", -1, fault, "")
		return
	}
	port, ok := p.source(p.portOf(s.Service), s.Source, s.Address, s.ID.Group, s.Path.Slot)
	if !ok {
		p.core.Left(time.Now(), time.Time{}, s.Nonce, "", -1, proof.Busy, "the source port of slot "+fmt.Sprint(s.Path.Slot)+" is not known to lead to its sub-port")
		return
	}
	p.size(s)
	from := netip.AddrPortFrom(s.Source, port)
	var way departure
	var err error
	if s.Service > 0 {
		way, err = transmit(from, netip.AddrPortFrom(s.Address, p.portOf(s.Service)), foreign, nearby)
	} else {
		way, err = p.transmit(from, s.Address, &s.Packet, p.key(), stamped)
	}
	device, subPort := p.devices.left(time.Now(), way.devices, s.Path.SubPort)
	fault, text := faultOf(err), ""
	if err != nil {
		text = p.errorText(err, s, port)
	}
	if fault == proof.TooBig && s.Big && p.devices.shrunk(s.Size+familyOf(s.Address).header) {
		fault = proof.Busy // the next one is smaller
	}
	p.core.Left(time.Now(), way.at, s.Nonce, device, subPort, fault, text)
}

// size sets the size of a packet. The caller holds mu.
func (p *Prober) size(s *proof.Send) {
	switch {
	case s.Service > 0:
		s.Size = len(foreign)
	case s.Size == 0 && s.Big:
		p.devices.refresh(time.Now(), devicesAge)
		s.Size = min(max(p.devices.mtu-familyOf(s.Address).header, proof.MinSize), maxPayload)
	case s.Size == 0:
		s.Size = proof.MinSize
	}
}

// errorText describes why a probe was not sent.
func (p *Prober) errorText(err error, s *proof.Send, port uint16) string {
	var cause error = err
	for inner := errors.Unwrap(cause); inner != nil; inner = errors.Unwrap(cause) {
		cause = inner
	}
	switch faultOf(err) {
	case proof.Busy:
		return fmt.Sprintf("source port %d of slot %d: %v", port, s.Path.Slot, cause)
	case proof.TooBig:
		if i := s.Path.SubPort; i >= 0 && i < len(p.devices.mtus) {
			return fmt.Sprintf("MTU %d of %s, packets have %d", p.devices.mtus[i], p.c.SubPorts[i].Device, s.Size+familyOf(s.Address).header)
		}
	}
	return cause.Error()
}

// key returns the key of own probes.
func (p *Prober) key() []byte {
	if keys := p.c.Keys(); len(keys) > 0 {
		return keys[0]
	}
	return nil
}

// sendDirect sends a packet out of a sub-port's device, from the port of proofs to it, whatever the weights. The caller
// holds mu.
func (p *Prober) sendDirect(from, to netip.Addr, subPort int, packet *proof.Packet, key []byte) error {
	p.devices.refresh(time.Now(), devicesAge)
	index, s := p.devices.indexOf(subPort), p.sockets[from]
	if index == 0 || s == nil || s.err != nil {
		return unix.ENODEV
	}
	p.out = packet.Append(p.out[:0], key)
	return s.sendBy(index, from, netip.AddrPortFrom(to, p.c.Port), p.out)
}

// transmit sends a packet to the port of proofs.
func (p *Prober) transmit(from netip.AddrPort, to netip.Addr, packet *proof.Packet, key []byte, how manner) (departure, error) {
	p.out = packet.Append(p.out[:0], key)
	return transmit(from, netip.AddrPortFrom(to, p.c.Port), p.out, how)
}

// listen opens and closes sockets until they are those of the loopbacks. The caller holds mu.
func (p *Prober) listen(sources [][]netip.Addr) {
	wanted := map[netip.Addr]bool{}
	for _, a := range slices.Concat(sources...) {
		wanted[a] = true
	}
	for a, s := range p.sockets {
		if !wanted[a] || s.err != nil {
			s.close()
			delete(p.sockets, a)
		}
	}
	for a := range wanted {
		if p.sockets[a] != nil {
			continue
		}
		s := listen(netip.AddrPortFrom(a, p.c.Port))
		if p.sockets[a] = s; s.err != nil {
			s.err = fmt.Errorf("UDP port %d of %s: %w", p.c.Port, a, s.err)
			continue
		}
		go s.serve(p.c.Log, func(m *message) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.packet(a, m)
			p.reply(a, s)
			p.wakeUp()
		})
	}
}

// drain handles the packets to a loopback that wait, and answers them together. The caller holds mu.
func (p *Prober) drain(local netip.Addr, s *socket) {
	p.in.next, p.in.count = 0, 0
	for range mostWaiting {
		m, ok := s.next(&p.in)
		if !ok {
			break
		}
		p.packet(local, &m)
	}
	p.reply(local, s)
}

// reply sends the answers that wait. The caller holds mu.
func (p *Prober) reply(local netip.Addr, s *socket) {
	if len(p.answers) == 0 {
		return
	}
	now := time.Now()
	p.devices.refresh(now, devicesAge)
	for some := range slices.Chunk(p.answers, inboxSize) {
		p.post.reset()
		for i := range some {
			r := &some[i]
			index := p.devices.indexOf(r.subPort)
			if index == 0 {
				p.dropped[dropUnanswered]++
				continue
			}
			r.packet.Answered = now.UnixNano()
			p.out = r.packet.Append(p.out[:0], r.key)
			p.post.add(p.out, s.family.source(local, index), netip.AddrPortFrom(r.to, p.c.Port))
		}
		p.post.send(s.waiting)
	}
	p.answers = p.answers[:0]
}

// packet handles a datagram. The caller holds mu.
func (p *Prober) packet(local netip.Addr, m *message) {
	now := time.Now()
	if m.arrived.IsZero() {
		m.arrived = now
	}
	packet, key, err := proof.Parse(m.data, p.c.Keys())
	id, ok := p.peerOf(local, m.from)
	switch {
	case errors.Is(err, proof.ErrKey):
		p.dropped[dropKey]++
		return
	case err != nil:
		p.dropped[dropFormat]++
		return
	case !ok:
		p.dropped[dropStranger]++
		return
	}
	device, subPort := p.devices.at(now, m.index)
	if packet.Kind == proof.Answer {
		p.core.Answered(now, m.arrived, id, &packet, device, subPort)
		return
	}
	if !p.limit.allow(now, m.from) {
		p.dropped[dropLimit]++
		return
	}
	p.core.Received(now, m.arrived, id, &packet)
	p.answer(m.arrived, local, id, &packet, key, device, subPort)
}

// wakeUp makes Run call tick if the core needs it. The caller holds mu.
func (p *Prober) wakeUp() {
	if p.core.Pending() {
		p.setWake(time.Now())
	}
}

// answer answers a probe. The caller holds mu.
func (p *Prober) answer(arrived time.Time, local netip.Addr, id proof.ID, probe *proof.Packet, key []byte, device string, subPort int) {
	for i := range answerPaths {
		a, path, ok := p.core.Reflect(id, probe, device, subPort)
		if !ok {
			break
		}
		a.Received, a.Answered = arrived.UnixNano(), time.Now().UnixNano()
		if path.Direct() {
			p.answers = append(p.answers, reply{a, id.Address, path.SubPort, key})
			return
		}
		port, ok := p.source(p.c.Port, local, id.Address, id.Group, path.Slot)
		if !ok {
			break
		}
		if _, err := p.transmit(netip.AddrPortFrom(local, port), id.Address, &a, key, plainly); faultOf(err) != proof.Busy {
			return // own probes find the fault
		}
		probe.Slot += uint16(1 + i)
	}
	p.dropped[dropUnanswered]++
}

// peerOf returns the peer of a source group that a packet between two addresses belongs to. The caller holds mu.
func (p *Prober) peerOf(local, remote netip.Addr) (proof.ID, bool) {
	if p.view == nil {
		return proof.ID{}, false
	}
	layout := p.view.Layout()
	for g := range layout.Groups {
		for _, s := range layout.Groups[g].Sources {
			if id := (proof.ID{Group: g, Address: remote}); s.Addr() == local && p.core.Knows(id) {
				return id, true
			}
		}
	}
	return proof.ID{}, false
}

// report records the findings that begin and end. The caller holds mu.
func (p *Prober) report() {
	now := p.core.Findings()
	if len(now) == 0 && len(p.reported) == 0 {
		return
	}
	current := map[proof.Finding]bool{}
	for _, f := range now {
		k := proof.Finding{Problem: f.Problem, Direction: f.Direction, Plane: f.Plane, Device: f.Device, Big: f.Big, Service: f.Service, Avoided: f.Avoided}
		if current[k] = true; !p.reported[k] {
			p.events = append(p.events, Event{Subject: place(&f), Detail: p.text(&f)})
		}
	}
	for k := range p.reported {
		if !current[k] {
			p.events = append(p.events, Event{place(&k), "ended: " + p.what(&k), true})
		}
	}
	p.reported = current
	p.mark(now)
}

// mark hands over the sub-ports with findings if they have changed. The caller holds mu.
func (p *Prober) mark(findings []proof.Finding) {
	wrong := []string{}
	for _, sp := range p.c.SubPorts {
		if slices.ContainsFunc(findings, func(f proof.Finding) bool {
			return !f.Avoided && f.Plane == sp.Plane && (f.Device == "" || f.Device == sp.Device)
		}) {
			wrong = append(wrong, sp.Device)
		}
	}
	if !slices.Equal(wrong, p.wrong) {
		p.wrong = wrong
		p.c.Wrong(wrong)
	}
}

// close closes the sockets and waits for their goroutines.
func (p *Prober) close() {
	p.mu.Lock()
	p.core.SetAvoid(time.Now(), false, 0)
	avoidances := p.core.TakeAvoidances()
	p.mark(nil)
	if p.alarm != nil {
		p.alarm.close()
		p.alarm = nil
	}
	var ended []chan struct{}
	for _, s := range p.sockets {
		s.close()
		ended = append(ended, s.done)
	}
	p.mu.Unlock()
	if len(avoidances) > 0 {
		p.c.Avoid(avoidances)
	}
	for _, done := range ended {
		<-done
	}
}
