package nupa

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/rdma"
)

// ends returns the two ends of a ring.
func ends(t testing.TB, a *area) (*sender, *receiver) {
	t.Helper()
	a.endpoint(0).generation().Store(1)
	out, ok := a.acquire(a.endpoint(0))
	if !ok {
		t.Fatal("no ring")
	}
	return &out, &receiver{ring: a.ring(out.index), start: out.start, next: out.start}
}

// TestRingIsAQueue compares random posts, takes, put-backs, ends, reaps and revocations with a slice.
func TestRingIsAQueue(t *testing.T) {
	var sent atomic.Uint64
	text := pattern(MaxOp+256, 1)
	for seed := range uint64(gate.Count(t, gate.Models, 6, 20)) {
		rng := rand.New(rand.NewPCG(seed, 3))
		out, in := ends(t, newBed(t, 1, 4).area)
		type entry struct {
			op      *rdma.Op
			ended   bool
			revoked bool
		}
		var queue []entry // from the sender's oldest on
		at := 0           // the receiver's position in it
		tookOne, count := false, 0
		for range 20000 {
			switch rng.IntN(6) {
			case 0, 1:
				op := &rdma.Op{Kind: rdma.OpSend, Key: uint32(count), Head: text[:rng.IntN(33)], Local: text[count%256:][:rng.IntN(200)*rng.IntN(300)]}
				if out.post(op, &sent) {
					queue = append(queue, entry{op: op})
					count++
				} else if len(queue) == 0 {
					t.Fatal("an empty ring takes nothing")
				}
				if len(queue) > slotCount {
					t.Fatal("more operations than slots")
				}
			case 2, 3:
				if tookOne {
					if rng.IntN(4) == 0 {
						in.putBack()
					} else {
						in.end(executed, 0)
						queue[at].ended = true
						at++
					}
					tookOne = false
					continue
				}
				for at < len(queue) && queue[at].revoked {
					queue[at].ended = true
					at++
				}
				what, _ := in.take()
				tookOne = at < len(queue)
				if what == operation != tookOne || what == damage || what == closed {
					t.Fatalf("seed %d: found %d where the twin has %v", seed, what, tookOne)
				}
				if tookOne {
					op := queue[at].op
					if in.d.key != op.Key || !bytes.Equal(in.head(), op.Head) || !bytes.Equal(in.data(), op.Local) {
						t.Fatalf("seed %d: took %+v, want %+v", seed, in.d, op)
					}
				}
			case 4:
				e, status, _, ok, damaged := out.reap()
				if want := len(queue) > 0 && queue[0].ended; ok != want || damaged {
					t.Fatalf("seed %d: reaped %v, want %v, damaged %v", seed, ok, want, damaged)
				}
				if !ok {
					continue
				}
				if queue[0].revoked != (status == skipped) || !queue[0].revoked && e.op != queue[0].op {
					t.Fatal("reaped another")
				}
				queue = queue[1:]
				at--
			case 5:
				if rng.IntN(20) != 0 {
					continue
				}
				first := at
				if tookOne {
					first++
				}
				if got := out.revoke(); got > out.oldest+uint64(first) && got != out.next {
					t.Fatalf("revoked from %d, want %d", got-out.oldest, first)
				}
				for i := first; i < len(queue); i++ {
					queue[i].revoked = true
					out.entry(out.oldest + uint64(i)).op = nil
				}
			}
		}
		if count < 1000 {
			t.Errorf("seed %d: only %d operations", seed, count)
		}
	}
}

// TestRevokeRacesWithTake runs sender and receiver concurrently: every operation is executed once or returned once,
// never both, and the executed ones are a prefix of those posted between two revocations.
func TestRevokeRacesWithTake(t *testing.T) {
	out, in := ends(t, newBed(t, 1, 4).area)
	const rounds = 2000
	var (
		sent atomic.Uint64
		stop atomic.Bool
		took []uint64
		end  = make(chan struct{})
		rng  = rand.New(rand.NewPCG(1, 4))
	)
	go func() {
		defer close(end)
		rng := rand.New(rand.NewPCG(2, 4))
		for {
			what, _ := in.take()
			switch {
			case what == operation && rng.IntN(3) == 0:
				in.putBack()
				runtime.Gosched()
			case what == operation:
				took = append(took, binary.LittleEndian.Uint64(in.data()))
				in.end(executed, 0)
			case what != nothing:
				t.Errorf("found %d", what)
				return
			case stop.Load():
				return
			default:
				runtime.Gosched()
			}
		}
	}()
	var completed, returned []uint64
	next := uint64(0)
	for range rounds {
		for range rng.IntN(20) {
			data := binary.LittleEndian.AppendUint64(nil, next)
			for !out.post(&rdma.Op{Kind: rdma.OpSend, Local: data}, &sent) {
				runtime.Gosched()
				completed = reapAll(t, out, completed)
			}
			next++
		}
		if rng.IntN(2) == 0 {
			runtime.Gosched()
		}
		last := uint64(0)
		for seq := out.revoke(); seq < out.next; seq++ {
			if e := out.entry(seq); e.op != nil {
				n := binary.LittleEndian.Uint64(e.op.Local)
				if n < last {
					t.Fatal("returned out of order")
				}
				last = n
				returned = append(returned, n)
				e.op = nil
			}
		}
		completed = reapAll(t, out, completed)
	}
	for !out.idle() {
		runtime.Gosched()
		completed = reapAll(t, out, completed)
	}
	stop.Store(true)
	<-end
	fate := make([]int, next)
	for _, n := range completed {
		fate[n]++
	}
	for _, n := range returned {
		fate[n] += 2
	}
	for n, f := range fate {
		if f != 1 && f != 2 {
			t.Fatalf("operation %d: fate %d", n, f)
		}
	}
	if len(took) != len(completed) {
		t.Fatalf("%d executed, %d completed", len(took), len(completed))
	}
	for i := range took {
		if took[i] != completed[i] || i > 0 && took[i] <= took[i-1] {
			t.Fatalf("operation %d was executed, %d completed", took[i], completed[i])
		}
	}
	if len(completed) == 0 || len(returned) == 0 {
		t.Errorf("%d completed, %d returned: there was no race", len(completed), len(returned))
	}
	t.Logf("%d posted, %d executed, %d returned", next, len(completed), len(returned))
}

func reapAll(t *testing.T, out *sender, into []uint64) []uint64 {
	for {
		e, status, _, ok, damaged := out.reap()
		switch {
		case damaged:
			t.Fatal("damaged")
		case !ok:
			return into
		case status == executed:
			into = append(into, binary.LittleEndian.Uint64(e.op.Local))
		}
	}
}

// TestRingIsNotTakenForItsLastUse checks that a late receiver finds no operation in a ring that now belongs to another
// channel.
func TestRingIsNotTakenForItsLastUse(t *testing.T) {
	var sent atomic.Uint64
	bed := newBed(t, 1, 4)
	out, in := ends(t, bed.area)
	out.post(&rdma.Op{Kind: rdma.OpSend}, &sent)
	if what, _ := in.take(); what != operation {
		t.Fatal(what)
	}
	in.end(executed, 0)
	out.reap()
	if !out.release(bed) {
		t.Fatal("not released")
	}
	again, _ := ends(t, bed.area)
	for range slotCount {
		if !again.post(&rdma.Op{Kind: rdma.OpSend}, &sent) {
			t.Fatal("full")
		}
	}
	if what, _ := in.take(); what != closed {
		t.Errorf("found %d", what)
	}
	in.leave()
	if again.left().Load() == again.start {
		t.Error("the late one has left for its successor")
	}
}

// TestCancelInTheMiddle cancels a message during its reception: it is not delivered, and the ring is not reused before
// the receiver is done.
func TestCancelInTheMiddle(t *testing.T) {
	var sent atomic.Uint64
	bed := newBed(t, 1, 4)
	out, in := ends(t, bed.area)
	bed.area.endpoint(1).generation().Store(1)
	out.receiver().Store(receiverWord(1, 1))
	out.post(&rdma.Op{Kind: rdma.OpSend}, &sent)
	in.take()
	out.cancel()
	if in.commit() || in.putBack() {
		t.Error("goes on with what was canceled")
	}
	if out.release(bed) {
		t.Error("released while the receiver works on it")
	}
	in.end(skipped, 0)
	if !out.release(bed) {
		t.Error("not released after")
	}
}

// TestDeadSendersRingIsTakenOnceOrNotAtAll checks a sender that dies with a posted operation, after its receiver has
// seen that the ring is open: either the receiver cannot take the operation any longer, or the ring is not reused.
func TestDeadSendersRingIsTakenOnceOrNotAtAll(t *testing.T) {
	for _, late := range []bool{false, true} {
		var sent atomic.Uint64
		bed := newBed(t, 1, 4)
		out, in := ends(t, bed.area)
		bed.area.endpoint(1).generation().Store(1)
		out.receiver().Store(receiverWord(1, 1))
		out.post(&rdma.Op{Kind: rdma.OpSend}, &sent)
		took := !late && in.change(in.next, posted, taken)
		released := bed.area.ring(out.index).release(bed) // by the endpoint that cleans up
		took = took || in.change(in.next, posted, taken)
		if took == released {
			t.Errorf("late %v: taken %v, released %v", late, took, released)
		}
	}
}

// TestDescriptorsAreChecked checks descriptors that lead outside the ring and the heap, and invalid ones.
func TestDescriptorsAreChecked(t *testing.T) {
	var sent atomic.Uint64
	a := newBed(t, 2, 4).area
	ours := uint64(a.ring(0).staging())
	good := descriptor{kind: rdma.OpSend, headLength: 1, length: 100, where: inFile, offset: ours}
	for _, tc := range []struct {
		name   string
		change func(*descriptor)
		want   arrival
	}{
		{"good", func(*descriptor) {}, operation},
		{"heap", func(d *descriptor) { d.offset = uint64(a.heapAt) }, operation},
		{"end of the heap", func(d *descriptor) { d.offset = uint64(a.heapEnd()) - 100 }, operation},
		{"kind", func(d *descriptor) { d.kind = rdma.OpFetchAdd + 1 }, damage},
		{"head", func(d *descriptor) { d.headLength = rdma.MaxHead + 1 }, damage},
		{"head of a write", func(d *descriptor) { d.kind = rdma.OpWrite }, damage},
		{"length", func(d *descriptor) { d.length = MaxOp + 1 }, damage},
		{"where", func(d *descriptor) { d.where = 2 }, damage},
		{"beyond the heap", func(d *descriptor) { d.offset = uint64(a.heapEnd()) - 99 }, damage},
		{"offset that wraps", func(d *descriptor) { d.offset = 1<<64 - 50 }, damage},
		{"header of the file", func(d *descriptor) { d.offset = 0 }, damage},
		{"another ring", func(d *descriptor) { d.offset = uint64(a.ring(1).staging()) }, damage},
		{"read into the heap", func(d *descriptor) { d.kind, d.headLength, d.offset = rdma.OpRead, 0, uint64(a.heapAt) }, damage},
		{"read into the slot", func(d *descriptor) { d.kind, d.headLength, d.where, d.length = rdma.OpRead, 0, inPlace, 8 }, damage},
		{"too much in the slot", func(d *descriptor) { d.where = inPlace }, damage},
		{"nothing, somewhere", func(d *descriptor) { d.length = 0 }, damage},
		{"atomic of 4 bytes", func(d *descriptor) { d.kind, d.headLength, d.where, d.length = rdma.OpFetchAdd, 0, inPlace, 4 }, damage},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a.ring(0).sender().Store(0)
			out, in := ends(t, a)
			out.post(&rdma.Op{Kind: rdma.OpSend}, &sent)
			d := good
			tc.change(&d)
			d.put(a.mem[out.slot(out.oldest):], []byte{1})
			if what, _ := in.take(); what != tc.want {
				t.Errorf("found %d, want %d", what, tc.want)
			}
		})
	}
}
