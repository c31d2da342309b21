package peers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// floor is testdata/floor, the least that a router in Go can do for one destination, with a kind of kernel object:
// "route" or "group".
type floor struct{ object string }

func (f floor) name() string  { return "floor-" + f.object }
func (floor) version() string { return "testdata/floor" }
func (floor) inKernel() bool  { return true }
func (floor) tools() []string { return []string{"go"} }

func (f floor) start(b *bed) {
	b.t.Helper()
	binary := filepath.Join(b.dir, "floor")
	build := exec.Command("go", "build", "-trimpath", "-o", binary, "./testdata/floor")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.t.Fatalf("%v\n%s", err, out)
	}
	args := []string{f.object, "10.128.0.0", fmt.Sprint(serverAS), loopback.String()}
	for p := range planes {
		args = append(args, fmt.Sprintf("%s,%s,%s", serverAddress(p), leafAddress(p), device(p)))
	}
	b.run(binary, args...)
}

// TestFloor checks that the floor follows UPDATEs and the end of a session, so that its figures are those of a router.
func TestFloor(t *testing.T) {
	gate.Slow(t, gate.Chaos, "two beds of the contest")
	t.Parallel()
	for _, object := range []string{"route", "group"} {
		t.Run(object, func(t *testing.T) {
			b := newBed(t, floor{object}, 1, variant{})
			if err := b.settle(); err != nil {
				t.Fatal(err)
			}
			for _, step := range []struct {
				want   weights
				change func() (moment, error)
			}{
				{degraded, func() (moment, error) { return b.leaves[0].announce(half, []int{0}) }},
				{without, func() (moment, error) { return b.leaves[0].kill(), nil }},
				{even, func() (moment, error) {
					l, at := b.leaves[0], now()
					l.mu.Lock()
					l.speeds[0] = full
					l.mu.Unlock()
					return at, l.start()
				}},
			} {
				if _, err := event(b, step.want, step.want, step.change); err != nil {
					t.Fatalf("weights %v: %v", step.want, err)
				}
			}
		})
	}
}
