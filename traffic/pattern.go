package traffic

import (
	"fmt"
	"slices"
	"strings"
)

// Pattern selects the pairs of sources and destinations.
type Pattern string

// The patterns.
const (
	AllToAll Pattern = "all-to-all" // each rank to every other
	Incast   Pattern = "incast"     // all other ranks to rank 0
	Ring     Pattern = "ring"       // each rank to the next, in the steps of an all-reduce
	PeerPeer Pattern = "p2p"        // rank 0 to rank 1, rank 2 to rank 3, and so on
)

// Patterns returns all patterns.
func Patterns() []string {
	return []string{string(AllToAll), string(Incast), string(Ring), string(PeerPeer)}
}

// Pair is a direction of data between two ranks.
type Pair struct{ Source, Destination int }

// Pairs returns a pattern's pairs over ranks 0 to n-1, in the order of their numbers. n must be at least 2. With
// PeerPeer the last of an odd number of ranks has no pair.
func (p Pattern) Pairs(n int) ([]Pair, error) {
	if n < 2 {
		return nil, fmt.Errorf("%d loopbacks: traffic needs at least 2", n)
	}
	var out []Pair
	switch p {
	case AllToAll:
		// In the order of distance, so that at any time each rank is the destination of one source.
		for d := 1; d < n; d++ {
			for s := range n {
				out = append(out, Pair{s, (s + d) % n})
			}
		}
	case Incast:
		for s := 1; s < n; s++ {
			out = append(out, Pair{s, 0})
		}
	case Ring:
		for s := range n {
			out = append(out, Pair{s, (s + 1) % n})
		}
	case PeerPeer:
		for s := 0; s+1 < n; s += 2 {
			out = append(out, Pair{s, s + 1})
		}
	default:
		return nil, fmt.Errorf("pattern %q is not known: use %s", p, strings.Join(Patterns(), ", "))
	}
	return out, nil
}

// RingSteps returns the number of steps of an all-reduce over a ring of n ranks: n-1 of reduce-scatter, then n-1 of
// all-gather.
func RingSteps(n int) int { return 2 * (n - 1) }

// RingChunk returns the chunk, of n, that a rank sends in a step of an all-reduce. In reduce-scatter (steps 0 to n-2)
// it is the partial sum, to which the next rank adds its own; in all-gather it is a complete sum.
func RingChunk(n, rank, step int) int { return ((rank-step)%n + n) % n }

// ringStepMessages returns the number of messages of a step. If messages is not 0, a pair sends them in rounds of whole
// all-reduces. If it is 0 (until the time is up), a step is one window of outstanding messages.
func ringStepMessages(n int, messages, outstanding uint64) uint64 {
	if messages == 0 {
		return outstanding
	}
	steps := uint64(RingSteps(n))
	return max(1, (messages+steps-1)/steps)
}

// schedule is a pair's place in a pattern. The zero value is that of pair 0 in a pattern without dependencies.
type schedule struct {
	pair uint32
	// For rings: number of ranks, rank of the source, and messages per step (0 means no ring).
	ranks, rank int
	step        uint64
}

// granted returns the number of messages that may be sent, given the number that have arrived over the previous pair:
// all of step k once step k-1 is complete.
func (s schedule) granted(arrived uint64) uint64 {
	if s.step == 0 {
		return ^uint64(0)
	}
	return (arrived/s.step + 1) * s.step
}

// stream returns the identity of a message's content: its stream, and its number there. Each pair has a stream, but a
// message of an all-gather belongs to the stream of its chunk, which is the same for every pair.
func (s schedule) stream(m uint64) (stream, number uint64) {
	if s.step == 0 {
		return uint64(s.pair), m
	}
	steps := uint64(RingSteps(s.ranks))
	round, step := m/s.step/steps, m/s.step%steps
	if step < steps/2 {
		return uint64(s.pair), m
	}
	const chunks = 1 << 32 // streams from this number on are chunks
	return chunks + uint64(RingChunk(s.ranks, s.rank, int(step))), round*s.step + m%s.step
}

// pairTo returns the pair that ends at a rank, or -1.
func pairTo(pairs []Pair, rank int) int {
	return slices.IndexFunc(pairs, func(p Pair) bool { return p.Destination == rank })
}
