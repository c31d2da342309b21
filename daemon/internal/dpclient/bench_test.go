package dpclient

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/fared/fared/dataplane/memory"
)

// startOverSocket connects a client to an in-memory data plane over a unix socket.
func startOverSocket(b *testing.B, gather int) (*Client, *memory.Dataplane) {
	b.Helper()
	path := filepath.Join(b.TempDir(), "dp.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	dp := memory.New(memory.Config{})
	server := grpc.NewServer()
	dp.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := Open("unix:"+path, nil)
	if err != nil {
		b.Fatal(err)
	}
	client, err := New(Config{Conn: conn, Forwarding: testForwarding(), Gather: gather})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- client.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		<-ended
		if err := conn.Close(); err != nil {
			b.Error(err)
		}
		server.Stop()
		if err := <-served; err != nil {
			b.Error(err)
		}
	})
	return client, dp
}

// wait drains events until change is in effect.
func wait(b *testing.B, client *Client, change uint64, buf []Event) []Event {
	b.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		buf = client.Take(buf[:0])
		for _, e := range buf {
			if e.Kind == InEffect && e.Change == change {
				return buf
			}
			if e.Kind == Refused {
				b.Fatalf("refused: %+v", e)
			}
		}
		if len(buf) > 0 {
			continue
		}
		select {
		case <-client.Ready():
		case <-deadline.C:
			b.Fatalf("change %d did not come into effect: %+v", change, client.Status())
		}
	}
}

// BenchmarkProgramToInEffect measures the time from a declared change to the owner's event that it is in effect, over a
// unix socket.
func BenchmarkProgramToInEffect(b *testing.B) {
	client, _ := startOverSocket(b, 0)
	buf := wait(b, client, client.SetVector(vector(1, 1, 1, 1, 1)), nil)
	var times []time.Duration
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		begin := time.Now()
		buf = wait(b, client, client.SetSubPort(device(0, 0), n%2 != 0), buf)
		times = append(times, time.Since(begin))
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "p99-ns")
}

// BenchmarkProgramFromScratch programs a whole fabric over a unix socket, from an empty client and data plane; for
// comparison also with one operation per message.
func BenchmarkProgramFromScratch(b *testing.B) {
	for _, c := range []struct{ size, gather int }{{1024, 0}, {10000, 0}, {10000, 1}, {16384, 0}} {
		size, name := c.size, fmt.Sprint(c.size)
		if c.gather == 1 {
			name += "/one-by-one"
		}
		b.Run(name, func(b *testing.B) {
			client, dp := startOverSocket(b, c.gather)
			client.ReleaseRemovals(true)
			buf := wait(b, client, client.SetVector(vector(1, 1, 1, 1, 1)), nil)
			b.ReportAllocs()
			for b.Loop() {
				for n := range size {
					client.SetDestination(dst(n), 1)
				}
				settle(b, client)
				b.StopTimer()
				buf = client.Take(buf[:0])
				if _, got := dp.Size(); got != size {
					b.Fatalf("%d destinations, want %d", got, size)
				}
				for n := range size {
					client.DeleteDestination(dst(n))
				}
				settle(b, client)
				b.StartTimer()
			}
		})
	}
}

// settle waits until nothing is queued or in flight.
func settle(b *testing.B, client *Client) {
	b.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		if s := client.Status(); s.Connected && s.Queued == 0 && s.InFlight == 0 {
			return
		}
		select {
		case <-client.Ready():
		case <-deadline.C:
			b.Fatalf("not quiet: %+v", client.Status())
		}
	}
}

// BenchmarkBookMemory reports the client's memory for 16,384 destinations.
func BenchmarkBookMemory(b *testing.B) {
	const size = 16384
	var before, after runtime.MemStats
	for b.Loop() {
		runtime.GC()
		runtime.ReadMemStats(&before)
		book := newBook(order{}, DefaultWindow)
		book.setVector(vector(1, 1))
		for n := range size {
			book.setDestination(dst(n), 1)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/size, "B/destination")
		runtime.KeepAlive(book)
	}
}
