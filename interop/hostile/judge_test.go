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
	secondsKey = "FARED_HOSTILE_SECONDS" // duration of each attack; default 1.2, in the gate 0.3
	tightKey   = "FARED_HOSTILE_TIGHT"   // 1 asserts the limits of a quiet machine
)

// Limits. A process of a busy machine waits for a processor for seconds. So timeLimit, which is only far below a hang,
// is one of own time (span), and the limits of a quiet machine with two processors, which are those of users, hold on
// request.
const (
	timeLimit   = 10 * time.Second
	hangLimit   = time.Minute            // of elapsed time
	tightChange = 100 * time.Millisecond // elapsed time of an honest leaf's change, p99
	tightGap    = 500 * time.Millisecond // largest elapsed time between heartbeats
)

func tight() bool { return os.Getenv(tightKey) == "1" }

// attackTime returns the duration of each attack: usual, or that of the environment.
func attackTime(t testing.TB, usual time.Duration) time.Duration {
	t.Helper()
	text := os.Getenv(secondsKey)
	if text == "" {
		return usual
	}
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil || seconds <= 0 {
		t.Fatalf("%s=%q is not a number of seconds", secondsKey, text)
	}
	return time.Duration(seconds * float64(time.Second))
}

// memoryBound is the permitted growth of the resident set while the hostile leaf's two sessions hold routes: 8 MiB + 4
// KiB x routes a session (docs/operations/leaves.md), doubled because of garbage.
func memoryBound(routes int) int64 { return 2 * (2*8<<20 + int64(routes)*4<<10) }

// pace is the time between two changes of the honest leaf.
const pace = 50 * time.Millisecond

// verdict is the result of the measurements during an attack.
type verdict struct {
	changes []span // of the honest leaf
	gap     span   // largest gaps between heartbeats
	before  int64  // resident set
	peak    int64
	vectors int // set at the data plane
}

// The parts of a span.
func wall(s span) time.Duration { return s.wall }
func own(s span) time.Duration  { return s.own }
func ran(s span) time.Duration  { return s.ran }

// quantile returns a quantile of a part of the changes.
func (v *verdict) quantile(part func(span) time.Duration, q float64) time.Duration {
	var all []time.Duration
	for _, s := range v.changes {
		all = append(all, part(s))
	}
	slices.Sort(all)
	return all[min(len(all)-1, int(q*float64(len(all))))].Round(10 * time.Microsecond)
}

func (v *verdict) String() string {
	if len(v.changes) == 0 {
		return "no change is in effect"
	}
	return fmt.Sprintf("n %d, p50 %v, p99 %v, max %v (own p50 %v, p99 %v; ran p50 %v, p99 %v); heartbeat gap %v (own %v); resident %d MiB, +%d MiB; %d vectors",
		len(v.changes), v.quantile(wall, 0.5), v.quantile(wall, 0.99), v.quantile(wall, 1), v.quantile(own, 0.5), v.quantile(own, 0.99), v.quantile(ran, 0.5), v.quantile(ran, 0.99),
		v.gap.wall.Round(time.Millisecond), v.gap.own.Round(time.Millisecond), v.before>>20, (v.peak-v.before)>>20, v.vectors)
}

// observe measures while ctx lasts. It returns an error as soon as the process, a session or a change fails.
func (b *bed) observe(ctx context.Context) (*verdict, error) {
	v := &verdict{}
	var err error
	if v.before, err = resident(b.process.Pid()); err != nil {
		return nil, err
	}
	vectors := b.dataplane.setVectors()
	b.heartbeat.measure(b.pids()...)
	watch, stop := context.WithCancel(ctx)
	watched := make(chan error, 1)
	go func() { watched <- b.watch(watch, v) }()
	err = b.probe(ctx, v)
	stop()
	err = errors.Join(err, <-watched, b.judgeSessions(context.Background()))
	v.gap = b.heartbeat.widest()
	v.vectors = b.dataplane.setVectors() - vectors
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

// pids returns the processes that take part in a change: the server, and the test with its leaves and the data plane.
func (b *bed) pids() []int { return []int{b.process.Pid(), os.Getpid()} }

// probe changes the victim's bandwidth at the honest leaf, and measures until the change is in effect.
func (b *bed) probe(ctx context.Context, v *verdict) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for i := 0; ; i++ {
		part := uint32(1 + i%2) // halves of the full bandwidth
		b.dataplane.want([2]uint32{part, 2})
		before, server := read(b.pids()...), read(b.process.Pid())
		if err := b.leaves[0].write(update(well(prober, full*float32(part)/2), destination(victim))); err != nil {
			return err
		}
		var took span
		for {
			at, ok := b.dataplane.await(timeLimit)
			now := read(b.pids()...)
			if ok {
				took = now.until(before, at)
				took.ran = read(b.process.Pid()).ran - server.ran
				break
			}
			if took = now.since(before); took.own > timeLimit || took.wall > hangLimit {
				return errors.Join(b.process.Running(), fmt.Errorf("an honest leaf's change is not in effect after %v (own time %v)", took.wall, took.own))
			}
			if err := b.process.Running(); err != nil {
				return err
			}
		}
		v.changes = append(v.changes, took)
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
	change, gap, changeLimit, gapLimit := v.quantile(own, 0.99), v.gap.own, timeLimit, timeLimit
	if tight() {
		change, gap, changeLimit, gapLimit = v.quantile(wall, 0.99), v.gap.wall, tightChange, tightGap
	}
	if change > changeLimit {
		t.Errorf("an honest leaf's changes took %v (p99), want at most %v", change, changeLimit)
	}
	if gap > gapLimit || v.gap.wall > hangLimit {
		t.Errorf("no heartbeat for %v (own time %v), want at most %v", v.gap.wall, v.gap.own, gapLimit)
	}
	if bound := memoryBound(routes); v.peak-v.before > bound {
		t.Errorf("the resident set grew by %d MiB, want at most %d", (v.peak-v.before)>>20, bound>>20)
	}
}
