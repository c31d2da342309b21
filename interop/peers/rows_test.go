package peers

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"
)

// figure is a measured quantity of a row.
type figure struct {
	key   string
	title string
	unit  string // ms or MB
}

// samples are values by key of the figure.
type samples map[string][]float64

// row is a measurement at one number of destinations.
type row struct {
	name    string
	size    int
	rounds  int // by default
	figures []figure
	// measure makes one or more events at a contestant whose destinations all have even weights. mend starts the way back, in which all contestants
	// take part at the same time; nil if measure ends with even weights.
	measure func(*bed) (samples, error)
	mend    func(*bed) error
}

const (
	eventLimit = 20 * time.Second       // of an event
	quiet      = 100 * time.Millisecond // without a change, after which an event is over
)

// degraded are the weights when the leaf of the first plane advertises half of the full speed.
var degraded = weights{1, 2, 2, 2}

// without are the weights when the first plane is lost.
var without = weights{0, 1, 1, 1}

// idle leaves all processes without an event for a moment, as they are most of the time.
func idle(d time.Duration) {
	runtime.GC()
	time.Sleep(d)
}

// rowsAt returns the rows that make sense for a number of destinations; last is true for the largest one of the contest.
func rowsAt(n int, s settings) (all []row) {
	last, one := n == s.sizes[len(s.sizes)-1], n == 1
	numbered := func(name string) string { return fmt.Sprintf("%s%d", name, n) }
	destinations := count(n)

	if !one {
		all = append(all, row{name: numbered("memory"), rounds: 1,
			figures: []figure{{numbered("memory"), "resident memory of all processes, " + destinations, "MB"}},
			measure: func(b *bed) (samples, error) {
				mb, err := resident(b.pids())
				return samples{numbered("memory"): {mb}}, err
			}})
	}
	all = append(all, row{name: numbered("update"), rounds: 15,
		figures: []figure{{numbered("update"), "UPDATE of one destination to kernel weights, " + destinations, "ms"}},
		measure: func(b *bed) (samples, error) {
			down, err := event(b, degraded, even, func() (moment, error) { return b.leaves[0].announce(half, []int{0}) })
			if err != nil && !errors.Is(err, errLearned) {
				return nil, err
			}
			idle(s.idle)
			up, err := event(b, even, even, func() (moment, error) { return b.leaves[0].announce(full, []int{0}) })
			return samples{numbered("update"): {down, up}}, err
		}})
	if last {
		all = append(all, row{name: "degrade", rounds: 20,
			figures: []figure{
				{"degrade", "one plane degraded for each of " + destinations + ", first UPDATE to all in the kernel", "ms"},
				{"degrade-cpu", "processor time of it", "ms"}},
			measure: func(b *bed) (samples, error) {
				before := processorTime(b.pids())
				took, err := event(b, degraded, degraded, func() (moment, error) { return b.leaves[0].announce(half, b.every()) })
				return samples{"degrade": {took}, "degrade-cpu": {milliseconds(processorTime(b.pids()) - before)}}, err
			},
			mend: func(b *bed) error {
				_, err := b.leaves[0].announce(full, b.every())
				return err
			}})
	}
	if last {
		all = append(all, row{name: "traffic", rounds: 10,
			figures: []figure{{"traffic", "the same to packets at all leaves, at 50,000 packets/s", "ms"}},
			measure: func(b *bed) (samples, error) {
				took, err := packetEvent(b, "traffic", b.every(), even, degraded, func() (moment, error) { return b.leaves[0].announce(half, b.every()) })
				return samples{"traffic": {took}}, err
			},
			mend: func(b *bed) error {
				_, err := b.leaves[0].announce(full, b.every())
				return err
			}})
	}
	rounds := 10
	if one {
		rounds = 30
	}
	all = append(all, row{name: numbered("kill"), rounds: rounds,
		figures: []figure{{numbered("kill"), "leaf killed (FIN) to kernel weights, " + destinations, "ms"}},
		measure: func(b *bed) (samples, error) {
			took, err := event(b, without, without, func() (moment, error) { return b.leaves[0].kill(), nil })
			return samples{numbered("kill"): {took}}, err
		},
		mend: func(b *bed) error { return b.leaves[0].start() }})
	if one {
		all = append(all, links(s, "own", false), links(s, "far", true))
	}
	if last && !one {
		all = append(all, row{name: "links", rounds: 8,
			figures: []figure{
				{numbered("rewrite"), "own carrier lost, the kernel's routes rewritten, " + destinations, "ms"},
				{numbered("back"), "own carrier back to weights restored, " + destinations, "ms"}},
			measure: func(b *bed) (samples, error) {
				down, err := event(b, without, without, func() (moment, error) { return b.link(false, 0, false) })
				if err != nil && !errors.Is(err, errLearned) {
					return nil, err
				}
				idle(s.idle)
				up, err := event(b, even, even, func() (moment, error) { return b.link(false, 0, true) })
				return samples{numbered("rewrite"): {down}, numbered("back"): {up}}, err
			}})
	}
	if last {
		all = append(all, row{name: "load", rounds: 8,
			figures: []figure{
				{"load", destinations + " loaded, OPEN to all in the kernel", "ms"},
				{"load-cpu", "processor time of it", "ms"}},
			measure: load})
	}
	for i := range all {
		all[i].size = n
	}
	return all
}

// count writes a number of destinations.
func count(n int) string {
	if n == 1 {
		return "1 destination"
	}
	digits := fmt.Sprint(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits + " destinations"
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// event makes a change, and returns the milliseconds until all destinations have the weights: in the kernel, or by packets where the kernel does not show them.
func event(b *bed, first, rest weights, change func() (moment, error)) (took float64, err error) {
	before := b.state
	b.state = [2]weights{first, rest}
	if !b.contestant.inKernel() {
		destinations := b.every()
		if before[1] == rest {
			destinations = destinations[:1]
		}
		return packetEvent(b, fmt.Sprint("kernel ", before, b.state), destinations, before[0], first, change)
	}
	if err := b.judge.want(first, rest); err != nil {
		return 0, err
	}
	if b.judge.all {
		return 0, errors.New("the kernel has the new weights before the event")
	}
	began, err := change()
	if err != nil {
		return 0, err
	}
	at, err := b.judge.await(eventLimit, quiet)
	if err != nil {
		return 0, errors.Join(err, b.running())
	}
	return at.since(began), nil
}

// links returns the row of a sub-port that loses its carrier, by its own end or by the leaf's, and gets it back.
func links(s settings, name string, far bool) row {
	end := map[bool]string{false: "own", true: "the leaf's"}[far]
	figures := []figure{
		{name, "carrier lost at " + end + " end, to corrected weights, by packets", "ms"},
		{name + "-rewrite1", "the same to the kernel's routes rewritten", "ms"},
		{name + "-back1", "carrier back at " + end + " end, to weights restored", "ms"}}
	return row{name: name, rounds: 20, figures: figures, measure: func(b *bed) (samples, error) {
		got := samples{}
		if err := b.judge.want(without, without); err != nil {
			return nil, err
		}
		var began moment
		took, err := packetEvent(b, name, b.every(), even, without, func() (at moment, err error) {
			began, err = b.link(far, 0, false)
			return began, err
		})
		learned := errors.Is(err, errLearned)
		if err != nil && !learned {
			return nil, err
		}
		got[name] = []float64{took}
		if b.contestant.inKernel() {
			at, err := b.judge.await(eventLimit, quiet)
			if err != nil {
				return nil, err
			}
			got[name+"-rewrite1"] = []float64{at.since(began)}
		}
		b.state = [2]weights{without, without}
		idle(s.idle)
		up, err := event(b, even, even, func() (moment, error) { return b.link(far, 0, true) })
		if err != nil && !errors.Is(err, errLearned) {
			return nil, err
		}
		got[name+"-back1"] = []float64{up}
		return got, nil
	}}
}

// load closes all sessions, waits until no route is left, and measures the sessions' return.
func load(b *bed) (samples, error) {
	none := weights{}
	if _, err := event(b, none, none, func() (moment, error) {
		began := now()
		for _, l := range b.leaves {
			l.kill()
		}
		return began, nil
	}); err != nil && !errors.Is(err, errLearned) {
		return nil, err
	}
	idle(b.idle)
	b.gate.arm()
	defer b.gate.release()
	var before time.Duration
	took, err := event(b, even, even, func() (moment, error) {
		for _, l := range b.leaves {
			if err := l.start(); err != nil {
				return 0, err
			}
		}
		began, err := b.gate.await(eventLimit)
		before = processorTime(b.pids())
		return began, err
	})
	return samples{"load": {took}, "load-cpu": {milliseconds(processorTime(b.pids()) - before)}}, err
}

// selected reports whether a row's name is chosen: by itself, or by its beginning without the number of destinations.
func selected(name string, chosen []string) bool {
	for _, c := range chosen {
		if c == name || strings.HasPrefix(name, c) && strings.Trim(name[len(c):], "0123456789") == "" {
			return true
		}
	}
	return len(chosen) == 0
}
