package bpf

import (
	"slices"
	"time"

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
	for s.objects.Wait() == nil {
		events, err := s.objects.Poll()
		if err == nil && !slices.ContainsFunc(events, s.cfg.concerns) {
			continue
		}
		s.whileOpen(func() {
			compare := func(f *findings) error { return s.kernel.comparePaths(&s.want, f) }
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
	for _, m := range s.have.entries() {
		if err := m.repair(f); err != nil {
			return err
		}
	}
	return s.kernel.comparePaths(&s.want, f)
}

// compareWords compares the state that all packets depend on.
func (s *Steering) compareWords(f *findings) error {
	if err := s.compareProgram(f); err != nil {
		return err
	}
	for _, m := range s.have.words() {
		if err := m.repair(f); err != nil {
			return err
		}
	}
	var live [maxSources]steerLive
	for _, l := range s.want.layout.sources {
		live[l.number] = s.have.live.have[l.number]
	}
	if err := s.kernel.light(&live); err != nil {
		return err
	}
	return s.compareHead(f)
}

// compareProgram restores a program that was detached or replaced, and pins that were removed.
func (s *Steering) compareProgram(f *findings) error {
	info, err := s.have.pinned.link.Info() // an error after an attempt to attach the program elsewhere
	if s.unmended || err != nil || info.TCX() == nil || int(info.TCX().Ifindex) != s.have.routes.anchor {
		f.differs("the program is no longer attached to %s", s.cfg.Device)
		if err := s.mend(); err != nil {
			return err
		}
	} else if s.have.pinned.switched && info.Program != s.have.pinned.id {
		f.differs("another program is attached to %s in place of the agent's", s.cfg.Device)
		if err := s.have.pinned.switchOver(); err != nil {
			return err
		}
	}
	if n, err := s.have.pinned.repin(s.cfg.PinDir); n > 0 || err != nil {
		// Packets are not affected; pins matter only to the next start.
		s.cfg.Log.Warn("steering: another program removed pins; recreating them", "pins", n, "error", err)
	}
	return nil
}

// comparePaths compares the rules and routes that lead to the program.
func (k *kernel) comparePaths(want *desired, f *findings) error {
	if want.forwarding == nil || !k.have.pinned.switched {
		return nil // no acknowledged state leads to our program
	}
	if err := k.have.routes.repair(f); err != nil {
		return err
	}
	return k.have.routes.rules(want.steered(), f.differs)
}
