package bfd

import (
	"net/netip"
	"testing"
	"time"
)

// TestDiscriminators checks that discriminators are unique although the generator repeats itself, never 0, and free
// again after the end.
func TestDiscriminators(t *testing.T) {
	r, here := NewResponder(nil), host()
	next := uint32(0)
	r.random = func() uint32 { next++; return next / 3 } // 0, 0, 1, 1, 1, 2, ...
	seen := map[uint32]bool{}
	for range 5 {
		s, _ := start(t, r, patient.between(here, host()))
		d := s.machine.c.Discriminator
		if d == 0 || seen[d] {
			t.Errorf("discriminator %d after %v", d, seen)
		}
		seen[d] = true
	}
	if len(r.discriminators) != 5 {
		t.Errorf("%d in use, want 5", len(r.discriminators))
	}
}

// TestDiscriminatorSelects checks that Your Discriminator alone selects the session, whatever the packet's source
// address; with 0 the address selects it (RFC 5880, Section 6.8.6). A session of another place does not receive the
// packet.
func TestDiscriminatorSelects(t *testing.T) {
	r, here, elsewhere, one, two := NewResponder(nil), host(), host(), host(), host()
	a, _ := start(t, r, patient.between(here, one))
	b, _ := start(t, r, patient.between(here, two))
	away, _ := start(t, r, patient.between(elsewhere, one))
	p := Packet{State: Down, Multiplier: 255, MyDiscr: 9, DesiredMinTx: 10 * time.Second, RequiredMinRx: time.Second}
	states := func() [3]State { return [3]State{a.Status().State, b.Status().State, away.Status().State} }
	say := func(from, to netip.Addr, yours uint32, s *Session) {
		t.Helper()
		p.YourDiscr = yours
		sayRaw(t, from, to, p)
		s.receiver.drain()
	}
	say(two, here, a.machine.c.Discriminator, a)
	if got := states(); got != [3]State{Init, Down, Down} {
		t.Errorf("a's discriminator from b's address: %v", got)
	}
	say(two, here, away.machine.c.Discriminator, a)
	say(host(), here, 0, a)
	if got := states(); got != [3]State{Init, Down, Down} {
		t.Errorf("another place's discriminator, and an unknown address: %v", got)
	}
	say(two, here, 0, b)
	if got := states(); got != [3]State{Init, Init, Down} {
		t.Errorf("0 from b's address: %v", got)
	}
}
