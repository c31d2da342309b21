package peers

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"
)

// figure is a measured quantity of a row.
type figure struct {
	key   string
	title string
	unit  string // ms, MB, %, packets or changes
	label string // in the drawing; "" leaves the figure out
}

// variant is a setting of all contestants of a row.
type variant struct {
	bfd time.Duration // interval of BFD; 0 disables it
	// damped leaves fared's damping of links at its default. Otherwise damping is disabled, because the rounds of a row
	// fail the same link in a row.
	damped bool
	silent bool // fared sends and answers no probes
}

// variants lists the beds of a number of destinations.
var variants = []variant{{}, {damped: true}, {bfd: bfdInterval}}

// samples are values by key of the figure.
type samples map[string][]float64

// row is a measurement at one number of destinations.
type row struct {
	name    string
	size    int
	bed     variant
	packets bool // all contestants are judged by packets, not only those without kernel routes
	rounds  int  // by default
	figures []figure
	// measure makes one or more events at a contestant whose destinations all have even weights. mend starts the way
	// back, in which all contestants take part at the same time; nil if measure ends with even weights.
	measure func(*bed) (samples, error)
	mend    func(*bed) error
}

const (
	single = 100 // samples of an event of one destination, so that a p99 is not the largest one of few

	eventLimit  = 20 * time.Second       // of an event
	settleLimit = time.Minute            // of the way back
	quiet       = 100 * time.Millisecond // without a change, after which an event is over

	bfdInterval = 50 * time.Millisecond
)

// degraded are the weights when the leaf of the first plane advertises half of the full speed.
var degraded = weights{1, 2, 2, 2, 2, 2, 2, 2}

// without are the weights when the first plane is lost.
var without = weights{0, 1, 1, 1, 1, 1, 1, 1}

// idle leaves all processes without an event for a moment, as they are most of the time.
func idle(d time.Duration) {
	runtime.GC()
	time.Sleep(d)
}

// rowsAt returns the rows that make sense for a number of destinations; last is true for the largest one of the
// contest.
func rowsAt(n int, s settings) (all []row) {
	last, one := n == s.sizes[len(s.sizes)-1], n == 1
	numbered := func(name string) string { return fmt.Sprintf("%s%d", name, n) }
	destinations := count(n)

	if !one {
		all = append(all, row{name: numbered("memory"), rounds: 1,
			figures: []figure{{numbered("memory"), "resident memory of all processes, " + destinations, "MB", ""},
				{numbered("memory") + "-pss", "shared pages of it once", "MB", ""}},
			measure: func(b *bed) (samples, error) {
				mb, err := resident(b.pids(), "VmRSS")
				pss, err2 := resident(b.pids(), "Pss")
				return samples{numbered("memory"): {mb}, numbered("memory") + "-pss": {pss}}, errors.Join(err, err2)
			}})
	}
	if !one {
		all = append(all, memoryAfterCycles(s, numbered("cycles"), destinations))
	}
	updates, kills := 10, 8
	if one {
		updates, kills = single/2, single
	}
	all = append(all, row{name: numbered("update"), rounds: updates,
		figures: []figure{{numbered("update"), "UPDATE of one destination to kernel weights, " + destinations, "ms", "UPDATE, " + destinations}},
		measure: func(b *bed) (samples, error) {
			down, err := event(b, degraded, even, func() (moment, error) { return b.leaves[0].announce(half, []int{0}) })
			if err != nil && !errors.Is(err, errLearned) {
				return nil, err
			}
			idle(s.idle)
			up, err := event(b, even, even, func() (moment, error) { return b.leaves[0].announce(full, []int{0}) })
			return samples{numbered("update"): {down, up}}, err
		}})
	if one {
		all = append(all, updateByPackets(s))
	}
	if last {
		all = append(all, row{name: "degrade", rounds: 15,
			figures: []figure{
				{"degrade", "one plane degraded for each of " + destinations + ", first UPDATE to all in the kernel", "ms", "plane degraded, " + destinations},
				{"degrade-cpu", "processor time of it", "ms", ""}},
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
		all = append(all, row{name: "traffic", rounds: 8, packets: true,
			figures: []figure{{"traffic", "the same to packets at all leaves, at 50,000 packets/s", "ms", "the same, by packets"}},
			measure: func(b *bed) (samples, error) {
				took, err := packetEvent(b, "traffic", b.every(), even, degraded, func() (moment, error) { return b.leaves[0].announce(half, b.every()) })
				return samples{"traffic": {took}}, err
			},
			mend: func(b *bed) error {
				_, err := b.leaves[0].announce(full, b.every())
				return err
			}})
	}
	all = append(all, row{name: numbered("kill"), rounds: kills,
		figures: []figure{{numbered("kill"), "leaf killed (FIN) to kernel weights, " + destinations, "ms", "leaf killed, " + destinations}},
		measure: func(b *bed) (samples, error) {
			took, err := event(b, without, without, func() (moment, error) { return b.leaves[0].kill(), nil })
			return samples{numbered("kill"): {took}}, err
		},
		mend: func(b *bed) error { return b.leaves[0].start() }})
	if one {
		beside := paceOf(n)
		all = append(all, links(s, "own", "", false, beside), links(s, "far", "", true, beside), killBeside(), links(s, "own-beside", besides, false, slow), linkFlap(s), row{name: "bfd", rounds: single, bed: variant{bfd: bfdInterval}, packets: true,
			figures: []figure{{"bfd", "leaf frozen, BFD 3 x 50 ms, by packets", "ms", "leaf frozen, BFD, by packets"}},
			measure: func(b *bed) (samples, error) {
				took, err := packetEvent(b, "bfd", b.every(), even, without, func() (moment, error) { return b.leaves[0].freeze(true), nil })
				return samples{"bfd": {took}}, err
			},
			mend: func(b *bed) error {
				b.leaves[0].freeze(false)
				return nil
			}})
	}
	all = append(all, row{name: numbered("idle"), rounds: 1,
		figures: []figure{{numbered("idle"), fmt.Sprintf("%v without an event, processor time, %s", s.flap/3, destinations), "ms", ""}},
		measure: func(b *bed) (samples, error) {
			idle(s.rest) // work after a start or a change has ended
			before := processorTime(b.pids())
			idle(s.flap / 3)
			used := processorTime(b.pids()) - before
			// An UPDATE tells idle processes from stopped ones.
			_, err := event(b, degraded, even, func() (moment, error) { return b.leaves[0].announce(half, []int{0}) })
			if err != nil && !errors.Is(err, errLearned) {
				return nil, err
			}
			return samples{numbered("idle"): {milliseconds(used)}}, nil
		},
		mend: func(b *bed) error {
			_, err := b.leaves[0].announce(full, []int{0})
			return err
		}})
	if last && !one {
		all = append(all, row{name: "links", rounds: 6,
			figures: []figure{
				{numbered("rewrite"), "own carrier lost, the kernel's routes rewritten, " + destinations, "ms", "carrier lost, " + destinations},
				{numbered("back"), "own carrier back to weights restored, " + destinations, "ms", "carrier back, " + destinations}},
			measure: func(b *bed) (samples, error) {
				down, err := event(b, without, without, func() (moment, error) { return b.link(false, false) })
				if err != nil && !errors.Is(err, errLearned) {
					return nil, err
				}
				idle(s.idle)
				up, err := event(b, even, even, func() (moment, error) { return b.link(false, true) })
				return samples{numbered("rewrite"): {down}, numbered("back"): {up}}, err
			}})
	}
	if last {
		all = append(all, row{name: "load", rounds: 6,
			figures: []figure{
				{"load", destinations + " loaded, OPEN to all in the kernel", "ms", destinations + " loaded"},
				{"load-cpu", "processor time of it", "ms", ""}},
			measure: load}, row{name: "flap", rounds: 1,
			figures: []figure{
				{"flap-cpu", fmt.Sprintf("one plane of %s alternates at 10 Hz for %v, processor time", destinations, s.flap), "ms", ""},
				{"flap-states", "changes of the last destination in the kernel meanwhile", "changes", ""},
				{"flap-last", "the last change to all in the kernel", "ms", ""},
				{"flap-other", "meanwhile: UPDATE of one destination by another leaf to kernel weights", "ms", ""}},
			measure: func(b *bed) (samples, error) { return flap(b, s.flap) },
			mend: func(b *bed) error {
				_, err := b.leaves[0].announce(full, b.every())
				return err
			}})
	}
	for i := range all {
		all[i].size = n
	}
	return all
}

// memoryAfterCycles returns the row of the memory that remains after changes. Pages of files are shared, and the kernel
// drops them when it needs memory; anonymous ones are the processes' own.
func memoryAfterCycles(s settings, name, destinations string) row {
	kinds := []string{"VmRSS", "RssAnon", "RssFile", "Pss"}
	key := func(kind string) string {
		return name + map[string]string{"RssAnon": "-anon", "RssFile": "-file", "Pss": "-pss"}[kind]
	}
	figures := []figure{{key("VmRSS"), "resident memory after 6 degraded planes, 3 killed leaves and 3 lost carriers, " + destinations, "MB", ""},
		{key("RssAnon"), "anonymous pages of it", "MB", ""}, {key("RssFile"), "pages of files of it", "MB", ""},
		{key("Pss"), "shared pages of it once", "MB", ""}}
	return row{name: name, rounds: 1, figures: figures, measure: func(b *bed) (samples, error) {
		change := func(times int, want weights, begin func() (moment, error), end func() error) error {
			for range times {
				if _, err := event(b, want, want, begin); err != nil && !errors.Is(err, errLearned) {
					return err
				}
				if err := end(); err != nil {
					return err
				}
				if err := b.settle(); err != nil {
					return err
				}
			}
			return nil
		}
		announce := func(gbps int) (moment, error) { return b.leaves[0].announce(gbps, b.every()) }
		err := change(6, degraded, func() (moment, error) { return announce(half) }, func() error { _, err := announce(full); return err })
		if err == nil {
			err = change(3, without, func() (moment, error) { return b.leaves[0].kill(), nil }, b.leaves[0].start)
		}
		if err == nil {
			err = change(3, without, func() (moment, error) { return b.link(false, false) }, func() error { _, err := b.link(false, true); return err })
		}
		if err != nil {
			return nil, err
		}
		idle(s.rest)
		got := samples{}
		for _, kind := range kinds {
			mb, err := resident(b.pids(), kind)
			if err != nil {
				return nil, err
			}
			got[key(kind)] = []float64{mb}
		}
		return got, nil
	}}
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

// event makes a change, and returns the milliseconds until all destinations have the weights: in the kernel, or by
// packets where the kernel does not show them.
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
	at, err := b.judge.await(b.limit, quiet)
	if err != nil {
		return 0, errors.Join(err, b.running())
	}
	return at.since(began), nil
}

// updateByPackets returns the row of an UPDATE that ends with packets for all contestants: the kernel may report a
// change later than packets follow.
func updateByPackets(s settings) row {
	const name = "update-packets"
	n := float64(planes)
	figures := []figure{
		{name, "UPDATE of one destination, by packets", "ms", "UPDATE, 1 destination, by packets"},
		{name + "-moved", fmt.Sprintf("flows moved when one of %d paths halves (%.1f must)", planes, 100*(1/n-1/(2*n-1))), "%", ""}}
	return row{name: name, rounds: single / 2, packets: true, figures: figures, measure: func(b *bed) (samples, error) {
		var took []float64
		var err error
		for _, x := range []struct {
			key       string
			gbps      int
			from, end weights
		}{{name, half, even, degraded}, {name + " back", full, degraded, even}} {
			idle(s.idle)
			var ms float64
			if ms, err = packetEvent(b, x.key, b.every(), x.from, x.end, func() (moment, error) { return b.leaves[0].announce(x.gbps, []int{0}) }); err != nil && !errors.Is(err, errLearned) {
				return nil, err
			}
			b.state = [2]weights{x.end, even}
			took = append(took, ms)
		}
		return samples{name: took, name + "-moved": {b.watched[name].moved}}, err
	}}
}

// besides ends the titles of events next to packets at slow.
const besides = ", next to 8,000 packets/s"

var slow = pace{1, time.Second / 8000}

// withPackets makes a change that takes the first plane away, while packets arrive. It returns the milliseconds until
// packets follow, and until the kernel has the weights, of contestants that it has weights of. The first event of a key
// returns errLearned.
func withPackets(b *bed, key string, p pace, change func() (moment, error)) (packets float64, kernel []float64, err error) {
	if err := b.judge.want(without, without); err != nil {
		return 0, nil, err
	}
	var began moment
	packets, err = pacedEvent(b, key, p, b.every(), even, without, func() (at moment, err error) {
		began, err = change()
		return began, err
	})
	if err != nil && !errors.Is(err, errLearned) {
		return 0, nil, err
	}
	if b.contestant.inKernel() {
		at, err := b.judge.await(b.limit, quiet)
		if err != nil {
			return 0, nil, err
		}
		kernel = []float64{at.since(began)}
	}
	b.state = [2]weights{without, without}
	return packets, kernel, err
}

// killBeside returns the row of a leaf killed while packets are sent.
func killBeside() row {
	const name = "kill-beside"
	figures := []figure{
		{name, "leaf killed (FIN) to kernel weights, 1 destination" + besides, "ms", ""},
		{name + "-packets", "the same, by packets", "ms", ""}}
	return row{name: name, rounds: single, packets: true, figures: figures, measure: func(b *bed) (samples, error) {
		packets, kernel, err := withPackets(b, name, slow, func() (moment, error) { return b.leaves[0].kill(), nil })
		got := samples{name + "-packets": {packets}}
		if kernel != nil {
			got[name] = kernel
		}
		return got, err
	}, mend: func(b *bed) error { return b.leaves[0].start() }}
}

// links returns the row of a sub-port that loses its carrier, by its own end or by the leaf's, and gets it back.
func links(s settings, name, besides string, far bool, p pace) row {
	end := map[bool]string{false: "own", true: "the leaf's"}[far]
	label := func(text string) string {
		if besides != "" {
			return ""
		}
		return text
	}
	figures := []figure{
		{name, "carrier lost at " + end + " end, to corrected weights, by packets" + besides, "ms", label("carrier lost at " + end + " end, by packets")},
		{name + "-moved1", "flows of the other planes moved by it", "%", ""},
		{name + "-rewrite1", "the same to the kernel's routes rewritten", "ms", ""},
		{name + "-back1", "carrier back at " + end + " end, to weights restored", "ms", label("carrier back at " + end + " end")}}
	return row{name: name, rounds: single, packets: true, figures: figures, measure: func(b *bed) (samples, error) {
		got := samples{}
		took, kernel, err := withPackets(b, name, p, func() (moment, error) { return b.link(far, false) })
		learned := errors.Is(err, errLearned)
		if err != nil && !learned {
			return nil, err
		}
		got[name], got[name+"-moved1"] = []float64{took}, []float64{b.watched[name].spared}
		if kernel != nil {
			got[name+"-rewrite1"] = kernel
		}
		idle(s.idle)
		up, err := event(b, even, even, func() (moment, error) { return b.link(far, true) })
		if err != nil && !errors.Is(err, errLearned) {
			return nil, err
		}
		got[name+"-back1"] = []float64{up}
		return got, nil
	}}
}

// period is the time between two changes of a flap.
const period = 100 * time.Millisecond

// flap changes the speed of all destinations at one leaf at 10 Hz, and that of one destination at another leaf every
// second.
func flap(b *bed, duration time.Duration) (samples, error) {
	const key = "flap"
	one := []int{b.destinations - 1}
	announce := func(gbps int) (moment, error) { return b.leaves[0].announce(gbps, b.every()) }
	if !b.contestant.inKernel() {
		if _, err := packetEvent(b, key, one, even, degraded, func() (moment, error) { return announce(half) }); !errors.Is(err, errLearned) {
			return nil, err
		}
		if _, err := announce(full); err != nil {
			return nil, err
		}
		if err := b.settle(); err != nil {
			return nil, err
		}
		idle(b.idle)
		w := b.watched[key]
		b.traffic.start(w.flows[:1], pace{1, time.Millisecond})
	} else if err := b.judge.want(degraded, degraded); err != nil {
		return nil, err
	}
	before, changes := processorTime(b.pids()), b.judge.changes
	type result struct {
		began moment
		err   error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		tick := time.NewTicker(period)
		defer tick.Stop()
		for i := range 2*int(duration/(2*period)) + 1 { // an odd number: the last state differs from the first
			if r.began, r.err = announce([]int{half, full}[i%2]); r.err != nil {
				break
			}
			<-tick.C
		}
		done <- r
	}()
	var r result
	got := samples{}
	sent, slow, turns := moment(0), false, 0
	other := time.NewTicker(duration / 10)
	defer other.Stop()
	for running := true; running; {
		if err := b.judge.drain(); err != nil {
			return nil, err
		}
		if sent != 0 && b.judge.other == slow {
			got["flap-other"], sent = append(got["flap-other"], b.judge.turned.since(sent)), 0
		}
		select {
		case r = <-done:
			running = false
		case <-other.C:
			const most = 8 // even, so that the other leaf ends with its first speed before the last change
			if sent == 0 && turns < most && b.contestant.inKernel() {
				slow = !slow
				turns++
				var err error
				if sent, err = b.leaves[1].announce(map[bool]int{true: half, false: full}[slow], []int{0}); err != nil {
					return nil, err
				}
			}
		case <-time.After(readInterval):
		}
	}
	if slow {
		if _, err := b.leaves[1].announce(full, []int{0}); err != nil {
			return nil, err
		}
	}
	if r.err != nil {
		return nil, r.err
	}
	if b.contestant.inKernel() {
		at, err := b.judge.await(b.limit, quiet)
		if err != nil {
			return nil, err
		}
		got["flap-last"], got["flap-states"] = []float64{at.since(r.began)}, []float64{float64(b.judge.changes - changes)}
	} else {
		for deadline := now() + moment(b.limit); !b.traffic.settled(b.watched[key].places[:1], time.Second); time.Sleep(10 * time.Millisecond) {
			if now() > deadline {
				return nil, fmt.Errorf("packets are not at their places within %v", b.limit)
			}
		}
		packets := b.traffic.stop()
		got["flap-last"] = []float64{b.traffic.settledAt(packets, r.began, b.watched[key].places[:1]).since(r.began)}
		moved, place := 0, lost
		for i, p := range packets {
			at := b.traffic.place(b.traffic.from+uint32(i), p.at)
			if at != lost && place != lost && at != place {
				moved++
			}
			place = at
		}
		got["flap-states"] = []float64{float64(moved)}
	}
	got["flap-cpu"] = []float64{milliseconds(processorTime(b.pids()) - before)}
	return got, nil
}

// linkFlap returns the row of a leaf's end of a link that goes down and up at 10 Hz.
func linkFlap(s settings) row {
	return row{name: "linkflap", rounds: 1, bed: variant{damped: true},
		figures: []figure{
			{"linkflap-lost", fmt.Sprintf("a link goes down and up at 10 Hz for %v: packets lost of 6,000/s", s.flap), "packets", ""},
			{"linkflap-cpu", "processor time of it", "ms", ""}},
		measure: func(b *bed) (samples, error) {
			flows := b.traffic.every(b.every())
			before := processorTime(b.pids())
			b.traffic.start(flows, pace{1, time.Second / 6000})
			var err error
			tick := time.NewTicker(period / 2)
			defer tick.Stop()
			for i := 0; i < 2*int(s.flap/period) && err == nil; i++ {
				<-tick.C
				_, err = b.link(true, i%2 == 1)
			}
			packets := b.traffic.stop()
			missing := 0
			for i, p := range packets {
				if b.traffic.place(b.traffic.from+uint32(i), p.at) == lost {
					missing++
				}
			}
			return samples{"linkflap-lost": {float64(missing)}, "linkflap-cpu": {milliseconds(processorTime(b.pids()) - before)}}, err
		},
		mend: func(*bed) error { return nil }}
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
		began, err := b.gate.await(b.limit)
		before = processorTime(b.pids())
		return began, err
	})
	return samples{"load": {took}, "load-cpu": {milliseconds(processorTime(b.pids()) - before)}}, err
}

// selected reports whether a row's name is chosen: as a whole, or without the number of destinations.
func selected(name string, chosen []string) bool {
	return len(chosen) == 0 || slices.Contains(chosen, name) || slices.Contains(chosen, strings.TrimRight(name, "0123456789"))
}
