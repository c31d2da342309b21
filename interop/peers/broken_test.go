package peers

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// broken is BIRD with a fault.
type broken struct {
	bird
	fault   string
	packets bool // judged by packets
}

func (x broken) name() string   { return "bird, " + x.fault }
func (x broken) inKernel() bool { return !x.packets }

func (x broken) start(b *bed) {
	switch x.fault {
	case "absent":
	case "without weights":
		b.startBIRD(bird{}, false)
	default:
		x.bird.start(b)
	}
}

// shown is the limit of an event that never ends.
const shown = 500 * time.Millisecond

// repair undoes the leaves' part of an event that a contestant did not answer.
func (b *bed) repair(t *testing.T) {
	t.Helper()
	for _, l := range b.leaves {
		l.freeze(false)
		l.mu.Lock()
		listening := l.ln != nil
		for d := range l.speeds {
			l.speeds[d] = full
		}
		l.mu.Unlock()
		if !listening {
			if err := l.start(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, far := range []bool{false, true} {
		if _, err := b.link(far, true); err != nil {
			t.Fatal(err)
		}
	}
	b.state = [2]weights{even, even}
}

// TestJudgesNoticeAStoppedContestant measures every row of a contestant whose processes are stopped. Only rows in which
// the kernel does all the work may have a figure.
func TestJudgesNoticeAStoppedContestant(t *testing.T) {
	gate.Slow(t, gate.Chaos, "events of which none is measured, until their limits")
	t.Parallel()
	for _, byPackets := range []bool{false, true} {
		for _, n := range []int{1, 8} {
			s := settings{sizes: []int{1, 8}, flap: 2 * period}
			b := newBed(t, broken{fault: "stopped", packets: byPackets}, n, variant{})
			if err := b.settle(); err != nil {
				t.Fatal(err)
			}
			for _, p := range b.processes {
				if err := p.Signal(unix.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = p.Signal(unix.SIGCONT) }) // it may have ended
			}
			b.limit = shown
			for _, x := range rowsAt(n, s) {
				kernelAlone := strings.HasPrefix(x.name, "memory") || x.name == "linkflap" || byPackets && slices.Contains([]string{"own", "far", "own-beside", "links"}, x.name)
				if kernelAlone {
					continue
				}
				got, err := x.measure(b)
				if err == nil || errors.Is(err, errLearned) {
					t.Errorf("%s, by packets %v: figures %v of a stopped contestant (%v)", x.name, byPackets, got, err)
				}
				b.repair(t)
			}
		}
	}
}

// TestJudgesNoticeWrongWeights checks that equal weights are not taken for those of a degraded plane.
func TestJudgesNoticeWrongWeights(t *testing.T) {
	gate.Slow(t, gate.Chaos, "events of which none is measured, until their limits")
	t.Parallel()
	for _, byPackets := range []bool{false, true} {
		b := newBed(t, broken{fault: "without weights", packets: byPackets}, 1, variant{})
		if err := b.settle(); err != nil {
			t.Fatal(err)
		}
		b.limit = shown
		if took, err := event(b, degraded, even, func() (moment, error) { return b.leaves[0].announce(half, []int{0}) }); err == nil || errors.Is(err, errLearned) {
			t.Errorf("by packets %v: %v ms (%v)", byPackets, took, err)
		}
	}
}

// TestJudgesNoticeAnAbsentContestant checks that a contest does not begin without routes.
func TestJudgesNoticeAnAbsentContestant(t *testing.T) {
	gate.Slow(t, gate.Chaos, "events of which none is measured, until their limits")
	t.Parallel()
	netnstest.Require(t)
	for _, byPackets := range []bool{false, true} {
		b := newBed(t, broken{fault: "absent", packets: byPackets}, 1, variant{})
		b.limit = shown
		if err := b.settleWithin(shown); err == nil {
			t.Errorf("by packets %v: even weights without a process", byPackets)
		}
	}
}
