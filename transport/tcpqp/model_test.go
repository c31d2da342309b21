package tcpqp

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// TestModelOnStreams checks that on streams that may fail at any byte every operation is executed once, completes
// afterwards, and leaves memory equal to the model's.
func TestModelOnStreams(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	deaths, copied, moved := 0, uint64(0), uint64(0)
	for seed := range uint64(9) {
		death := []float64{0, 0.001, 0.01, 0.1}[seed%4]
		s := newSim(seed, death, 1<<(12+seed%8), seed%3 == 0)
		o := rdmatest.Options{Seed: seed, Ops: 1500, Channels: 1 + int(seed%5), Window: 24, NotReady: 0.1 * float64(seed%3)}
		if seed%2 == 1 {
			o.Flap = 5 * time.Millisecond
		}
		switch { // an operation that takes longer than the streams last never completes
		case death > 0.01:
			o.MaxSize = 2000
		case death > 0:
			o.MaxSize = 20000
		case seed%8 == 0:
			o.MaxSize = maxOp
		}
		result := rdmatest.ChannelsOn(t, s, o)
		deaths += s.deaths
		for _, c := range result.Counters {
			copied += c["reads_copied"]
			moved += c["moved"]
			if c["malformed"]+c["failed"] > 0 {
				t.Fatalf("seed %d: %v", seed, c)
			}
		}
	}
	t.Logf("%d streams died, %d moves, %d READs were copied", deaths, moved, copied)
	if deaths < 100 || moved < 100 || copied < 10 {
		t.Error("the model saw too little of what can happen")
	}
}

// TestModelOnManyStreams does many short runs, of more kinds.
func TestModelOnManyStreams(t *testing.T) {
	for seed := range uint64(gate.Count(t, gate.Models, 20, 60)) {
		rng := rand.New(rand.NewPCG(seed, 2))
		o := rdmatest.Options{
			Seed: seed, Ops: 200, Channels: 1 + rng.IntN(6), Window: 1 + rng.IntN(40), MaxSize: 1 + rng.IntN(4000), NotReady: rng.Float64() / 2,
		}
		if rng.IntN(2) == 1 {
			o.Flap = time.Duration(1+rng.IntN(20)) * time.Millisecond
		}
		rdmatest.ChannelsOn(t, newSim(seed, rng.Float64()/30, 1<<(11+rng.IntN(8)), rng.IntN(2) == 1), o)
	}
}
