package hostile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
)

// Environment variables.
const (
	secondsKey = "FARED_HOSTILE_SECONDS" // duration of each attack; default 1.2
	binaryKey  = "FARED_HOSTILE_BINARY"  // file of the binary under test; default: it is built
	tightKey   = "FARED_HOSTILE_TIGHT"   // 1 asserts the limits of a quiet machine
)

// Limits. On a busy machine a process waits for a processor for seconds, so the default limits are only far below a hang; the tight ones are those of a quiet
// machine with two processors.
const (
	timeLimit   = 5 * time.Second
	tightChange = 100 * time.Millisecond // p99 of an honest leaf's change
	tightGap    = 500 * time.Millisecond // largest gap between heartbeats
)

func tight() bool { return os.Getenv(tightKey) == "1" }

// attackTime returns the duration of each attack.
func attackTime(t testing.TB) time.Duration {
	t.Helper()
	text := os.Getenv(secondsKey)
	if text == "" {
		return 1200 * time.Millisecond
	}
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil || seconds <= 0 {
		t.Fatalf("%s=%q is not a number of seconds", secondsKey, text)
	}
	return time.Duration(seconds * float64(time.Second))
}

// memoryBound is the permitted growth of the resident set while the hostile leaf's two sessions hold routes: 8 MiB + 4 KiB x routes a session
// (docs/operations/leaves.md), doubled because of garbage.
func memoryBound(routes int) int64 { return 2 * (2*8<<20 + int64(routes)*4<<10) }

// pace is the time between two changes of the honest leaf.
const pace = 50 * time.Millisecond

// verdict is the result of the measurements during an attack.
type verdict struct {
	changes []time.Duration // of the honest leaf, sorted
	gap     time.Duration   // largest gap between heartbeats
	before  int64           // resident set
	peak    int64
	vectors int // set at the data plane
}

func (v *verdict) quantile(q float64) time.Duration {
	return v.changes[min(len(v.changes)-1, int(q*float64(len(v.changes))))].Round(10 * time.Microsecond)
}

func (v *verdict) String() string {
	return fmt.Sprintf("n %d, p50 %v, p99 %v, max %v; heartbeat gap %v; resident %d MiB, +%d MiB; %d vectors", len(v.changes), v.quantile(0.5), v.quantile(0.99), v.quantile(1),
		v.gap.Round(time.Millisecond), v.before>>20, (v.peak-v.before)>>20, v.vectors)
}

// observe measures while ctx lasts. It returns an error as soon as the process, a session or a change fails.
func (b *bed) observe(ctx context.Context) (*verdict, error) {
	v := &verdict{}
	var err error
	if v.before, err = resident(b.process.Pid()); err != nil {
		return nil, err
	}
	vectors := b.dataplane.setVectors()
	b.heartbeat.gap()
	watch, stop := context.WithCancel(ctx)
	watched := make(chan error, 1)
	go func() { watched <- b.watch(watch, v) }()
	err = b.probe(ctx, v)
	stop()
	err = errors.Join(err, <-watched, b.judgeSessions(context.Background()))
	v.gap = max(v.gap, b.heartbeat.gap())
	v.vectors = b.dataplane.setVectors() - vectors
	slices.Sort(v.changes)
	// A process that has ended is the cause of all other failures.
	if end := b.process.Running(); end != nil {
		return v, end
	}
	return v, err
}

// watch samples the resident set and judges the sessions until ctx ends.
func (b *bed) watch(ctx context.Context, v *verdict) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		now, err := resident(b.process.Pid())
		if err != nil {
			return err
		}
		v.peak = max(v.peak, now)
		if i%20 == 0 {
			if err := b.judgeSessions(context.Background()); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// probe changes the victim's bandwidth at the honest leaf, and measures until the change is in effect.
func (b *bed) probe(ctx context.Context, v *verdict) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for i := 0; ; i++ {
		part := uint32(1 + i%2) // halves of the full bandwidth
		b.dataplane.want([2]uint32{part, 2})
		began := time.Now()
		if err := b.leaves[0].write(update(well(prober, full*float32(part)/2), destination(victim))); err != nil {
			return err
		}
		at, err := b.dataplane.await(timeLimit)
		if err != nil {
			return errors.Join(b.process.Running(), err)
		}
		v.changes = append(v.changes, at.Sub(began))
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// judge fails the test if a measurement exceeds its limit.
func (v *verdict) judge(t testing.TB, routes int) {
	t.Helper()
	change, gap := timeLimit, timeLimit
	if tight() {
		change, gap = tightChange, tightGap
	}
	if p99 := v.quantile(0.99); p99 > change {
		t.Errorf("an honest leaf's changes took %v (p99), want at most %v", p99, change)
	}
	if v.gap > gap {
		t.Errorf("no heartbeat for %v, want at most %v", v.gap, gap)
	}
	if bound := memoryBound(routes); v.peak-v.before > bound {
		t.Errorf("the resident set grew by %d MiB, want at most %d", (v.peak-v.before)>>20, bound>>20)
	}
}
