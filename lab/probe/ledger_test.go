package probe

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// packet is one packet of a random sequence that is passed to ledgers and to the reference model.
type packet struct {
	at      Lane
	sent    int64
	tally   int
	arrives int // number of arrivals
}

// twin is a reference model: it computes an outage from every packet of some tallies.
func twin(planes int, gap int64, packets []packet, tallies ...int) Outage {
	o := Outage{ByPlane: make([]uint64, planes)}
	lost := slices.DeleteFunc(slices.Clone(packets), func(p packet) bool { return p.arrives > 0 || !slices.Contains(tallies, p.tally) })
	if len(lost) == 0 {
		return o
	}
	ofPair := map[int][]packet{}
	for _, p := range lost {
		o.Packets++
		o.ByPlane[p.at.Plane]++
		ofPair[p.at.Pair] = append(ofPair[p.at.Pair], p)
	}
	o.Pairs = len(ofPair)
	for pair := range 1000 { // from the lowest pair
		if all := ofPair[pair]; len(all) > 0 {
			if took := all[len(all)-1].sent - all[0].sent + gap; took > o.Interval {
				o.Interval, o.Worst = took, pair
			}
		}
	}
	inOrder := func(a, b packet) int {
		if a.sent != b.sent {
			return int(a.sent - b.sent)
		}
		return 1000*(a.at.Pair-b.at.Pair) + a.at.Plane - b.at.Plane
	}
	slices.SortFunc(lost, inOrder)
	o.First, o.FirstSent = lost[0].at, lost[0].sent
	o.LastSent = lost[len(lost)-1].sent
	o.Last = lost[slices.IndexFunc(lost, func(p packet) bool { return p.sent == o.LastSent })].at
	o.Span = o.LastSent - o.FirstSent + gap
	return o
}

// TestOutage compares ledgers with the reference model for random losses and duplicates over several servers, tallies
// and turns of the ring.
func TestOutage(t *testing.T) {
	const servers, planes, gap = 3, 4, 7
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		var ledgers []*ledger
		for range servers {
			ledgers = append(ledgers, &ledger{entries: make([]entry, 8<<r.IntN(4)), next: ^uint32(0) - uint32(r.IntN(200))})
			ledgers[len(ledgers)-1].settled = ledgers[len(ledgers)-1].next
		}
		tallies := []*Tally{{losses: map[Lane]loss{}}, {number: 1, losses: map[Lane]loss{}}, {number: 2, losses: map[Lane]loss{}}}
		var packets []packet
		now := int64(0)
		fate := r.IntN(20) // n of 20 packets are lost
		for n := range r.IntN(400) {
			now += int64(r.IntN(3))
			p := packet{at: Lane{r.IntN(servers)*10 + r.IntN(4), r.IntN(planes)}, sent: now, tally: min(2, n/100), arrives: 1}
			switch {
			case r.IntN(20) < fate:
				p.arrives = 0
			case r.IntN(10) == 0:
				p.arrives = 2
			}
			l := ledgers[p.at.Pair/10]
			number := l.send(tallies[p.tally], p.at, p.sent)
			for nth := range p.arrives {
				if got, want := l.arrive(number), []arrival{firstTime, duplicate}[nth]; got != want {
					t.Fatalf("seed %d: arrival %d of packet %d is %d, want %d", seed, nth+1, n, got, want)
				}
			}
			packets = append(packets, p)
		}
		for _, n := range tallies {
			for _, l := range ledgers {
				l.settle(n)
			}
			if seed%2 == 0 {
				continue // checked all at once, below
			}
			if got, want := fmt.Sprintf("%+v", NewOutage(planes, gap, n)), fmt.Sprintf("%+v", twin(planes, gap, packets, int(n.number))); got != want {
				t.Fatalf("seed %d, tally %d:\n%s, want\n%s", seed, n.number, got, want)
			}
		}
		if got, want := fmt.Sprintf("%+v", NewOutage(planes, gap, tallies[1:]...)), fmt.Sprintf("%+v", twin(planes, gap, packets, 1, 2)); got != want {
			t.Fatalf("seed %d:\n%s, want\n%s", seed, got, want)
		}
	}
}

// TestOneLostPacket verifies that the interval of a single lost packet is one packet's gap, and that no loss gives
// zero.
func TestOneLostPacket(t *testing.T) {
	l, n := newLedger(0), &Tally{losses: map[Lane]loss{}}
	arrived := l.send(n, Lane{4, 1}, 100)
	l.arrive(arrived)
	l.settle(n)
	if o := NewOutage(2, 50, n); o.Packets != 0 || o.Interval != 0 || o.Span != 0 || o.Pairs != 0 {
		t.Errorf("nothing was lost: %+v", o)
	}
	l.send(n, Lane{4, 1}, 200)
	l.settle(n)
	if o := NewOutage(2, 50, n); o.Packets != 1 || o.Interval != 50 || o.Span != 50 || o.Pairs != 1 || o.Worst != 4 || o.FirstSent != 200 || o.LastSent != 200 || !slices.Equal(o.ByPlane, []uint64{0, 1}) {
		t.Errorf("one packet was lost: %+v", o)
	}
}

// TestLatePackets verifies that a packet that arrives after it was settled, or after its entry was reused, remains
// lost, and that another copy of one that arrived before still counts as a duplicate while its entry exists.
func TestLatePackets(t *testing.T) {
	l, n := newLedger(0), &Tally{losses: map[Lane]loss{}}
	lost := l.send(n, Lane{}, 1)
	there := l.send(n, Lane{}, 2)
	if got := l.arrive(there); got != firstTime {
		t.Errorf("%d", got)
	}
	l.settle(n)
	if got := l.arrive(lost); got != late {
		t.Errorf("a packet that was settled: %d", got)
	}
	if got := l.arrive(there); got != duplicate {
		t.Errorf("a packet that has arrived before: %d", got)
	}
	for i := range len(l.entries) {
		l.arrive(l.send(n, Lane{}, int64(3+i)))
	}
	for _, number := range []uint32{lost, there} {
		if got := l.arrive(number); got != late {
			t.Errorf("a packet whose entry is another's: %d", got)
		}
	}
	if o := NewOutage(1, 1, n); o.Packets != 1 {
		t.Errorf("%d packets are lost, want the one that was late", o.Packets)
	}
}

// TestLedgerSize verifies that two seconds of packets at the highest rate fit.
func TestLedgerSize(t *testing.T) {
	for rate, want := range map[int]int{0: 1024, 2000: 4096, 200_000: 1 << 19} {
		if got := len(newLedger(rate).entries); got != want {
			t.Errorf("%d packets a second: %d entries, want %d", rate, got, want)
		}
	}
}
