package chaos

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

const (
	randomFabrics = 4 // in a run
	randomCuts    = 5 // on each fabric
)

// TestRandomFabrics cuts and restores cables of random fabrics whose owners have different numbers of sub-ports at
// different speeds. After each change all weights, and the packets counted on every cable, must follow from the lesser
// bandwidth of both ends.
func TestRandomFabrics(t *testing.T) {
	gate.Slow(t, gate.Chaos, "cuts of random fabrics")
	seed := rand.Uint64N(1e9)
	if text := os.Getenv(seedKey); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", seedKey, err)
		}
	}
	for i := range uint64(randomFabrics) {
		t.Run(fmt.Sprintf("%s=%d", seedKey, seed+i), func(t *testing.T) {
			c := newChaos(t, draw(rand.New(rand.NewPCG(seed+i, 1))), seed+i)
			for range randomCuts {
				what := ""
				for what == "" {
					switch c.r.IntN(4) {
					case 0:
						what = c.mend()
					default:
						what = c.cut(c.r.IntN(2) == 0)
					}
					if what == "" && c.r.IntN(8) == 0 {
						what = "change nothing"
					}
				}
				took, problem := c.settle(time.Now(), settleLimit)
				if problem != "" {
					t.Fatalf("%s: not right after %v: %s", what, took, problem)
				}
				t.Logf("%s: right after %v", what, took)
			}
			t.Logf("%d bursts of %d packets of random flows; packets of slots by server: %v", c.firsts, len(c.f.d.pairs())*c.f.d.flows(), c.slots)
		})
	}
}

// TestDraw verifies that random fabrics are of every kind, can be built, and can lose a cable.
func TestDraw(t *testing.T) {
	kinds := map[string]int{}
	for seed := range uint64(300) {
		d := draw(rand.New(rand.NewPCG(seed, 1)))
		is := allUp(d)
		for _, software := range d.leaf {
			if err := validate(d, software); err != nil {
				t.Fatalf("seed %d: %v\n%v", seed, err, d)
			}
			kinds[software]++
		}
		for name, has := range map[string]bool{"own ports": d.gpus > 1, "shared ports": d.gpus == 1, "IPv6 alone": !d.family[0], "IPv4 alone": !d.family[1],
			"both families": d.family[0] && d.family[1], "spray": d.spray, "shared AS": d.sharedAS, "one software": d.homogeneous(), "enough": enough(&is, keptPlanes+1)} {
			if has {
				kinds[name]++
			}
		}
		if !enough(&is, keptPlanes+1) {
			t.Errorf("seed %d: no leaf can be lost: %v", seed, d)
		}
	}
	if len(kinds) != 12 {
		t.Errorf("not all kinds are drawn: %v", kinds)
	}
	for name, build := range designs {
		for _, software := range build().leaf {
			if err := validate(build(), software); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
