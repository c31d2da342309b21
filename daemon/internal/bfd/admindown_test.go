package bfd

import (
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// TestAdminDownIsRepeated counts the packets of a closed session on the wire: AdminDown with its discriminator until a
// detection time has passed, although the first ones are dropped; and no other packets. Time is virtual, and stands
// still while the test reads from a socket.
func TestAdminDownIsRepeated(t *testing.T) {
	here, there := host(), host()
	in := listenRaw(t, there)
	synctest.Test(t, func(t *testing.T) {
		r := NewResponder(nil)
		c := Config{Interval: 100 * time.Millisecond, Multiplier: 2, Counters: new(Counters)}.between(here, there)
		receiver, err := listen(place{local: here})
		if err != nil {
			t.Fatal(err)
		}
		receiver.responder, r.receivers[receiver.place] = r, receiver
		close(receiver.done) // the test reads in place of the receiver's goroutine, whose wait would stop the time
		conn, err := dial(c)
		if err != nil {
			t.Fatal(err)
		}
		s := newSession(c, receiver, conn, r.discriminatorLocked())
		receiver.sessions[there], receiver.numbered[s.machine.c.Discriminator] = s, s
		go s.run()
		sayRaw(t, there, here, Packet{State: Down, Multiplier: 3, MyDiscr: 9, DesiredMinTx: time.Second, RequiredMinRx: 100 * time.Millisecond})
		if err := receiver.raw.Read(func(fd uintptr) bool {
			receiver.read(int(fd))
			return s.Status().State == Init
		}); err != nil {
			t.Fatal(err)
		}
		s.Close()
		next := func() (due, sent time.Time) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.machine.Next(), s.machine.sent
		}
		var first, last time.Time
		count := 0
	packets:
		for due, sent := next(); ; {
			p := receivePacket(t, in)
			switch {
			case p.State != AdminDown && count > 0:
				t.Errorf("%+v after AdminDown", p)
			case p.State != AdminDown:
				continue
			case p.MyDiscr != s.machine.c.Discriminator || p.YourDiscr != 9 || p.Diagnostic != AdministrativelyDown:
				t.Errorf("%+v", p)
			}
			if last = time.Now(); count == 0 {
				first = last
			}
			count++
			for before := sent; sent.Equal(before); due, sent = next() {
				if due.IsZero() {
					break packets
				}
				time.Sleep(time.Until(due))
				synctest.Wait()
			}
		}
		<-s.gone
		// Multiplier 2, one packet per 0.75 to 1 s: the detection time of the neighbor is 2 s.
		if count < 3 || count > 4 || last.Sub(first) < 1400*time.Millisecond || last.Sub(first) > 2*time.Second {
			t.Errorf("%d packets in %v, want 3 or 4 in up to 2 s", count, last.Sub(first))
		}
		if len(r.discriminators) != 0 || len(r.parting) != 0 {
			t.Errorf("discriminators are left: %v", r.discriminators)
		}
	})
}

// receivePacket waits for a packet.
func receivePacket(t *testing.T, in *net.UDPConn) Packet {
	t.Helper()
	var b [100]byte
	n, err := in.Read(b[:])
	if err != nil {
		t.Fatal(err)
	}
	p, err := ParsePacket(b[:n])
	if err != nil {
		t.Fatal(err)
	}
	return p
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
