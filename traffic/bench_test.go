package traffic

import "testing"

// BenchmarkLocal sends messages of 64 KiB from one node to another in this process, every byte verified.
func BenchmarkLocal(b *testing.B) {
	for _, transport := range Transports() {
		b.Run(transport, func(b *testing.B) {
			const message = 64 << 10
			run := Config{Pattern: PeerPeer, Message: message, Size: message * uint64(max(b.N, 1))}
			l, err := StartLocal(LocalConfig{Nodes: 2, Transport: transport, Run: run})
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			b.SetBytes(message)
			b.ReportAllocs()
			b.ResetTimer()
			r, err := Coordinate(b.Context(), run, l.Servers, nil)
			b.StopTimer()
			if err != nil || !r.Ok {
				b.Fatal(r.GetErrors(), err)
			}
			b.ReportMetric(float64(r.Total.Latency.P50Ns), "p50-ns")
			b.ReportMetric(float64(r.Total.Latency.P99Ns), "p99-ns")
		})
	}
}
