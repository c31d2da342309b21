package worker

import (
	"context"
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/fared/fared/topo"
)

// fleet is 2,048 servers with 8 GPUs on 8 planes.
var fleet = topo.Spec{Planes: 8, Servers: 2048, GPUs: 8, Leaves: 32, Spines: 16}

// usage returns the memory in use and the processor time of this process.
func usage() (bytes uint64, processor time.Duration) {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	return m.HeapAlloc + m.StackInuse, time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkFleet connects 2,048 simulated daemons to a worker in this process, and to its successor after its end. The
// memory is that of both ends; the processor time at rest is that of ten seconds.
func BenchmarkFleet(b *testing.B) {
	f := number(b, fleet)
	for b.Loop() {
		l := listen(b)
		address := l.Addr().String()
		before, _ := usage()
		w, stop := serve(b, f, l)
		ctx, cancel := context.WithCancel(b.Context())
		begun := time.Now()
		for _, n := range f.Server {
			go simulated(ctx, f, n, []string{address}, grpc.WithReadBufferSize(buffer), grpc.WithWriteBufferSize(buffer))
		}
		until(b, "all daemons report", func() bool { return len(w.reports()) == f.Servers })
		b.ReportMetric(time.Since(begun).Seconds(), "s/connect")
		time.Sleep(10 * time.Second) // for the decision
		after, busy := usage()
		b.ReportMetric(float64(after-before)/float64(f.Servers)/1024, "KiB/daemon")
		time.Sleep(10 * time.Second)
		_, later := usage()
		b.ReportMetric(float64(later-busy)/1e8, "%core")
		stop()
		begun = time.Now()
		l, err := net.Listen("tcp4", address)
		if err != nil {
			b.Fatal(err)
		}
		w, stop = serve(b, f, l)
		until(b, "all daemons report again", func() bool { return len(w.reports()) == f.Servers })
		b.ReportMetric(time.Since(begun).Seconds(), "s/reconnect")
		cancel()
		stop()
	}
}
