package nri

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// BenchmarkHooks measures the answers to RunPodSandbox and StopPodSandbox, through the sockets of the runtime, while
// the agent is absent. A runtime calls its plugins one after another, so each answer delays all pods.
func BenchmarkHooks(b *testing.B) {
	bed := newBed(b)
	r := newRuntime(b, bed.dir, bed.dir+"/none")
	bed.plug(b, time.Second)
	bed.await(b, r)
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		p := sandbox(fmt.Sprint(i), "/run/netns/x", AttachAnnotation, "true")
		begin := time.Now()
		r.run(p)
		middle := time.Now()
		r.stop(p)
		took = append(took, middle.Sub(begin), time.Since(middle))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
	b.ReportMetric(float64(took[len(took)-1].Microseconds()), "max-µs")
}
