package nupa

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/fared/fared/transport/rdma"
)

// TestModel compares random operations in order with memory that is an array: overlapping, sometimes parked, with
// receivers not ready.
func TestModel(t *testing.T) {
	var direct, revoked, notReady uint64
	for seed := range uint64(10) {
		rng := rand.New(rand.NewPCG(seed, 1))
		bed := newBed(t, 2, 64)
		a, b := bed.join(addressA), bed.join(addressB)
		ca, cb := connect(t, a, b)
		regions := [2][]byte{b.shared(8192), make([]byte, 8192)}
		model := [2][]byte{make([]byte, 8192), make([]byte, 8192)}
		b.register(0, regions[0], everything)
		b.register(1, regions[1], everything)
		sends := 0
		var waiting []*rdma.Op // in the order of posting; a set would post them on another channel
		want := map[*rdma.Op][]byte{}
		apply := func(op *rdma.Op) { // the model executes in the order of completion, which for an ordered channel is the order of posting
			at := op.Remote - addressOf(regions[op.Key])
			cell := model[op.Key][at:]
			switch op.Kind {
			case rdma.OpWrite:
				copy(cell, op.Local)
			case rdma.OpRead:
				want[op] = bytes.Clone(cell[:len(op.Local)])
			case rdma.OpFetchAdd:
				was := binary.NativeEndian.Uint64(cell)
				want[op] = binary.NativeEndian.AppendUint64(nil, was)
				binary.NativeEndian.PutUint64(cell, was+op.Swap)
			case rdma.OpSend:
				sends++
			}
			if w := want[op]; w != nil && !bytes.Equal(w, op.Local) {
				t.Errorf("seed %d: kind %d gave %x, want %x", seed, op.Kind, op.Local, w)
			}
		}
		seen, parked := 0, false
		const total = 2000
		for posted := 0; posted < total || len(waiting)+len(a.posted) > 0; {
			if len(waiting) == 0 && posted < total {
				n := rng.IntN(300)
				op := &rdma.Op{Kind: rdma.OpKind(rng.IntN(5)), Key: uint32(rng.IntN(2)), Swap: rng.Uint64()}
				op.Remote = addressOf(regions[op.Key]) + uint64(rng.IntN(900))*8
				if op.Kind == rdma.OpCompareSwap {
					op.Kind = rdma.OpWrite
				}
				if op.Kind == rdma.OpFetchAdd {
					n = 8
				}
				op.Local = pattern(n, byte(posted))
				waiting = append(waiting, op)
				posted++
			}
			for len(waiting) > 0 && a.tryPost(ca, waiting[0]) {
				waiting = waiting[1:]
			}
			switch rng.IntN(12) {
			case 0:
				a.Do(func() { ca.SetPaths([]rdma.Path{{}}) })
				parked = true
			case 1, 2, 3:
				if parked {
					a.Do(func() { ca.SetPaths(live()) })
					parked = false
				}
			case 4, 5:
				settle(a)
			case 6, 7, 8:
				settle(b)
			case 9:
				b.Do(func() { b.receives += rng.IntN(8); cb.Ready() })
			}
			waiting = append(a.returned, waiting...)
			a.returned = nil
			for ; seen < len(a.completed); seen++ {
				apply(a.completed[seen])
			}
			if len(a.failed)+len(b.failed) > 0 {
				t.Fatal(a.failed, b.failed)
			}
		}
		for k := range regions {
			if !bytes.Equal(regions[k], model[k]) {
				t.Errorf("seed %d: memory %d differs from the model", seed, k)
			}
		}
		if len(b.delivered) != sends || len(a.completed) != total {
			t.Errorf("seed %d: %d delivered of %d, %d completed", seed, len(b.delivered), sends, len(a.completed))
		}
		direct, revoked, notReady = direct+a.tr.count.direct, revoked+a.tr.count.revoked, notReady+b.tr.count.notReady
	}
	if direct == 0 || revoked == 0 || notReady == 0 {
		t.Errorf("%d executed by the initiator, %d revoked, %d not ready: something never happened", direct, revoked, notReady)
	}
}
