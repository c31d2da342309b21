package chaos

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
)

// Environment variables.
const (
	minutesKey = "FARED_CHAOS_MINUTES" // duration in minutes; default 0.5
	seedKey    = "FARED_CHAOS_SEED"    // default: a new one, which is logged
	fabricKey  = "FARED_CHAOS_FABRIC"  // name of a design; default: the seed draws one
)

const (
	// settleLimit is the time limit for correct weights and packets after a disturbance has ended. It covers hold time,
	// the sessions' next attempt, FRR's start and End-of-RIB, on a machine that is busy with other tests.
	settleLimit = 30 * time.Second
	// grace is the time after which no weight may be shown as in effect that packets do not obey.
	grace = 2 * time.Second
	// firstPort is the lowest source port of random flows, above the ports on which servers listen.
	firstPort = 8192
	// mostFaults is the number of faults that end a run early.
	mostFaults = 4
)

// chaos is one run.
type chaos struct {
	f     *fabric
	r     *rand.Rand
	count *counter
	is    cables         // cables that are up
	far   map[cable]bool // cables cut at the leaf
	// frozen is true if the silent leaf is stopped, and false if it is dead.
	frozen bool
	faults int
	said   map[bool]int // answers of `fared health` that agreed, by whether all works
	untrue bool         // this step has shown a wrong weight as in effect: recorded once
	took   map[string][]time.Duration
	firsts uint32       // number of bursts
	slots  [servers]int // number of packets of slots
}

// TestChaos disturbs a fabric at random for some minutes. After every disturbance weights and packets must be correct
// within settleLimit, and no weight may be shown as in effect while packets do not obey it.
func TestChaos(t *testing.T) {
	gate.Slow(t, gate.Chaos, "random failures for half a minute or more")
	minutes := 0.5
	if text := os.Getenv(minutesKey); text != "" {
		var err error
		if minutes, err = strconv.ParseFloat(text, 64); err != nil {
			t.Fatalf("%s: %v", minutesKey, err)
		}
	}
	seed := rand.Uint64N(1e9)
	if text := os.Getenv(seedKey); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", seedKey, err)
		}
	}
	d := draw(rand.New(rand.NewPCG(seed, 1)))
	if name := os.Getenv(fabricKey); name != "" {
		build := designs[name]
		if build == nil {
			t.Fatalf("%s: no fabric %q; use one of %v", fabricKey, name, slices.Sorted(maps.Keys(designs)))
		}
		d = build()
	}
	t.Logf("%s=%d %s=%v %s=%s", seedKey, seed, minutesKey, minutes, fabricKey, os.Getenv(fabricKey))
	c := newChaos(t, d, seed)
	end := time.Now().Add(time.Duration(minutes * float64(time.Minute)))
	for step := 1; time.Now().Before(end) && c.faults < mostFaults; step++ {
		c.step(step)
	}
	c.summarize()
}

func newChaos(t *testing.T, d *design, seed uint64) *chaos {
	t.Helper()
	f := newFabric(t, d)
	c := &chaos{f: f, r: rand.New(rand.NewPCG(seed, 0)), is: allUp(d), far: map[cable]bool{}, said: map[bool]int{}, took: map[string][]time.Duration{}}
	c.count = newCounter(f)
	if took, problem := c.settle(time.Now(), time.Minute); problem != "" {
		t.Fatalf("the fabric does not come up: %s", problem)
	} else {
		t.Logf("all weights and packets are right %v after the start", took)
	}
	return c
}

// step makes one disturbance and waits until everything is correct.
func (c *chaos) step(number int) {
	t := c.f.t
	t.Helper()
	what, name := "", ""
	for what == "" {
		a := pick(c.r)
		name, what = a.name, a.do(c)
	}
	c.untrue = false
	start := time.Now()
	t.Logf("step %d: %s", number, what)
	took, problem := c.settle(start, settleLimit)
	c.took[name] = append(c.took[name], took)
	if problem != "" {
		c.fault("step %d (%s): not right after %v: %s", number, what, took, problem)
		c.heal()
		return
	}
	t.Logf("step %d: right after %v", number, took)
}

// fault records a fault.
func (c *chaos) fault(format string, args ...any) {
	c.f.t.Helper()
	c.faults++
	c.f.t.Errorf("FAULT: "+format, args...)
}

// heal restarts every process of the servers after a fault, so that the fault does not affect the next steps.
func (c *chaos) heal() {
	for _, n := range c.f.server {
		n.kill(control)
		n.kill(dataplane)
		n.startAll()
	}
	if took, problem := c.settle(time.Now(), 2*settleLimit); problem != "" {
		c.f.t.Fatalf("not even a new start helps: %s", problem)
	} else {
		c.f.t.Logf("after the fault: right %v after a new start of the servers", took)
	}
}

// rows holds the rows of all servers, by source and destination.
type rows = [ends][ends]*farev1.DestinationWeights

// read queries every server for its weights. problem describes the first server that does not answer, or whose weights
// do not follow from the cables.
func (c *chaos) read() (all rows, problem string) {
	var problems []string
	bad := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	var shows [servers]map[[2]string]*farev1.DestinationWeights
	for s, n := range c.f.server {
		var err error
		if shows[s], err = n.rows(); err != nil {
			bad("%s shows no weights: %v", n.Name, err)
		}
	}
	for _, pair := range c.f.d.pairs() {
		src, dst := pair[0], pair[1]
		server := c.f.d.serverOf(src)
		row := shows[server][[2]string{c.f.loopback(dst).String(), c.f.loopback(src).String()}]
		name := c.f.d.nameOf(src) + " toward " + c.f.d.nameOf(dst)
		if row == nil {
			if shows[server] != nil {
				bad("no weights of %s", name)
			}
			continue
		}
		all[src][dst] = row
		want := c.is.want(src, dst)
		slots := want
		if c.f.sprays(server) {
			slots = want.inPlanes()
		}
		is, inEffect := shown(row)
		if text := differ(want, is); text != "" {
			bad("%s: %s", name, text)
		} else if text := differ2(slots, slotShares(row, c.f.loopback(src).String())); text != "" {
			bad("slots of %s: %s", name, text)
		} else if !inEffect {
			bad("%s: weights are not in effect", name)
		}
	}
	return all, strings.Join(problems, "\n")
}

// words compares what `fared health` says of each server with the server's cables and leaves, the only things that this
// run leaves broken: it is healthy if all of them work, and not otherwise.
func (c *chaos) words() (problem string) {
	var problems []string
	whole := allUp(c.f.d)
	for s, n := range c.f.server {
		works := true
		for p := range planes {
			for g := range c.f.d.owners() {
				if of := whole.lit(p, g); g/c.f.d.gpus == s && of > 0 {
					works = works && c.is.leaf[p] && c.is.lit(p, g) == of
				}
			}
		}
		out, err := exec.CommandContext(c.f.t.Context(), binary.Fared(c.f.t), "health", "--socket", n.socket("fared")).CombinedOutput()
		if strings.HasPrefix(string(out), "HEALTHY") == works {
			c.said[works]++
		} else {
			problems = append(problems, fmt.Sprintf("all of %s works: %t, and health (%v): %s", n.Name, works, err, out))
		}
	}
	return strings.Join(problems, "\n")
}

// sprays reports whether a server's slots belong to planes, not to sub-ports.
func (f *fabric) sprays(server int) bool { return f.d.spray && f.d.driver[server] == "bpf" }

// differ2 is differ for slots' shares, which are rounded to parts per billion.
func differ2(want, is shares) string {
	for p := range planes {
		for i := range subPorts {
			if d := want[p][i] - is[p][i]; d > 1e-8 || d < -1e-8 {
				return fmt.Sprintf("p%d.%d: slots have %.9f, want %.9f", p, i, is[p][i], want[p][i])
			}
		}
	}
	return ""
}

// settle waits until every weight shown and every packet is correct.
func (c *chaos) settle(since time.Time, limit time.Duration) (took time.Duration, problem string) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		c.alive()
		began := time.Now()
		before, problem := c.read()
		b := c.count.send(&before, firstPort+c.offset())
		for _, pair := range c.f.d.pairs() {
			c.slots[c.f.d.serverOf(pair[0])] += b.slotsSent[pair[0]][pair[1]].sum()
		}
		after, later := c.read()
		if problem == "" {
			problem = later
		}
		if problem == "" {
			problem = c.words()
		}
		for _, pair := range c.f.d.pairs() {
			src, dst := pair[0], pair[1]
			if text := b.wrong(c.f.d, src, dst, c.is.want(src, dst), true); text != "" && problem == "" {
				problem = text
			}
			if began.Sub(since) > grace {
				c.checkStable(b, src, dst, before[src][dst], after[src][dst])
			}
		}
		if took = time.Since(since).Round(time.Millisecond); problem == "" || took > limit {
			return took, problem
		}
		<-tick.C
	}
}

// offset varies the source ports of bursts without the seed's generator, because the number of bursts of a step differs
// between runs.
func (c *chaos) offset() int {
	c.firsts++
	return int(c.firsts*2654435761>>16) % (65536 - firstPort - mostFlows)
}

// checkStable records a fault if a row was shown as in effect before and after a burst, but the packets did not obey
// it.
func (c *chaos) checkStable(b *burst, src, dst int, before, after *farev1.DestinationWeights) {
	if before == nil || after == nil || !proto.Equal(before, after) {
		return
	}
	is, inEffect := shown(before)
	if !inEffect || !before.Reachable || c.untrue {
		return
	}
	if text := b.wrong(c.f.d, src, dst, is, false); text != "" {
		c.untrue = true
		c.fault("shown as in effect, and packets go elsewhere: %s", text)
	}
}

// alive records a fault for every process that exited by itself, and restarts it.
func (c *chaos) alive() {
	for _, n := range c.f.nodes() {
		for name, p := range n.processes {
			if err := p.Running(); err != nil {
				c.fault("%s of %s: %v", name, n.Name, err)
				delete(n.processes, name)
				n.start(name)
			}
		}
	}
}

// summarize logs the durations by kind of disturbance.
func (c *chaos) summarize() {
	t := c.f.t
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(c.took)) {
		all := c.took[name]
		slices.SortFunc(all, func(a, b time.Duration) int { return cmp.Compare(a, b) })
		t.Logf("%-24s %4d times, right after %v (median), %v (most)", name, len(all), all[len(all)/2], all[len(all)-1])
	}
	t.Logf("fared health agreed %d times where all works, %d times where something does not", c.said[true], c.said[false])
	t.Logf("%d bursts of %d packets of random flows; packets of slots by server: %v", c.firsts, len(c.f.d.pairs())*c.f.d.flows(), c.slots)
}
