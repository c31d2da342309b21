package nupa

import (
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

func must(address string) netip.Addr { return netip.MustParseAddr(address) }

// echo receives messages at minimal cost: it sends them back, or counts them.
type echo struct {
	*host
	c    rdma.Channel
	ping bool // counts instead
	body [MaxOp]byte
	n    int
	op   rdma.Op
	got  atomic.Int64
	done atomic.Int64
}

func (e *echo) admit(n int) []byte {
	e.n = n
	return e.body[:n]
}

func (e *echo) deliver() {
	if e.ping {
		e.got.Add(1)
		return
	}
	e.op = rdma.Op{Kind: rdma.OpSend, Local: e.body[:e.n]}
	e.c.Post(&e.op)
}

func (e *echo) complete(err error) {
	if err != nil {
		e.t.Error(err)
	}
	e.done.Add(1)
}

// report reports the median and the 99th percentile of round trip times.
func report(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
	b.ReportMetric(float64(len(took)), "round-trips")
}

// pingPong sends n bytes back and forth: the other end posts its reply inside the delivery.
func pingPong(b *testing.B, e *echo, n int) {
	took := make([]time.Duration, 0, b.N)
	op := rdma.Op{Kind: rdma.OpSend, Local: make([]byte, n)}
	post := func() { e.c.Post(&op) }
	b.ReportAllocs()
	b.ResetTimer()
	for i := range int64(b.N) {
		begin := time.Now()
		for e.done.Load() < i {
			runtime.Gosched()
		}
		e.Do(post)
		for e.got.Load() <= i {
			runtime.Gosched()
		}
		took = append(took, time.Since(begin))
	}
	b.StopTimer()
	report(b, took)
}

// lean makes h a host of minimal cost.
func lean(h *host, c rdma.Channel, ping bool) *echo {
	e := &echo{host: h, c: c, ping: ping}
	h.Do(func() { h.lean = e })
	return e
}

func BenchmarkSendPingPong(b *testing.B) {
	b.Run("one process", func(b *testing.B) {
		path := filepath.Join("/dev/shm", filepath.Base(b.TempDir())+"-nupa")
		defer removeAll(b, path)
		spin := Config{Spin: time.Millisecond}
		x, y := start(b, path, addressA.String(), spin), start(b, path, addressB.String(), spin)
		cx, cy := connect(b, x, y)
		e, f := lean(x, cx, true), lean(y, cy, false)
		pingPong(b, e, 8)
		e.Do(cx.Close)
		f.Do(cy.Close)
		x.tr.Stop()
		y.tr.Stop()
	})
	b.Run("two processes", func(b *testing.B) {
		path := filepath.Join("/dev/shm", filepath.Base(b.TempDir())+"-nupa")
		defer removeAll(b, path)
		x := start(b, path, addressA.String(), Config{Spin: time.Millisecond})
		o := fork(b, "echo", path)
		c, _ := o.connect(x)
		e := lean(x, c, true)
		pingPong(b, e, 8)
		e.Do(c.Close)
		o.in.Close()
		o.read("end")
		o.cmd.Wait()
		x.tr.Stop()
	})
}

// BenchmarkWrite measures operations that one endpoint executes directly, without the peer.
func BenchmarkWrite(b *testing.B) {
	for _, n := range []int{8, 4096, MaxOp} {
		b.Run(size(n), func(b *testing.B) {
			path := filepath.Join("/dev/shm", filepath.Base(b.TempDir())+"-nupa")
			defer removeAll(b, path)
			x, y := start(b, path, addressA.String(), Config{}), start(b, path, addressB.String(), Config{})
			cx, cy := connect(b, x, y)
			region := y.shared(MaxOp)
			y.Do(func() { y.register(7, region, everything) })
			e := lean(x, cx, true)
			op := rdma.Op{Kind: rdma.OpWrite, Key: 7, Remote: addressOf(region), Local: make([]byte, n)}
			post := func() { e.c.Post(&op) }
			b.ReportAllocs()
			b.SetBytes(int64(n))
			for b.Loop() {
				e.Do(post)
			}
			e.Do(cx.Close)
			y.Do(cy.Close)
			y.Do(func() { y.tr.Deregistered(7) })
			y.tr.Free(region)
			x.tr.Stop()
			y.tr.Stop()
		})
	}
}

// BenchmarkWriteThroughRing measures WRITEs to memory outside the file, with as many outstanding as fit.
func BenchmarkWriteThroughRing(b *testing.B) {
	for _, n := range []int{8, 4096, MaxOp} {
		b.Run(size(n), func(b *testing.B) {
			path := filepath.Join("/dev/shm", filepath.Base(b.TempDir())+"-nupa")
			defer removeAll(b, path)
			x, y := start(b, path, addressA.String(), Config{}), start(b, path, addressB.String(), Config{})
			cx, cy := connect(b, x, y)
			region := make([]byte, MaxOp)
			y.Do(func() { y.register(7, region, everything) })
			e := lean(x, cx, true)
			op := rdma.Op{Kind: rdma.OpWrite, Key: 7, Remote: addressOf(region), Local: make([]byte, n)}
			taken := false
			post := func() { taken = e.c.Post(&op) }
			b.ReportAllocs()
			b.SetBytes(int64(n))
			posted := int64(0)
			for b.Loop() {
				for e.Do(post); !taken; e.Do(post) {
					runtime.Gosched()
				}
				posted++
			}
			for e.done.Load() < posted {
				runtime.Gosched()
			}
			e.Do(cx.Close)
			y.Do(cy.Close)
			x.tr.Stop()
			y.tr.Stop()
		})
	}
}

func size(n int) string { return strconv.Itoa(n) + "B" }

func removeAll(b *testing.B, path string) {
	if err := os.Remove(path); err != nil {
		b.Error(err)
	}
}
