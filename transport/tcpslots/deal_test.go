package tcpslots

import (
	"math/rand/v2"
	"testing"

	"github.com/fared/fared/client/slots"
)

// shares divides 10^9 parts among n slots of each of some sub-ports by weight, rounded down, the rest to the first
// slots: a plane has perPlane sub-ports.
func shares(weights []int, perPlane, n int) (list []slots.Slot) {
	sum := 0
	for _, w := range weights {
		sum += w * n
	}
	rest := uint32(1e9)
	for range n {
		for i, w := range weights {
			share := uint32(1e9 * w / sum)
			rest -= share
			list = append(list, slots.Slot{Plane: i / perPlane, SubPort: i, Share: share, Parked: w == 0})
		}
	}
	for i := 0; rest > 0; i = (i + 1) % len(list) {
		if list[i].Share > 0 {
			list[i].Share++
			rest--
		}
	}
	return list
}

// TestPeriodIsExact checks for random weights of sub-ports that a period has exactly as many turns of each sub-port as
// its weight, or where that needs more than 1,024 turns the nearest number, that every prefix is within one turn of the
// weight of each plane, and that the slots of a bin are those of its sub-port.
func TestPeriodIsExact(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		perPlane, planes, n := 1+r.IntN(3), 1+r.IntN(8), 1+r.IntN(4)
		weights, sum, greatest := make([]int, perPlane*planes), 0, 1+r.IntN(60)
		for i := range weights {
			weights[i] = r.IntN(greatest + 1)
			sum += weights[i]
		}
		if sum == 0 {
			continue
		}
		list := shares(weights, perPlane, n)
		d := dealOf(list)
		turns, ofPlane, planeWeight := make([]int, len(weights)), make([]int, planes), make([]int, planes)
		for i, w := range weights {
			planeWeight[i/perPlane] += w
		}
		for i := range int(d.Turns) {
			b := d.Bin[d.Turn[i]]
			subPort := list[d.Slot[b.Own.First]].SubPort
			turns[subPort]++
			ofPlane[b.Plane]++
			for p, w := range planeWeight {
				if due := float64(w) * float64(i+1) / float64(sum); float64(ofPlane[p]) < due-1.01 || float64(ofPlane[p]) > due+1.01 {
					t.Fatalf("weights %v: after %d turns plane %d had %d, want %.2f", weights, i+1, p, ofPlane[p], due)
				}
			}
			if int(b.Own.Count) != n || int(b.Plane) != subPort/perPlane {
				t.Fatalf("weights %v: bin %+v of sub-port %d", weights, b, subPort)
			}
			for _, of := range []connectRange{b.Own, b.All} {
				for _, slot := range d.Slot[of.First : of.First+of.Count] {
					s := list[slot]
					if s.Share == 0 || s.Plane != int(b.Plane) || of == b.Own && s.SubPort != subPort {
						t.Fatalf("weights %v: slot %d %+v in bin %+v", weights, slot, s, b)
					}
				}
			}
		}
		for i, w := range weights {
			due := float64(w) * float64(d.Turns) / float64(sum)
			if sum <= maxTurns && float64(turns[i]) != due || float64(turns[i]) < due-1 || float64(turns[i]) > due+1 {
				t.Fatalf("weights %v: sub-port %d has %d of %d turns, want %.2f", weights, i, turns[i], d.Turns, due)
			}
		}
	}
	if d := dealOf(shares([]int{2, 2, 1, 2}, 1, 3)); d.Turns != 7 {
		t.Errorf("weights 2:2:1:2 have a period of %d turns, want 7", d.Turns)
	}
	if d := dealOf([]slots.Slot{{Parked: true}}); d.Turns != 0 {
		t.Errorf("a vector without shares has %d turns", d.Turns)
	}
}
