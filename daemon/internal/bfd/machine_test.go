package bfd

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// epoch is the start of a test's virtual clock.
var epoch = time.Unix(1_000_000, 0)

// neighbor is the source of the other end's packets.
var neighbor = netip.MustParseAddrPort("192.0.2.1:50000")

func none(int64) int64 { return 0 }

func testMachine(discr uint32, interval time.Duration, multiplier uint8) *Machine {
	return NewMachine(MachineConfig{Discriminator: discr, Interval: interval, Multiplier: multiplier, Random: none})
}

// brought returns a machine in a state, after the packets that lead to it.
func brought(t *testing.T, s State, now time.Time) *Machine {
	t.Helper()
	m := testMachine(1, 100*time.Millisecond, 3)
	p := Packet{State: Down, Multiplier: 3, MyDiscr: 2, DesiredMinTx: time.Second, RequiredMinRx: 100 * time.Millisecond}
	if s == Init || s == Up {
		m.Receive(p, neighbor, now)
	}
	if s == Up {
		p.State, p.YourDiscr = Init, 1
		m.Receive(p, neighbor, now)
	}
	if s == AdminDown {
		m.Disable(now)
	}
	for _, ok := m.Output(now); ok; _, ok = m.Output(now) {
	}
	if m.state != s {
		t.Fatalf("state %s, want %s", m.state, s)
	}
	return m
}

// TestStates checks the state machine of RFC 5880, Sections 6.2 and 6.8.6, with every received state in every state.
func TestStates(t *testing.T) {
	for _, c := range []struct {
		from, received, want State
		diag                 Diagnostic
	}{
		{Down, AdminDown, Down, NoDiagnostic}, {Down, Down, Init, NoDiagnostic}, {Down, Init, Up, NoDiagnostic}, {Down, Up, Down, NoDiagnostic},
		{Init, AdminDown, Down, NeighborDown}, {Init, Down, Init, NoDiagnostic}, {Init, Init, Up, NoDiagnostic}, {Init, Up, Up, NoDiagnostic},
		{Up, AdminDown, Down, NeighborDown}, {Up, Down, Down, NeighborDown}, {Up, Init, Up, NoDiagnostic}, {Up, Up, Up, NoDiagnostic},
		{AdminDown, AdminDown, AdminDown, AdministrativelyDown}, {AdminDown, Down, AdminDown, AdministrativelyDown},
		{AdminDown, Init, AdminDown, AdministrativelyDown}, {AdminDown, Up, AdminDown, AdministrativelyDown},
	} {
		t.Run(fmt.Sprintf("%s receives %s", c.from, c.received), func(t *testing.T) {
			m := brought(t, c.from, epoch)
			m.Receive(Packet{State: c.received, Multiplier: 3, MyDiscr: 2, YourDiscr: 1, DesiredMinTx: time.Second, RequiredMinRx: time.Millisecond}, neighbor, epoch)
			if m.state != c.want || m.diag != c.diag {
				t.Errorf("%s (%s), want %s (%s)", m.state, m.diag, c.want, c.diag)
			}
			p, notified := m.Output(epoch)
			if changed := c.want != c.from; notified != changed || notified && (p.State != c.want || p.Diagnostic != c.diag) {
				t.Errorf("output %+v (%v) after it", p, notified)
			}
		})
	}
}

// TestOtherSessionsPacket checks that a packet with another discriminator is discarded (RFC 5880, Section 6.8.6).
func TestOtherSessionsPacket(t *testing.T) {
	m := brought(t, Up, epoch)
	p := Packet{State: Down, Multiplier: 3, MyDiscr: 2, YourDiscr: 7, DesiredMinTx: time.Second, RequiredMinRx: time.Second}
	if before := *m; m.Receive(p, neighbor, epoch.Add(time.Millisecond)) != UnknownSession || m.Status() != before.Status() || m.lastReceived != before.lastReceived {
		t.Errorf("it was taken: %+v", m.Status())
	}
	if p.YourDiscr = 1; m.Receive(p, neighbor, epoch) != Accepted || m.state != Down {
		t.Errorf("ours was not taken: %+v", m.Status())
	}
}

// TestPinned checks, while a session is up, that packets in every state count only from the address, the port and the
// discriminator with which it came up (RFC 5881, Section 4), whether or not they have our discriminator; and that a
// neighbor that has restarted is accepted after the detection time.
func TestPinned(t *testing.T) {
	for _, s := range []State{AdminDown, Down, Init, Up} {
		for _, yours := range []uint32{0, 1} {
			p := Packet{State: s, Multiplier: 255, MyDiscr: 2, YourDiscr: yours, Poll: true, DesiredMinTx: time.Hour, RequiredMinRx: time.Hour}
			other := p
			other.MyDiscr = 3
			for _, c := range []struct {
				p    Packet
				from string
				want Drop
			}{
				{p, "192.0.2.2:50000", OtherAddress}, {p, "192.0.2.1:50001", OtherPort}, {other, "192.0.2.1:50000", OtherDiscriminator},
			} {
				m := brought(t, Up, epoch)
				before := *m
				if got := m.Receive(c.p, netip.MustParseAddrPort(c.from), epoch.Add(time.Millisecond)); got != c.want || m.Status() != before.Status() || m.lastReceived != before.lastReceived || m.answer || m.remoteDiscr != 2 {
					t.Errorf("%+v from %s: %s, %+v", c.p, c.from, got, m.Status())
				}
				end := epoch.Add(m.DetectionTime())
				m.Advance(end)
				restarted := Packet{State: Down, Multiplier: 3, MyDiscr: 8, DesiredMinTx: time.Second, RequiredMinRx: time.Second}
				if got := m.Receive(restarted, netip.MustParseAddrPort("192.0.2.1:60000"), end); got != Accepted || m.state != Init {
					t.Errorf("a neighbor that has restarted: %s, %+v", got, m.Status())
				}
			}
			if m := brought(t, Up, epoch); m.Receive(p, neighbor, epoch) != Accepted || (m.state == Up) != (s == Init || s == Up) {
				t.Errorf("the neighbor's %+v: %+v", p, m.Status())
			}
		}
	}
}

// TestOtherSenderInInit checks that a sender that replaces the neighbor's discriminator before the session is up does
// not keep it down: the packet after each of the neighbor's has the neighbor's discriminator.
func TestOtherSenderInInit(t *testing.T) {
	m := brought(t, Init, epoch)
	for i := range 3 {
		now := epoch.Add(time.Duration(i) * 10 * time.Millisecond)
		for _, discr := range []uint32{7, 2} {
			m.Receive(Packet{State: Down, Multiplier: 3, MyDiscr: discr, DesiredMinTx: time.Second, RequiredMinRx: time.Second}, neighbor, now)
			if p, ok := m.Output(now); !ok || p.State != Init || p.YourDiscr != discr {
				t.Errorf("after a packet of %d: %+v (%v)", discr, p, ok)
			}
			if p, ok := m.Output(now); ok {
				t.Errorf("one too many: %+v", p)
			}
		}
	}
}

// TestDetection checks that the detection time is the other end's multiplier times the slower of its transmission and
// our reception interval (Section 6.8.4).
func TestDetection(t *testing.T) {
	for _, c := range []struct {
		minTx      time.Duration
		multiplier uint8
		want       time.Duration
	}{
		{time.Second, 3, 3 * time.Second}, {100 * time.Millisecond, 5, 500 * time.Millisecond},
		{10 * time.Millisecond, 3, 300 * time.Millisecond}, {250 * time.Millisecond, 1, 250 * time.Millisecond},
	} {
		for _, s := range []State{Down, Init, Up} {
			m := brought(t, s, epoch)
			received := map[State]State{Down: Up, Init: Down, Up: Up}[s] // changes nothing
			m.Receive(Packet{State: received, Multiplier: c.multiplier, MyDiscr: 2, YourDiscr: 1, DesiredMinTx: c.minTx, RequiredMinRx: time.Hour}, neighbor, epoch)
			if got := m.DetectionTime(); got != c.want {
				t.Errorf("detection time %v, want %v", got, c.want)
			}
			m.Advance(epoch.Add(c.want - 1))
			if m.state != s || m.remoteDiscr != 2 {
				t.Errorf("%s: too early: %+v", s, m.Status())
			}
			m.Advance(epoch.Add(c.want))
			want := Status{State: Down, RemoteState: Down}
			if s != Down {
				want.Diagnostic = DetectionTimeExpired
			}
			if m.Status() != want || m.remoteDiscr != 0 {
				t.Errorf("%s: after %v of silence %+v, want %+v", s, c.want, m.Status(), want)
			}
		}
	}
}

// TestIntervals checks that transmission is slow until the session is up, and then uses the slower of our transmission
// and the other end's reception interval; polls announce the change.
func TestIntervals(t *testing.T) {
	m := testMachine(1, 100*time.Millisecond, 3)
	now := epoch
	expect := func(what string, wait time.Duration, want Packet) {
		t.Helper()
		if next := m.Next(); wait > 0 && next.Sub(now) != wait {
			t.Fatalf("%s: next in %v, want %v", what, next.Sub(now), wait)
		}
		now = now.Add(wait)
		want.Multiplier, want.MyDiscr, want.RequiredMinRx = 3, 1, 100*time.Millisecond
		if p, ok := m.Output(now); !ok || p != want {
			t.Fatalf("%s: %+v (%v), want %+v", what, p, ok, want)
		}
	}
	quiet := func() {
		t.Helper()
		if p, ok := m.Output(now); ok {
			t.Fatalf("one too many: %+v", p)
		}
	}
	expect("the first, at once", 0, Packet{State: Down, DesiredMinTx: time.Second})
	quiet()
	expect("a second later", time.Second, Packet{State: Down, DesiredMinTx: time.Second})
	m.Receive(Packet{State: Init, Multiplier: 100, MyDiscr: 2, YourDiscr: 1, DesiredMinTx: time.Second, RequiredMinRx: 50 * time.Millisecond}, neighbor, now)
	expect("up, said at once", 0, Packet{State: Up, YourDiscr: 2, DesiredMinTx: 100 * time.Millisecond, Poll: true})
	quiet()
	m.Receive(Packet{State: Up, Multiplier: 100, MyDiscr: 2, YourDiscr: 1, DesiredMinTx: time.Second, RequiredMinRx: 50 * time.Millisecond}, neighbor, now)
	expect("polling on, for that was no answer", 100*time.Millisecond, Packet{State: Up, YourDiscr: 2, DesiredMinTx: 100 * time.Millisecond, Poll: true})
	other := Packet{State: Up, Final: true, Poll: true, Multiplier: 100, MyDiscr: 2, YourDiscr: 1, DesiredMinTx: time.Second, RequiredMinRx: 300 * time.Millisecond}
	m.Receive(other, neighbor, now)
	expect("its poll, at once", 0, Packet{State: Up, YourDiscr: 2, DesiredMinTx: 100 * time.Millisecond, Final: true})
	quiet()
	expect("as slowly as it takes", 300*time.Millisecond, Packet{State: Up, YourDiscr: 2, DesiredMinTx: 100 * time.Millisecond})
	other.Poll, other.Final, other.RequiredMinRx = false, false, 0
	m.Receive(other, neighbor, now)
	if next := m.Next(); !next.Equal(now.Add(m.DetectionTime())) {
		t.Errorf("next in %v although it takes none: want the detection time", next.Sub(now))
	}
	other.RequiredMinRx, other.Demand = time.Millisecond, true
	m.Receive(other, neighbor, now)
	if next := m.Next(); !next.Equal(now.Add(m.DetectionTime())) {
		t.Errorf("next in %v in demand mode: want the detection time", next.Sub(now))
	}
	other.Demand, other.State, other.Diagnostic = false, AdminDown, AdministrativelyDown
	m.Receive(other, neighbor, now)
	expect("down, said at once", 0, Packet{State: Down, Diagnostic: NeighborDown, YourDiscr: 2, DesiredMinTx: time.Second, Poll: true})
	expect("slow again", time.Second, Packet{State: Down, Diagnostic: NeighborDown, YourDiscr: 2, DesiredMinTx: time.Second, Poll: true})
	// The other end waits for three of our packets, one a second: until then it must receive AdminDown (6.8.16).
	other.State, other.Poll, other.RequiredMinRx = Init, true, time.Millisecond
	m.Disable(now)
	admin := Packet{State: AdminDown, Diagnostic: AdministrativelyDown, YourDiscr: 2, DesiredMinTx: time.Second}
	expect("the end, said at once", 0, admin)
	for range 3 {
		if m.Receive(other, neighbor, now) == Accepted {
			t.Error("a packet was taken in AdminDown")
		}
		quiet()
		expect("and again", time.Second, admin)
	}
	quiet()
	if next := m.Next(); !next.IsZero() {
		t.Errorf("next at %v after the end", next)
	}
}

// TestDueAtOnce checks that a poll is answered, and a change of state announced, without waiting for the interval (RFC
// 5880, Sections 6.8.7 and 6.5).
func TestDueAtOnce(t *testing.T) {
	now := epoch.Add(time.Millisecond)
	for name, received := range map[string]Packet{
		"a poll":            {State: Up, Poll: true},
		"a change of state": {State: Down},
	} {
		m := brought(t, Up, epoch)
		if next := m.Next(); !next.After(now) {
			t.Fatalf("%s: due %v before it came", name, next.Sub(now))
		}
		received.Multiplier, received.MyDiscr, received.YourDiscr = 3, 2, 1
		received.DesiredMinTx, received.RequiredMinRx = time.Second, 100*time.Millisecond
		m.Receive(received, neighbor, now)
		if next := m.Next(); next.IsZero() || next.After(now) {
			t.Errorf("%s: due in %v, want at once", name, next.Sub(now))
		}
		if _, ok := m.Output(now); !ok {
			t.Errorf("%s: nothing to send", name)
		}
		if next := m.Next(); !next.After(now) {
			t.Errorf("%s: still due %v later", name, next.Sub(now))
		}
	}
}

// TestJitter checks for 75 to 100 % of the interval, at most 90 % if the multiplier is 1 (Section 6.8.7).
func TestJitter(t *testing.T) {
	for multiplier, most := range map[uint8]time.Duration{1: lonely * 9 / 10, 3: lonely} {
		seed := rand.Uint64()
		m := NewMachine(MachineConfig{Discriminator: 1, Interval: lonely, Multiplier: multiplier, Random: rand.New(rand.NewPCG(seed, 0)).Int64N})
		now, least, longest := epoch, time.Hour, time.Duration(0)
		m.Output(now)
		for range 20000 {
			wait := m.Next().Sub(now)
			least, longest = min(least, wait), max(longest, wait)
			now = now.Add(wait)
			if _, ok := m.Output(now); !ok {
				t.Fatal("nothing to send when it is due")
			}
		}
		if least != lonely*3/4 || longest != most {
			t.Errorf("seed %d: multiplier %d waits %v to %v, want %v to %v", seed, multiplier, least, longest, lonely*3/4, most)
		}
	}
}

// TestLonely requires longer waits after unanswered packets, which announce them, and an immediate packet with the
// shorter interval, without a poll, after the neighbor's first.
func TestLonely(t *testing.T) {
	m := NewMachine(MachineConfig{Discriminator: 1, Interval: 50 * time.Millisecond, Multiplier: 3, Random: func(int64) int64 { return 0 }})
	now := epoch
	for i := range 10 {
		p, _ := m.Output(now)
		want := slow
		if i >= patience {
			want = lonely
		}
		if wait := m.Next().Sub(now); wait != want || p.DesiredMinTx != want {
			t.Fatalf("packet %d announces %v, the next one follows after %v, want %v", i, p.DesiredMinTx, wait, want)
		}
		now = m.Next()
	}
	m.Receive(Packet{State: Down, Multiplier: 3, MyDiscr: 2, DesiredMinTx: time.Second, RequiredMinRx: time.Second}, neighbor, now)
	if p, ok := m.Output(now); !ok || p.State != Init || p.DesiredMinTx != slow || p.Poll {
		t.Errorf("sent %v %+v, want Init without a poll, at %v", ok, p, slow)
	}
	if wait := m.Next().Sub(now); wait != slow {
		t.Errorf("the next packet follows after %v", wait)
	}
}

// TestMeeting requires that sessions without a neighbor, which begin at different times, soon send at the same times,
// and that each keeps to 75 to 90 % of an interval (Section 6.8.7).
func TestMeeting(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	var meeting Meeting
	var machines []*Machine
	next := map[*Machine]time.Time{}
	for i := range 8 {
		m := NewMachine(MachineConfig{Discriminator: uint32(1 + i), Interval: 50 * time.Millisecond, Multiplier: uint8(1 + i%3), Random: random.Int64N, Meeting: &meeting})
		machines, next[m] = append(machines, m), epoch.Add(time.Duration(random.Int64N(int64(time.Second))))
	}
	const settling, end = 4 * time.Minute, 8 * time.Minute
	wakes, last := 0, epoch
	for {
		m := slices.MinFunc(machines, func(a, b *Machine) int { return next[a].Compare(next[b]) })
		now := next[m]
		if now.After(epoch.Add(end)) {
			break
		}
		if _, ok := m.Output(now); !ok {
			t.Fatalf("seed %d: nothing to send when it is due", seed)
		}
		least, most := slow*3/4, lonely*9/10
		if now.After(epoch.Add(settling)) {
			least = lonely * 3 / 4
		}
		if next[m] = m.Next(); next[m].Sub(now) < least || next[m].Sub(now) > most {
			t.Errorf("seed %d: a wait of %v, want %v to %v", seed, next[m].Sub(now), least, most)
		}
		if now.After(epoch.Add(settling)) && now.Sub(last) > 100*time.Microsecond {
			wakes++
		}
		last = now
	}
	if most := int((end-settling)/(lonely*3/4)) + 4; wakes > most {
		t.Errorf("seed %d: %d wake-ups of 8 sessions in %v, want at most %d", seed, wakes, end-settling, most)
	}
}

// wire is two machines over a link that drops, delays and repeats packets, but preserves the order, like a cable; with
// a virtual clock.
type wire struct {
	t      *testing.T
	random *rand.Rand
	now    time.Time
	ends   [2]*Machine
	flying []flight
	loss   [2]float64       // of end i's packets
	last   [2]time.Time     // when the newest packet of end i arrives
	sent   [2]time.Time     // when end i last sent, not counting answers to polls
	gap    [2]time.Duration // the permitted silence after that
}

type flight struct {
	at time.Time
	to int
	p  Packet
}

const delay = 5 * time.Millisecond // maximum, one way

// run continues until a time or until ok returns true.
func (w *wire) run(until time.Time, ok func() bool) bool {
	for {
		w.step()
		if ok != nil && ok() {
			return true
		}
		next := until
		for i, m := range w.ends {
			at := m.Next()
			if at.Before(w.now) && !at.IsZero() {
				w.t.Fatalf("end %d has something left to do at %v, now is %v", i, at, w.now)
			}
			if !at.IsZero() && at.Before(next) {
				next = at
			}
		}
		for _, f := range w.flying {
			if f.at.Before(next) {
				next = f.at
			}
		}
		if w.now = next; !next.Before(until) {
			return ok == nil
		}
	}
}

// step delivers the packets that have arrived and drives both ends' machines.
func (w *wire) step() {
	rest := w.flying[:0:0]
	for _, f := range w.flying {
		if f.at.After(w.now) {
			rest = append(rest, f)
		} else {
			w.ends[f.to].Receive(f.p, neighbor, w.now)
		}
	}
	w.flying = rest
	for i, m := range w.ends {
		m.Advance(w.now)
		for p, ok := m.Output(w.now); ok; p, ok = m.Output(w.now) {
			w.check(i, m, p)
			for range 1 + w.random.IntN(20)/19 {
				if w.random.Float64() >= w.loss[i] {
					if at := w.now.Add(time.Duration(w.random.Int64N(int64(delay)))); at.After(w.last[i]) {
						w.last[i] = at
					}
					w.flying = append(w.flying, flight{w.last[i], 1 - i, p})
				}
			}
		}
	}
}

// check verifies sent packets against the RFC.
func (w *wire) check(i int, m *Machine, p Packet) {
	back, err := ParsePacket(p.AppendTo(nil))
	if err != nil || back != p {
		w.t.Fatalf("end %d sent %+v: %v", i, p, err)
	}
	switch {
	case p.Poll && p.Final:
		w.t.Fatalf("end %d sent poll and final at once", i)
	case p.State != Up && p.DesiredMinTx < slow:
		w.t.Fatalf("end %d wants to send every %v in state %s", i, p.DesiredMinTx, p.State)
	case p.State != m.state || p.State != Down && p.YourDiscr == 0:
		w.t.Fatalf("end %d sent %+v in state %s", i, p, m.state)
	}
	if !p.Final {
		most := max(p.DesiredMinTx, m.remoteMinRx)
		if gap := w.now.Sub(w.sent[i]); !w.sent[i].IsZero() && gap > max(most, w.gap[i]) {
			w.t.Fatalf("end %d was silent for %v, interval %v, before %v", i, gap, most, w.gap[i])
		}
		w.sent[i], w.gap[i] = w.now, most
	}
}

func (w *wire) up() bool { return w.ends[0].state == Up && w.ends[1].state == Up }

// settled reports whether both ends are up, with the detection times of the fast intervals.
func (w *wire) settled() bool {
	return w.up() && !w.ends[0].polling && !w.ends[1].polling && w.ends[0].remoteMinTx == w.ends[1].desiredMinTx && w.ends[1].remoteMinTx == w.ends[0].desiredMinTx
}

// TestTwoEnds checks that over any wire two ends come up, detect silence within the detection time and not before,
// notify each other, and recover.
func TestTwoEnds(t *testing.T) {
	for round := range 300 {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("%d/seed %d", round, seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			w := &wire{t: t, random: r, now: epoch}
			auth := Auth{}
			if kind := AuthType(r.IntN(6)); kind >= KeyedMD5 {
				auth = Auth{Type: kind, Keys: []Key{{ID: 1, Secret: "secret"}}}
			}
			for i := range w.ends {
				w.ends[i] = NewMachine(MachineConfig{
					Discriminator: uint32(1 + i), Interval: time.Duration(20+r.IntN(2000)) * time.Millisecond, Multiplier: uint8(2 + r.IntN(4)), Random: r.Int64N,
					Auth: auth,
				})
			}
			loss := r.Float64() / 3
			w.loss = [2]float64{loss, loss}
			if !w.run(w.now.Add(time.Hour), w.up) {
				t.Fatalf("not up in an hour with %.0f %% lost", 100*loss)
			}
			w.loss = [2]float64{}
			w.run(w.now.Add(time.Minute), nil) // packets dropped before still count for a detection time
			if !w.run(w.now.Add(time.Minute), w.settled) {
				t.Fatalf("not settled: %+v %+v", w.ends[0].Status(), w.ends[1].Status())
			}
			if w.run(w.now.Add(5*time.Minute), func() bool { return !w.up() }) {
				t.Fatalf("down although nothing was lost: %+v %+v", w.ends[0].Status(), w.ends[1].Status())
			}
			deaf := r.IntN(2)
			w.loss[1-deaf] = 1
			bothWays := r.IntN(2) == 0
			if bothWays {
				w.loss[deaf] = 1
			}
			w.run(w.now.Add(delay), nil) // packets in flight arrive
			m, from := w.ends[deaf], w.now
			detection := m.DetectionTime()
			last := m.lastReceived
			if !w.run(from.Add(time.Hour), func() bool { return m.state != Up }) {
				t.Fatal("silence was not noticed")
			}
			if took := w.now.Sub(last); took != detection || m.diag != DetectionTimeExpired {
				t.Errorf("noticed after %v (%s), want %v", took, m.diag, detection)
			}
			other := w.ends[1-deaf]
			if !bothWays {
				if !w.run(w.now.Add(delay), func() bool { return other.state != Up }) || other.diag != NeighborDown {
					t.Errorf("the other end was not notified: %+v", other.Status())
				}
			}
			// One direction is not enough to come up.
			if w.run(w.now.Add(time.Minute), w.up) {
				t.Fatal("up although one end is deaf")
			}
			w.loss = [2]float64{}
			if !w.run(w.now.Add(time.Minute), w.settled) {
				t.Fatalf("not back: %+v %+v", w.ends[0].Status(), w.ends[1].Status())
			}
			w.ends[0].Disable(w.now)
			if !w.run(w.now.Add(2*delay), func() bool { return w.ends[1].state == Down }) || w.ends[1].remoteState != AdminDown || w.ends[1].diag != NeighborDown {
				t.Errorf("AdminDown was not understood: %+v", w.ends[1].Status())
			}
		})
	}
}
