package dpclient

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// flood declares size vectors with one destination each and applies them: the result of one leaf that advertises a
// distinct bandwidth with every route.
func flood(tb testing.TB, b *book, size int) {
	tb.Helper()
	for n := range size {
		b.setVector(vector(uint32(n+1), uint32(n%60+1), uint32(n/60+1)))
		b.setDestination(dst(n), uint32(n+1))
	}
	carryOut(tb, b)
}

// carryOut sends all queued operations and acknowledges them.
func carryOut(tb testing.TB, b *book) {
	tb.Helper()
	for op, ok := popCommitted(b); ok; op, ok = popCommitted(b) {
		b.send(&op, 0)
		if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}); err != nil {
			tb.Fatal(err)
		}
	}
	b.take(nil)
}

func connectedBook() *book {
	b := newBook(newOrder(testForwarding()), DefaultWindow)
	b.resync(State{})
	b.release(true)
	return b
}

// cpuTime returns the processor time of the calling thread, which a busy machine extends less than wall time.
func cpuTime() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// floods are the changes that a leaf can cause with size distinct bandwidths, and that a restart of the data plane
// causes afterwards. Each returns the processor time of the measured part; the caller is locked to its thread.
var floods = []struct {
	name string
	run  func(tb testing.TB, size int) time.Duration
}{
	{"delete", func(tb testing.TB, size int) time.Duration {
		b := connectedBook()
		flood(tb, b, size)
		begin := cpuTime()
		for n := range size {
			b.deleteDestination(dst(n))
		}
		for n := range size {
			b.deleteVector(uint32(n + 1))
		}
		carryOut(tb, b)
		took := cpuTime() - begin
		if len(b.wanted.vectors)+len(b.places.wires)+b.wanted.destinations.Len() != 0 {
			tb.Errorf("%d vectors, %d on the wire, %d destinations are left", len(b.wanted.vectors), len(b.places.wires), b.wanted.destinations.Len())
		}
		return took
	}},
	{"restart", func(tb testing.TB, size int) time.Duration {
		b := connectedBook()
		flood(tb, b, size)
		begin := cpuTime()
		b.disconnect()
		b.resync(State{})
		carryOut(tb, b)
		took := cpuTime() - begin
		for n := range size {
			if o := b.wanted.destinations.get(dst(n)); !b.wanted.obeyed(o) {
				tb.Fatalf("%s is not in effect", o.name())
			}
		}
		return took
	}},
	{"renumber", func(tb testing.TB, size int) time.Duration { // every number on the wire belongs to another vector
		have := State{Vectors: map[uint32]*farev1.Vector{}}
		for n := range size {
			have.Vectors[uint32(n+1)] = vector(uint32(n+1), 0, 0, uint32(n+1))
		}
		b := newBook(newOrder(testForwarding()), DefaultWindow)
		begin := cpuTime()
		b.resync(have)
		flood(tb, b, size)
		b.release(true)
		carryOut(tb, b)
		took := cpuTime() - begin
		if len(b.places.wires) != size {
			tb.Errorf("%d vectors on the wire, want %d", len(b.places.wires), size)
		}
		return took
	}},
	{"blocked", func(tb testing.TB, size int) time.Duration { // destinations before their vectors
		b := connectedBook()
		begin := cpuTime()
		for n := range size {
			b.setDestination(dst(n), uint32(n+1))
		}
		carryOut(tb, b)
		flood(tb, b, size)
		took := cpuTime() - begin
		for n := range size {
			if o := b.wanted.destinations.get(dst(n)); !b.wanted.obeyed(o) {
				tb.Fatalf("%s is not in effect", o.name())
			}
		}
		return took
	}},
}

// BenchmarkFlood measures the cost of many distinct bandwidths in the client's book: 16 times the vectors are to cost
// about 16 times as much.
func BenchmarkFlood(b *testing.B) {
	for _, f := range floods {
		for _, size := range []int{1024, 4096, 16384} {
			b.Run(fmt.Sprintf("%s/%d", f.name, size), func(b *testing.B) {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				var times []time.Duration
				for b.Loop() {
					times = append(times, f.run(b, size))
				}
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)/2].Microseconds())/1000, "p50-cpu-ms")
			})
		}
	}
}

// TestFlood checks that every flood is carried out. BenchmarkFlood shows that the cost is linear in the number of
// vectors.
func TestFlood(t *testing.T) {
	for _, f := range floods {
		t.Run(f.name, func(t *testing.T) { f.run(t, 4*DefaultWindow) })
	}
}

// popCommitted ends the open transaction and returns the next operation.
func popCommitted(b *book) (operation, bool) {
	b.commit()
	return b.pop()
}
