package superp

import (
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/transport/internal/congestion"
	"github.com/fared/fared/transport/rdma"
)

// dumb is the reference model of the receiver: a set of psns.
type dumb struct {
	next uint32
	seen map[uint32]bool
}

func (d *dumb) take(psn uint32) {
	d.seen[psn] = true
	for d.seen[d.next] {
		d.next++
	}
}

// acks returns the expected fields: normal if any of the 31 psns after the next expected one has arrived, or none at
// all, or if plain; otherwise a NACK with the first psn that has arrived.
func (d *dumb) acks(window uint32, plain bool) (ack, sack uint32) {
	bitmap := func(first uint32) (b uint32) {
		for i := range uint32(32) {
			if d.seen[first+i] {
				b |= 1 << i
			}
		}
		return b
	}
	if b := bitmap(d.next); b != 0 || plain {
		return d.next - 1, b
	}
	for i := range window {
		if d.seen[d.next+i] {
			return d.next + i, bitmap(d.next + i)
		}
	}
	return d.next - 1, 0
}

func TestReceiverIsItsTwin(t *testing.T) {
	for _, window := range []int{1, 16, 32, 33, 100, 256, 1024} {
		rng := rand.New(rand.NewPCG(1, uint64(window)))
		for _, start := range []uint32{0, 0xffffff00} {
			r, d := newReceiver(window), dumb{next: start, seen: map[uint32]bool{}}
			r.next, r.high = start, start
			nacks := 0
			for i := range 20000 {
				// Mostly near, sometimes anywhere in the window and beyond, on both sides.
				psn := d.next + uint32(rng.IntN(window+8)) - 4
				if i%3 == 0 {
					psn = d.next + uint32(rng.IntN(3))
				}
				want := fresh
				switch off := int32(psn - d.next); {
				case off < 0 || d.seen[psn]:
					want = duplicate
				case int(off) >= window:
					want = outside
				}
				if want == duplicate && int32(psn-d.next) >= int32(window) {
					t.Fatal("the twin has a psn above the window")
				}
				if got := r.judge(psn); got != want {
					t.Fatalf("window %d: psn %d with %d expected: %v, want %v", window, psn, d.next, got, want)
				}
				if want != fresh {
					continue
				}
				if inOrder := r.take(psn); inOrder != (psn == d.next) {
					t.Fatalf("in order: %v", inOrder)
				}
				d.take(psn)
				plain := i%2 == 1
				r.plain = plain
				ack, sack := r.acks()
				if r.plain == plain {
					t.Fatal("two of the same kind in a row")
				}
				if wantAck, wantSack := d.acks(uint32(window), plain); ack != wantAck || sack != wantSack {
					t.Fatalf("window %d, expected %d: ack %d sack %032b, want %d %032b", window, d.next, ack, sack, wantAck, wantSack)
				}
				if sack&1 != 0 {
					nacks++
				}
			}
			if window > 100 && nacks == 0 {
				t.Errorf("window %d: no NACK", window)
			}
		}
	}
}

// line is a sender and a receiver, and between them a channel of datagrams that a script controls.
type line struct {
	t            testing.TB
	s            sender
	r            receiver
	now          time.Duration
	timing       rdma.Timing
	paths        []*path
	flying       []uint32 // psns
	acks         []PDL
	got          map[uint32]bool // psns that the receiver has
	acknowledged map[uint32]bool // psns that the sender considers acknowledged
	base         uint32
}

func newLine(t testing.TB, window, receive int, base uint32) *line {
	l := &line{t: t, s: newSender(Parameters{Window: window, Reorder: 3}, congestion.Peers{}.Join(netip.Addr{}), new(uint64)), r: newReceiver(receive), base: base,
		timing: rdma.Timing{}.WithDefaults(), got: map[uint32]bool{}, acknowledged: map[uint32]bool{}}
	l.s.begin(base)
	l.r.next, l.r.high = base, base
	l.s.offered = uint32(receive)
	for i := range 3 {
		l.paths = append(l.paths, &path{Path: rdma.Path{Slot: i, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}, share: 1})
	}
	return l
}

// works implements acker.
func (l *line) works(*path) {}

// acked checks that the receiver has the packet. content.seqno holds the psn.
func (l *line) acked(c *content) {
	psn := uint32(c.seqno)
	if !l.got[psn] {
		l.t.Fatalf("psn %d is acknowledged and has not been received", psn)
	}
	if l.acknowledged[psn] {
		l.t.Fatalf("psn %d is acknowledged twice", psn)
	}
	l.acknowledged[psn] = true
}

func (l *line) went(psn uint32, r *sent, p int) {
	l.paths[p].count(1, r.times > 0)
	l.s.went(r, l.paths[p], l.now)
	l.flying = append(l.flying, psn)
}

func (l *line) push(p int, newAck bool) {
	if !l.s.room(newAck) {
		return
	}
	used := l.s.nxt - l.s.una
	if limit := min(l.s.window, l.s.offered); used >= max(limit, 1) || limit > 1 && used+1 >= limit && !newAck {
		l.t.Fatalf("room for one more with %d of %d unacknowledged, new ack: %v", used, limit, newAck)
	}
	psn, r := l.s.push(content{seqno: int(l.s.nxt)}, true, l.now)
	l.went(psn, r, p)
}

func (l *line) again(p int) {
	for psn := l.s.una; l.s.lost > 0 && psn != l.s.nxt; psn++ {
		if r := l.s.at(psn); r.lost {
			l.went(psn, r, p)
		}
	}
}

// deliver delivers a packet in flight to the receiver, and queues an acknowledgement.
func (l *line) deliver(i int, keep bool) {
	if len(l.flying) == 0 {
		return
	}
	i %= len(l.flying)
	psn := l.flying[i]
	if !keep {
		l.flying = append(l.flying[:i], l.flying[i+1:]...)
	}
	switch l.r.judge(psn) {
	case fresh:
		if l.got[psn] {
			l.t.Fatalf("psn %d is fresh for the second time", psn)
		}
		l.got[psn] = true
		l.r.take(psn)
	case outside:
		l.t.Fatalf("psn %d of a sender that obeys is above the window", psn)
	}
	h := PDL{RWin: uint16(l.r.window - 1)}
	h.AckPSN, h.SACK = l.r.acks()
	l.acks = append(l.acks, h)
}

func (l *line) ack(i int, keep bool) {
	if len(l.acks) == 0 {
		return
	}
	i %= len(l.acks)
	h := l.acks[i]
	if !keep {
		l.acks = append(l.acks[:i], l.acks[i+1:]...)
	}
	if !l.s.ack(&h, l.now, l) {
		l.t.Fatalf("%+v is not believed; window %d-%d", h, l.s.una, l.s.nxt)
	}
}

// finish delivers reliably: all packets must be acknowledged, once.
func (l *line) finish() {
	for range 10 * (len(l.s.ring) + len(l.flying) + 10) {
		for len(l.flying) > 0 {
			l.deliver(0, false)
		}
		for len(l.acks) > 0 {
			l.ack(0, false)
		}
		if l.s.una == l.s.nxt {
			break
		}
		d := l.s.deadline(&l.timing)
		if d == 0 {
			l.t.Fatalf("%d packets are not acknowledged, and no timer runs", l.s.nxt-l.s.una)
		}
		l.now = max(l.now, d)
		l.s.expire(8, l.now)
		l.again(0)
	}
	if l.s.una != l.s.nxt || uint32(len(l.acknowledged)) != l.s.nxt-l.base || l.s.lost != 0 {
		l.t.Fatalf("%d of %d packets were acknowledged, %d count as lost", len(l.acknowledged), l.s.nxt-l.base, l.s.lost)
	}
}

func (l *line) script(b []byte) {
	for len(b) >= 2 {
		act, arg := b[0], int(b[1])
		b = b[2:]
		l.now += time.Duration(arg) * time.Microsecond
		switch act % 9 {
		case 0, 1:
			for range arg%16 + 1 {
				l.push(arg%3, act&0x10 != 0)
			}
		case 2:
			for range arg%16 + 1 {
				l.deliver(0, false)
			}
		case 3:
			l.deliver(arg, act&0x10 != 0)
		case 4:
			if len(l.flying) > 0 {
				i := arg % len(l.flying)
				l.flying = append(l.flying[:i], l.flying[i+1:]...)
			}
		case 5:
			l.ack(arg, act&0x10 != 0)
		case 6:
			for range arg%16 + 1 {
				l.ack(0, false)
			}
		case 7:
			l.again(arg % 3)
		case 8:
			switch arg % 4 {
			case 0:
				l.paths[arg/4%3].gone = true
				l.s.strand(func(p *path) bool { return p.living() })
				l.paths[arg/4%3] = &path{Path: rdma.Path{Slot: arg, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}, share: 1}
			case 1:
				l.s.expire(8, l.now)
			case 2:
				l.acks = nil
			}
		}
	}
	l.finish()
}

// FuzzPDL fuzzes the channel between a sender and a receiver: the sender never considers a missing packet as arrived,
// no packet is delivered twice, windows hold, and in the end all packets are acknowledged.
func FuzzPDL(f *testing.F) {
	f.Add([]byte{0, 15, 2, 15, 6, 15}, uint16(32), uint16(32), uint32(0))
	f.Add([]byte{0, 15, 4, 0, 2, 15, 6, 15, 7, 0, 3, 200, 5, 1}, uint16(256), uint16(1024), uint32(0xfffffff0))
	rng := rand.New(rand.NewPCG(3, 3))
	for range 20 {
		b := make([]byte, 400)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b, uint16(rng.IntN(1024)), uint16(rng.IntN(1024)), rng.Uint32())
	}
	f.Fuzz(func(t *testing.T, b []byte, window, receive uint16, base uint32) {
		if len(b) > 4096 {
			return
		}
		newLine(t, 1+int(window)%1024, 1+int(receive)%1024, base).script(b)
	})
}

// TestSenderKeepsThePathsOrder checks that packets sent before others that have arrived on the same path are lost
// unless they arrive within the time of reordering, and that packets on another path are not.
func TestSenderKeepsThePathsOrder(t *testing.T) {
	l := newLine(t, 64, 64, 0)
	// await lets the time of reordering pass.
	await := func() {
		t.Helper()
		if at := l.s.detectAt; at-l.now-reordering > 1 || l.s.lost != 0 { // time 0 counts as 1
			t.Errorf("%d packets lost, to be judged at %v, now it is %v", l.s.lost, at, l.now)
		}
		l.now = l.s.detectAt
		l.s.detect(l.s.una, l.now)
	}
	for range 4 {
		l.push(0, false) // psns 0 to 3 on path 0
	}
	for range 4 {
		l.push(1, false) // 4 to 7 on path 1
	}
	l.flying = l.flying[1:] // 0 is lost
	for range 3 {
		l.deliver(0, false) // 1, 2, 3
	}
	l.ack(2, false)
	await()
	if !l.s.at(0).lost || l.s.lost != 1 {
		t.Errorf("psn 0 lost: %v, %d in all", l.s.at(0).lost, l.s.lost)
	}
	l.again(1)
	l.deliver(3, false) // 7 overtakes no packet of path 0, but 4, 5, 6 of its path
	l.ack(len(l.acks)-1, false)
	await()
	if l.s.at(4).lost != true || l.s.at(5).lost || l.s.lost != 1 {
		t.Errorf("psn 4 lost: %v, 5: %v; %d in all", l.s.at(4).lost, l.s.at(5).lost, l.s.lost)
	}
	l.again(2)
	l.finish()
}

// TestSenderForgivesReordering delivers a packet late, but within the time of reordering: it is not retransmitted, and
// the congestion window stays.
func TestSenderForgivesReordering(t *testing.T) {
	l := newLine(t, 64, 64, 0)
	for range 5 {
		l.push(0, false)
	}
	for range 4 {
		l.deliver(1, false) // 1 to 4
	}
	l.ack(len(l.acks)-1, false)
	if l.s.detectAt == 0 || l.s.lost != 0 {
		t.Errorf("%d packets lost, to be judged at %v", l.s.lost, l.s.detectAt)
	}
	l.now += reordering / 2
	l.deliver(0, false)
	l.ack(len(l.acks)-1, false)
	l.now += reordering
	l.s.detect(l.s.una, l.now)
	if l.s.lost != 0 || l.s.detectAt != 0 || *l.s.cuts != 0 {
		t.Errorf("%d packets lost, to be judged at %v, %d cuts", l.s.lost, l.s.detectAt, *l.s.cuts)
	}
	l.finish()
}

// TestSenderRefusesLies checks that acknowledgements of packets that were never sent change nothing.
func TestSenderRefusesLies(t *testing.T) {
	l := newLine(t, 64, 64, 100)
	for range 5 {
		l.push(0, false)
	}
	for _, h := range []PDL{{AckPSN: 105}, {AckPSN: 105, SACK: 1}, {AckPSN: 1 << 30, SACK: 0xffffffff}} {
		if before := l.s.una; l.s.ack(&h, 1, l) || l.s.una != before {
			t.Errorf("%+v is believed", h)
		}
	}
	if h := (PDL{AckPSN: 98, SACK: 0xfffffffe}); !l.s.ack(&h, 1, l) || len(l.acknowledged) > 0 {
		t.Errorf("an old acknowledgement counts: %v", l.acknowledged)
	}
	l.finish()
}

// TestWindows checks that the last place is reserved for a new acknowledgement, and that the peer's window applies if
// it is smaller.
func TestWindows(t *testing.T) {
	l := newLine(t, 16, 16, 0)
	for range 40 {
		l.push(0, false)
	}
	if n := l.s.nxt - l.s.una; n != 15 {
		t.Errorf("%d packets in a window of 16, want 15", n)
	}
	l.push(0, true)
	l.push(0, true)
	if n := l.s.nxt - l.s.una; n != 16 {
		t.Errorf("%d packets with acknowledgements in a window of 16", n)
	}
	for range 16 {
		l.deliver(0, false)
	}
	l.r.window = 4
	l.acks = []PDL{{AckPSN: 15, RWin: 3}}
	l.ack(0, false)
	for range 40 {
		l.push(0, true)
	}
	if n := l.s.nxt - l.s.una; n != 4 {
		t.Errorf("%d packets in the peer's window of 4", n)
	}
}

// TestPeerShrinksItsWindow checks that packets without a request for acknowledgement start no timer, until they fill a
// smaller window of the peer. Time counts only from then on.
func TestPeerShrinksItsWindow(t *testing.T) {
	l := newLine(t, 64, 64, 0)
	for range 4 {
		l.s.push(content{seqno: int(l.s.nxt)}, false, l.now)
	}
	if d := l.s.deadline(&l.timing); d != 0 {
		t.Errorf("a timer runs, to %v", d)
	}
	l.now = time.Hour
	l.s.ack(&PDL{AckPSN: ^uint32(0), RWin: 3}, l.now, l)
	if d := l.s.deadline(&l.timing); d <= l.now || l.s.progress != l.now {
		t.Errorf("at %v: deadline %v, counted from %v", l.now, d, l.s.progress)
	}
}

// TestPathsDealByShare checks that over time each path carries its share of bytes, within a run.
func TestPathsDealByShare(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	var s paths
	for round := range 50 {
		var to []rdma.Path
		var total uint64
		for i := range 1 + rng.IntN(8) {
			p := rdma.Path{Slot: i, Port: uint16(50000 + i), Share: uint32(rng.IntN(5)), Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}
			if rng.IntN(4) == 0 {
				p.Share = rng.Uint32()
			}
			total += uint64(p.Share)
			to = append(to, p)
		}
		s.set(to)
		sum, largest := 0, 0
		for range 20000 {
			n := 64 + rng.IntN(1000)
			p := s.next(n, nil, 0)
			p.count(n, false)
			sum += n
			largest = max(largest, n)
		}
		for i := range to {
			want := float64(sum) * float64(to[i].Share) / float64(max(total, 1))
			if total == 0 {
				want = float64(sum) / float64(len(to))
			}
			if got := float64(to[i].Sent.Load()); got < want-float64(run*largest*len(to)) || got > want+float64(run*largest*len(to)) {
				t.Errorf("round %d: path %d of %+v carried %.0f bytes, want %.0f", round, i, to, got, want)
			}
		}
	}
}

// TestPathsSet checks which paths are live, and when packets in flight must move.
func TestPathsSet(t *testing.T) {
	path := func(slot int, share uint32, lent bool) rdma.Path {
		return rdma.Path{Slot: slot, Port: uint16(50000 + slot), Share: share, Lent: lent, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}
	}
	var s paths
	for _, x := range []struct {
		to   []rdma.Path
		died bool
		live []bool
	}{
		{[]rdma.Path{path(0, 1, false), path(1, 2, false)}, false, []bool{true, true}},
		{[]rdma.Path{path(0, 3, false), path(1, 2, false)}, false, []bool{true, true}},
		{[]rdma.Path{path(0, 0, false), path(1, 2, false)}, true, []bool{false, true}},
		{[]rdma.Path{path(1, 2, false)}, false, []bool{true}},
		{[]rdma.Path{path(2, 1, false)}, true, []bool{true}},
		{[]rdma.Path{path(2, 0, false), path(3, 0, false)}, false, []bool{true, true}},
		{[]rdma.Path{path(2, 0, false), path(3, 0, true)}, true, []bool{false, true}},
	} {
		if died := s.set(x.to); died != x.died {
			t.Errorf("%+v: died: %v", x.to, died)
		}
		for i, p := range s.all {
			if p.living() != x.live[i] {
				t.Errorf("%+v: path %d lives: %v", x.to, i, p.living())
			}
			p.count(1, false)
		}
	}
}

// TestSuspectedLoss checks that a packet that acknowledgements show missing, on a path that has delivered nothing
// since, reduces the congestion window only once the path delivers a later packet, and not if the path was stalled
// meanwhile.
func TestSuspectedLoss(t *testing.T) {
	for _, stalled := range []bool{false, true} {
		l := newLine(t, 64, 64, 0)
		window := l.s.flight.Size()
		arrives := func(p int) { // a new packet by a path, a millisecond later its acknowledgement
			t.Helper()
			l.push(p, true)
			l.deliver(len(l.flying)-1, false)
			l.now += time.Millisecond
			l.ack(0, false)
		}
		l.push(0, true) // does not arrive
		arrives(1)
		l.now += time.Second
		arrives(1)
		if l.s.lost != 1 || l.s.flight.Size() != window {
			t.Fatalf("%d packets lost, a window of %d packets, want 1 and %d", l.s.lost, l.s.flight.Size(), window)
		}
		l.paths[0].stalled = stalled
		arrives(0)
		want := window / 2
		if stalled {
			want = window
		}
		if got := l.s.flight.Size(); got != want {
			t.Errorf("stalled %v: a window of %d packets, want %d", stalled, got, want)
		}
	}
}
