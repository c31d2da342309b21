package congestion

import (
	"net/netip"
	"testing"
	"time"
)

// bottleneck is a link with a queue, in virtual time, and senders that always have packets. Each packet is acknowledged
// when it has passed the link. A sender notices a dropped packet by the acknowledgement of a later one, or after
// timeout, and sends it again.
type bottleneck struct {
	queue, mark int // packets; mark 0: none is marked
	// free is the time from which on the link is free.
	free                   time.Duration
	sent, dropped, carried int
	marked                 int
}

const (
	packet  = 40 * time.Microsecond  // time of a packet on the link: 1000 bytes at 200 Mbit/s
	trip    = 100 * time.Microsecond // round trip without a queue
	timeout = 20 * time.Millisecond
)

type flying struct {
	sent, back time.Duration // back is the time of the acknowledgement, or of the timeout of a dropped packet
	dropped    bool
	marked     bool
}

// send sends a packet.
func (b *bottleneck) send(now time.Duration) flying {
	b.sent++
	begin := max(b.free, now)
	waiting := int((begin - now) / packet)
	if waiting >= b.queue {
		b.dropped++
		return flying{sent: now, back: now + timeout, dropped: true}
	}
	p := flying{sent: now, marked: b.mark > 0 && waiting >= b.mark}
	if p.marked {
		b.marked++
	}
	b.free = begin + packet
	p.back = b.free + trip
	return p
}

// sender is a sender with windows of congestion control, or a fixed one.
type sender struct {
	flight  *Flight
	fixed   int
	flying  []flying // in the order of sending
	arrived int
}

// step handles everything that is due, and sends.
func (s *sender) step(b *bottleneck, now time.Duration) {
	kept := s.flying[:0]
	for _, p := range s.flying {
		switch {
		case p.back > now:
			kept = append(kept, p)
		case p.dropped:
			s.flight.Lost(p.sent, now)
			s.flight.Add(-1)
		default:
			s.arrived++
			b.carried++
			s.flight.Sample(now - p.sent)
			s.flight.Acked(1)
			if p.marked {
				s.flight.Marked(p.sent, now)
			}
			for i := range kept { // those before it are missing
				if kept[i].dropped {
					kept[i].back = min(kept[i].back, now)
				}
			}
		}
	}
	s.flying = kept
	for s.fixed > 0 && len(s.flying) < s.fixed || s.fixed == 0 && s.flight.Room() > 0 {
		s.flying = append(s.flying, b.send(now))
		s.flight.Add(1)
	}
}

// run runs senders for two seconds, all of which begin at once. Each has several channels to the peer.
func (b *bottleneck) run(senders, channels, fixed int) (utilization, dropped, marked float64, least int) {
	var all []*sender
	for range senders {
		peers := Peers{}
		for range channels {
			all = append(all, &sender{flight: peers.Join(netip.Addr{}), fixed: fixed})
		}
	}
	const length = 2 * time.Second
	for now := time.Duration(0); now < length; now += packet / 2 {
		for _, s := range all {
			s.step(b, now)
		}
	}
	least = b.carried
	for i := 0; i < len(all); i += channels {
		n := 0
		for _, s := range all[i : i+channels] {
			n += s.arrived
		}
		least = min(least, n)
	}
	return float64(b.carried) * float64(packet) / float64(length), float64(b.dropped) / float64(b.sent), float64(b.marked) / float64(b.sent), least
}

// TestIncast lets eight senders share a link, by queues of several lengths. With fixed windows the same link drops most
// packets, so the senders do fill it.
func TestIncast(t *testing.T) {
	for _, x := range []struct {
		name                  string
		queue, mark, channels int
		fixed                 int
		least, most           float64 // utilization, dropped
	}{
		{"fixed windows", 100, 0, 1, 64, 0, 1},
		{"drops", 100, 0, 1, 0, 0.95, 0.02},
		{"drops, four channels a sender", 100, 0, 4, 0, 0.95, 0.05},
		{"drops, a short queue", 50, 0, 1, 0, 0.95, 0.05},
		{"drops, a long queue", 500, 0, 1, 0, 0.95, 0.02},
		{"marks", 100, 30, 1, 0, 0.95, 0.005},
		{"marks, four channels a sender", 100, 30, 4, 0, 0.95, 0.01},
	} {
		t.Run(x.name, func(t *testing.T) {
			b := &bottleneck{queue: x.queue, mark: x.mark}
			utilization, dropped, marked, least := b.run(8, x.channels, x.fixed)
			t.Logf("%.3f of the link, %.2f %% dropped, %.2f %% marked, the least has %.2f of its part", utilization, 100*dropped, 100*marked, float64(8*least)/float64(b.carried))
			if x.fixed > 0 {
				if dropped < 0.2 {
					t.Errorf("windows of %d packets: %.2f %% dropped: no incast", x.fixed, 100*dropped)
				}
				return
			}
			if utilization < x.least || dropped > x.most {
				t.Errorf("want %.2f of the link and at most %.1f %% dropped", x.least, 100*x.most)
			}
			if 8*3*least < b.carried {
				t.Errorf("a sender got %d of %d packets", least, b.carried)
			}
			if x.mark > 0 && marked == 0 {
				t.Error("nothing was marked")
			}
		})
	}
}

// TestAlone lets one sender without competition reach the rate of a link whose queue is long.
func TestAlone(t *testing.T) {
	b := &bottleneck{queue: 1000}
	if utilization, dropped, _, _ := b.run(1, 1, 0); utilization < 0.99 || dropped > 0.02 {
		t.Errorf("%.3f of the link, %.2f %% dropped", utilization, 100*dropped)
	}
}

func TestOneReductionAFlight(t *testing.T) {
	f := Peers{}.Join(netip.Addr{})
	f.Set(64)
	f.Acked(60)
	if f.Size() != 64 {
		t.Fatalf("a window of 4 packets has %d after 60 acknowledged ones", f.Size())
	}
	const ms = time.Millisecond
	for i, x := range []struct {
		lost      bool
		sent, now time.Duration
		want      int
	}{
		{true, 1 * ms, 10 * ms, 32},
		{true, 2 * ms, 11 * ms, 32},  // of the same flight
		{false, 9 * ms, 12 * ms, 32}, // a mark of it
		{false, 10 * ms, 13 * ms, 25},
		{true, 20 * ms, 21 * ms, 12},
		{true, 30 * ms, 31 * ms, 6},
		{true, 40 * ms, 41 * ms, 3},
		{true, 50 * ms, 51 * ms, 1},
		{true, 60 * ms, 61 * ms, 1},
		{false, 70 * ms, 71 * ms, 1},
	} {
		reduced := f.Marked
		if x.lost {
			reduced = f.Lost
		}
		was := f.Size()
		if got := reduced(x.sent, x.now); f.Size() != x.want || !got && was != f.Size() {
			t.Errorf("step %d: a window of %d packets, %v; want %d", i, f.Size(), got, x.want)
		}
	}
}

// TestChannelsShareAWindow checks the room of channels to one peer: all together the window, and each at least its
// share and one packet.
func TestChannelsShareAWindow(t *testing.T) {
	peers := Peers{}
	a, b, other := peers.Join(netip.MustParseAddr("192.0.2.1")), peers.Join(netip.MustParseAddr("192.0.2.1")), peers.Join(netip.MustParseAddr("192.0.2.2"))
	room := func(wantA, wantB int) {
		t.Helper()
		if a.Room() != wantA || b.Room() != wantB || other.Room() != initial {
			t.Errorf("room of %d, %d and %d packets, want %d, %d and %d", a.Room(), b.Room(), other.Room(), wantA, wantB, initial)
		}
	}
	room(4, 4)
	a.Set(4)
	room(0, 2) // b has its share, though a has filled the window
	b.Set(1)
	room(-1, 1)
	a.Set(1)
	room(2, 2)
	a.Set(3)
	a.Lost(0, 1)
	a.Lost(1, 2)
	room(-2, 0) // a window of one packet
	b.Set(0)
	room(-2, 1)
	a.Leave()
	a.Leave()
	a.Set(5)
	if b.Room() != 1 {
		t.Errorf("room of %d packets after the other channel has left", b.Room())
	}
	b.Leave()
	if len(peers) != 1 {
		t.Errorf("%d windows, want that of the other peer", len(peers))
	}
	if f := peers.Join(netip.MustParseAddr("192.0.2.1")); f.Room() != initial {
		t.Error("a new channel continues the window of closed ones")
	}
}

// TestUnusedWindowDoesNotGrow checks that acknowledgements of few packets do not open a window for many.
func TestUnusedWindowDoesNotGrow(t *testing.T) {
	f := Peers{}.Join(netip.Addr{})
	for range 1000 {
		f.Set(1)
		f.Acked(1)
	}
	if f.Size() != initial {
		t.Errorf("a window of %d packets, of which one was used", f.Size())
	}
}
