package bfd

import (
	"testing"
	"time"
)

// TestAdminDownIsRepeated counts the packets of a closed session on the wire: AdminDown with its discriminator until a detection time has
// passed, although the first ones are dropped; and no other packets.
func TestAdminDownIsRepeated(t *testing.T) {
	r, here, there := NewResponder(nil), host(), host()
	in := listenRaw(t, there)
	s, _ := start(t, r, Config{Interval: 100 * time.Millisecond, Multiplier: 2}.between(here, there))
	sayRaw(t, there, here, Packet{State: Down, Multiplier: 3, MyDiscr: 9, DesiredMinTx: time.Second, RequiredMinRx: 100 * time.Millisecond})
	until(t, s, Init)
	s.Close()
	var b [100]byte
	var first, last time.Time
	count := 0
	for over := false; !over; {
		r.mu.Lock()
		over = len(r.parting) == 0
		r.mu.Unlock()
		if err := in.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		n, err := in.Read(b[:])
		if err != nil {
			continue
		}
		p, err := ParsePacket(b[:n])
		switch {
		case err != nil:
			t.Fatal(err)
		case p.State != AdminDown && count > 0:
			t.Errorf("%+v after AdminDown", p)
		case p.State == AdminDown:
			if p.MyDiscr != s.machine.c.Discriminator || p.YourDiscr != 9 || p.Diagnostic != AdministrativelyDown {
				t.Errorf("%+v", p)
			}
			if last = time.Now(); count == 0 {
				first = last
			}
			count++
		}
	}
	// Multiplier 2, one packet per 0.75 to 1 s: the detection time of the neighbor is 2 s.
	if count < 3 || count > 4 || last.Sub(first) < 1400*time.Millisecond {
		t.Errorf("%d packets in %v, want 3 or 4 in up to 2 s", count, last.Sub(first))
	}
	if len(r.discriminators) != 0 {
		t.Errorf("discriminators are left: %v", r.discriminators)
	}
}

// TestNextSessionEndsAdminDown checks that the neighbor receives only the next session's packets, and comes up with it.
func TestNextSessionEndsAdminDown(t *testing.T) {
	r, here, there := NewResponder(nil), host(), host()
	a, _ := start(t, r, Config{}.between(here, there))
	b, _ := start(t, NewResponder(nil), Config{}.between(there, here))
	until(t, a, Up)
	until(t, b, Up)
	a.Close()
	until(t, b, Down)
	again, _ := start(t, r, Config{}.between(here, there))
	<-a.gone
	until(t, again, Up)
	until(t, b, Up)
	if again.machine.c.Discriminator == a.machine.c.Discriminator {
		t.Error("both sessions have one discriminator")
	}
}
