package lab

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// transferBytes is the environment variable with the number of bytes of TestTransfer's runs, in place of their
// defaults.
const transferBytes = "FARED_TRANSFER"

// TestTransfer has 4 servers send each other WRITEs over 4 planes while, one after the other, leaves die with their
// processes, ports of servers lose both cables, Y-cables lose one half, and all of them return. Every byte must arrive
// correctly and once, no queue pair may report an error, and planes must carry the parts that their weights give them.
func TestTransfer(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives other processes")
	gate.Slow(t, gate.Labs, "1 GB by each transport")
	for _, test := range []struct{ transport, driver string }{{"roce", "linux"}, {"roce", "bpf"}, {"superp", "linux"}, {"tcp", "linux"}} {
		t.Run(test.transport+", "+test.driver, func(t *testing.T) {
			bytes := uint64(1e9)
			if text := os.Getenv(transferBytes); text != "" {
				var err error
				if bytes, err = strconv.ParseUint(text, 10, 63); err != nil {
					t.Fatalf("%s: %v", transferBytes, err)
				}
			}
			o := startOutages(t, test.transport, test.driver)
			for (o.verified() < bytes || len(o.dark) == 0) && !t.Failed() {
				o.begin(bytes - min(bytes, o.verified()))
				for !o.over() {
					o.outage(false)
				}
				o.judge()
			}
			if err := o.Close(); err != nil {
				t.Error(err)
			}
			if left := leftovers(t); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// TestMisplaced verifies TestTransfer's judge of planes: repetitions on one plane do not count against it, and bytes on
// another plane than their slot's do.
func TestMisplaced(t *testing.T) {
	planes := func(wires ...uint64) (out []*farev1.TrafficPlaneReport) {
		var all uint64
		for _, w := range wires {
			all += w
		}
		for i, w := range wires {
			out = append(out, &farev1.TrafficPlaneReport{Plane: fmt.Sprint("p", i), Sent: 1000, DuePpb: 25e7, Wire: &w, WirePpb: w * 1e9 / all})
		}
		return out
	}
	repeated := planes(1120, 1000, 1000, 1000)
	repeated[0].Again = 120
	uncounted := planes(1000, 1000, 1000, 1000)
	uncounted[2].Wire = nil
	for _, test := range []struct {
		name   string
		planes []*farev1.TrafficPlaneReport
		want   int
	}{
		{"as due", planes(1000, 1000, 1000, 1000), 0},
		{"12 % of a plane again", repeated, 0},
		{"12 % more on a plane", planes(1120, 1000, 1000, 1000), 1},
		{"a plane's bytes are on another", planes(2000, 0, 1000, 1000), 2},
		{"a plane is not counted", uncounted, 1},
	} {
		if got := misplaced(test.planes, 2e7); len(got) != test.want {
			t.Errorf("%s: %q, want %d", test.name, got, test.want)
		}
	}
}

// TestTransferWithoutSteering verifies that a transfer fails whose flows the kernels of the servers place by their
// addresses alone: by the slots every plane carries its part, by the wire it does not.
func TestTransferWithoutSteering(t *testing.T) {
	gate.Slow(t, gate.Labs, "a transfer that has to fail")
	o := startOutages(t, "superp", "linux")
	ended := make(chan struct{})
	var writers sync.WaitGroup
	for _, n := range o.Server {
		writers.Go(func() {
			if err := o.plan.Namespace(n.Name).Do(func() error {
				for {
					if err := os.WriteFile("/proc/sys/net/ipv4/fib_multipath_hash_policy", []byte("0"), 0o644); err != nil {
						return err
					}
					select {
					case <-ended:
						return nil
					case <-time.After(10 * time.Millisecond): // the agent sets it back each second
					}
				}
			}); err != nil {
				t.Error(err)
			}
		})
	}
	defer writers.Wait()
	defer close(ended)
	r, err := o.transfer.play(t.Context(), o.transfer.config(0, runTime), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range r.report.GetPlanes() {
		if off := int64(p.GetSentPpb()) - int64(p.GetDuePpb()); off > 1e7 || off < -1e7 {
			t.Errorf("%s: slots sent %d ppb, due are %d ppb", p.GetPlane(), p.GetSentPpb(), p.GetDuePpb())
		}
	}
	complaint := "is the transport's destination port steered"
	if r.report.GetOk() || !slices.ContainsFunc(r.report.GetErrors(), func(text string) bool { return strings.Contains(text, complaint) }) {
		t.Errorf("ok is %v, errors %q, want one with %q", r.report.GetOk(), r.report.GetErrors(), complaint)
	}
	t.Logf("%q", r.report.GetErrors())
}

// BenchmarkOutages compares the goodput of RoCEv2 at the beginning of outages of leaves with the goodput later in the
// same outages. b.N is the minimum number of leaf outages, 10 by default.
func BenchmarkOutages(b *testing.B) {
	o := startOutages(b, "roce", "linux")
	for o.leavesDied() < max(b.N, leastOutages) && !b.Failed() {
		o.begin(0)
		if len(o.runs) == 0 {
			o.whole = o.pass(steadyMeasured)
		}
		for !o.over() {
			o.outage(o.leavesDied() < max(b.N, leastOutages))
		}
		o.judge()
	}
	o.reportGoodput(b)
}

// startOutages starts a fabric of 4 servers and 4 planes with queue pairs of a transport.
func startOutages(t testing.TB, transport, driver string) *outages {
	t.Helper()
	netnstest.Require(t, "tc", "go")
	ownFiles(t)
	return &outages{TB: t, Fabric: fabric(t, Options{Spec: topo.Spec{Planes: 4, Servers: 4, Speed: 100 * fare.Gigabit}, Transport: transport,
		Netns: &backend.Netns{Driver: driver, Binary: binary.Fared(t)}, Quick: true})}
}

// outages is a transfer with the failures of the fabric meanwhile. Its runs end by time and not by size, so all pairs
// send for the whole run.
type outages struct {
	testing.TB
	*Fabric
	next int           // number of the next outage, which determines its kind, plane and server
	runs []transferRun // completed runs
	done chan struct{} // closed when the present run is complete
	// The fields below may be read once done is closed.
	run   transferRun
	err   error
	whole span // a time in which all planes were up
	dark  []dark
	// follows has the times that weights took to follow the beginning of an outage. Meanwhile the kernel sends what is
	// due on the plane by others.
	follows []span
}

// span is a period of time.
type span struct{ from, to time.Time }

// dark is an outage. That of a leaf may continue for as long again, later, when every transport has long adapted.
type dark struct {
	span
	later span
	kind  string
	plane int
}

// expected is the approximate goodput of all pairs together, bit/s, and leastRun the minimum duration of a run.
const (
	expected = 1.6e9
	leastRun = 5 * time.Second
)

// begin begins a run of about n bytes, and returns once the first bytes have arrived.
func (o *outages) begin(bytes uint64) {
	o.Helper()
	done, flowing := make(chan struct{}), make(chan struct{})
	o.done = done
	q, d := o.transfer, max(leastRun, time.Duration(float64(bytes)*8/expected*float64(time.Second)))
	go func() {
		defer close(done)
		o.run, o.err = q.play(o.Context(), q.config(0, d), func() { close(flowing) })
	}()
	o.Cleanup(func() { <-done }) // before the fabric is closed; the test's context has ended
	select {
	case <-flowing:
	case <-done:
		o.Fatalf("nothing has arrived: %v", o.err)
	}
}

// verified returns the number of bytes that have arrived in all runs.
func (o *outages) verified() (bytes uint64) {
	for _, r := range o.runs {
		bytes += r.report.GetTotal().GetBytes()
	}
	return bytes
}

// leavesDied returns the number of outages of leaves.
func (o *outages) leavesDied() (n int) {
	for _, d := range o.dark {
		if d.kind == "leaf" {
			n++
		}
	}
	return n
}

// between returns the goodputs of intervals within a span.
func (o *outages) between(s span) (bps []uint64) {
	for _, r := range o.runs {
		bps = append(bps, r.between(s.from, s.to)...)
	}
	return bps
}

func (o *outages) over() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}

// pass waits for d, unless the transfer ends.
func (o *outages) pass(d time.Duration) (s span) {
	s.from = time.Now()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-o.done:
	}
	s.to = time.Now()
	return s
}

// act performs a line of a script.
func (o *outages) act(verb string, args ...string) {
	o.Helper()
	do, err := o.resolve(Action{Verb: verb, Args: args})
	if err == nil {
		err = do(o.Context())
	}
	if err != nil {
		o.Fatalf("%s %q: %v", verb, args, err)
	}
}

// settled waits until all weights are correct.
func (o *outages) settled() {
	o.Helper()
	if wrong := o.settle(o.Context(), settleTimeout); len(wrong) > 0 {
		o.Fatal(wrong[0])
	}
}

// within returns the part of s in a span that begins at a time.
func (s span) within(from time.Time, length time.Duration) time.Duration {
	begin, end := s.from, s.to
	if begin.Before(from) {
		begin = from
	}
	if to := from.Add(length); end.After(to) {
		end = to
	}
	return max(0, end.Sub(begin))
}

// Durations of the measurements without changes, and of outages.
const (
	steadyMeasured = 1500 * time.Millisecond
	darkTime       = 600 * time.Millisecond
)

// turns lists the kinds of outages: of a leaf, of a server's port, of half a Y-cable.
var turns = []string{"leaf", "port", "leaf", "half"}

// outage performs the next outage, with a kind, plane and server in turn. It takes about a second with the recovery,
// longer if compare asks for a second measurement during a leaf's outage.
func (o *outages) outage(compare bool) {
	i := o.next
	o.next++
	round := i / len(turns)
	plane := (round + i%len(turns)) % o.Planes
	server := o.Server[round%o.Servers].Name
	d := dark{kind: turns[i%len(turns)], plane: plane}
	begin, end, args := "cut", "mend", []string{server, o.PlaneName(plane)}
	switch d.kind {
	case "leaf":
		begin, end, args = "kill", "restart", []string{o.Leaf[plane].Name}
	case "half":
		args[1] = o.Groups()[round%o.Servers].Planes[plane][round%o.SubPorts].Down.Device
	}
	from := time.Now()
	o.act(begin, args...)
	o.settled()
	o.follows = append(o.follows, span{from, time.Now()})
	d.span = o.pass(darkTime - time.Since(from))
	d.from = from
	if compare && d.kind == "leaf" {
		d.later = o.pass(darkTime)
	}
	if !o.over() {
		o.dark = append(o.dark, d)
	}
	o.act(end, args...)
	o.settled()
}

// queryTime is the part of the measured time until weights follow that queries of all nodes take beside a transfer that
// uses all processors.
const queryTime = time.Second

// leastOutages is the number of leaf outages that a median needs.
const leastOutages = 10

// judge reports the errors of the completed run.
func (o *outages) judge() {
	o.Helper()
	if o.err != nil {
		o.Fatal(o.err)
	}
	o.runs = append(o.runs, o.run)
	r := o.run.report
	total := r.GetTotal()
	elapsed := time.Duration(r.GetElapsedNs())
	during, until := 0, time.Duration(0)
	for _, d := range o.dark {
		if d.from.After(o.run.began) {
			during++
		}
	}
	for _, s := range o.follows {
		until += max(0, s.within(o.run.began, elapsed)-queryTime)
	}
	// A plane may differ from its part by 1 % of all bytes, a node's by 2 %; where weights follow seconds late, as on a
	// busy machine, by the plane's part of that time.
	late := int64(1e9 * float64(until) / float64(max(elapsed, 1)) / float64(o.Planes-1))
	ofAll, ofNode := max(1e7, late), max(2e7, 2*late)
	if !r.GetOk() || total.GetLost()+total.GetDuplicated()+total.GetWrongBytes()+total.GetErrors() > 0 {
		o.Errorf("%v, %q", total, r.GetErrors())
	}
	again, sent := transmitted(r.GetPlanes())
	for _, p := range r.GetPlanes() {
		o.Logf("%s: slots sent %d bytes, %.3f %% of all, and %d again, the wire has %d, %.3f %%; by weights it is %.3f %%", p.GetPlane(), p.GetSent(), float64(p.GetSentPpb())/1e7,
			p.GetAgain(), p.GetWire(), float64(p.GetWirePpb())/1e7, float64(p.GetDuePpb())/1e7)
	}
	for _, text := range misplaced(r.GetPlanes(), ofAll) {
		o.Error(text)
	}
	for _, n := range r.GetNodes() {
		for _, text := range misplaced(n.GetPlanes(), ofNode) {
			o.Errorf("node %s, %s", n.GetLoopback(), text)
		}
	}
	if len(r.GetPlanes()) != o.Planes || sent < total.GetBytes() {
		o.Errorf("%d planes have carried %d of %d bytes", len(r.GetPlanes()), sent, total.GetBytes())
	}
	o.Logf("%d bytes in %d messages verified in %v at %d Mbit/s, %d outages, one every %v, weights %v later than normal, %d bytes sent again", total.GetBytes(),
		total.GetMessages(), elapsed.Round(time.Millisecond), total.GetGoodputBps()/1e6, during, (elapsed / time.Duration(max(during, 1))).Round(10*time.Millisecond),
		until.Round(time.Millisecond), again)
}

// transmitted returns the bytes that planes have sent again, and for the first time.
func transmitted(planes []*farev1.TrafficPlaneReport) (again, sent uint64) {
	for _, p := range planes {
		again, sent = again+p.GetAgain(), sent+p.GetSent()
	}
	return again, sent
}

// misplaced describes the planes whose part on the wire is off by more than ppb. Weights determine where bytes are sent
// for the first time, and a lost packet is sent again by its plane, so where a busy machine drops packets a plane
// carries its part and what it sends again.
func misplaced(planes []*farev1.TrafficPlaneReport, ppb int64) (out []string) {
	again, sent := transmitted(planes)
	for _, p := range planes {
		expected := (float64(p.GetDuePpb())*float64(sent) + 1e9*float64(p.GetAgain())) / float64(max(sent+again, 1))
		least, most := min(int64(expected), int64(p.GetDuePpb())), max(int64(expected), int64(p.GetDuePpb())) // what had no carrier the first time is on the wire once
		if wire := int64(p.GetWirePpb()); p.Wire == nil || wire < least-ppb || wire > most+ppb {
			out = append(out, fmt.Sprintf("%s: the wire has %.3f %% of all bytes; with its part by weights, %.3f %%, and %d bytes again it is %.3f %%",
				p.GetPlane(), float64(p.GetWirePpb())/1e7, float64(p.GetDuePpb())/1e7, p.GetAgain(), expected/1e7))
		}
	}
	return out
}

// reportGoodput compares the goodput at the beginning of leaf outages with that later in the same outage. The first
// followTime of an outage belongs to failure detection, BGP and retransmission.
func (o *outages) reportGoodput(b *testing.B) {
	whole := median(o.between(o.whole))
	var after, raw []float64
	for _, kind := range []string{"leaf", "port", "half"} {
		var of []float64 // fractions of the goodput with all planes
		for _, d := range o.dark {
			within := o.between(span{d.from.Add(followTime), d.to})
			if d.kind != kind || len(within) == 0 {
				continue // or the outage was between two runs
			}
			of = append(of, float64(median(within))/float64(whole))
			if later := float64(median(o.between(d.later))); later > 0 {
				after = append(after, float64(median(within))/later)
				raw = append(raw, mean(o.between(d.span))/later)
			}
		}
		o.Logf("%d outages of a %s: goodput is %.2f of that with all planes, %d Mbit/s (medians)", len(of), kind, middle(of), whole/1e6)
	}
	o.Logf("%d outages of leaves: after %v the goodput is %.3f of that later in the outage (median, %.3f), with those %v it is %.3f (median)",
		len(after), followTime, middle(after), after, followTime, middle(raw))
	b.ReportMetric(0, "ns/op") // the benchmark determines the duration of an outage
	b.ReportMetric(middle(after), "of-later-goodput")
	b.ReportMetric(float64(len(after)), "outages")
}

func mean(values []uint64) float64 {
	var all float64
	for _, v := range values {
		all += float64(v)
	}
	return all / float64(max(len(values), 1))
}

// middle returns the median, or 0 for no values.
func middle(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	values = slices.Sorted(slices.Values(values))
	return values[len(values)/2]
}

// TestTransferInScenarios verifies the transfers of steps. A server's queue pairs continue, and new ones can be
// created, while its control plane and its agent are dead, if leaves keep its routes; if they do not, steps report no
// transfer until the server is reachable again.
func TestTransferInScenarios(t *testing.T) {
	gate.Needed(t, "verified traffic through failures")
	gate.WithoutRaceDetector(t, "drives other processes")
	const crash = "step both crash\n crash server1 both\nstep both return\n revive server1 both\n"
	for name, test := range map[string]struct {
		leaf, transport, memory, script string
		carried                         []bool // by step
	}{
		"routes are kept":     {topo.FRR, "roce", "", crash, []bool{true, true}},
		"routes are not kept": {topo.Fared, "roce", "", crash, []bool{false, true}},
		"superp":              {topo.Fared, "superp", "", "step half a cable\n cut server2 p1.0\n expect server1 -> server2 2:1\n", []bool{true}},
		"tcp":                 {topo.Fared, "tcp", "", "step half a cable\n cut server2 p1.0\n expect server1 -> server2 2:1\n", []bool{true}},
		"a plane of memory":   {topo.Fared, "roce", "p1", "step a leaf fails\n kill leaf1\n expect server1 -> server2 1:0\nstep it returns\n restart leaf1\n expect server1 -> server2 1:1\n", []bool{true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "routes are kept" {
				gate.Slow(t, gate.Labs, "a transfer in another fabric")
			}
			o := smallest(t, backend.Netns{Driver: "linux"})
			o.Transport, o.Leaf, o.MemoryPlane, o.RestartTime = test.transport, test.leaf, test.memory, 10*time.Minute
			f := fabric(t, o)
			results, ok := play(t, f, script(t, test.script))
			var fastest uint64
			for i, r := range results {
				if !ok || (r.Transfer != nil) != test.carried[i] || r.Traffic != nil {
					t.Fatalf("%s: %q, %+v", r.Step, r.Wrong, r.Transfer)
				}
				x := r.Transfer
				if x == nil {
					continue
				}
				if x.Bytes == 0 || x.Messages == 0 || x.Lost+x.Duplicated+x.WrongBytes > 0 || x.GoodputBps < x.LowestBps || x.AllowedBps == 0 {
					t.Errorf("%s: %+v", r.Step, x)
				}
				fastest = max(fastest, x.GoodputBps)
				var sent, due, wire uint64
				for _, p := range x.Planes {
					sent, due, wire = sent+p.Sent, due+p.Due, wire+p.Wire
				}
				for p, part := range x.Planes {
					if d := float64(part.Sent)/float64(sent) - float64(part.Due)/float64(due); d > 0.01 || d < -0.01 {
						t.Errorf("%s: %s carried %d of %d, %d of %d were due", r.Step, p, part.Sent, sent, part.Due, due)
					}
					if counted := part.Wire > 0; counted == (p == test.memory) {
						t.Errorf("%s: %s has %d bytes on the wire", r.Step, p, part.Wire)
					}
				}
				if wire < sent && test.memory == "" {
					t.Errorf("%s: slots sent %d bytes, the wire has %d", r.Step, sent, wire)
				}
			}
			if fastest == 0 { // a step's median is 0 where a busy machine delivers nothing in most intervals
				t.Error("no step has a goodput")
			}
		})
	}
}

// TestTransferFails verifies that a step's transfer detects the exit of a traffic node, which ends the lab.
func TestTransferFails(t *testing.T) {
	o := smallest(t, backend.Netns{})
	o.Transport = "roce"
	f, err := Start(t.Context(), o, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	x := f.transfer.begin(t.Context())
	killAll(t, f, f.Server[1], "traffic")
	if _, wrong := x.end(time.Now(), false, 0); len(wrong) != 1 || !strings.Contains(wrong[0], "the transfer: node server2 is unreachable") {
		t.Errorf("%q", wrong)
	}
	killAll(t, f, f.Server[0], "traffic")
	if err := f.Close(); err == nil || !strings.Contains(err.Error(), ": traffic ended unexpectedly (signal: killed)") { // the second end may be noticed later
		t.Error(err)
	}
}
