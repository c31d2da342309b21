package tcpqp

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/wecmp"
)

// TestStalledStream checks that while the streams of one plane of four stop and no weight changes, messages continue on
// the other planes, and that once they transfer again all operations complete and each slot has its share.
func TestStalledStream(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine")
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial} {
		t.Run(ordering.String(), func(t *testing.T) {
			whole, _ := stalledStream(t, ordering, false)
			got, stalls := stalledStream(t, ordering, true)
			t.Logf("%d messages, %d undisturbed, %d stalls", got, whole, stalls)
			if got < whole*3/4*8/10 {
				t.Errorf("%d messages arrived with one plane of four dead, %d undisturbed", got, whole)
			}
			if stalls != 1 {
				t.Errorf("slot 1 has stalled %d times, want once", stalls)
			}
		})
	}
}

// stalledStream returns the number of messages that have arrived in 300 ms, and the number of stalls of slot 1.
func stalledStream(t *testing.T, ordering wecmp.Ordering, hole bool) (arrived int, stalls uint64) {
	const size, cells = 1 << 10, 1 << 14
	s := newSim(1, 0, 64<<10, false)
	var devices [2]*rdma.Device
	for i := range devices {
		tr := &simTransport{sim: s, index: i}
		s.ends = append(s.ends, tr)
		d, err := rdma.Open(rdma.Config{Address: simAddresses[i], Transports: []rdma.Transport{tr}, Clock: s.Now})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		devices[i] = d
	}
	var slots []rdma.Slot
	for i := range 4 {
		slots = append(slots, rdma.Slot{Slot: i, Plane: fmt.Sprint("p", i), Port: uint16(61440 + i), Share: wecmp.Parts / 4})
	}
	e := rdmatest.Connect(t, devices, rdma.SetConfig{Ordering: ordering, SendDepth: cells}, rdma.LocalWrite|rdma.RemoteWrite, [2]int{size * cells, size * cells}, [2][]rdma.Slot{slots, slots})
	a, memory := e.Sets[0], e.Memory
	posted, done := 0, 0
	batch := make([]rdma.Completion, 64)
	poll := func() {
		for n := e.CQs[0].Poll(batch); n > 0; n = e.CQs[0].Poll(batch) {
			for _, c := range batch[:n] {
				if c.Err != nil || c.ID != uint64(done) {
					t.Fatalf("completion %d is of message %d: %v", done, c.ID, c.Err)
				}
				done++
			}
		}
	}
	post := func(n int) {
		for range n {
			local := memory[0].Bytes()[posted*size:][:size]
			copy(local, bytes.Repeat([]byte{byte(1 + posted%255)}, size))
			if _, err := a.PostSend(rdma.SendWR{ID: uint64(posted), Opcode: rdma.Write, Local: rdma.SGE{MR: memory[0], Offset: posted * size, Length: size},
				RemoteAddress: memory[1].Address() + uint64(posted)*size, RemoteKey: memory[1].Key(), OrderKey: uint64(posted)}); err != nil {
				t.Fatal(err)
			}
			posted++
		}
	}
	count := func() (n int) {
		for i := range posted {
			if bytes.Equal(memory[0].Bytes()[i*size:][:size], memory[1].Bytes()[i*size:][:size]) {
				n++
			}
		}
		return n
	}
	// One message every 40 µs: less than the capacity of the streams.
	from := s.Now()
	feed := func(d time.Duration) {
		for until := s.Now() + d; s.Now() < until; {
			post(max(0, int((s.Now()-from)/(40*time.Microsecond))-posted))
			s.Net.Run(func() bool { return false }, s.Now()+100*time.Microsecond)
			poll()
		}
	}
	feed(20 * time.Millisecond)
	before := count()
	s.SetPlane(1, !hole)
	feed(300 * time.Millisecond)
	arrived = count() - before
	s.SetPlane(1, true)
	if !s.Net.Run(func() bool { poll(); return done == posted }, s.Now()+10*time.Second) {
		t.Fatalf("%d of %d messages complete: %v", done, posted, devices[0].Counters())
	}
	if n := count(); n != posted {
		t.Fatalf("%d of %d messages are in memory", n, posted)
	}
	was := a.Slots()
	post(4000)
	if !s.Net.Run(func() bool { poll(); return done == posted }, s.Now()+10*time.Second) {
		t.Fatalf("%d of %d messages complete: %v", done, posted, devices[0].Counters())
	}
	for i, slot := range a.Slots() {
		if sent := slot.Sent - was[i].Sent; ordering == wecmp.Weak && (sent < 999*size || sent > 1001*size) {
			t.Errorf("slot %d sent %d bytes once the plane was back, want %d", i, sent, 1000*size)
		}
		if slot.Stalled {
			t.Errorf("slot %d is still stalled", i)
		}
	}
	return arrived, a.Slots()[1].Stalls
}
