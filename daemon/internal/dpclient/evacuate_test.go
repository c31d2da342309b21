package dpclient

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

// peerPlane is a minimal data plane: it applies operations in the order sent, and answers when the test requests it.
type peerPlane struct {
	vectors      map[uint32]*farev1.Vector
	destinations map[Destination]uint32
	waiting      []operation
	contents     []*farev1.Vector // of waiting vector sets
}

func (p *peerPlane) send(b *book) bool {
	op, ok := popCommitted(b)
	if !ok {
		return false
	}
	b.send(&op, 0)
	p.waiting = append(p.waiting, op)
	content := (*farev1.Vector)(nil)
	if op.class == VectorSet {
		content = op.wire.content
	}
	p.contents = append(p.contents, content)
	if op.class == DestinationSet {
		p.contents[len(p.contents)-1] = &farev1.Vector{Id: op.wire.id}
	}
	return true
}

// answer applies the oldest operation, or refuses it.
func (p *peerPlane) answer(t *testing.T, b *book, refuse bool) {
	t.Helper()
	op, content := p.waiting[0], p.contents[0]
	p.waiting, p.contents = p.waiting[1:], p.contents[1:]
	ack := &farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}
	if refuse {
		ack.Level, ack.Code, ack.Message = farev1.AckLevel_ACK_LEVEL_REFUSED, uint32(codes.ResourceExhausted), "table full"
	} else {
		switch op.class {
		case VectorSet:
			p.vectors[op.wire.id] = content
		case DestinationSet:
			p.destinations[op.object.key()] = content.Id
		case DestinationDelete:
			delete(p.destinations, op.object.key())
		case VectorDelete:
			delete(p.vectors, op.wire.id)
		}
	}
	if err := b.acknowledge(ack); err != nil {
		t.Fatal(err)
	}
}

// over lists the destinations that leave over a device now, or may because of operations in flight: each operation may
// be applied or refused, so it tries all combinations.
func (p *peerPlane) over(device string) (out []string) {
	found := map[string]bool{}
	for carried := range uint(1) << len(p.waiting) {
		vectors, destinations := maps.Clone(p.vectors), maps.Clone(p.destinations)
		look := func() {
			for d, id := range destinations {
				if slices.ContainsFunc(vectors[id].GetMembers(), func(m *farev1.VectorMember) bool { return m.Device == device }) {
					found[d.String()] = true
				}
			}
		}
		look()
		for i, op := range p.waiting {
			if carried&(1<<i) == 0 {
				continue
			}
			switch op.class {
			case VectorSet:
				vectors[op.wire.id] = p.contents[i]
			case DestinationSet:
				destinations[op.object.key()] = p.contents[i].Id
			case DestinationDelete:
				delete(destinations, op.object.key())
			}
			look()
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// TestEvacuationAgainstThePackets checks that under random changes, refusals and late answers an evacuation is done
// exactly when no destination leaves over the device, now or because of operations in flight, whatever other objects
// are refused or change.
func TestEvacuationAgainstThePackets(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	ended, waited := 0, 0
	for seed := range uint64(gate.Count(t, gate.Models, 200, 400)) {
		random := rand.New(rand.NewPCG(seed, 7))
		b := connectedBook()
		p := &peerPlane{vectors: map[uint32]*farev1.Vector{}, destinations: map[Destination]uint32{}}
		drained := false
		content := func(id uint32) *farev1.Vector {
			g := vector(id, uint32(random.IntN(2)), 1+random.Uint32N(3), random.Uint32N(3), 1)
			if drained {
				g.Members = slices.DeleteFunc(g.Members, func(m *farev1.VectorMember) bool { return m.Device == device(0, 0) })
			}
			return g
		}
		wanted := map[uint32]bool{}
		step := func() {
			id := 1 + random.Uint32N(4)
			switch random.IntN(6) {
			case 0:
				b.setVector(content(id))
				wanted[id] = true
			case 1:
				if wanted[id] {
					b.setDestination(dst(random.IntN(6)), id)
				}
			case 2:
				if random.IntN(4) == 0 {
					b.deleteDestination(dst(random.IntN(6)))
				}
			case 3, 4:
				if len(p.waiting) < 7 {
					p.send(b)
				}
			default:
				if len(p.waiting) > 0 {
					p.answer(t, b, random.IntN(8) == 0)
				}
			}
		}
		for range 60 {
			step()
		}
		drained = true
		for id := range wanted {
			b.setVector(content(id))
		}
		e := &Evacuation{devices: map[string]bool{device(0, 0): true}}
		for range 60 {
			over := p.over(device(0, 0))
			n, _ := (&Evacuation{devices: e.devices}).waiting(b, 0)
			if n != len(over) {
				t.Fatalf("seed %d: waits for %d destinations, %v leave over the device", seed, n, over)
			}
			if done := e.done(b); done != (len(over) == 0) {
				t.Fatalf("seed %d: done %v, yet %v leave over the device", seed, done, over)
			}
			if len(over) == 0 {
				ended++
				break
			}
			waited++
			step()
		}
	}
	if ended < 50 || waited < 500 {
		t.Errorf("%d evacuations ended, after %d waits: the test does not try what it is for", ended, waited)
	}
}

// TestEvacuationOfASharedDevice checks that a device that keeps a smaller share is clear once the data plane has that
// share.
func TestEvacuationOfASharedDevice(t *testing.T) {
	b := connectedBook()
	b.setVector(vector(1, 2, 1))
	b.setDestination(dst(0), 1)
	carryOut(t, b)
	b.setVector(vector(1, 1, 1))
	e := &Evacuation{devices: map[string]bool{device(0, 0): true}}
	if e.done(b) {
		t.Error("done before the smaller part was sent")
	}
	carryOut(t, b)
	if !e.done(b) {
		t.Error("not done although the smaller part is acknowledged")
	}
}

// TestEvacuationSaysWhy checks that there is a reason for every destination that the evacuation waits for, and after a
// reconnect for the state read back.
func TestEvacuationSaysWhy(t *testing.T) {
	b := connectedBook()
	for id := range uint32(3) {
		b.setVector(vector(id+1, 1, id+1))
		b.setDestination(dst(int(id)), id+1)
	}
	carryOut(t, b)
	for id := range uint32(3) {
		b.setVector(vector(id+1, 0, id+1, 1))
	}
	e := &Evacuation{devices: map[string]bool{device(0, 0): true}}
	op, _ := popCommitted(b)
	b.send(&op, 0)
	if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_REFUSED, Code: uint32(codes.ResourceExhausted), Message: "table full"}); err != nil {
		t.Fatal(err)
	}
	n, reasons := e.waiting(b, 2)
	if n != 3 || len(reasons) != 2 || reasons[0] != "destination 10.200.0.0/32: vector 1 was refused: table full" || reasons[1] != "destination 10.200.0.1/32: not acknowledged yet" {
		t.Errorf("waits for %d: %q", n, reasons)
	}
	for op, ok := popCommitted(b); ok; op, ok = popCommitted(b) {
		b.send(&op, 0)
		if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}); err != nil {
			t.Fatal(err)
		}
	}
	if n, _ := e.waiting(b, 2); n != 1 || e.done(b) {
		t.Errorf("waits for %d, want the one of the refused vector", n)
	}
	// The data plane loses its state, and reconnects with that of an earlier run: all of it counts again.
	b.disconnect()
	if e.done(b) {
		t.Error("done without a connection")
	}
	b.places.held = true
	b.resync(State{Vectors: map[uint32]*farev1.Vector{9: vector(9, 1)}, Destinations: map[Destination]uint32{dst(7): 9, dst(1): 9}})
	n, reasons = e.waiting(b, 9)
	if n != 2 || !strings.Contains(reasons[1], "10.200.0.7/32: from an earlier run") {
		t.Errorf("after a reconnect it waits for %d: %q", n, reasons)
	}
	carryOut(t, b)
	b.release(true)
	carryOut(t, b)
	if !e.done(b) {
		t.Error("not done although everything is carried out")
	}
}
