package nupa

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

const everything = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead | rdma.RemoteAtomic

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7) + seed
	}
	return b
}

// TestOperations runs every kind of operation, with target and data of the initiator in the file and outside, and with
// lengths around each limit.
func TestOperations(t *testing.T) {
	for _, target := range []string{"shared", "private"} {
		for _, local := range []string{"shared", "private"} {
			for _, n := range []int{0, 1, 8, inPlaceSize, inPlaceSize + 1, 4096, MaxOp} {
				t.Run(fmt.Sprintf("%s to %s, %d bytes", local, target, n), func(t *testing.T) {
					bed := newBed(t, 2, 200)
					a, b := bed.join(addressA), bed.join(addressB)
					ca, _ := connect(t, a, b)
					memory := func(h *host, where string, n int) []byte {
						if where == "shared" {
							return h.shared(n)
						}
						return make([]byte, n)
					}
					region, src, dst := memory(b, target, 2*MaxOp), memory(a, local, n), memory(a, local, n)
					b.register(7, region, everything)
					copy(src, pattern(n, 1))
					at := addressOf(region) + 64
					b.receives = 1
					write := a.post(ca, &rdma.Op{Kind: rdma.OpWrite, Key: 7, Remote: at, Local: src})
					if direct := a.tr.count.direct == 1; direct != (target == "shared" && n > 0) {
						t.Errorf("executed by the initiator: %v", direct)
					}
					read := a.post(ca, &rdma.Op{Kind: rdma.OpRead, Key: 7, Remote: at, Local: dst})
					send := a.post(ca, &rdma.Op{Kind: rdma.OpSend, Head: []byte("head"), Local: src})
					settle(a, b)
					for _, op := range []*rdma.Op{write, read, send} {
						a.wants(op, nil)
					}
					if !bytes.Equal(region[64:64+n], src) || region[63] != 0 || region[64+n] != 0 {
						t.Error("what was written is not what is there")
					}
					if !bytes.Equal(dst, src) {
						t.Error("what was read is not what is there")
					}
					if len(b.delivered) != 1 || string(b.delivered[0]) != "head"+string(src) {
						t.Error("what was delivered is not what was sent")
					}
				})
			}
		}
	}
}

func TestAtomics(t *testing.T) {
	bed := newBed(t, 2, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, _ := connect(t, a, b)
	region := b.shared(64)
	b.register(7, region, everything)
	at := addressOf(region) + 8
	binary.NativeEndian.PutUint64(region[8:], 10)
	for _, step := range []struct {
		op         rdma.Op
		was, after uint64
	}{
		{rdma.Op{Kind: rdma.OpFetchAdd, Swap: 5}, 10, 15},
		{rdma.Op{Kind: rdma.OpCompareSwap, Compare: 15, Swap: 1}, 15, 1},
		{rdma.Op{Kind: rdma.OpCompareSwap, Compare: 15, Swap: 2}, 1, 1},
		{rdma.Op{Kind: rdma.OpFetchAdd, Swap: 1<<64 - 1}, 1, 0},
	} {
		step.op.Key, step.op.Remote, step.op.Local = 7, at, make([]byte, 8)
		op := a.post(ca, &step.op)
		settle(a, b)
		a.wants(op, nil)
		if was, after := binary.NativeEndian.Uint64(op.Local), binary.NativeEndian.Uint64(region[8:]); was != step.was || after != step.after {
			t.Errorf("%+v: was %d, is %d, want %d, %d", step.op, was, after, step.was, step.after)
		}
	}
}

// TestRefusals checks that a refused operation completes with its error, that later operations are not executed, and
// that both ends are notified.
func TestRefusals(t *testing.T) {
	for _, tc := range []struct {
		name string
		op   rdma.Op
		want error
		bad  func(b *host)
	}{
		{name: "wrong key", op: rdma.Op{Kind: rdma.OpWrite, Key: 8, Local: make([]byte, 8)}, want: rdma.ErrRemoteAccess},
		{name: "beyond the end", op: rdma.Op{Kind: rdma.OpWrite, Key: 7, Remote: 4090, Local: make([]byte, 8)}, want: rdma.ErrRemoteAccess},
		{name: "before the start", op: rdma.Op{Kind: rdma.OpRead, Key: 7, Remote: 1<<64 - 1, Local: make([]byte, 8)}, want: rdma.ErrRemoteAccess},
		{name: "no right to write", op: rdma.Op{Kind: rdma.OpWrite, Key: 9, Local: make([]byte, 8)}, want: rdma.ErrRemoteAccess},
		{name: "no right to do atomics", op: rdma.Op{Kind: rdma.OpFetchAdd, Key: 9, Local: make([]byte, 8)}, want: rdma.ErrRemoteAccess},
		{name: "no bytes, wrong key", op: rdma.Op{Kind: rdma.OpWrite, Key: 8}, want: rdma.ErrRemoteAccess},
		{name: "refused message", op: rdma.Op{Kind: rdma.OpSend, Local: make([]byte, 8)}, want: rdma.ErrRemoteInvalid, bad: func(b *host) { b.refuse = true }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bed := newBed(t, 2, 8)
			a, b := bed.join(addressA), bed.join(addressB)
			ca, cb := connect(t, a, b)
			region := b.shared(4096)
			b.register(7, region, everything)
			b.register(9, region, rdma.RemoteRead)
			if tc.bad != nil {
				tc.bad(b)
			}
			tc.op.Remote += addressOf(region)
			op := a.post(ca, &tc.op)
			after := a.post(ca, &rdma.Op{Kind: rdma.OpWrite, Key: 7, Remote: addressOf(region), Local: []byte{0xff}})
			back := b.post(cb, &rdma.Op{Kind: rdma.OpSend})
			settle(a, b)
			a.wants(op, tc.want)
			a.wants(after, rdma.ErrFlushed)
			b.wants(back, rdma.ErrFlushed)
			if !bytes.Equal(region, make([]byte, 4096)) {
				t.Error("something was written")
			}
			if a.failed[ca] == nil || b.failed[cb] == nil {
				t.Errorf("failures heard: %v, %v", a.failed, b.failed)
			}
			if b.tr.count.refused != 1 || b.tr.count.damaged+a.tr.count.damaged != 0 {
				t.Errorf("counted %+v", b.tr.count)
			}
			a.Do(ca.Close)
			b.Do(cb.Close)
			if _, ok := bed.area.acquire(a.tr.self); !ok {
				t.Error("the rings were not given back")
			}
		})
	}
}

// TestOrderIsKeptWhileNotReady checks that a WRITE does not overtake an earlier SEND that is held.
func TestOrderIsKeptWhileNotReady(t *testing.T) {
	bed := newBed(t, 2, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, cb := connect(t, a, b)
	region := b.shared(64)
	b.register(7, region, everything)
	send := a.post(ca, &rdma.Op{Kind: rdma.OpSend, Local: []byte("first")})
	write := a.post(ca, &rdma.Op{Kind: rdma.OpWrite, Key: 7, Remote: addressOf(region), Local: []byte{1}})
	settle(a, b)
	if region[0] != 0 || len(a.completed) != 0 || b.tr.count.notReady != 1 {
		t.Fatalf("written %d, completed %d, not ready %d", region[0], len(a.completed), b.tr.count.notReady)
	}
	bed.now += time.Hour // a live peer may be unready for any time
	b.Do(b.tr.check)
	a.Do(a.tr.check)
	if a.failed[ca] != nil {
		t.Fatal(a.failed[ca])
	}
	b.Do(func() { b.receives = 1; cb.Ready() })
	settle(a, b)
	a.wants(send, nil)
	a.wants(write, nil)
	settle(a)
	if region[0] != 1 || len(b.delivered) != 1 {
		t.Errorf("written %d, delivered %q", region[0], b.delivered)
	}
	now := a.post(ca, &rdma.Op{Kind: rdma.OpWrite, Key: 7, Remote: addressOf(region), Local: []byte{2}})
	if region[0] != 2 || a.tr.count.direct != 1 {
		t.Error("with nothing before it, a WRITE is executed by its initiator")
	}
	a.wants(now, nil)
}

func TestFullRingGivesRoomAgain(t *testing.T) {
	for _, n := range []int{8, MaxOp} { // slots run out, staging runs out
		bed := newBed(t, 2, 8)
		a, b := bed.join(addressA), bed.join(addressB)
		ca, _ := connect(t, a, b)
		b.receives = 1 << 30
		posted := 0
		for a.tryPost(ca, &rdma.Op{Kind: rdma.OpSend, Local: make([]byte, n)}) {
			posted++
		}
		if want := min(slotCount, stagingSize/max(n, 1)); posted != want {
			t.Errorf("%d bytes: %d operations posted, want %d", n, posted, want)
		}
		settle(a, b)
		if a.rooms != 1 || len(a.completed) != posted {
			t.Errorf("%d bytes: %d rooms, %d of %d completed", n, a.rooms, len(a.completed), posted)
		}
		a.post(ca, &rdma.Op{Kind: rdma.OpSend, Local: make([]byte, n)})
	}
}

func TestParkingGivesBackWhatIsNotTaken(t *testing.T) {
	for _, lent := range []bool{false, true} {
		bed := newBed(t, 2, 8)
		a, b := bed.join(addressA), bed.join(addressB)
		ca, cb := connect(t, a, b)
		b.receives = 2
		var ops []*rdma.Op
		for i := range 5 {
			ops = append(ops, a.post(ca, &rdma.Op{Kind: rdma.OpSend, Local: []byte{byte(i)}}))
			if i == 1 {
				settle(a, b)
			}
		}
		parked := []rdma.Path{{Sent: new(atomic.Uint64)}}
		if lent {
			parked = []rdma.Path{{Share: 1, Lent: true, Sent: new(atomic.Uint64)}}
		}
		a.Do(func() { ca.SetPaths(parked) })
		if len(a.returned) != 3 || len(a.completed) != 2 {
			t.Fatalf("returned %d, completed %d", len(a.returned), len(a.completed))
		}
		for i, op := range a.returned {
			if op != ops[2+i] {
				t.Error("not returned in the order of posting")
			}
		}
		if a.tryPost(ca, ops[2]) {
			t.Error("a parked channel has taken an operation")
		}
		settle(a, b)
		a.Do(func() { ca.SetPaths(live()) })
		if a.rooms != 1 {
			t.Errorf("%d rooms", a.rooms)
		}
		b.Do(func() { b.receives = 5; cb.Ready() })
		again := a.post(ca, ops[2])
		settle(a, b)
		a.wants(again, nil)
		if len(b.delivered) != 3 || b.delivered[2][0] != 2 {
			t.Errorf("delivered %v", b.delivered)
		}
	}
}

// TestParkingTakesBackWhatIsHeld parks the channel while the peer is not ready: the peer has taken the message, and
// puts it back.
func TestParkingTakesBackWhatIsHeld(t *testing.T) {
	bed := newBed(t, 2, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, _ := connect(t, a, b)
	op := a.post(ca, &rdma.Op{Kind: rdma.OpSend})
	c := ca.(*channel)
	seq := c.out.oldest
	if !c.out.change(seq, posted, taken) { // like the peer inside Admit
		t.Fatal("not posted")
	}
	a.Do(func() { ca.SetPaths([]rdma.Path{{}}) })
	if len(a.returned) != 0 {
		t.Fatal("what the peer has taken was returned")
	}
	c.out.change(seq, taken, posted)
	settle(a, b)
	if len(a.returned) != 1 || a.returned[0] != op || len(b.delivered) != 0 {
		t.Errorf("returned %d, delivered %d", len(a.returned), len(b.delivered))
	}
}

func TestCloseFlushes(t *testing.T) {
	bed := newBed(t, 4, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, cb := connect(t, a, b)
	op := a.post(ca, &rdma.Op{Kind: rdma.OpSend})
	back := b.post(cb, &rdma.Op{Kind: rdma.OpSend})
	a.mu.Lock()
	ca.Close()
	a.wants(op, rdma.ErrFlushed) // before Close returns
	a.mu.Unlock()
	settle(a, b)
	b.wants(back, rdma.ErrFlushed)
	if b.failed[cb] == nil || a.failed[ca] != nil {
		t.Errorf("heard: %v, %v", a.failed, b.failed)
	}
	if b.tryPost(cb, &rdma.Op{Kind: rdma.OpSend}) {
		t.Error("a broken channel has taken an operation")
	}
	b.Do(cb.Close)
	for range 10 { // rings are reused
		ca, cb = connect(t, a, b)
		b.receives = 1
		op := a.post(ca, &rdma.Op{Kind: rdma.OpSend, Local: []byte("x")})
		settle(a, b)
		a.wants(op, nil)
		a.Do(ca.Close)
		b.Do(cb.Close)
	}
}

// TestCloseInsideDeliver closes the channel inside calls to the host.
func TestCloseInsideDeliver(t *testing.T) {
	bed := newBed(t, 2, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, cb := connect(t, a, b)
	b.receives = 2
	b.onDeliver = func(ch rdma.Channel) { ch.Close() }
	first := a.post(ca, &rdma.Op{Kind: rdma.OpSend})
	second := a.post(ca, &rdma.Op{Kind: rdma.OpSend})
	settle(a, b)
	a.wants(first, nil)
	a.wants(second, rdma.ErrFlushed)
	if len(b.delivered) != 1 || b.failed[cb] != nil {
		t.Errorf("delivered %d, failed %v", len(b.delivered), b.failed[cb])
	}
}

func TestPeerIsGone(t *testing.T) {
	for _, tc := range []struct {
		name string
		how  func(bed *bed, b *host)
		want error
	}{
		{"dead", func(bed *bed, b *host) { bed.dead[b.tr.self.index] = true }, errPeerGone},
		{"joined again", func(bed *bed, b *host) { bed.dead[b.tr.self.index] = true; bed.join(addressB) }, errPeerGone},
		{"silent", func(bed *bed, b *host) { bed.now += 31 * time.Second }, errSilent},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bed := newBed(t, 4, 8)
			a, b := bed.join(addressA), bed.join(addressB)
			ca, _ := connect(t, a, b)
			op := a.post(ca, &rdma.Op{Kind: rdma.OpSend})
			a.Do(a.tr.check)
			if len(a.failed) != 0 {
				t.Fatal("failed too early")
			}
			tc.how(bed, b)
			a.Do(a.tr.check)
			a.wants(op, rdma.ErrRetryExceeded)
			if err := a.failed[ca]; err != tc.want || a.tr.count.peersLost != 1 {
				t.Errorf("failed with %v, want %v", err, tc.want)
			}
			a.Do(ca.Close)
		})
	}
}

// TestTakeover checks that an endpoint that joins after a crash finds all rings, regions and pages of the dead endpoint
// free.
func TestTakeover(t *testing.T) {
	bed := newBed(t, 2, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, _ := connect(t, a, b)
	region := b.shared(5 * pageSize)
	b.register(7, region, everything)
	c := ca.(*channel)
	a.post(ca, &rdma.Op{Kind: rdma.OpSend})
	c.out.change(c.out.oldest, posted, taken)                      // b dies while it executes
	bed.area.endpoint(b.tr.self.index).touching().Store(uint64(1)) // and copies
	if _, err := bed.area.join(bed, addressB, 1); err == nil || !strings.Contains(err.Error(), "in use by process") {
		t.Errorf("two endpoints of one address: %v", err)
	}
	bed.dead[b.tr.self.index] = true
	b2 := bed.join(addressB)
	if _, err := b2.tr.Alloc(6 * pageSize); err != nil {
		t.Error(err)
	}
	// a still has the old channel; its WRITE must not change memory that now belongs to another endpoint.
	op := &rdma.Op{Kind: rdma.OpWrite, Key: 7, Remote: addressOf(region), Local: []byte{1}}
	a.tryPost(ca, op)
	if region[0] != 0 {
		t.Error("written to a dead endpoint's region")
	}
	a.Do(a.tr.check)
	a.Do(ca.Close)
	ca, _ = connect(t, a, b2)
	b2.receives = 1
	send := a.post(ca, &rdma.Op{Kind: rdma.OpSend})
	settle(a, b2)
	a.wants(send, nil)
}

// TestDeregisteredWaits checks that Deregistered waits for a peer that copies, and that the pages are lost rather than
// reused if the wait fails.
func TestDeregisteredWaits(t *testing.T) {
	bed := newBed(t, 2, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	region := b.shared(pageSize)
	b.register(7, region, everything)
	a.tr.self.touching().Store(uint64(b.tr.published[7] + 1))
	b.tr.Deregistered(7)
	b.tr.Free(region)
	if b.tr.count.lost != 1 || bed.area.page(0).Load() != pageLost {
		t.Errorf("lost %d, page %x", b.tr.count.lost, bed.area.page(0).Load())
	}
	again := b.shared(pageSize)
	b.register(8, again, everything)
	a.tr.self.touching().Store(0)
	b.tr.Deregistered(8)
	b.tr.Free(again)
	if b.tr.count.lost != 1 || bed.area.page(1).Load() != 0 {
		t.Error("untouched memory is lost")
	}
}

func TestConnectRefuses(t *testing.T) {
	bed := newBed(t, 3, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	var ca, cb rdma.Channel
	a.Do(func() { ca, _ = a.tr.Channel(rdma.ChannelConfig{Remote: addressB}) })
	b.Do(func() { cb, _ = b.tr.Channel(rdma.ChannelConfig{Remote: addressA}) })
	for i, want := range map[int]string{0: "version", 4: "another file", 12: "no longer belongs", 15: "not in this file", 16: "no longer belongs",
		24: "no longer belongs", 27: "not in this file", 28: "no longer belongs"} {
		bad := cb.Local()
		bad[i] ^= 0x40
		if i == 12 {
			bad[i] ^= 0x41
		}
		if i == 24 {
			bad[i] = 2
		}
		if err := ca.Connect(bad, live()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("byte %d: %v, want %q", i, err, want)
		}
	}
	if err := ca.Connect(cb.Local()[:35], live()); err == nil {
		t.Error("short")
	}
	if err := ca.Connect(cb.Local(), live()); err != nil {
		t.Fatal(err)
	}
	if err := ca.Connect(cb.Local(), live()); err == nil {
		t.Error("connected twice")
	}
}

func TestPostPanicsOnWhatCanNeverBeTaken(t *testing.T) {
	bed := newBed(t, 2, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, _ := connect(t, a, b)
	for _, op := range []*rdma.Op{
		{Kind: rdma.OpWrite, Local: make([]byte, MaxOp+1)},
		{Kind: rdma.OpSend, Head: make([]byte, rdma.MaxHead+1)},
		{Kind: rdma.OpFetchAdd, Local: make([]byte, 4)},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%d was taken", op.Kind)
				}
			}()
			ca.Post(op)
		}()
	}
}
