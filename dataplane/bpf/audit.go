package bpf

import (
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

// attend compares rules and routes whenever other programs change some, until Close.
func (s *Steering) attend() {
	defer s.done.Done()
	for s.objects.Wait() == nil {
		events, err := s.objects.Poll()
		if err == nil && !slices.ContainsFunc(events, s.cfg.concerns) {
			continue
		}
		s.whileOpen(func() {
			compare := s.comparePaths
			if s.guard.unrepaired() {
				compare = s.compareAll // the known difference may be elsewhere
			}
			s.guard.check(compare)
			s.guard.freed()
		})
	}
}

// concerns reports whether an object is in the agent's table.
func (c Config) concerns(e rtnl.ObjectEvent) bool {
	return e.Rule != nil && e.Rule.Table == c.Table || e.Route != nil && e.Route.Table == c.Table
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
			s.whileOpen(func() {
				compare := s.compareWords
				if s.guard.unrepaired() {
					compare = s.compareAll
				}
				s.guard.check(compare)
			})
		case <-audit.C:
			s.Audit()
		}
	}
}

// Audit compares everything with the kernel and repairs the differences.
func (s *Steering) Audit() {
	s.whileOpen(func() {
		s.guard.audits++
		s.guard.check(s.compareAll)
		s.guard.freed()
	})
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
