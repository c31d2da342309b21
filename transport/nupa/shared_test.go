package nupa

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/transport/rdma"
)

// kernel returns the configuration of an endpoint in shared memory on a simulated machine: the locks of different boot
// ids do not meet, and nothing else of the kernel is used.
func kernel(path string, boot byte) Config {
	return Config{File: path, Size: planeSize, Channels: 8, Shared: true, DeadAfter: 400 * time.Millisecond, boot: [16]byte{boot},
		Timing: rdma.Timing{}.WithDefaults()}
}

func mapKernel(t testing.TB, path string, boot byte) *shared {
	t.Helper()
	m, _, err := mapFile(kernel(path, boot))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.close)
	return m.(*shared)
}

// TestLayoutIsMadeOnce starts many endpoints at once in memory that is not empty except for its first word, one of
// which was the maker until its machine stopped. Each gets a place.
func TestLayoutIsMadeOnce(t *testing.T) {
	for _, first := range []uint64{0, uint64(making) | 7<<32} {
		path := filepath.Join(t.TempDir(), "plane")
		content := bytes.Repeat([]byte{0xee}, planeSize)
		binary.LittleEndian.PutUint64(content, first)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		var wait sync.WaitGroup
		machines := make([]*shared, 8)
		for i := range machines {
			wait.Go(func() {
				if m, _, err := mapFile(kernel(path, byte(i+1))); err != nil {
					t.Error(err)
				} else {
					machines[i] = m.(*shared)
				}
			})
		}
		wait.Wait()
		if t.Failed() {
			return
		}
		var places [8]endpoint
		for i, s := range machines {
			wait.Go(func() {
				var err error
				if places[i], err = s.area.join(s, must(fmt.Sprint("192.0.2.", i+1)), 1); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		taken := map[int]bool{}
		for i, s := range machines {
			defer s.close()
			if taken[places[i].index] {
				t.Errorf("two machines have place %d", places[i].index)
			}
			taken[places[i].index] = true
			if s.area.id != machines[0].area.id {
				t.Errorf("machine %d: id %x instead of %x", i, s.area.id, machines[0].area.id)
			}
		}
		a := machines[0].area
		for i := range endpointCount {
			if e := a.endpoint(i); e.claimed() != taken[i] || e.generation().Load() > 1 {
				t.Fatalf("endpoint %d has generation %d", i, e.generation().Load())
			}
		}
		if out, ok := a.acquire(a.endpoint(0)); !ok || out.start != 2*slotCount {
			t.Errorf("acquired %v from %d on", ok, out.start)
		}
		if _, err := a.alloc(0, a.pages*pageSize); err != nil {
			t.Error(err)
		}
	}
}

// TestLateMakerChangesNothing lets the maker of a layout go on after another one has made it.
func TestLateMakerChangesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plane")
	s := mapKernel(t, path, 1)
	s.area.endpoint(5).generation().Store(77)
	before := bytes.Clone(s.mem)
	a, err := geometry(int64(len(s.mem)), 8)
	if err != nil {
		t.Fatal(err)
	}
	if s.makeLayout(s.area.u64(0), uint64(making)|9<<32, a) {
		t.Error("made by a late maker")
	}
	if !bytes.Equal(s.mem, before) {
		t.Error("the late maker has changed the memory")
	}
}

func TestSharedRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plane")
	mapKernel(t, path, 1)
	local := kernel(path, 1)
	local.Shared = false
	if _, _, err := mapFile(local); err == nil || !strings.Contains(err.Error(), "made for endpoints on several kernels") {
		t.Errorf("a plane of several kernels opened for one: %v", err)
	}
	path = filepath.Join(t.TempDir(), "local")
	local.File = path
	m, _, err := mapFile(local)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	if _, _, err := mapFile(kernel(path, 1)); err == nil || !strings.Contains(err.Error(), "made for endpoints on one kernel") {
		t.Errorf("a plane of one kernel opened for several: %v", err)
	}
	other := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(other, bytes.Repeat([]byte("not a plane\n"), 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := mapFile(kernel(other, 1)); !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), "zero its first 8 bytes") {
		t.Errorf("got %v", err)
	}
	ones := filepath.Join(t.TempDir(), "ones")
	if err := os.WriteFile(ones, bytes.Repeat([]byte{0xff}, planeSize), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := mapFile(kernel(ones, 1)); !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), "enable it") {
		t.Errorf("got %v", err)
	}
	fast := kernel(filepath.Join(t.TempDir(), "fast"), 1)
	fast.DeadAfter = 3
	if _, _, err := mapFile(fast); err == nil || !strings.Contains(err.Error(), "Config.DeadAfter") {
		t.Errorf("got %v", err)
	}
	tiny := kernel(filepath.Join(t.TempDir(), "tiny"), 1)
	tiny.Size = 1000
	if _, _, err := mapFile(tiny); !errors.Is(err, ErrFile) {
		t.Errorf("got %v", err)
	}
}

// TestPlaces claims places of the file from several simulated machines: who is alive, who has ended, and who gets which
// place.
func TestPlaces(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plane")
	join := func(s *shared, address string) (endpoint, error) {
		e, err := s.area.join(s, must(address), 1)
		if err == nil {
			s.start(e.index)
		}
		return e, err
	}
	a, b := mapKernel(t, path, 1), mapKernel(t, path, 2)
	ea, err := join(a, "192.0.2.1")
	if err != nil {
		t.Fatal(err)
	}
	defer a.stop()
	eb, err := join(b, "192.0.2.2")
	if err != nil {
		t.Fatal(err)
	}
	if ea.index == eb.index {
		t.Fatal("two machines, one place")
	}
	c := mapKernel(t, path, 3)
	if _, err := c.area.join(c, must("192.0.2.2"), 1); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("two endpoints of one address: %v", err)
	}
	b.stop() // the machine stands still
	for deadline := time.Now().Add(time.Minute); a.alive(eb.index); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("alive without a heartbeat")
		}
	}
	if a.ended(eb.index) {
		t.Error("a machine that stands still has ended")
	}
	again := mapKernel(t, path, 2) // the same boot: the process of b exists, so its place is not free
	e, err := join(again, "192.0.2.2")
	if err != nil {
		t.Fatal(err)
	}
	if e.index == eb.index || eb.generation().Load() != 1 {
		t.Errorf("took place %d with generation %d of a process that exists", e.index, eb.generation().Load())
	}
	again.stop()
	rebooted := mapKernel(t, path, 9) // another boot of the machine with this address: neither process exists any longer
	e, err = join(rebooted, "192.0.2.2")
	if err != nil {
		t.Fatal(err)
	}
	defer rebooted.stop()
	if !a.alive(e.index) {
		t.Error("a new incarnation is as dead as its predecessor")
	}
	if e.index != eb.index || e.generation().Load() != 3 {
		t.Errorf("took place %d with generation %d, want %d with 3", e.index, e.generation().Load(), eb.index)
	}
	claimed := 0
	for i := range endpointCount {
		if a.area.endpoint(i).claimed() {
			claimed++
		}
	}
	if claimed != 2 || !a.alive(ea.index) {
		t.Errorf("%d places are claimed, want 2", claimed)
	}
}

// rival is a machine whose first claim meets one of another machine for the same place.
type rival struct {
	*shared
	met bool
}

func (r *rival) claim(i int) (bool, error) {
	if !r.met {
		r.met = true
		r.area.endpoint(i).generation().Add(1)
	}
	return r.shared.claim(i)
}

func TestClaimsMeet(t *testing.T) {
	r := &rival{shared: mapKernel(t, filepath.Join(t.TempDir(), "plane"), 1)}
	e, err := r.area.join(r, addressA, 1)
	if err != nil {
		t.Fatal(err)
	}
	if e.index != 1 || r.area.endpoint(0).process().Load() != 0 {
		t.Errorf("took place %d, which another machine has claimed", e.index)
	}
}

// TestFencing lets an endpoint go on whose place another one has taken, because it was taken for ended: it cannot
// change the rings of its successors, and fails.
func TestFencing(t *testing.T) {
	bed := newBed(t, 4, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, cb := connect(t, a, b)
	late := a.post(ca, &rdma.Op{Kind: rdma.OpSend, Local: []byte("late")})
	old := *ca.(*channel)
	bed.dead[a.tr.self.index] = true
	a2 := bed.join(addressA)
	if a2.tr.self.index != a.tr.self.index {
		t.Fatal("the place is not taken over")
	}
	b.Do(b.tr.check)
	b.Do(cb.Close)
	ca2, _ := connect(t, a2, b)
	b.receives = 10
	send := a2.post(ca2, &rdma.Op{Kind: rdma.OpSend, Local: []byte("new")})
	var sent atomic.Uint64
	if ca2.(*channel).out.index != old.out.index {
		t.Fatal("the successor has another ring")
	}
	if old.out.post(&rdma.Op{Kind: rdma.OpSend, Local: []byte("bad")}, &sent) {
		t.Error("a late sender has posted to the ring of its successor")
	}
	settle(a2, b)
	a2.wants(send, nil)
	if len(b.delivered) != 1 || string(b.delivered[0]) != "new" {
		t.Errorf("delivered %q", b.delivered)
	}
	if a.tryPost(ca, &rdma.Op{Kind: rdma.OpSend}) {
		t.Error("an endpoint without a place has posted")
	}
	if _, err := a.tr.Alloc(1); !errors.Is(err, errReplaced) {
		t.Errorf("allocated: %v", err)
	}
	if _, err := a.tr.Channel(rdma.ChannelConfig{Remote: addressB}); !errors.Is(err, errReplaced) {
		t.Errorf("a channel: %v", err)
	}
	a.Do(a.tr.check)
	a.wants(late, rdma.ErrFlushed)
	if a.failed[ca] != errReplaced {
		t.Errorf("failed with %v", a.failed[ca])
	}
	a.Do(ca.Close)
	if a.tr.detach() {
		t.Error("an endpoint without a place has left it")
	}
	for range 10 {
		send := a2.post(ca2, &rdma.Op{Kind: rdma.OpSend, Local: []byte("more")})
		b.receives = 1
		settle(a2, b)
		a2.wants(send, nil)
	}
}

// TestReplacedLeavesThePlaceAlone lets endpoints go on whose place another one has taken: none of the words there
// changes, on which the other one's liveness, its notifications and its meetings depend.
func TestReplacedLeavesThePlaceAlone(t *testing.T) {
	bed := newBed(t, 4, 8)
	a, b := bed.join(addressA), bed.join(addressB)
	ca, _ := connect(t, a, b)
	var unconnected rdma.Channel
	meet := func(h *host) (ch rdma.Channel) {
		h.Do(func() {
			var err error
			if ch, err = h.tr.Channel(rdma.ChannelConfig{Remote: addressB}); err != nil {
				t.Fatal(err)
			}
			Meet(ch)
		})
		return ch
	}
	unconnected = meet(a)
	bed.dead[a.tr.self.index] = true
	a2 := bed.join(addressA)
	place := a2.tr.self
	if place.index != a.tr.self.index {
		t.Fatal("the place is not taken over")
	}
	meet(a2)
	place.pending(0).Store(0b1010)
	before := bytes.Clone(bed.area.mem[place.at:][:endpointSize])
	a.Do(func() {
		Meet(unconnected)
		a.tr.serve()
		a.tr.check()
	})
	if !bytes.Equal(bed.area.mem[place.at:][:endpointSize], before) {
		t.Errorf("the place was\n%x, is\n%x", before, bed.area.mem[place.at:][:endpointSize])
	}
	for _, ch := range []rdma.Channel{ca, unconnected} {
		if a.failed[ch] != errReplaced {
			t.Errorf("a channel of the replaced endpoint has failed with %v", a.failed[ch])
		}
	}
	s := &shared{file: &file{}, area: bed.area}
	heart := place.heart().Load()
	s.live(place.index, a.tr.was)
	if n := place.heart().Load(); n != heart {
		t.Errorf("the replaced endpoint beats as the other one: %d after %d", n, heart)
	}
	s.live(place.index, a2.tr.was)
	if n := place.heart().Load(); n != heart+1 {
		t.Errorf("%d heartbeats after %d, want one more", n, heart)
	}
}

// clocked counts the looks at the clock, of which each check of an endpoint's goroutine has one.
type clocked struct {
	*host
	looks atomic.Int64
}

func (c *clocked) Now() time.Duration {
	c.looks.Add(1)
	return c.host.Now()
}

// TestReplacedRuns takes the place of an endpoint whose goroutines run, and notifies the new one of work: the first
// endpoint fails its channel and goes on with nothing of the place.
func TestReplacedRuns(t *testing.T) {
	defer goleak.VerifyNone(t)
	path := filepath.Join(t.TempDir(), "plane")
	h := &clocked{host: newHost(t, addressA)}
	h.tr = New(kernel(path, 1)).(*transport)
	if err := h.tr.Start(h); err != nil {
		t.Fatal(err)
	}
	defer h.tr.Stop()
	var ch rdma.Channel
	h.Do(func() {
		var err error
		if ch, err = h.tr.Channel(rdma.ChannelConfig{Remote: addressB}); err != nil {
			t.Error(err)
		}
	})
	other := mapKernel(t, path, 2)
	place := other.area.endpoint(h.tr.self.index)
	check := func() {
		for looks, deadline := h.looks.Load()+2, time.Now().Add(time.Minute); h.looks.Load() < looks; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("no check")
			}
		}
	}
	place.generation().Add(2) // the place is free, and taken once more
	check()
	place.pending(0).Store(0b1010)
	heart, beat, sleeps := place.heart().Load(), place.beat().Load(), h.tr.sleeps.Load()
	check()
	var failed error
	h.Do(func() { failed = h.failed[ch] })
	if failed != errReplaced {
		t.Errorf("failed with %v", failed)
	}
	if p := place.pending(0).Load(); p != 0b1010 || place.heart().Load() != heart || place.beat().Load() != beat || h.tr.sleeps.Load() != sleeps {
		t.Errorf("the goroutines have gone on with the place: notifications %b, %d and %d heartbeats more, %d sleeps more",
			p, place.heart().Load()-heart, place.beat().Load()-beat, h.tr.sleeps.Load()-sleeps)
	}
}

// TestLateReceiver lets receivers go on that were dead, after the ring's sender has closed it, and checks that the
// ring's next use is not affected.
func TestLateReceiver(t *testing.T) {
	for _, state := range []string{"taken", "revoked"} {
		var sent atomic.Uint64
		bed := newBed(t, 1, 4)
		out, in := ends(t, bed.area)
		bed.area.endpoint(1).generation().Store(1)
		bed.paused[1] = true
		out.receiver().Store(receiverWord(1, 1))
		out.post(&rdma.Op{Kind: rdma.OpSend, Local: []byte("first")}, &sent)
		if state == "taken" {
			in.take()
		}
		out.cancel()
		if released := out.release(bed); released != (state == "revoked") {
			t.Fatalf("%s: released %v", state, released)
		}
		if state == "taken" {
			if _, ok := bed.area.acquire(bed.area.endpoint(0)); ok {
				t.Fatal("acquired a ring to which a paused receiver may write")
			}
			in.end(executed, 0)
			if !out.release(bed) {
				t.Fatal("not released after the end")
			}
			continue
		}
		next, reader := ends(t, bed.area)
		for range slotCount {
			if !next.post(&rdma.Op{Kind: rdma.OpSend, Local: []byte("next")}, &sent) {
				t.Fatal("full")
			}
		}
		if in.change(in.next, revoked, passed) {
			t.Error("a late receiver has changed the ring's next use")
		}
		in.leave()
		if bed.area.ring(0).receiver().CompareAndSwap(noReceiver(out.start), receiverWord(1, 1)) {
			t.Error("a late receiver has connected to the ring's next use")
		}
		for range slotCount {
			if what, _ := reader.take(); what != operation || string(reader.data()) != "next" {
				t.Fatalf("took %d, %q", what, reader.data())
			}
			reader.end(executed, 0)
			if _, _, _, ok, damaged := next.reap(); !ok || damaged {
				t.Fatal("not reaped")
			}
		}
	}
}

// TestReadsOfWithdrawnRegions reads a region while its owner withdraws it, uses the memory for other things and
// publishes it once more: no READ mixes the contents.
func TestReadsOfWithdrawnRegions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plane")
	begin := func(address string, boot byte) *host {
		h := newHost(t, must(address))
		h.tr = New(kernel(path, boot)).(*transport)
		if err := h.tr.Start(h); err != nil {
			t.Fatal(err)
		}
		return h
	}
	a, b := begin(addressA.String(), 1), begin(addressB.String(), 2)
	ca, cb := connect(t, a, b)
	region := b.shared(MaxOp)
	var stop atomic.Bool
	ended := make(chan struct{})
	b.Do(func() { b.register(7, region, everything) })
	go func() {
		defer close(ended)
		for k := byte(1); !stop.Load(); k++ {
			b.Do(func() {
				b.tr.Deregistered(7)
				for i := range region {
					region[i] = k
				}
				b.register(7, region, everything)
			})
			time.Sleep(10 * time.Microsecond)
		}
	}()
	const total = 1000
	for range total {
		op := &rdma.Op{Kind: rdma.OpRead, Key: 7, Remote: addressOf(region), Local: make([]byte, MaxOp)}
		a.post(ca, op)
		a.eventually("read", func() bool { return len(a.posted) == 0 })
		a.wants(op, nil)
		if n := bytes.Count(op.Local, op.Local[:1]); n != len(op.Local) {
			t.Fatalf("a READ has %d bytes %d, and others", n, op.Local[0])
		}
	}
	stop.Store(true)
	<-ended
	if a.tr.count.direct == 0 {
		t.Error("no READ was executed by the initiator")
	}
	t.Logf("%d of %d READs were executed by the initiator", a.tr.count.direct, total)
	a.Do(ca.Close)
	b.Do(cb.Close)
	b.Do(func() { b.tr.Deregistered(7) })
	b.tr.Free(region)
	a.tr.Stop()
	b.tr.Stop()
}
