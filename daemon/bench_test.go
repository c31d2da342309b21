package daemon

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// acks observes the connection to the data plane: it records when the relevant operations are in effect.
type acks struct {
	mu      sync.Mutex
	kind    map[uint64]string // pending operations
	sent    map[string]int
	arrived chan ack
}

type ack struct {
	kind string
	at   time.Time
}

func newAcks() *acks {
	return &acks{kind: map[uint64]string{}, sent: map[string]int{}, arrived: make(chan ack, 1<<16)}
}

type ackStream struct {
	grpc.ClientStream
	*acks
}

func (a *acks) intercept(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := streamer(ctx, desc, cc, method, opts...)
	return &ackStream{s, a}, err
}

func (s *ackStream) SendMsg(m any) error {
	r, ok := m.(*farev1.ProgramRequest)
	if !ok {
		return s.ClientStream.SendMsg(m)
	}
	for _, op := range append(slices.Clone(r.Operations), r.Operation) {
		if op == nil {
			continue
		}
		kind := "removal"
		switch op.Op.(type) {
		case *farev1.Operation_SubPort:
			kind = "sub-port"
		case *farev1.Operation_SetVector:
			kind = "group"
		case *farev1.Operation_SetDestination:
			kind = "destination"
		}
		s.mu.Lock()
		s.kind[op.Id] = kind
		s.sent[kind]++
		s.mu.Unlock()
	}
	return s.ClientStream.SendMsg(m)
}

func (s *ackStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	r, ok := m.(*farev1.ProgramResponse)
	if err != nil || !ok {
		return err
	}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range r.Acks {
		if kind := s.kind[a.Id]; kind != "" && a.Level == farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
			delete(s.kind, a.Id)
			s.arrived <- ack{kind, now}
		}
	}
	return nil
}

// quiet waits until no operation is pending, and drops the recorded acknowledgements.
func (a *acks) quiet(t testing.TB) {
	t.Helper()
	eventually(t, "quiet at the data plane", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.kind) == 0
	})
	for len(a.arrived) > 0 {
		<-a.arrived
	}
}

// next waits for an acknowledgement of one of the kinds.
func (a *acks) next(t testing.TB, kinds ...string) time.Time {
	t.Helper()
	limit := time.NewTimer(waitLimit)
	defer limit.Stop()
	for {
		select {
		case x := <-a.arrived:
			if slices.Contains(kinds, x.kind) {
				return x.at
			}
		case <-limit.C:
			t.Fatalf("no acknowledgement of %v", kinds)
		}
	}
}

func (a *acks) counts() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := map[string]int{}
	for k, n := range a.sent {
		out[k] = n
	}
	return out
}

// serveDataplane serves a data plane on a unix socket, like a separate process.
func serveDataplane(t testing.TB, dp *memory.Dataplane) (socket string) {
	t.Helper()
	socket = filepath.Join(testbed.ShortDir(t), "dp")
	testbed.Serve(t, socket, dp.Register)
	return socket
}

// measured returns a rig whose data plane is behind a unix socket.
func measured(b testing.TB, s shape, o rigOptions) (*rig, *acks) {
	b.Helper()
	checkLeaks(b)
	a := newAcks()
	o.checked, o.dp = true, memory.New(memory.Config{})
	o.conn = testbed.Dial(b, serveDataplane(b, o.dp), grpc.WithStreamInterceptor(a.intercept))
	return newRig(b, s, o), a
}

// report prints the distribution of the measured durations.
func report(b *testing.B, name string, took []time.Duration) {
	slices.Sort(took)
	at := func(p float64) float64 { return float64(took[int(p*float64(len(took)-1))].Microseconds()) }
	b.ReportMetric(at(0.5), name+"p50-µs")
	b.ReportMetric(at(0.99), name+"p99-µs")
	b.ReportMetric(0, "ns/op") // the time between the measurements is meaningless
}

// BenchmarkUpdateToInEffect measures the time from a leaf's write of an UPDATE with another bandwidth to its TCP socket
// until the data plane's acknowledgement that the new weights are in effect arrives. Aim: 200 µs at the median.
func BenchmarkUpdateToInEffect(b *testing.B) {
	for _, x := range []struct {
		n     int
		pause time.Duration // before an UPDATE; after some milliseconds its code and data have left the caches
		twin  bool          // meanwhile another daemon of this process handles an UPDATE every 5 ms, so that the code stays in the caches
	}{{n: 1}, {n: 1, pause: time.Millisecond}, {n: 1, pause: 20 * time.Millisecond}, {n: 1, pause: 20 * time.Millisecond, twin: true}, {n: 1024}} {
		n := x.n
		b.Run(fmt.Sprintf("destinations=%d/pause=%v/twin=%v", n, x.pause, x.twin), func(b *testing.B) {
			if x.twin {
				defer twin(b)()
			}
			r, a := measured(b, shape{Planes: 4, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, n)})
			r.settled(n)
			d := destination(0)
			var took []time.Duration
			want := map[fare.Bandwidth]string{400e9: "p0.0=1 p0.1=1 p1.0=2 p1.1=2 p2.0=2 p2.1=2 p3.0=2 p3.1=2", 800e9: "p0.0=1 p0.1=1 p1.0=1 p1.1=1 p2.0=1 p2.1=1 p3.0=1 p3.1=1"}
			one := func(v fare.Bandwidth, last string) {
				a.quiet(b)
				time.Sleep(x.pause)
				began := time.Now()
				r.leaves[0].announce(v, d)
				took = append(took, a.next(b, last).Sub(began))
				if got := r.forwards(d); got != want[v] {
					b.Fatalf("acknowledged, but forwarded by %s, want %s", got, want[v])
				}
			}
			// A single destination has its own group, whose vector changes in place; one of many destinations moves to
			// another group.
			last := "group"
			if n > 1 {
				last = "destination"
			}
			one(400e9, last)
			one(800e9, last)
			took = took[:0]
			b.ResetTimer()
			for i := range b.N {
				one([]fare.Bandwidth{400e9, 800e9}[i%2], last)
			}
			b.StopTimer()
			report(b, "", took)
		})
	}
}

// twin runs another daemon in this process until the returned function is called. One of its leaves changes the
// bandwidth of its only destination every 5 ms.
func twin(b *testing.B) (stop func()) {
	r, _ := measured(b, shape{Planes: 4, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, 1)})
	r.settled(1)
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for v := fare.Bandwidth(400e9); ; v = 1200e9 - v {
			select {
			case <-end:
				return
			case <-tick.C:
				r.leaves[0].announce(v, destination(0))
			}
		}
	}()
	return func() { close(end); <-ended }
}

// BenchmarkLossToInEffect measures the time from the failure of a leaf's TCP connection, or of a link, until the
// sub-port's state, and then the new weights, are acknowledged as in effect. The part that grows with the number of
// destinations is not work of the loop or the data plane, but GoBGP's concurrent removal of the session's routes.
func BenchmarkLossToInEffect(b *testing.B) {
	for _, loss := range []struct {
		name string
		n    int
		cut  func(*rig)
		mend func(*rig)
	}{
		{"session", 1, func(r *rig) { r.leaves[0].drop() }, func(*rig) {}},
		{"session", 1024, func(r *rig) { r.leaves[0].drop() }, func(*rig) {}},
		{"link", 1024, func(r *rig) { r.links.change(0, func(e *LinkEvent) { e.Up = false }) }, func(r *rig) { r.links.change(0, func(e *LinkEvent) { e.Up = true }) }},
	} {
		b.Run(fmt.Sprintf("%s/destinations=%d", loss.name, loss.n), func(b *testing.B) {
			n := loss.n
			r, a := measured(b, shape{Planes: 4, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, n)})
			r.settled(n)
			var subPort, weights []time.Duration
			b.ResetTimer()
			for range b.N {
				eventually(b, "the session is up", func() bool { return r.leaves[0].has(own) == "400G" })
				r.settled(n)
				r.uniform("1:1:1:1", n)
				a.quiet(b)
				began := time.Now()
				loss.cut(r)
				subPort = append(subPort, a.next(b, "sub-port").Sub(began))
				weights = append(weights, a.next(b, "group").Sub(began))
				eventually(b, "the leaf has noticed", func() bool { return r.leaves[0].has(own) != "400G" || r.leaves[0].count() > len(weights) })
				loss.mend(r)
			}
			b.StopTimer()
			report(b, "sub-port-", subPort)
			report(b, "weights-", weights)
		})
	}
}

// BenchmarkPlaneLost measures the failure of a whole plane of 16,384 destinations. The number of operations does not
// depend on the number of destinations.
func BenchmarkPlaneLost(b *testing.B) {
	const n = 16384
	r, a := measured(b, shape{Planes: 4, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, n)})
	settled := func() {
		r.settled(n)
		r.uniform("1:1:1:1", n)
		a.quiet(b)
	}
	settled()
	var took []time.Duration
	operations := 0
	b.ResetTimer()
	for range b.N {
		settled()
		before := a.counts()
		began := time.Now()
		r.links.change(2, func(e *LinkEvent) { e.Up = false })
		took = append(took, a.next(b, "group").Sub(began))
		a.quiet(b)
		if got := r.weights(destination(n / 2)); got != "1:1:0:1" {
			b.Fatalf("weights %s", got)
		}
		for kind, count := range a.counts() {
			operations += count - before[kind]
		}
		r.links.change(2, func(e *LinkEvent) { e.Up = true })
	}
	b.StopTimer()
	report(b, "", took)
	b.ReportMetric(float64(operations)/float64(b.N), "operations/loss")
}

// processTime returns the processor time of this process.
func processTime() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// burst returns the event of a leaf that advertises a bandwidth for each of some destinations in the first plane.
func burst(r *rig, b fare.Bandwidth, destinations []netip.Prefix) speaker.Event {
	ev, attrs := speaker.Routes{Session: 0, Generation: 1}, coretest.Attributes(b, r.s.PeerAS(0), 65001)
	for _, d := range destinations {
		ev.Changes = append(ev.Changes, speaker.Change{Prefix: d, Attrs: attrs})
	}
	return ev
}

// BenchmarkDegraded measures a change of one plane's bandwidth toward each of 10,000 destinations, until the new
// weights are in effect: "update" from a leaf's UPDATEs, "loop" from the routes at the loop, without BGP. Processor
// time is that of the process, which contains the leaves and the data plane. A burst that arrives in parts takes more
// operations.
func BenchmarkDegraded(b *testing.B) {
	const n = 10000
	for _, from := range []string{"update", "loop"} {
		b.Run(from, func(b *testing.B) {
			r, a := measured(b, shape{Planes: 4, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, n)})
			all := coretest.Destinations(n)
			r.settled(n)
			var took []time.Duration
			var cpu time.Duration
			var allocated uint64
			operations := 0
			b.ResetTimer()
			for i := range b.N {
				value, want := []fare.Bandwidth{200e9, 400e9}[i%2], []string{"1:2:2:2", "1:1:1:1"}[i%2]
				a.quiet(b)
				runtime.GC()
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				counts, began, spent := a.counts(), time.Now(), processTime()
				if from == "update" {
					r.leaves[0].announce(value, all...)
				} else {
					r.inside(func(l *loop) {
						l.wokenAt = time.Now()
						l.sessions([]speaker.Event{burst(r, value, all)})
						l.builder.Commit()
					})
				}
				r.uniform(want, n)
				took, cpu = append(took, time.Since(began)), cpu+processTime()-spent
				runtime.ReadMemStats(&after)
				allocated += after.TotalAlloc - before.TotalAlloc
				a.quiet(b)
				for kind, count := range a.counts() {
					operations += count - counts[kind]
				}
				for _, d := range []int{0, n / 2, n - 1} {
					if got := r.weights(destination(d)); got != want {
						b.Fatalf("weights %s of %s, want %s", got, destination(d), want)
					}
				}
			}
			b.StopTimer()
			report(b, "", took)
			b.ReportMetric(float64(cpu.Microseconds())/1000/float64(b.N), "cpu-ms/change")
			b.ReportMetric(float64(operations)/float64(b.N), "operations/change")
			b.ReportMetric(float64(allocated)/float64(b.N)/(1<<20), "MiB/change")
		})
	}
}

// memoryChild is the environment variable with the configuration file of a child process and the expected number of
// destinations.
const memoryChild = "FARED_TEST_MEMORY_CHILD"

// BenchmarkMemory measures the resident memory of a daemon in a separate process, with all changes in effect and
// garbage collected. Aims: 256 MiB for 64 sessions x 1,024 prefixes, 96 MiB for 4 x 10,000.
func BenchmarkMemory(b *testing.B) {
	for _, c := range []struct{ planes, subPorts, prefixes int }{{8, 8, 1024}, {4, 1, 10000}, {8, 2, 131072}} {
		b.Run(fmt.Sprintf("sessions=%d/prefixes=%d", c.planes*c.subPorts, c.prefixes), func(b *testing.B) {
			for range b.N {
				rss, peak := measureMemory(b, shape{Planes: c.planes, SubPorts: c.subPorts}, c.prefixes)
				b.ReportMetric(rss, "resident-MiB")
				b.ReportMetric(peak, "peak-MiB")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

func measureMemory(b testing.TB, s shape, prefixes int) (rss, peak float64) {
	s.Port, s.Net = netnstest.FreePort(b), 96
	s.Extra = "bgp: {max_prefixes: 262144}\ndataplane: {address: \"unix:" + serveDataplane(b, memory.New(memory.Config{})) + "\"}\n"
	s = s.Defaults()
	for i := range s.Planes * s.SubPorts {
		l := newRawLeaf(b, s.Device(i), uint16(s.PeerAS(i)), leafNode(i/s.SubPorts), netip.AddrPortFrom(s.There(i), uint16(s.Port)), &journal{})
		announceAll(800e9, prefixes)(l)
	}
	file := filepath.Join(b.TempDir(), "fared.yaml")
	if err := os.WriteFile(file, []byte(s.Text()), 0o600); err != nil {
		b.Fatal(err)
	}
	child := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkMemoryChild$", "-test.benchtime=1x")
	child.Env = append(os.Environ(), memoryChild+"="+file+" "+strconv.Itoa(prefixes))
	child.Stderr = os.Stderr
	out, err := child.Output()
	if err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	_, figures, _ := strings.Cut(string(out), "figures: ")
	if _, err := fmt.Sscanf(figures, "resident %f peak %f", &rss, &peak); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	return rss, peak
}

// BenchmarkMemoryChild is the process that BenchmarkMemory measures; run directly, it does nothing.
func BenchmarkMemoryChild(t *testing.B) {
	file, count, ok := strings.Cut(os.Getenv(memoryChild), " ")
	if !ok {
		t.Skip("only as a child of BenchmarkMemory")
	}
	n, err := strconv.Atoi(count)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	subPorts := 0
	for _, p := range cfg.Planes {
		subPorts += len(p.SubPorts)
	}
	d, err := New(cfg, Deps{Memory: dialMemory, Links: newTestLinks(subPorts, 400e9), Embedded: true})
	if err != nil {
		t.Fatal(err)
	}
	running(t, d)
	eventually(t, "everything is in effect", func() bool {
		resp, err := d.FabricService().GetStatus(t.Context(), &farev1.GetStatusRequest{})
		return err == nil && resp.Converged && resp.DestinationsReachable == uint32(n) && resp.Dataplane.OperationsPending == 0
	})
	debug.FreeOSMemory()
	fmt.Printf("figures: resident %f peak %f\n", procStatus(t, "VmRSS:"), procStatus(t, "VmHWM:"))
}

// procStatus returns a line of /proc/self/status, in MiB.
func procStatus(t testing.TB, key string) float64 {
	t.Helper()
	f, err := os.Open("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if words := strings.Fields(lines.Text()); len(words) == 3 && words[0] == key {
			kib, err := strconv.ParseFloat(words[1], 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib / 1024
		}
	}
	t.Fatalf("no %s", key)
	return 0
}
