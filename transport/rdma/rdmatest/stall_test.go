package rdmatest_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/wecmp"
)

const (
	stallPlanes  = 8
	stallMessage = 16 << 10
	stallCells   = 8192 / stallLess
	stallAfter   = stallCells / 10        // messages after the plane is back
	stallRate    = 40_000_000 / stallLess // bytes per second and plane
	stallTime    = 300 * time.Millisecond
	shortStall   = 20 * time.Millisecond // for all tested cores: far less than an outage
	stallLess    = 3 + effort/12         // 11 with the race detector
)

// stallBed is a pair of sets over eight planes of equal rate, one slot per plane. The first set writes messages to
// cells of the second's memory, each message once to one cell. The content of a cell proves that its message has been
// executed.
type stallBed struct {
	t       *testing.T
	net     *rdmatest.Net
	devices [2]*rdma.Device
	sets    [2]*rdma.Set
	cq      *rdma.CQ
	local   *rdma.MR
	remote  *rdma.MR
	next    int // cell of the next message
	done    int // completions
}

func newStallBed(t *testing.T, construct seeded, ordering wecmp.Ordering) *stallBed {
	t.Helper()
	config := rdmatest.NetConfig{Seed: 1}
	for range stallPlanes {
		config.Planes = append(config.Planes, rdmatest.Plane{Delay: 5 * time.Microsecond, Jitter: 2 * time.Microsecond, Rate: stallRate})
	}
	b := &stallBed{t: t, net: rdmatest.NewNet(config)}
	var slots []rdma.Slot
	for i := range stallPlanes {
		slots = append(slots, rdma.Slot{Slot: i, Plane: fmt.Sprint("p", i), Port: uint16(61440 + i), Share: wecmp.Parts / stallPlanes})
	}
	for i := range b.devices {
		at := netip.AddrFrom4([4]byte{10, 255, 0, byte(1 + i)})
		end := b.net.Transport(netip.AddrPortFrom(at, 0), construct(1))
		d, err := rdma.Open(rdma.Config{Address: at, Transports: []rdma.Transport{end}, Clock: b.net.Now})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(d.Close)
		b.devices[i] = d
	}
	e := rdmatest.Connect(t, b.devices, rdma.SetConfig{Ordering: ordering, SegmentSize: stallMessage, SendDepth: 2 * stallCells}, rdma.LocalWrite|rdma.RemoteWrite,
		[2]int{stallMessage + 8*stallCells, stallMessage * stallCells}, [2][]rdma.Slot{slots, slots})
	b.sets, b.cq, b.local, b.remote = e.Sets, e.CQs[0], e.Memory[0], e.Memory[1]
	rng := rand.New(rand.NewPCG(5, 5))
	for i := range b.local.Bytes() {
		b.local.Bytes()[i] = byte(rng.Uint32())
	}
	return b
}

// post writes the next n cells, each with a different key and address.
func (b *stallBed) post(n int) {
	b.t.Helper()
	for range n {
		wr := rdma.SendWR{ID: uint64(b.next), Opcode: rdma.Write, Local: rdma.SGE{MR: b.local, Offset: 8 * b.next, Length: stallMessage},
			RemoteAddress: b.remote.Address() + uint64(b.next)*stallMessage, RemoteKey: b.remote.Key(), OrderKey: uint64(b.next)}
		if _, err := b.sets[0].PostSend(wr); err != nil {
			b.t.Fatal(err)
		}
		b.next++
	}
}

// arrived returns the number of bytes of whole messages in the peer's memory.
func (b *stallBed) arrived() (n int) {
	for i := range b.next {
		if bytes.Equal(b.remote.Bytes()[i*stallMessage:][:stallMessage], b.local.Bytes()[8*i:][:stallMessage]) {
			n += stallMessage
		}
	}
	return n
}

func (b *stallBed) pass(d time.Duration) {
	b.t.Helper()
	b.net.Run(func() bool { return false }, b.net.Now()+d)
	if err := b.net.Err(); err != nil {
		b.t.Fatal(err)
	}
}

// finish runs until all posted work requests have completed, and checks that each completion is of the next one.
func (b *stallBed) finish() {
	b.t.Helper()
	batch := make([]rdma.Completion, 64)
	if !b.net.Run(func() bool {
		for n := b.cq.Poll(batch); n > 0; n = b.cq.Poll(batch) {
			for _, c := range batch[:n] {
				if c.Err != nil || c.ID != uint64(b.done) {
					b.t.Fatalf("completion %d is of message %d: %v", b.done, c.ID, c.Err)
				}
				b.done++
			}
		}
		return b.done == b.next
	}, b.net.Now()+10*time.Second) {
		b.t.Fatalf("%d of %d messages complete: %v", b.done, b.next, b.devices[0].Counters())
	}
	if got, want := b.arrived(), b.next*stallMessage; got != want {
		b.t.Fatalf("%d of %d bytes are in the peer's memory", got, want)
	}
}

// testStall runs sets over a plane that loses everything for 300 ms, without a change of weights. Messages on other
// slots continue at the rate of the remaining planes, and when the plane is back each slot has its share.
func testStall(t *testing.T, construct seeded) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		if ordering == wecmp.Strong && stallLess > 1 {
			continue // too few addresses for an even spread
		}
		t.Run(ordering.String(), func(t *testing.T) {
			during := func(hole bool) (*stallBed, int) {
				b := newStallBed(t, construct, ordering)
				b.post(stallCells - stallAfter)
				b.pass(30 * time.Millisecond)
				before := b.arrived()
				b.net.SetPlane(3, !hole)
				b.pass(stallTime)
				return b, b.arrived() - before
			}
			_, whole := during(false)
			b, got := during(true)
			if max := stallRate * stallPlanes * stallTime.Seconds(); float64(whole) < 0.8*max {
				t.Errorf("undisturbed %d bytes arrived in %v, the planes carry %.0f", whole, stallTime, max)
			}
			least := float64(whole) * 7 / 8 * 0.9
			t.Logf("%.3f of the undisturbed %d bytes", float64(got)/float64(whole), whole)
			if float64(got) < least {
				t.Errorf("%d bytes arrived in %v with one plane of %d dead, %d undisturbed: want %.0f", got, stallTime, stallPlanes, whole, least)
			}
			b.net.SetPlane(3, true)
			b.finish()
			before := b.sets[0].Slots()
			b.post(stallAfter)
			b.finish()
			for i, s := range b.sets[0].Slots() {
				sent, due := int(s.Sent-before[i].Sent), int(s.Due-before[i].Due)
				if ordering == wecmp.Weak && max(sent-due, due-sent) > 2*stallMessage {
					t.Errorf("slot %d sent %d bytes after the plane was back, due %d", i, sent, due)
				}
				if sent == 0 {
					t.Errorf("slot %d sent nothing after the plane was back", i)
				}
			}
		})
	}
}

// testBlindSets runs sets over planes that go down and come back unannounced, under every ordering, with loss: each
// work request is executed once, in the promised order.
func testBlindSets(t *testing.T, construct seeded, seeds int) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		stalls := uint64(0)
		for seed := range uint64(max(2, seeds/effort)) {
			o := rdmatest.SetOptions{Ordering: ordering}
			o.Seed, o.Ops, o.Window, o.MaxSize = seed, 2000, 48, 8<<10
			o.Rate, o.Blind, o.Flap, o.Outage, o.Notice, o.NotReady = 5e6, true, 20*time.Millisecond, 200*time.Millisecond, 5*time.Millisecond, 0.02
			if seed%2 == 1 {
				o.Loss, o.Duplicate, o.Reorder = 0.02, 0.01, 0.01
			}
			r := rdmatest.Sets(t, construct(seed), o)
			stalls += r.Stalls
			if r.Ops != uint64(o.Ops) || r.Flaps == 0 {
				t.Errorf("%v, seed %d: %d work requests, %d flaps", ordering, seed, r.Ops, r.Flaps)
			}
		}
		t.Logf("%v: %d stalls", ordering, stalls)
		if stalls < 10 {
			t.Errorf("%v: %d stalls in all: too few to show anything", ordering, stalls)
		}
	}
}

func TestRoCEBlindSets(t *testing.T) {
	testBlindSets(t, newRoCE, gate.Count(t, gate.Models, 3, 8))
}

func TestSUPERpBlindSets(t *testing.T) {
	testBlindSets(t, newSUPERp, gate.Count(t, gate.Models, 3, 8))
}

func TestRoCEStall(t *testing.T) {
	testStall(t, newRoCE)
}

func TestSUPERpStall(t *testing.T) {
	testStall(t, newSUPERp)
}
