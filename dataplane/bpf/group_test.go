package bpf

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

// testLayout has n sub-ports, two per plane, numbered in reverse order.
func testLayout(n int, perPacket bool) source {
	l := source{place: map[string]int{}, plane: map[string]int{}, planeOf: map[string]string{}, perPacket: perPacket}
	for i := range n {
		device, plane := fmt.Sprint("d", i), fmt.Sprint("p", i/2)
		l.order = append(l.order, device)
		l.place[device], l.plane[plane], l.planeOf[device] = n-1-i, i/2, plane
	}
	return l
}

func weighted(l source, weights []uint32) *farev1.Vector {
	g := &farev1.Vector{Id: 7}
	for i, w := range weights {
		if w > 0 {
			g.Members = append(g.Members, &farev1.VectorMember{Plane: l.planeOf[l.order[i]], Device: l.order[i], Weight: w})
		}
	}
	return g
}

// shares returns the number of flows of each place.
func shares(t testing.TB, v steerGroup) (part [maxPlaces]uint64) {
	t.Helper()
	from := uint64(0)
	for i, upto := range v.Upto {
		if uint64(upto)+1 < from {
			t.Fatalf("segment %d ends before it begins: %v", i, v.Upto)
		}
		part[v.Place[i]] += uint64(upto) + 1 - from
		from = uint64(upto) + 1
	}
	if from != whole {
		t.Fatalf("the segments end at %d: %v", from, v.Upto)
	}
	return part
}

func placeOf(v *steerGroup, flow uint32) uint8 {
	for i, upto := range v.Upto {
		if flow <= upto {
			return v.Place[i]
		}
	}
	return 0xff
}

// TestWeights checks that, for any weights, each member has its share of the flows to within two flows, and that in
// per-packet mode each plane has its run.
func TestWeights(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	r := rand.New(rand.NewPCG(3, 4))
	for round := range 2000 {
		n := 1 + r.IntN(maxPlaces)
		if round < 4 {
			n = maxPlaces
		}
		l := testLayout(n, round%2 == 1)
		draw := func() []uint32 {
			out := make([]uint32, n)
			for i := range out {
				switch r.IntN(4) {
				case 0:
				case 1:
					out[i] = 1 + r.Uint32N(maxWeight)
				default:
					out[i] = 1 + r.Uint32N(9)
				}
			}
			return out
		}
		for _, weights := range [][]uint32{draw(), draw()} {
			v := l.value(weighted(l, weights))
			part := shares(t, v)
			var sum uint64
			for _, w := range weights {
				sum += uint64(w)
			}
			for i, w := range weights {
				place := l.place[l.order[i]]
				if (v.Members>>place&1 != 0) != (w > 0) {
					t.Fatalf("weights %v: member %d: mask %x", weights, i, v.Members)
				}
				if sum == 0 {
					continue
				}
				if want := float64(w) / float64(sum) * whole; math.Abs(float64(part[place])-want) > 2 || w > 0 && part[place] == 0 {
					t.Fatalf("weights %v: member %d has %d flows, want %.1f", weights, i, part[place], want)
				}
			}
			if l.perPacket {
				for p, run := range v.Run {
					var want uint64
					for i := 2 * p; i < min(2*p+2, n); i++ {
						want += part[l.place[l.order[i]]] * min(1, uint64(weights[i]))
					}
					if uint64(run.Width) != min(want, whole-1) {
						t.Fatalf("weights %v: plane %d: run of %d, want %d", weights, p, run.Width, want)
					}
					for _, at := range []uint32{run.First, run.First + run.Width - 1} {
						if place := placeOf(&v, at); run.Width > 0 && l.plane[l.planeOf[l.order[n-1-int(place)]]] != p {
							t.Fatalf("plane %d's run has place %d", p, place)
						}
					}
				}
			}
		}
	}
}

// TestWeightsMoveLittle checks that in per-flow mode a sub-port that loses its weight moves no other flows than its
// own, and that its return restores the previous placement.
func TestWeightsMoveLittle(t *testing.T) {
	for n := 2; n <= 16; n++ {
		l := testLayout(n, false)
		equal := make([]uint32, n)
		for i := range equal {
			equal[i] = 1
		}
		full := l.value(weighted(l, equal))
		for lost := range n {
			weights := append([]uint32(nil), equal...)
			weights[lost] = 0
			v := l.value(weighted(l, weights))
			for flow := uint64(0); flow < whole; flow += whole / 4096 {
				was, is := placeOf(&full, uint32(flow)), placeOf(&v, uint32(flow))
				if was != is && was != uint8(l.place[l.order[lost]]) {
					t.Fatalf("%d sub-ports, %d lost: flow %x moved from %d to %d", n, lost, flow, was, is)
				}
			}
		}
	}
}
