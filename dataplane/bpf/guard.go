package bpf

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

var (
	_ contract.Guardian = (*Steering)(nil)
	_ contract.Retrier  = (*Steering)(nil)
)

// lookInterval is the interval of cheap checks of state without notifications: whether the program is attached, and the
// words that all packets depend on.
const lookInterval = 500 * time.Millisecond

// guard detects changes of kernel objects by other programs. Steering's mutex guards it.
type guard struct {
	report  func(*farev1.Integrity) // nil without a receiver
	torn    string                  // difference that is not repaired yet; "" if there is none
	repairs uint64
	audits  uint64
	// occupied is true if a commit was refused because of another program's route, since the last call of again.
	occupied bool
	again    func() // reports that a refused change may succeed; nil without a receiver
	// ousted describes the program that keeps the place in front of the agent's, "" if there is none; returns are the times of the agent's
	// returns to that place.
	ousted  string
	returns []time.Time
}

// Guard implements contract.Guardian.
func (s *Steering) Guard(report func(*farev1.Integrity)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guard.report = report
}

// Retry implements contract.Retrier.
func (s *Steering) Retry(again func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guard.again = again
}

// freed reports that routes of other programs in the table may have been removed. The caller holds mu.
func (g *guard) freed() {
	if g.occupied && g.again != nil {
		g.occupied = false
		g.again()
	}
}

// findings collects the differences of one comparison.
type findings struct {
	s     *Steering
	n     uint64
	first string
}

// differs records a difference, before it is repaired. The first one is reported immediately.
func (f *findings) differs(format string, args ...any) {
	if f.n++; f.n > 1 {
		return
	}
	f.first = fmt.Sprintf(format, args...)
	f.s.tear(f.first)
}

// tear reports that the kernel lacks something. The caller holds mu.
func (s *Steering) tear(what string) {
	s.guard.torn = what
	if s.guard.report != nil {
		s.guard.report(&farev1.Integrity{Message: "steering: " + what, Repairs: s.guard.repairs})
	}
}

// check compares with the kernel, repairs, and reports both. compare records each difference before it repairs it; if it
// returns an error, the difference remains and check is called again. The caller holds mu.
func (s *Steering) check(compare func(*findings) error) {
	was := s.guard.torn
	f := findings{s: s}
	err := compare(&f)
	switch {
	case err != nil:
		if s.guard.torn != err.Error() {
			s.cfg.Log.Error("steering: cannot repair objects that another program changed; retrying", "difference", f.first, "error", err)
		}
		s.tear(err.Error())
	case s.guard.ousted != "":
		s.guard.repairs += f.n
		if f.n > 0 {
			f.logRepairs(f.first)
		}
		if s.guard.torn != s.guard.ousted {
			s.tear(s.guard.ousted)
		}
	case f.n > 0 || was != "":
		s.guard.torn = ""
		s.guard.repairs += f.n
		first := f.first
		if first == "" {
			first = was
		}
		f.logRepairs(first)
		if s.guard.report != nil {
			s.guard.report(&farev1.Integrity{Intact: true, Message: "steering: repaired: " + first, Repairs: s.guard.repairs})
		}
	}
}

func (f *findings) logRepairs(first string) {
	f.s.cfg.Log.Warn("steering: another program changed objects of the agent; they are repaired", "objects", f.n, "first", first)
}

// attend compares rules and routes whenever other programs change some, until Close.
func (s *Steering) attend() {
	defer s.done.Done()
	for s.objects.Wait() == nil {
		events, err := s.objects.Poll()
		s.mu.Lock()
		if !s.closed && (err != nil || slices.ContainsFunc(events, s.concerns)) {
			compare := s.comparePaths
			if s.guard.torn != s.guard.ousted {
				compare = s.compareAll // the known difference may be elsewhere
			}
			s.check(compare)
			s.guard.freed()
		}
		s.mu.Unlock()
	}
}

// concerns reports whether an object is in the agent's table.
func (s *Steering) concerns(e rtnl.ObjectEvent) bool {
	return e.Rule != nil && e.Rule.Table == s.cfg.Table || e.Route != nil && e.Route.Table == s.cfg.Table
}

// keep runs the cheap checks and the audits until Close.
func (s *Steering) keep() {
	defer s.done.Done()
	look, audit := time.NewTicker(lookInterval), time.NewTicker(s.cfg.AuditInterval)
	defer look.Stop()
	defer audit.Stop()
	for {
		select {
		case <-s.quit:
			return
		case <-look.C:
			s.mu.Lock()
			if s.guard.torn != s.guard.ousted && !s.closed { // something is not repaired yet
				s.check(s.compareAll)
			} else if !s.closed {
				s.check(s.compareWords)
			}
			s.mu.Unlock()
		case <-audit.C:
			s.Audit()
		}
	}
}

// Audit compares everything with the kernel and repairs the differences.
func (s *Steering) Audit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.guard.audits++
		s.check(s.compareAll)
		s.guard.freed()
	}
}

func (s *Steering) compareAll(f *findings) error {
	if err := s.compareWords(f); err != nil {
		return err
	}
	if err := s.compareMaps(f); err != nil {
		return err
	}
	return s.comparePaths(f)
}

// compareWords compares the state that all packets depend on.
func (s *Steering) compareWords(f *findings) error {
	if err := s.compareProgram(f); err != nil {
		return err
	}
	for _, c := range []interface{ repair(*findings) error }{&s.live, &s.settings, &s.names} {
		if err := c.repair(f); err != nil {
			return err
		}
	}
	if err := s.light(s.live.have); err != nil {
		return err
	}
	return s.compareHead(f)
}

// compareProgram restores a program that was detached or replaced, and pins that were removed.
func (s *Steering) compareProgram(f *findings) error {
	info, err := s.pinned.link.Info() // an error after an attempt to attach the program elsewhere
	if s.unmended || err != nil || info.TCX() == nil || int(info.TCX().Ifindex) != s.routes.anchor {
		f.differs("the program is no longer attached to %s", s.cfg.Device)
		if err := s.mend(); err != nil {
			return err
		}
	} else if s.pinned.switched && info.Program != s.pinned.id {
		f.differs("another program is attached to %s in place of the agent's", s.cfg.Device)
		if err := s.pinned.switchOver(); err != nil {
			return err
		}
	}
	if n, err := s.pinned.repin(s.cfg.PinDir); n > 0 || err != nil {
		// Packets are not affected; pins matter only to the next start.
		s.cfg.Log.Warn("steering: another program removed pins; recreating them", "pins", n, "error", err)
	}
	return nil
}

// compareMaps compares all map entries that the agent writes.
func (s *Steering) compareMaps(f *findings) error {
	for _, m := range []interface{ repair(*findings) error }{
		&s.ports, &s.places, &s.planes, &s.haveDevice, &s.haveSource, &s.haveGroup, &s.haveTable, &s.havePins, &s.haveDest,
	} {
		if err := m.repair(f); err != nil {
			return err
		}
	}
	return nil
}

// comparePaths compares the rules and routes that lead to the program.
func (s *Steering) comparePaths(f *findings) error {
	if s.forwarding == nil || !s.pinned.switched {
		return nil // no acknowledged state leads to our program
	}
	if err := s.routes.repair(f); err != nil {
		return err
	}
	return s.routes.rules(s.steered(), s.cfg.Priority, s.families(), f.differs)
}

func (s *Steering) families() []uint8 {
	if s.ipv6 {
		return []uint8{unix.AF_INET, unix.AF_INET6}
	}
	return []uint8{unix.AF_INET}
}

// steered lists the steered ports.
func (s *Steering) steered() (ports []port) {
	for _, p := range s.forwarding.UdpPorts {
		ports = append(ports, port{unix.IPPROTO_UDP, uint16(p)})
	}
	for _, p := range s.forwarding.TcpPorts {
		ports = append(ports, port{unix.IPPROTO_TCP, uint16(p)})
	}
	return ports
}

// repair reads the routes of the table and restores the wanted ones.
func (r *routes) repair(f *findings) error {
	before := r.have
	strange, err := r.read()
	if err != nil {
		r.have = before
		return err
	}
	if strange > 0 {
		f.differs("a route of table %d does not lead to the anchor", r.table)
	}
	gone := map[netip.Prefix]netip.Addr{}
	for key, source := range r.have.All() {
		if before.Get(struct{}{}, key.Prefix) == nil {
			f.differs("an unexpected route to %v exists in table %d", key.Prefix, r.table)
			gone[key.Prefix] = *source
		}
	}
	had := make(map[netip.Prefix]netip.Addr, before.Len())
	for key, source := range before.All() {
		if now := r.have.Get(struct{}{}, key.Prefix); now == nil || *now != *source {
			f.differs("the route to %v in table %d is gone or was changed", key.Prefix, r.table)
		}
		had[key.Prefix] = *source
	}
	if err := r.remove(gone); err != nil {
		return err
	}
	r.mine = had // replace even a route that another program added
	defer func() { r.mine = nil }()
	return r.add(had)
}

// repair restores the map.
func (m *mirror[K, V]) repair(f *findings) error {
	want := m.have
	if err := m.read(); err != nil {
		m.have = want
		return err
	}
	var extra []K
	for k := range m.have {
		if _, ok := want[k]; !ok {
			f.differs("map %v has an unexpected entry", m.kernel)
			extra = append(extra, k)
		}
	}
	for k, v := range want {
		if now, ok := m.have[k]; !ok || now != v {
			f.differs("map %v lacks an entry, or has a different one", m.kernel)
		}
	}
	if err := m.remove(extra); err != nil {
		return err
	}
	return m.set(want)
}

// repair restores the array.
func (c *cells[V]) repair(f *findings) error {
	for i, want := range c.have {
		var now V
		if err := c.kernel.Lookup(uint32(i), &now); err != nil {
			return fmt.Errorf("bpf: read map %v: %w", c.kernel, err)
		}
		if now == want {
			continue
		}
		f.differs("map %v has a different word", c.kernel)
		c.have[i] = now
		if err := c.set(i, want); err != nil {
			return err
		}
	}
	return nil
}
