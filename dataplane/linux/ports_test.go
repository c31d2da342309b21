package linux

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/wecmp"
)

// lastingPorts returns, for each of n sub-ports, the source ports whose flows fall into its lasting buckets, as the
// control plane computes them from FlowHash.
func lastingPorts(f *farev1.FlowHash, n int, protocol uint8, source, destination netip.Addr) [][]uint16 {
	ports := make([][]uint16, n)
	hash := wecmp.LinuxL4{Seed: f.Seed}
	for port := wecmp.MinPort; port <= wecmp.MaxPort; port++ {
		h, _ := hash.Hash(source, destination, protocol, uint16(port), wecmp.PortRoCE)
		bucket := int(h % f.Buckets)
		for i := range n {
			end := (2*int(f.Buckets)*(i+1) + n) / (2 * n)
			if bucket < end && bucket >= end-int(f.LastingBuckets) {
				ports[i] = append(ports[i], uint16(port))
			}
		}
	}
	return ports
}

// steps records which sub-ports must keep their flows: those whose weight is above 0 before and after a step.
type steps struct {
	mu   sync.Mutex // guards hold
	hold [][]bool
}

func (s *steps) add(hold []bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold = append(s.hold, hold)
}

func (s *steps) at() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.hold) - 1
}

// held reports whether sub-port i had to keep its flows from step first until now.
func (s *steps) held(first, i int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !slices.ContainsFunc(s.hold[first:], func(hold []bool) bool { return !hold[i] })
}

// TestLastingPortsStay queries the kernel for the egress of every port in a lasting bucket while weights change and
// carriers are lost.
func TestLastingPortsStay(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "the kernel's hash leads the ports of slots to the same sub-port, through any change")
	for _, n := range []int{4, 6} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			if n != 4 {
				gate.Slow(t, gate.Kernel, "another number of sub-ports")
			}
			lastingPortsStay(t, n, gate.Count(t, gate.Kernel, 15, 60))
		})
	}
}

// keeps reports whether a weight's share is at least the given number of buckets, with one more for rounding.
func keeps(weights []uint32, i int, buckets uint32) bool {
	sum := uint32(0)
	for _, w := range weights {
		sum += w
	}
	return sum > 0 && weights[i]*testBuckets >= (buckets+1)*sum
}

func lastingPortsStay(t *testing.T, n, changes int) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	h := newHost(t, n)
	d, c := h.start()
	s := program(t, c.server)
	lasting := d.Capabilities().FlowHash.LastingBuckets
	ones := slices.Repeat([]uint32{1}, n)
	s.do(h.group(1, ones...), destination(target4(0), 1), destination(target6(0), 1))
	devices := make([]uint32, n)
	links, err := h.conn.Links()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		var i int
		if _, err := fmt.Sscanf(l.Name, "p%d", &i); err == nil {
			devices[i] = uint32(l.Index)
		}
	}
	type question struct {
		rtnl.Query
		subPort int
	}
	var questions []question
	for f, dst := range []string{target4(0), target6(0)} {
		source, to := mustPrefix(h.forwarding.Loopbacks[f]).Addr(), mustPrefix(dst).Addr()
		protocol := []uint8{wecmp.ProtocolUDP, wecmp.ProtocolTCP}[f]
		for i, ports := range lastingPorts(d.Capabilities().FlowHash, n, protocol, source, to) {
			if len(ports) < 100 {
				t.Fatalf("sub-port %d has %d lasting ports", i, len(ports))
			}
			for _, port := range ports {
				questions = append(questions, question{rtnl.Query{Source: source, Destination: to, IPProto: protocol, Sport: port, Dport: wecmp.PortRoCE}, i})
			}
		}
	}
	random.Shuffle(len(questions), func(i, j int) { questions[i], questions[j] = questions[j], questions[i] })
	var queries []rtnl.Query
	for _, q := range questions {
		queries = append(queries, q.Query)
	}
	all := slices.Repeat([]bool{true}, n)
	var history steps
	var unanswered atomic.Int64
	history.add(all)
	ask := func(conn *rtnl.Conn, from, to int) error {
		first := history.at()
		paths, err := conn.Paths(queries[from:to])
		if err != nil {
			return err
		}
		for i, path := range paths {
			// A replaced group releases the cached routes of all its members (nh_rt_cache_flush, fib6_nh_release_dsts):
			// an IPv6 lookup at that instant may find no device. It never finds another sub-port.
			if path.Device == 0 && questions[from+i].Destination.Is6() {
				again, err := conn.Paths(queries[from+i : from+i+1])
				if err != nil {
					return err
				}
				path = again[0]
				unanswered.Add(1)
			}
			if q := questions[from+i]; path.Device != devices[q.subPort] && history.held(first, q.subPort) {
				return fmt.Errorf("steps %d to %d: %v port %d of p%d leaves over %+v, not #%d", first, history.at(), q.Destination, q.Sport, q.subPort, path, devices[q.subPort])
			}
		}
		return nil
	}
	conn := netnstest.In(h.Namespace, rtnl.Dial)
	defer conn.Close()
	stop, done := make(chan struct{}), make(chan error, 1)
	rounds := 0
	go func() {
		for {
			for from := 0; from < len(queries); from += 64 {
				select {
				case <-stop:
					done <- nil
					return
				default:
				}
				if err := ask(conn, from, min(from+64, len(queries))); err != nil {
					done <- err
					return
				}
			}
			rounds++
		}
	}()
	sequence := [][]uint32{{2, 2, 1, 2}, {1, 1, 0, 1}, {1, 1, 1, 1}, {1, 0, 0, 1000}, {500, 1, 1, 1}, {1, 1, 1, 1}}
	for range changes {
		weights := make([]uint32, n)
		for i := range weights {
			weights[i] = uint32(random.IntN([]int{2, 4, 100}[random.IntN(3)]))
		}
		sequence = append(sequence, weights)
	}
	weights := ones
	for step, next := range sequence {
		for len(next) < n {
			next = append(next, 1)
		}
		lost := -1
		hold := make([]bool, n)
		part := uint32(1) // of the lasting buckets: the kernel itself only spares those far from the start
		if step%8 == 7 {
			part = 2
		}
		for i := range hold {
			hold[i] = keeps(weights, i, part*lasting) && keeps(next, i, part*lasting)
		}
		if step%8 == 7 {
			lost = random.IntN(n)
			hold[lost] = false
		}
		history.add(hold)
		if lost >= 0 {
			h.leaf.IP("link", "set", fmt.Sprintf("p%d", lost), "down")
		}
		s.do(h.group(1, next...))
		if lost >= 0 {
			h.leaf.IP("link", "set", fmt.Sprintf("p%d", lost), "up")
			h.carriers(n)
			h.balanced(target4(0), next)
			h.balanced(target6(0), next)
			d.Stats() // returns once all effects of the link event are applied
		}
		now := make([]bool, n)
		for i := range now {
			now[i] = keeps(next, i, lasting)
		}
		history.add(now)
		if err := ask(h.conn, 0, len(queries)); err != nil {
			t.Fatalf("step %d, weights %v: %v", step, next, err)
		}
		weights = next
	}
	close(stop)
	if err := <-done; err != nil {
		t.Errorf("meanwhile: %v; weights %v", err, sequence)
	}
	t.Logf("%d ports, asked %d times meanwhile, %d answers repeated; %+v", len(queries), rounds, unanswered.Load(), d.Stats())
}

// balanced waits until exactly the sub-ports with a weight have buckets.
func (h *host) balanced(dst string, weights []uint32) {
	h.t.Helper()
	want := map[string]int{}
	for i, q := range (layout{testBuckets, len(weights)}).quotas(weights) {
		if q > 0 {
			want[fmt.Sprintf("p%d", i)] = q
		}
	}
	if len(want) == 0 {
		want["blackhole"] = testBuckets
	}
	h.wants(dst, want)
}

func TestLanding(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "the kernel answers for each source port as computed")
	h := newHost(t, 5)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 9, 1, 0, 1), destination(target4(0), 1), destination(target6(0), 1))
	before := h.Objects()
	for f, dst := range []string{target4(0), target6(0)} {
		source, to := mustPrefix(h.forwarding.Loopbacks[f]).Addr(), mustPrefix(dst).Addr()
		for _, protocol := range []uint8{0, wecmp.ProtocolUDP, wecmp.ProtocolTCP} {
			response, err := c.server.Landing(context.Background(), &farev1.LandingRequest{
				Source: source.String(), Destination: to.String(), DestinationPort: wecmp.PortRoCE, Protocol: uint32(protocol),
			})
			if err != nil {
				t.Fatal(err)
			}
			want := make([]byte, 16384)
			for i, ports := range lastingPorts(d.Capabilities().FlowHash, 5, cmp.Or(protocol, wecmp.ProtocolUDP), source, to) {
				for _, port := range ports {
					want[int(port)-wecmp.MinPort] = byte(i + 1)
				}
			}
			if !slices.Equal(response.Devices, []string{"p0", "p1", "p2", "p3", "p4"}) || !slices.Equal(response.SubPortOfPort, want) {
				t.Errorf("%s, protocol %d: the kernel's answer differs from what is computed", dst, protocol)
			}
		}
	}
	if after := h.Objects(); after != before {
		t.Errorf("questions left something:\n%s", after)
	}
	for _, c2 := range []struct {
		source, destination string
		port, protocol      uint32
		code                codes.Code
	}{
		{"", "10.255.1.1", 4791, 0, codes.InvalidArgument}, {"10.255.0.1", "leaf", 4791, 0, codes.InvalidArgument},
		{"10.255.0.1", "fd00:255::100", 4791, 0, codes.InvalidArgument}, {"10.255.0.1", "10.255.1.1", 0, 0, codes.InvalidArgument},
		{"10.255.0.1", "10.255.1.1", 65536, 6, codes.InvalidArgument}, {"10.255.0.1", "10.255.1.1", 4791, 1, codes.InvalidArgument},
		{"10.255.0.1", "10.255.1.1", 4791, 256 + 6, codes.InvalidArgument},
		{"10.255.0.1", "10.9.9.9", 4791, 0, codes.NotFound}, {"10.8.8.8", "10.255.1.1", 4791, 6, codes.Unavailable},
	} {
		_, err := c.server.Landing(context.Background(), &farev1.LandingRequest{
			Source: c2.source, Destination: c2.destination, DestinationPort: c2.port, Protocol: c2.protocol,
		})
		if status.Code(err) != c2.code {
			t.Errorf("%+v: %v", c2, err)
		}
	}
}

// TestKernelThatDisagrees checks that Hello selects the algorithm "ask" if the computed hash differs from the kernel's.
func TestKernelThatDisagrees(t *testing.T) {
	h := newHost(t, 4)
	d := h.open()
	d.mu.Lock()
	d.prober.misplace = func(hash uint32) uint32 { return hash + 512 }
	d.mu.Unlock()
	if err := d.SetForwarding(h.forwarding); err != nil {
		t.Fatal(err)
	}
	if f := d.Capabilities().FlowHash; f.GetAlgorithm() != asked || f.Seed != 0 || f.LastingBuckets != 32 {
		t.Errorf("%v", f)
	}
	// Each attempt asks for flows of both families, from no address and from the loopback, and all of them leave
	// elsewhere.
	if got := d.Stats().HashMismatches; got != hashAttempts*2*2*checkPorts {
		t.Errorf("%d flows left elsewhere", got)
	}
	d.mu.Lock()
	d.prober.misplace = nil
	d.mu.Unlock()
	if err := d.SetForwarding(h.forwarding); err != nil || d.Capabilities().FlowHash.Algorithm != computed {
		t.Errorf("%v, %v", d.Capabilities(), err)
	}
}

// TestSeedIsOfTheComputedHash checks that the audit restores the hash seed while ports are computed with it, and leaves
// it alone while the kernel is queried: in a container it may be unable to set it.
func TestSeedIsOfTheComputedHash(t *testing.T) {
	h := newHost(t, 4)
	const name = "net.ipv4.fib_multipath_hash_seed"
	if _, err := h.Output("sysctl", "-n", name); err != nil {
		t.Skipf("this kernel has no %s", name) // before Linux 6.11
	}
	d := h.open()
	for _, c := range []struct {
		misplace func(uint32) uint32
		want     string
	}{{func(hash uint32) uint32 { return hash + 512 }, "0"}, {nil, strconv.Itoa(DefaultSeed)}} {
		d.mu.Lock()
		d.prober.misplace = c.misplace
		d.mu.Unlock()
		if err := d.SetForwarding(h.forwarding); err != nil {
			t.Fatal(err)
		}
		h.Sysctl(name + "=0")
		d.audit()
		if got := strings.TrimSpace(h.Run("sysctl", "-n", name)); got != c.want {
			t.Errorf("after another program's 0 the seed is %s, want %s", got, c.want)
		}
	}
}

// TestSmallWeights simulates a kernel before 6.12, whose weights have 8 bits.
func TestSmallWeights(t *testing.T) {
	h := newHost(t, 3)
	h.config.maxWeight = 256
	_, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1), destination(target4(0), 1))
	for _, weights := range [][]uint32{{1, 0, 0}, {1, 5, 9}, {0, 1, 0}, {1, 1, 1}} {
		s.do(h.group(1, weights...))
		h.balanced(target4(0), weights)
	}
	nexthops := h.objects()
	for _, n := range nexthops {
		for _, m := range n.Members {
			if m.Weight > 256 {
				t.Errorf("%v", n)
			}
		}
	}
}
