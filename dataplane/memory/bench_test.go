package memory_test

import (
	"runtime"
	"testing"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

// BenchmarkConnection reports the memory of an in-process data plane with a Program stream.
func BenchmarkConnection(b *testing.B) {
	const planes = 200
	var before, after runtime.MemStats
	for b.Loop() {
		runtime.GC()
		runtime.ReadMemStats(&before)
		var conns []*memory.Conn
		for range planes {
			conn, err := memory.Dial(memory.New(memory.Config{}))
			if err != nil {
				b.Fatal(err)
			}
			client := farev1.NewDataplaneServiceClient(conn)
			if _, err := client.Hello(b.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
				b.Fatal(err)
			}
			s, err := client.Program(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			if _, err := s.Header(); err != nil {
				b.Fatal(err)
			}
			conns = append(conns, conn)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapInuse+after.StackInuse-before.HeapInuse-before.StackInuse)/planes, "B/plane")
		for _, conn := range conns {
			if err := conn.Close(); err != nil {
				b.Error(err)
			}
		}
	}
}
