package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/wecmp"
)

const even = wecmp.Parts / 4

// fourPlanes returns one slot per plane, with equal shares.
func fourPlanes(shares ...uint32) []Slot {
	if shares == nil {
		shares = []uint32{even, even, even, even}
	}
	out := make([]Slot, len(shares))
	for i, share := range shares {
		out[i] = Slot{Slot: i, Plane: fmt.Sprintf("plane%d", i+1), Port: uint16(50000 + i), Share: share}
	}
	return out
}

// pairOf connects two devices.
type pairOf struct {
	*loops
	a, b      *Device
	set       [2]*Set
	cq        [2]*CQ
	mr        [2]*MR
	completed [2][]Completion
}

var ordered = Limits{MaxOp: 1 << 20, Ordered: true}

func connectPair(t *testing.T, seed uint64, cfg SetConfig, slots []Slot, limits Limits, more ...func(*loops) Transport) *pairOf {
	t.Helper()
	l := newLoops(t, seed)
	p := &pairOf{loops: l}
	var transports [2][]Transport
	for _, m := range more {
		transports[0], transports[1] = append(transports[0], m(l)), append(transports[1], m(l))
	}
	p.a, p.b = l.open("10.255.0.1", limits, transports[0]...), l.open("10.255.0.2", limits, transports[1]...)
	var cfgs [2]SetConfig
	for i, d := range []*Device{p.a, p.b} {
		pd := d.AllocPD()
		var err error
		if p.mr[i], err = pd.Register(make([]byte, 1<<20), LocalWrite|RemoteWrite|RemoteRead|RemoteAtomic); err != nil {
			t.Fatal(err)
		}
		p.cq[i] = d.CreateCQ()
		cfgs[i] = cfg
		cfgs[i].PD, cfgs[i].SendCQ, cfgs[i].RecvCQ = pd, p.cq[i], p.cq[i]
	}
	a, offer, err := p.a.Offer(p.b.Address(), cfgs[0], slots)
	if err != nil {
		t.Fatal(err)
	}
	b, answer, err := p.b.Answer(offer, cfgs[1], slots)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Finish(answer); err != nil {
		t.Fatal(err)
	}
	p.set = [2]*Set{a, b}
	p.stuck = func() { p.dump(a, b) }
	return p
}

// poll appends completions to p.completed.
func (p *pairOf) poll() {
	var buf [16]Completion
	for i := range p.cq {
		for n := p.cq[i].Poll(buf[:]); n > 0; n = p.cq[i].Poll(buf[:]) {
			p.completed[i] = append(p.completed[i], buf[:n]...)
		}
	}
}

// until runs until the ends have a and b completions.
func (p *pairOf) until(a, b int) {
	p.t.Helper()
	p.run(func() bool {
		p.poll()
		return len(p.completed[0]) >= a && len(p.completed[1]) >= b
	})
}

func (p *pairOf) post(end int, wrs ...SendWR) {
	p.t.Helper()
	if n, err := p.set[end].PostSend(wrs...); err != nil {
		p.t.Fatalf("%d posted: %v", n, err)
	}
}

func (p *pairOf) remote(end int, offset uint64) (uint64, uint32) {
	m := p.mr[1-end]
	return m.Address() + offset, m.Key()
}

// TestOneOfEach checks that every operation has its effect and completes once, in both directions.
func TestOneOfEach(t *testing.T) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		t.Run(ordering.String(), func(t *testing.T) {
			p := connectPair(t, 1, SetConfig{Ordering: ordering, SegmentSize: 4096}, fourPlanes(), ordered)
			for end := range 2 {
				p.completed = [2][]Completion{}
				mine, theirs := p.mr[end].Bytes(), p.mr[1-end].Bytes()
				for i := range mine[:200_000] {
					mine[i], theirs[i] = byte(i*7+end), 0
				}
				at, key := p.remote(end, 100_000)
				word, _ := p.remote(end, (8-at%8)%8+300_000)
				word &^= 7
				for i := range 3 {
					if _, err := p.set[1-end].PostRecv(RecvWR{ID: uint64(100 + i), Local: SGE{p.mr[1-end], 500_000 + i*50_000, 50_000}}); err != nil {
						t.Fatal(err)
					}
				}
				p.post(end,
					SendWR{ID: 1, Opcode: Write, Local: SGE{p.mr[end], 0, 70_000}, RemoteAddress: at, RemoteKey: key},
					SendWR{ID: 2, Opcode: Send, Local: SGE{p.mr[end], 10, 30_000}},
					SendWR{ID: 3, Opcode: WriteImmediate, Inline: []byte("noted"), RemoteAddress: at + 80_000, RemoteKey: key, Immediate: 42},
					SendWR{ID: 4, Opcode: SendImmediate, Inline: []byte{}, Immediate: 43},
					SendWR{ID: 5, Opcode: FetchAdd, Local: SGE{p.mr[end], 400_000, 8}, RemoteAddress: word, RemoteKey: key, Add: 9, Fence: true},
					SendWR{ID: 6, Opcode: CompareSwap, Local: SGE{p.mr[end], 400_008, 8}, RemoteAddress: word, RemoteKey: key, Compare: 9, Swap: 1, Fence: true},
					SendWR{ID: 7, Opcode: Read, Local: SGE{p.mr[end], 600_000, 70_000}, RemoteAddress: at, RemoteKey: key, Fence: true},
					SendWR{ID: 8, Opcode: Write, RemoteAddress: at, RemoteKey: key, Silent: true},
				)
				want := [2]int{7, 3}
				p.until(want[end], want[1-end])
				if !bytes.Equal(theirs[100_000:170_000], mine[:70_000]) || !bytes.Equal(mine[600_000:670_000], mine[:70_000]) {
					t.Error("WRITE or READ went wrong")
				}
				if !bytes.Equal(theirs[500_000:530_000], mine[10:30_010]) || string(theirs[180_000:180_005]) != "noted" {
					t.Error("SEND or WRITE with immediate went wrong")
				}
				if was := [2]uint64{Uint64(mine[400_000:]), Uint64(mine[400_008:])}; was != [2]uint64{0, 9} {
					t.Errorf("atomics found %v", was)
				}
				var got []string
				for _, c := range append(slices.Clone(p.completed[end]), p.completed[1-end]...) {
					got = append(got, fmt.Sprint(c.ID, c.Opcode, c.Bytes, c.HasImmediate, c.Immediate, c.Err))
				}
				exp := []string{
					fmt.Sprint(1, Write, 70_000, false, 0, nil), fmt.Sprint(2, Send, 30_000, false, 0, nil), fmt.Sprint(3, WriteImmediate, 5, false, 0, nil), fmt.Sprint(4, SendImmediate, 0, false, 0, nil),
					fmt.Sprint(5, FetchAdd, 8, false, 0, nil), fmt.Sprint(6, CompareSwap, 8, false, 0, nil), fmt.Sprint(7, Read, 70_000, false, 0, nil),
					fmt.Sprint(100, Recv, 30_000, false, 0, nil), fmt.Sprint(101, RecvWrite, 5, true, 42, nil), fmt.Sprint(102, Recv, 0, true, 43, nil)}
				if !slices.Equal(got, exp) {
					t.Errorf("completions\n%v\nwant\n%v", got, exp)
				}
			}
		})
	}
}

// TestSharesAreExact checks that the bytes on each plane match the shares, also after the shares change.
func TestSharesAreExact(t *testing.T) {
	p := connectPair(t, 2, SetConfig{SegmentSize: 1024, SendDepth: 64}, fourPlanes(), ordered)
	at, key := p.remote(0, 0)
	shares := [][]uint32{nil, {0, 4e8, 4e8, 2e8}, {285714286, 285714286, 142857142, 285714286}, nil}
	posted := 0
	for _, s := range shares {
		before := p.set[0].Slots()
		if err := p.set[0].SetSlots(fourPlanes(s...)); err != nil {
			t.Fatal(err)
		}
		for range 300 {
			n := 1 + p.r.IntN(9000)
			p.post(0, SendWR{Opcode: Write, Local: SGE{p.mr[0], 0, n}, RemoteAddress: at, RemoteKey: key})
			posted++
			p.until(posted, 0)
		}
		for i, is := range p.set[0].Slots() {
			sent, due := is.Sent-before[i].Sent, is.Due-before[i].Due
			if d := int64(sent) - int64(due); d > 1025 || d < -3*1024 {
				t.Errorf("shares %v: slot %d sent %d, due %d", s, i, sent, due)
			}
			if is.Share == 0 && sent != 0 {
				t.Errorf("slot %d is parked and sent %d", i, sent)
			}
		}
	}
}

// TestFell checks which slots are reported as those of a failed plane: not the others, neither when their shares rise
// nor when they return to what they were.
func TestFell(t *testing.T) {
	p := connectPair(t, 2, SetConfig{SegmentSize: 1024, SendDepth: 64}, fourPlanes(), ordered)
	third := uint32(wecmp.Parts / 3)
	for _, test := range []struct {
		shares []uint32
		fell   [4]bool
	}{
		{nil, [4]bool{}},
		{[]uint32{third, third + 1, 0, third}, [4]bool{2: true}},                                // a plane is lost
		{nil, [4]bool{2: true}},                                                                 // and returns
		{[]uint32{285714286, 142857142, 285714286, 285714286}, [4]bool{1: true, 2: true}},       // half of another one
		{[]uint32{0, 0, 0, 0}, [4]bool{1: true, 2: true}},                                       // nothing is sent
		{[]uint32{250000000, 250000001, 249999999, 250000000}, [4]bool{1: true, 2: true}},       // no shares before
		{[]uint32{249999999, 250000000, 250000001, 250000000}, [4]bool{1: true, 2: true}},       // rounded
		{[]uint32{10000000, 330000000, 330000000, 330000000}, [4]bool{true, true, true, false}}, // slow
	} {
		if err := p.set[0].SetSlots(fourPlanes(test.shares...)); err != nil {
			t.Fatal(err)
		}
		for i, s := range p.set[0].Slots() {
			if s.Fell != test.fell[i] {
				t.Errorf("shares %v: slot %d: fell %v", test.shares, i, s.Fell)
			}
		}
	}
}

// TestFellWithGreatShares checks shares whose products exceed 64 bits.
func TestFellWithGreatShares(t *testing.T) {
	for _, test := range []struct {
		before, after []uint32
		fell          bool // slot 0
	}{
		{[]uint32{1e9, 0, 0, 0}, []uint32{1e9, 0, 0, 0}, false},
		{[]uint32{430500000, 430500000, 139000000, 0}, []uint32{430500000, 430500000, 139000000, 0}, false},
		{[]uint32{1e9, 0, 0, 0}, []uint32{5e8, 5e8, 0, 0}, false},
		{[]uint32{5e8, 5e8, 0, 0}, []uint32{495000000, 505000000, 0, 0}, true},
		{[]uint32{5e8, 5e8, 0, 0}, []uint32{499000000, 501000000, 0, 0}, false},
		{[]uint32{5e8, 5e8, 0, 0}, []uint32{0, 1e9, 0, 0}, true},
	} {
		p := connectPair(t, 2, SetConfig{SegmentSize: 1024, SendDepth: 64}, fourPlanes(test.before...), ordered)
		if err := p.set[0].SetSlots(fourPlanes(test.after...)); err != nil {
			t.Fatal(err)
		}
		if s := p.set[0].Slots()[0]; s.Fell != test.fell {
			t.Errorf("%v to %v: fell %v", test.before, test.after, s.Fell)
		}
	}
}

// TestPlaneDies checks that operations in flight on a failed plane continue on live slots, and later return to the
// plane.
func TestPlaneDies(t *testing.T) {
	p := connectPair(t, 3, SetConfig{SegmentSize: 1024}, fourPlanes(), ordered)
	at, key := p.remote(0, 0)
	for i := range 100 {
		p.post(0, SendWR{ID: uint64(i), Opcode: Write, Local: SGE{p.mr[0], 0, 5000}, RemoteAddress: at, RemoteKey: key})
	}
	p.until(10, 0)
	p.down["plane2"] = true
	third := uint32(wecmp.Parts / 3)
	if err := p.set[0].SetSlots(fourPlanes(third, 0, third, third+1)); err != nil {
		t.Fatal(err)
	}
	p.until(60, 0)
	p.down["plane2"] = false
	if err := p.set[0].SetSlots(fourPlanes()); err != nil {
		t.Fatal(err)
	}
	p.until(100, 0)
	for i, c := range p.completed[0] {
		if c.ID != uint64(i) || c.Err != nil {
			t.Fatalf("completion %d is of %d: %v", i, c.ID, c.Err)
		}
	}
}

// TestNothingLives checks that work waits while no slot is live, and continues when a slot is.
func TestNothingLives(t *testing.T) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Strong} {
		p := connectPair(t, 4, SetConfig{SegmentSize: 1024, Ordering: ordering}, fourPlanes(), ordered)
		p.run(func() bool { return len(p.events) == 0 }) // the ends have connected
		at, key := p.remote(0, 0)
		if err := p.set[0].SetSlots(fourPlanes(0, 0, 0, 0)); err != nil {
			t.Fatal(err)
		}
		p.post(0, SendWR{ID: 1, Opcode: WriteImmediate, Local: SGE{p.mr[0], 0, 5000}, RemoteAddress: at, RemoteKey: key})
		if _, err := p.set[1].PostRecv(RecvWR{ID: 2}); err != nil {
			t.Fatal(err)
		}
		for len(p.events) > 0 { // a credit is in flight
			p.step()
		}
		if p.poll(); len(p.completed[0])+len(p.completed[1]) > 0 {
			t.Fatalf("%v: something goes where nothing lives", ordering)
		}
		if err := p.set[0].SetSlots(fourPlanes(0, 0, 1e9, 0)); err != nil {
			t.Fatal(err)
		}
		p.until(1, 1)
	}
}

// TestSlotMovesToAnotherTransport checks that a moved slot is parked, that the other slots carry all traffic by their
// shares, and that the slot resumes after its return.
func TestSlotMovesToAnotherTransport(t *testing.T) {
	other := func(l *loops) Transport { return &loop{net: l, name: "other", limits: ordered} }
	slots := fourPlanes()
	slots[3].Plane = "shared"
	p := connectPair(t, 16, SetConfig{SegmentSize: 1024}, slots, ordered, other)
	at, key := p.remote(0, 0)
	done := 0
	write := func() (sent [4]uint64) {
		before := p.set[0].Slots()
		for range 300 {
			p.post(0, SendWR{Opcode: Write, Local: SGE{p.mr[0], 0, 1024}, RemoteAddress: at, RemoteKey: key})
		}
		done += 300
		p.until(done, 0)
		for i, s := range p.set[0].Slots() {
			sent[i] = s.Sent - before[i].Sent
		}
		return sent
	}
	give := func(slots []Slot) {
		t.Helper()
		if err := p.set[0].SetSlots(slots); err != nil {
			t.Fatal(err)
		}
	}
	moved := fourPlanes() // slot 3 to plane 4, and slot 0 to shared memory
	moved[0].Plane = "shared"
	give(moved)
	if got, want := write(), [4]uint64{0, 150 << 10, 150 << 10, 0}; got != want {
		t.Errorf("while two slots are elsewhere %v bytes went by each, want %v", got, want)
	}
	if s := p.set[0].Slots(); s[0].Plane != "plane1" || s[0].Share != 0 || s[3].Plane != "shared" || s[3].Share != 0 {
		t.Errorf("slots that are elsewhere: %+v and %+v", s[0].Slot, s[3].Slot)
	}
	give(slots)
	if got, want := write(), [4]uint64{75 << 10, 75 << 10, 75 << 10, 75 << 10}; got != want {
		t.Errorf("after their return %v bytes went by each, want %v", got, want)
	}
	for _, c := range p.completed[0] {
		if c.Err != nil {
			t.Fatal(c.Err)
		}
	}
}

// TestReturnedOperations checks that operations that a shared-memory channel returns go over Ethernet planes, once and
// in order.
func TestReturnedOperations(t *testing.T) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Strong} {
		other := func(l *loops) Transport { return &loop{net: l, name: "other", limits: ordered, returns: true} }
		slots := fourPlanes()
		slots[1].Plane = "shared"
		p := connectPair(t, 5, SetConfig{SegmentSize: 1024, Granule: 512, Ordering: ordering}, slots, ordered, other)
		word, key := p.remote(0, 8)
		word &^= 7
		adds := 0
		for round := range 50 {
			for i := range 16 {
				p.post(0, SendWR{Opcode: FetchAdd, Local: SGE{p.mr[0], 8 * i, 8}, RemoteAddress: word + uint64(i%8)*512, RemoteKey: key, Add: 1})
				adds++
			}
			slots[1].Share = even * uint32(round%2)
			p.until(adds-p.r.IntN(12), 0)
			if err := p.set[0].SetSlots(slots); err != nil {
				t.Fatal(err)
			}
		}
		p.until(adds, 0)
		sum := uint64(0)
		for i := range 8 {
			sum += Uint64(p.mr[1].Bytes()[word-p.mr[1].Address()+uint64(i)*512:])
		}
		if sum != uint64(adds) {
			t.Errorf("%v: %d additions were posted, %d executed", ordering, adds, sum)
		}
	}
}

// TestCompletesInsidePost checks completions inside Post, as in shared memory.
func TestCompletesInsidePost(t *testing.T) {
	other := func(l *loops) Transport { return &loop{net: l, name: "other", limits: ordered, atOnce: true} }
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		slots := []Slot{{Slot: 0, Plane: "shared", Port: 50000, Share: 1e9}}
		p := connectPair(t, 6, SetConfig{SegmentSize: 1024, Ordering: ordering, SendDepth: 32}, slots, ordered, other)
		at, key := p.remote(0, 0)
		receives := 0
		for i := range 500 {
			op := []Opcode{Write, WriteImmediate, Send, Read}[p.r.IntN(4)]
			if op == WriteImmediate || op == Send {
				receives++
				if _, err := p.set[1].PostRecv(RecvWR{Local: SGE{p.mr[1], 0, 5000}}); err != nil {
					t.Fatal(err)
				}
			}
			p.post(0, SendWR{ID: uint64(i), Opcode: op, Local: SGE{p.mr[0], 0, p.r.IntN(5000)}, RemoteAddress: at, RemoteKey: key, Fence: p.r.IntN(5) == 0})
			p.until(i-20, 0)
		}
		p.until(500, receives)
		for i, c := range p.completed[0] {
			if c.ID != uint64(i) || c.Err != nil {
				t.Fatalf("%v: completion %d is of %d: %v", ordering, i, c.ID, c.Err)
			}
		}
	}
}

// TestImmediateWaitsForEveryPiece checks that a WRITE with immediate is announced only when all of it is in place, even
// if its last piece completes inside Post while an earlier one is in flight.
func TestImmediateWaitsForEveryPiece(t *testing.T) {
	other := func(l *loops) Transport { return &loop{net: l, name: "other", limits: ordered, atOnce: true} }
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Strong} {
		slots := fourPlanes(even, even, even)
		slots[2].Plane = "shared"
		p := connectPair(t, 14, SetConfig{SegmentSize: 1024, Granule: 1024, Ordering: ordering}, slots, ordered, other)
		base, key := p.remote(0, 4096)
		base &^= 4095
		p.run(func() bool { return len(p.events) == 0 }) // the ends have connected
		at := base
		if ordering == wecmp.Weak {
			p.post(0, SendWR{Opcode: Write, Inline: make([]byte, 1024), RemoteAddress: base, RemoteKey: key}) // uses up the first lane's turn
		} else {
			for p.set[0].SlotFor(at) != 1 || p.set[0].SlotFor(at+1024) != 2 {
				at += 1024
			}
			p.post(0, SendWR{Opcode: Write, Inline: []byte{}, RemoteAddress: base, RemoteKey: key})
		}
		p.until(1, 0)
		if _, err := p.set[1].PostRecv(RecvWR{ID: 9}); err != nil {
			t.Fatal(err)
		}
		p.run(func() bool { return len(p.events) == 0 }) // a credit is in flight
		p.down["plane2"] = true
		p.post(0, SendWR{ID: 1, Opcode: WriteImmediate, Inline: bytes.Repeat([]byte{7}, 2048), RemoteAddress: at, RemoteKey: key})
		until := p.now + 10*time.Millisecond
		p.run(func() bool { return p.now > until })
		if p.poll(); len(p.completed[0]) != 1 || len(p.completed[1]) != 0 {
			t.Errorf("%v: completed before all of it is in place: %v, %v", ordering, p.completed[0][1:], p.completed[1])
		}
		p.down["plane2"] = false
		p.until(2, 1)
		if got := p.mr[1].Bytes()[at-p.mr[1].Address():][:2048]; !bytes.Equal(got, bytes.Repeat([]byte{7}, 2048)) {
			t.Errorf("%v: not all of it is in place", ordering)
		}
	}
}

// TestReturnedImmediates checks a WRITE with immediate that a channel returns together with its announcement: the
// announcement arrives once the WRITE is in place, on whatever planes the two travel.
func TestReturnedImmediates(t *testing.T) {
	other := func(l *loops) Transport { return &loop{net: l, name: "other", limits: ordered, returns: true} }
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		slots := fourPlanes(0, even, 0)
		slots[1].Plane = "shared"
		p := connectPair(t, 15, SetConfig{Ordering: ordering}, slots, ordered, other)
		at, key := p.remote(0, 0)
		posted := 0
		for round := range 50 {
			slots[0].Share, slots[1].Share, slots[2].Share = 0, even, 0
			if err := p.set[0].SetSlots(slots); err != nil {
				t.Fatal(err)
			}
			if _, err := p.set[1].PostRecv(RecvWR{ID: uint64(round)}); err != nil {
				t.Fatal(err)
			}
			p.run(func() bool { return len(p.events) == 0 }) // a credit is in flight
			p.poll()
			p.post(0, SendWR{ID: uint64(round), Opcode: WriteImmediate, Inline: []byte{byte(round + 1)}, RemoteAddress: at, RemoteKey: key})
			posted++
			for range p.r.IntN(3) {
				p.step() // the peer executes neither, the WRITE, or both
			}
			slots[0].Share, slots[1].Share, slots[2].Share = even, 0, even
			if err := p.set[0].SetSlots(slots); err != nil {
				t.Fatal(err)
			}
			p.run(func() bool { p.poll(); return len(p.completed[1]) == posted })
			if got := p.mr[1].Bytes()[0]; got != byte(round+1) {
				t.Fatalf("%v: WRITE %d is announced, and memory has that of %d", ordering, round, int(got)-1)
			}
			p.until(posted, posted)
		}
	}
}

// TestStrongOrder checks through 1,000 changes of weights that transactions on one address are executed in the order of
// posting, and that only addresses that must move do so.
func TestStrongOrder(t *testing.T) {
	const addresses, granule = 200, 64
	p := connectPair(t, 7, SetConfig{SegmentSize: 1024, Granule: granule, Ordering: wecmp.Strong, SendDepth: 4096}, fourPlanes(), ordered)
	base, key := p.remote(0, 4096)
	base &^= 4095
	var chain [addresses]uint64 // the expected value of each word
	slots := fourPlanes()
	moved, posted := 0, 0
	for change := range 1000 {
		for range 40 {
			// Each compare and swap succeeds only if all earlier ones on its word have been executed.
			i := p.r.IntN(addresses)
			p.post(0, SendWR{ID: uint64(i), Opcode: CompareSwap, Local: SGE{p.mr[0], posted % 4096 * 8, 8}, RemoteAddress: base + uint64(i)*granule, RemoteKey: key, Compare: chain[i], Swap: chain[i] + 1})
			chain[i]++
			posted++
		}
		p.until(posted-p.r.IntN(2000), 0)
		var before, after [addresses]int
		shares := make([]uint32, 4)
		was := make([]uint32, 4)
		for i := range addresses {
			before[i] = p.set[0].SlotFor(base + uint64(i)*granule)
		}
		for i := range slots {
			was[i] = slots[i].Share
			slots[i].Share = uint32([]int{0, even, even, even / 2, even / 4}[p.r.IntN(5)])
		}
		slots[change%4].Share = even
		for i := range slots {
			shares[i] = slots[i].Share
		}
		if err := p.set[0].SetSlots(slots); err != nil {
			t.Fatal(err)
		}
		for i := range addresses {
			after[i] = p.set[0].SlotFor(base + uint64(i)*granule)
			if before[i] == after[i] {
				continue
			}
			moved++
			// The address had to move: the share of its old slot fell relative to that of the new one.
			if uint64(shares[before[i]])*uint64(was[after[i]]) >= uint64(was[before[i]])*uint64(shares[after[i]]) && was[after[i]] > 0 {
				t.Fatalf("change %d: address %d moved from slot %d (%d -> %d) to slot %d (%d -> %d)", change, i, before[i], was[before[i]], shares[before[i]], after[i], was[after[i]], shares[after[i]])
			}
		}
	}
	p.until(posted, 0)
	for i := range addresses {
		if got := Uint64(p.mr[1].Bytes()[base-p.mr[1].Address()+uint64(i)*granule:]); got != chain[i] {
			t.Errorf("word %d is %d after %d swaps in order", i, got, chain[i])
		}
	}
	if moved == 0 {
		t.Error("no address moved in 1,000 changes: this test has lost its subject")
	}
	t.Logf("%d transactions, %d moves of addresses", posted, moved)
}

// TestPartialOrderAndFences checks that equal keys keep their order and that a fence waits for all earlier work
// requests.
func TestPartialOrderAndFences(t *testing.T) {
	p := connectPair(t, 8, SetConfig{SegmentSize: 1024, Ordering: wecmp.Partial, SendDepth: 4096}, fourPlanes(), ordered)
	base, key := p.remote(0, 4096)
	base &^= 4095
	var chain [16]uint64
	posted := 0
	total := uint64(0)
	for range 300 {
		for range 10 {
			k := p.r.IntN(len(chain))
			p.post(0, SendWR{Opcode: CompareSwap, Local: SGE{p.mr[0], 8 * (posted % 4096), 8}, RemoteAddress: base + 8*uint64(k), RemoteKey: key, Compare: chain[k], Swap: chain[k] + 1, OrderKey: uint64(k)})
			chain[k]++
			posted++
			total++
		}
		// The fenced READ sees all of them executed, whatever their keys.
		p.post(0, SendWR{ID: total, Opcode: Read, Local: SGE{p.mr[0], 500_000, 8 * len(chain)}, RemoteAddress: base, RemoteKey: key, OrderKey: uint64(posted), Fence: true})
		posted++
		p.until(posted, 0)
		sum := uint64(0)
		for k := range chain {
			sum += Uint64(p.mr[0].Bytes()[500_000+8*k:])
		}
		if sum != total {
			t.Fatalf("a fenced READ saw %d of %d swaps", sum, total)
		}
		slots := fourPlanes()
		for i := range slots {
			slots[i].Share *= uint32(p.r.IntN(3))
		}
		slots[p.r.IntN(4)].Share = even
		if err := p.set[0].SetSlots(slots); err != nil {
			t.Fatal(err)
		}
	}
}

// TestErrorsEndTheSet checks that the failed work request reports its error, and that later ones and all receives are
// flushed.
func TestErrorsEndTheSet(t *testing.T) {
	p := connectPair(t, 9, SetConfig{}, fourPlanes(), ordered)
	at, key := p.remote(0, 0)
	if _, err := p.set[0].PostRecv(RecvWR{ID: 9}); err != nil {
		t.Fatal(err)
	}
	p.post(0, SendWR{ID: 1, Opcode: Write, Inline: []byte("fine"), RemoteAddress: at, RemoteKey: key},
		SendWR{ID: 2, Opcode: Write, Inline: []byte("wrong key"), RemoteAddress: at, RemoteKey: key ^ 1, Fence: true},
		SendWR{ID: 3, Opcode: Write, Inline: []byte("too late"), RemoteAddress: at, RemoteKey: key, Fence: true})
	p.until(4, 0)
	for i, want := range []error{nil, ErrRemoteAccess, ErrFlushed, ErrFlushed} {
		if c := p.completed[0][i]; !errors.Is(c.Err, want) || c.ID != []uint64{1, 2, 3, 9}[i] {
			t.Errorf("completion %d: %d %v, want %v", i, c.ID, c.Err, want)
		}
	}
	<-p.set[0].Done()
	if err := p.set[0].Err(); !errors.Is(err, ErrRemoteAccess) {
		t.Errorf("the set ended with %v", err)
	}
	if _, err := p.set[0].PostSend(SendWR{Opcode: Send}); !errors.Is(err, ErrRemoteAccess) {
		t.Errorf("posting on it: %v", err)
	}
	p.set[0].Close()
}

func TestReceiveTooShort(t *testing.T) {
	p := connectPair(t, 10, SetConfig{}, fourPlanes(), ordered)
	if _, err := p.set[1].PostRecv(RecvWR{ID: 9, Local: SGE{p.mr[1], 0, 3}}); err != nil {
		t.Fatal(err)
	}
	p.post(0, SendWR{ID: 1, Opcode: Send, Inline: []byte("four")})
	p.until(1, 1)
	if err := p.completed[0][0].Err; !errors.Is(err, ErrRemoteInvalid) {
		t.Errorf("sender: %v", err)
	}
	if err := p.completed[1][0].Err; !errors.Is(err, ErrRemoteInvalid) {
		t.Errorf("receiver: %v", err)
	}
}

// TestQueueBounds checks that a set accepts as many work requests as its depth until completions are polled.
func TestQueueBounds(t *testing.T) {
	p := connectPair(t, 11, SetConfig{SendDepth: 3, RecvDepth: 2}, fourPlanes(), ordered)
	at, key := p.remote(0, 0)
	w := SendWR{Opcode: Write, Inline: []byte("x"), RemoteAddress: at, RemoteKey: key}
	if n, err := p.set[0].PostSend(w, w, w, w); n != 3 || !errors.Is(err, ErrQueueFull) {
		t.Errorf("%d taken, %v", n, err)
	}
	if n, err := p.set[0].PostRecv(RecvWR{}, RecvWR{}, RecvWR{}); n != 2 || !errors.Is(err, ErrQueueFull) {
		t.Errorf("%d receives taken, %v", n, err)
	}
	p.run(func() bool { return len(p.events) == 0 })
	if _, err := p.set[0].PostSend(w); !errors.Is(err, ErrQueueFull) {
		t.Errorf("completions have not been polled: %v", err)
	}
	p.until(3, 0)
	p.post(0, w, w, w)
}

func TestFaultyWorkRequests(t *testing.T) {
	p := connectPair(t, 12, SetConfig{}, fourPlanes(), ordered)
	other, err := p.a.AllocPD().Register(make([]byte, 8), LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	readOnly, err := p.mr[0].pd.Register(make([]byte, 8), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []SendWR{
		{Opcode: Recv}, {Opcode: 99}, {Opcode: Write, Local: SGE{Length: 1}}, {Opcode: Write, Local: SGE{other, 0, 8}}, {Opcode: Write, Local: SGE{p.mr[0], 1 << 20, 1}},
		{Opcode: Write, Local: SGE{p.mr[0], -1, 1}}, {Opcode: Write, Local: SGE{p.mr[0], 1, 1 << 20}}, {Opcode: Read, Local: SGE{readOnly, 0, 8}}, {Opcode: Read, Inline: []byte("x")},
		{Opcode: FetchAdd, Local: SGE{p.mr[0], 0, 4}}, {Opcode: FetchAdd, Local: SGE{p.mr[0], 0, 8}, RemoteAddress: 4},
	} {
		if n, err := p.set[0].PostSend(w); n != 0 || err == nil {
			t.Errorf("%+v is taken", w)
		}
	}
	if n, err := p.set[0].PostRecv(RecvWR{Local: SGE{readOnly, 0, 8}}); n != 0 || err == nil {
		t.Error("a receive into memory without LocalWrite is taken")
	}
	at, key := p.remote(0, 0)
	p.post(0, SendWR{Opcode: Write, Inline: []byte("the set lives on"), RemoteAddress: at, RemoteKey: key})
	p.until(1, 0)
}

// TestEndsThatDoNotFit checks that incompatible ends are refused with the reason.
func TestEndsThatDoNotFit(t *testing.T) {
	l := newLoops(t, 13)
	a, b := l.open("10.255.0.1", ordered), l.open("10.255.0.2", ordered)
	cfg := func(d *Device) SetConfig {
		return SetConfig{PD: d.AllocPD(), SendCQ: d.CreateCQ(), RecvCQ: d.CreateCQ()}
	}
	_, offer, err := a.Offer(b.Address(), cfg(a), fourPlanes())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Answer(offer, cfg(b), fourPlanes()[:3]); err == nil {
		t.Error("3 slots answer 4")
	}
	offer.Channels[1].Transport = "pigeon"
	if _, _, err := b.Answer(offer, cfg(b), fourPlanes()); err == nil {
		t.Error("another transport answers")
	}
	for _, slots := range [][]Slot{nil, {{Slot: 1, Port: 50000}}, {{Slot: 0}}} {
		if _, _, err := a.Offer(b.Address(), cfg(a), slots); err == nil {
			t.Errorf("slots %v are taken", slots)
		}
	}
	if _, _, err := a.Offer(b.Address(), cfg(b), fourPlanes()); err == nil {
		t.Error("a PD of another device is taken")
	}
	if _, _, err := a.Offer(b.Address(), SetConfig{}, fourPlanes()); err == nil {
		t.Error("no PD is taken")
	}
}
