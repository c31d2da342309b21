package daemon

import (
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
)

// used returns the processor time of this process.
func used(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkFlap measures the processor time of an UPDATE of all of 10,000 destinations by one of eight leaves, with a
// data plane in this process that places flows by a hash, and a slot table.
func BenchmarkFlap(b *testing.B) {
	const n = 10000
	hash := &farev1.FlowHash{Algorithm: "linux-l4", Seed: 7, Buckets: 1024, LastingBuckets: 16}
	dp := memory.New(memory.Config{Capabilities: &farev1.Capabilities{FlowHash: hash}})
	r := newRig(b, shape{Planes: 8, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, n), dp: dp})
	r.settled(n)
	table := publishing(b, r)
	last := coretest.Destinations(n)[n-1].Addr()
	share := map[fare.Bandwidth]uint32{200e9: 66666667, 400e9: 125000000}
	flap := func(v fare.Bandwidth) {
		var out []byte
		for some := range slices.Chunk(coretest.Destinations(n), 800) {
			out = append(out, r.leaves[0].update(v, some...)...)
		}
		r.leaves[0].mu.Lock()
		r.leaves[0].write(out)
		r.leaves[0].mu.Unlock()
		for {
			mark := table.Mark()
			pair, err := table.Lookup(own.Addr(), last, nil)
			if err == nil && pair.Slots[0].Share == share[v] && pair.InEffect {
				return
			}
			if _, err := table.Wait(b.Context(), mark); err != nil {
				b.Fatal(err)
			}
		}
	}
	flap(200e9)
	flap(400e9)
	b.ReportAllocs()
	b.ResetTimer()
	before := used(b)
	for i := range b.N {
		flap([]fare.Bandwidth{200e9, 400e9}[i%2])
	}
	b.ReportMetric(float64((used(b)-before).Microseconds())/1000/float64(b.N), "cpu-ms/op")
}
