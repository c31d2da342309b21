package packets

import (
	"fmt"
	"slices"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/wecmp"
)

// BenchmarkProgram programs destinations from an empty state through the agent's socket, from the first operation until
// all are in effect. Operations are combined into requests like in the control plane's client.
func BenchmarkProgram(b *testing.B) {
	const gather = 64
	for _, driver := range drivers {
		for _, n := range []int{10_000, 16_384} {
			b.Run(fmt.Sprintf("%s/%d", driver, n), func(b *testing.B) {
				bed := newBed(b, driver, families[0])
				bed.start()
				c := bed.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 1)
				c.weigh(draftWeights[0]...)
				var set, remove [][]*farev1.Operation
				for i := range n {
					if i%gather == 0 {
						set, remove = append(set, nil), append(remove, nil)
					}
					prefix := families[0].destination(i).String()
					d := &farev1.Destination{Prefix: prefix, Vector: 1}
					if c.pins {
						pair := &farev1.PairPorts{Source: bed.family.source.String()}
						for _, port := range c.ports(families[0].destination(i)) {
							pair.SourcePorts = append(pair.SourcePorts, uint32(port))
						}
						d.Pairs = []*farev1.PairPorts{pair}
					}
					set[i/gather] = append(set[i/gather], &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: d}})
					remove[i/gather] = append(remove[i/gather], &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: prefix}}})
				}
				var took []time.Duration
				b.ResetTimer()
				for b.Loop() {
					c.gathered(remove)
					begin := time.Now()
					c.gathered(set)
					took = append(took, time.Since(begin))
				}
				report(b, took)
			})
		}
	}
}

// BenchmarkSubPortLost sets a sub-port down and up with 16,384 destinations, from the operation until it is in effect.
func BenchmarkSubPortLost(b *testing.B) {
	for _, driver := range drivers {
		b.Run(driver, func(b *testing.B) {
			bed := newBed(b, driver, families[0])
			bed.start()
			c := bed.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 16_384)
			c.weigh(draftWeights[0]...)
			var took []time.Duration
			b.ResetTimer()
			for b.Loop() {
				begin := time.Now()
				c.subPort(2, 0, false)
				took = append(took, time.Since(begin))
				c.subPort(2, 0, true)
			}
			report(b, took)
		})
	}
}

// gathered programs operations, several per request.
func (c *control) gathered(requests [][]*farev1.Operation) {
	c.b.t.Helper()
	for _, ops := range requests {
		c.Request(ops...)
	}
	if refused := c.Await(); len(refused) > 0 {
		c.b.t.Fatalf("refused: %v", refused)
	}
}

func report(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-p50")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "µs-p99")
	b.ReportMetric(float64(len(took)), "n")
	b.ReportMetric(0, "ns/op")
}
