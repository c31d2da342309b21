package probe

import (
	"sync/atomic"
	"time"
)

// ledgerSpan is the minimum time for which a ledger remembers a packet while its server sends at the lab's rate. A
// cable's queue holds a packet for 50 ms; the rest allows for receivers that are not scheduled.
const ledgerSpan = 2 * time.Second

// ledger tracks each packet of a server from its sending until it is settled as arrived or lost. It is a ring, so its
// size depends on the rate alone, however long a step takes: 160 KiB for 2,000 packets per second, 20 MiB for 200,000.
// A packet is settled when its step is over, or when its entry is reused; a packet that arrives after that counts as
// late, and remains lost.
type ledger struct {
	entries []entry // by number; the length is a power of two
	// next is the number of the next packet, settled that of the oldest unsettled one. Numbers wrap.
	next, settled uint32
}

// entry is the state of one packet.
type entry struct {
	// state holds the packet's number in the upper half, settledBit, and in the lower bits the number of its arrivals.
	// Receivers modify it.
	state atomic.Uint64
	// The other fields belong to the sender.
	tally *Tally
	lane  Lane
	sent  int64 // ns since the traffic's epoch
}

const settledBit = 1 << 31

// Lane is a pair's path through a plane, the plane of the slot that sends the packet.
type Lane struct{ Pair, Plane int }

func newLedger(rate int) *ledger {
	size := 1024
	for size < int(float64(rate)*ledgerSpan.Seconds()) {
		size *= 2
	}
	return &ledger{entries: make([]entry, size)}
}

func (l *ledger) entry(number uint32) *entry { return &l.entries[int(number)&(len(l.entries)-1)] }

// send enters a packet and returns its number. Calls of send and settle must not overlap.
func (l *ledger) send(t *Tally, at Lane, sent int64) uint32 {
	number := l.next
	if int(number-l.settled) == len(l.entries) {
		l.settleOldest()
	}
	e := l.entry(number)
	e.tally, e.lane, e.sent = t, at, sent
	e.state.Store(uint64(number) << 32)
	l.next++
	return number
}

// arrival is the result of a packet's arrival.
type arrival int

const (
	firstTime arrival = iota
	duplicate
	late // it is already settled as lost, or its entry belongs to another packet
)

// arrive records the arrival of a packet. It is safe for concurrent use.
func (l *ledger) arrive(number uint32) arrival {
	e := l.entry(number)
	for {
		s := e.state.Load()
		if uint32(s>>32) != number || uint32(s) == settledBit {
			return late
		}
		if !e.state.CompareAndSwap(s, s+1) {
			continue
		}
		if uint32(s)&^settledBit > 0 {
			return duplicate
		}
		return firstTime
	}
}

// settle settles all packets of a tally and of earlier ones.
func (l *ledger) settle(t *Tally) {
	for l.settled != l.next && l.entry(l.settled).tally.number <= t.number {
		l.settleOldest()
	}
}

func (l *ledger) settleOldest() {
	e := l.entry(l.settled)
	l.settled++
	if uint32(e.state.Or(settledBit)) == 0 {
		e.tally.lose(e.lane, e.sent)
	}
}

// loss is the number of packets lost in a lane.
type loss struct {
	packets     uint64
	first, last int64 // sending times of the first and the last of them, ns since the traffic's epoch
}

// lose records a lost packet. The packets of a lane must come in the order of sending.
func (t *Tally) lose(at Lane, sent int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l, known := t.losses[at]
	if !known {
		l.first = sent
	}
	l.packets++
	l.last = sent
	t.losses[at] = l
}

// Outage is the sum of the losses of some tallies. The zero value means that nothing was lost.
type Outage struct {
	Packets uint64
	ByPlane []uint64
	Pairs   int // number of pairs that have lost packets
	// interval is the longest time for which a pair lost packets, worst that pair (the lowest of equals), and span the
	// time for which any pair lost packets. Both count from the sending of the first lost packet to that of the last,
	// plus the gap between two packets of a pair, so that a single lost packet does not count as zero; ns.
	Interval, Span int64
	Worst          int
	// first and last are the lanes of the first and the last lost packet (the lowest of equals), firstSent and lastSent
	// their sending times.
	First, Last         Lane
	FirstSent, LastSent int64
}

// NewOutage sums the losses of tallies. gap is the time between two packets of a pair, ns.
func NewOutage(planes int, gap int64, tallies ...*Tally) Outage {
	o := Outage{ByPlane: make([]uint64, planes)}
	pairs := map[int]loss{}
	for _, t := range tallies {
		t.mu.Lock()
		for at, l := range t.losses {
			p, known := pairs[at.Pair]
			if !known {
				p.first, p.last = l.first, l.last
			}
			pairs[at.Pair] = loss{first: min(p.first, l.first), last: max(p.last, l.last)}
			o.ByPlane[at.Plane] += l.packets
			if o.Packets == 0 || l.first < o.FirstSent || l.first == o.FirstSent && at.before(o.First) {
				o.First, o.FirstSent = at, l.first
			}
			if o.Packets == 0 || l.last > o.LastSent || l.last == o.LastSent && at.before(o.Last) {
				o.Last, o.LastSent = at, l.last
			}
			o.Packets += l.packets
		}
		t.mu.Unlock()
	}
	o.Pairs = len(pairs)
	for pair, l := range pairs {
		if took := l.last - l.first + gap; took > o.Interval || took == o.Interval && pair < o.Worst {
			o.Interval, o.Worst = took, pair
		}
	}
	if o.Packets > 0 {
		o.Span = o.LastSent - o.FirstSent + gap
	}
	return o
}

func (l Lane) before(m Lane) bool {
	return l.Pair < m.Pair || l.Pair == m.Pair && l.Plane < m.Plane
}
