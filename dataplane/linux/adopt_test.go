package linux

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// crash ends a Driver like a killed process, without a last message to the kernel.
func crash(t testing.TB, d *Driver) {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

// restart opens a Driver again, with the journal's state or without a journal, and settles.
func (h *host) restart(journal *farev1.SnapshotResponse) (*Driver, *client) {
	h.t.Helper()
	d := h.open()
	c := &client{t: h.t, server: contract.New(contract.Config{Name: "linux", Forwarder: d})}
	if journal != nil {
		if refused, err := c.server.Restore(h.forwarding, journal); err != nil || len(refused) > 0 {
			h.t.Fatal(refused, err)
		}
	} else {
		c.hello(h.forwarding)
	}
	if err := d.Settle(); err != nil {
		h.t.Fatal(err)
	}
	return d, c
}

func (c *client) snapshot() (all *farev1.SnapshotResponse) {
	c.server.View(func(s *contract.State) { all = proto.CloneOf(s.Snapshot()) })
	return all
}

func (h *host) some(s *stream) {
	s.do(h.group(1, 1, 1, 1, 1), h.group(2, 2, 2, 1, 2), h.group(3), h.group(4, 0, 0, 0, 5), h.group(5, 1, 1, 1, 1))
	for i := range 20 {
		s.do(destination(target4(i), uint32(1+i%5)), destination(target6(i), uint32(1+i%4)))
	}
	s.do(h.group(2, 2, 1, 1, 2), h.group(5, 3, 1, 0, 900))
}

func TestRestartWithJournalChangesNothing(t *testing.T) {
	h := newHost(t, 4)
	h.config.inPlace = true
	d, c := h.start()
	h.some(program(t, c.server))
	rest(t, d)
	before, text, journal := h.state(), h.IP("-d", "nexthop"), c.snapshot()
	crash(t, d)
	d, c = h.restart(journal)
	if s := d.Stats(); sent(s) != 0 || s.Errors != 0 {
		t.Errorf("%+v", s)
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	if h.IP("-d", "nexthop") != text {
		t.Error("nexthop objects changed")
	}
	s := program(t, c.server)
	s.do(h.group(1, 0, 1, 1, 1))
	h.wants(target4(0), equal("p1", "p2", "p3"))
}

func TestRestartWithoutJournalChangesNothing(t *testing.T) {
	h := newHost(t, 4)
	h.config.inPlace = true
	d, c := h.start()
	h.some(program(t, c.server))
	rest(t, d)
	before, text := h.state(), h.IP("-d", "nexthop")
	crash(t, d)
	d, c = h.restart(nil)
	if s := d.Stats(); sent(s) != 0 || s.Errors != 0 {
		t.Errorf("%+v", s)
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	if h.IP("-d", "nexthop") != text {
		t.Error("nexthop objects changed")
	}
	all := c.snapshot()
	if len(all.Destinations) != 40 {
		t.Fatalf("%d destinations were recovered", len(all.Destinations))
	}
	weights := func(prefix string) (w []uint32) {
		for _, d := range all.Destinations {
			for _, g := range all.Vectors {
				if d.Prefix == prefix && g.Id == d.Vector {
					for _, m := range g.Members {
						w = append(w, m.Weight)
					}
				}
			}
		}
		return w
	}
	if got := weights(target4(0)); !slices.Equal(got, []uint32{1, 1, 1, 1}) {
		t.Errorf("weights %v", got)
	}
	if got := weights(target6(2)); got != nil {
		t.Errorf("weights of an unreachable group %v", got)
	}
	if got := weights(target4(3)); !slices.Equal(got, []uint32{1}) {
		t.Errorf("weights %v", got)
	}
}

// TestRestartRepairs checks that a restart and an audit repair missing and superfluous objects.
func TestRestartRepairs(t *testing.T) {
	for _, how := range []string{"restart", "audit"} {
		t.Run(how, func(t *testing.T) {
			h := newHost(t, 4)
			d, c := h.start()
			h.some(program(t, c.server))
			before, journal := h.state(), c.snapshot()
			if how == "restart" {
				crash(t, d)
			} else if err := d.Settle(); err != nil {
				t.Fatal(err)
			}
			h.damage()
			if how == "restart" {
				if diff(h.state(), before) == "" {
					t.Fatal("no damage was done")
				}
				d, _ = h.restart(journal)
			} else {
				d.audit()
				if d.Stats().Differences == 0 {
					t.Errorf("%+v", d.Stats())
				}
			}
			netnstest.Eventually(t, time.Minute, func() error { // notifications of the damage may have begun the repair before the audit
				if d := diff(h.state(), before); d != "" {
					return errors.New(d)
				}
				return nil
			})
			rest(t, d)
			n := sent(d.Stats())
			d.audit()
			d.audit()
			if more := sent(d.Stats()) - n; more != 0 {
				t.Errorf("an audit of what is right sent %d changes", more)
			}
		})
	}
}

// damage removes half of all marked objects, changes a group, and adds a route and a nexthop that are not wanted.
func (h *host) damage() {
	h.t.Helper()
	nexthops := h.objects()
	b := h.conn.Begin()
	for i, n := range nexthops {
		switch {
		case len(n.Members) > 0 && i%3 == 0:
			b.DelNexthop(n.ID)
		case len(n.Members) > 2 && i%3 == 1:
			n.Members = n.Members[1:]
			b.SetNexthop(n, rtnl.Change)
		case len(n.Members) == 0 && i%2 == 0:
			b.DelNexthop(n.ID)
		}
	}
	for i := range 20 {
		if i%4 == 1 {
			b.DelRoute(rtnl.Route{Prefix: mustPrefix(target4(i)), Protocol: DefaultProtocol})
		}
	}
	b.SetNexthop(rtnl.Nexthop{ID: 77, Protocol: DefaultProtocol, Family: 2, Blackhole: true}, rtnl.Create)
	b.SetRoute(rtnl.Route{Prefix: mustPrefix("10.254.0.1/32"), Protocol: DefaultProtocol, Metric: DefaultMetric, Nexthop: 77}, rtnl.Create)
	b.SetRoute(rtnl.Route{Prefix: mustPrefix("10.254.0.0/24"), Protocol: DefaultProtocol, Metric: 3, Nexthop: 77}, rtnl.Create)
	h.conn.Do(b) // some were removed together with other objects
}

func TestForeignIsLeftAlone(t *testing.T) {
	h := newHost(t, 4)
	h.config.Table = 7000
	// The setting changes how ip shows routes by nexthop id.
	h.Sysctl("net.ipv4.nexthop_compat_mode=0")
	for _, line := range []string{
		"nexthop add id 5 via 10.1.0.2 dev p0 proto 196", "nexthop add id 6 via 10.1.1.2 dev p1 proto 11",
		fmt.Sprintf("nexthop add id %d via 10.1.1.2 dev p1", DefaultFirstID+2),
		"nexthop add id 7 group 5/6 proto 196", "nexthop add id 8 group 5,3/6 type resilient buckets 8",
		"route add 10.77.0.0/16 nhid 7 proto 196", "route add 10.77.0.1/32 nhid 8 table 7000",
		"route add " + strings.TrimSuffix(target4(1), "/32") + "/32 nhid 5 proto 11 table 7000 metric 20",
		"route add " + target4(2) + " via 10.1.2.2 table 7000 metric 30",
		"route add default via 10.1.3.2", "rule add pref 500 fwmark 9 lookup 90", "-6 route add " + target6(1) + " via fd01:1::2 table 7000 metric 20",
	} {
		h.IP(strings.Fields(line)...)
	}
	h.Run("tc", "qdisc", "replace", "dev", "p0", "root", "tbf", "rate", "1gbit", "burst", "64k", "latency", "1ms")
	foreign := func() string {
		var text strings.Builder
		for line := range strings.Lines(h.Objects()) {
			if !strings.Contains(line, "proto 179") {
				text.WriteString(line)
			}
		}
		qdiscs := h.Run("tc", "qdisc", "show", "dev", "p0")
		return text.String() + string(qdiscs)
	}
	before := foreign()
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), h.group(2, 1, 0, 2, 1))
	for _, dst := range []string{target4(1), target6(1)} {
		refused := s.try(destination(dst, 1))
		if len(refused) != 1 || codes.Code(refused[0].Code) != codes.Unavailable || !strings.Contains(refused[0].Message, "another program's") {
			t.Errorf("%s: %v", dst, refused)
		}
	}
	if refused := s.try(destination(target4(0), 1), destination(target4(1), 1), destination(target4(2), 1)); len(refused) != 1 {
		t.Errorf("among others: %v", refused)
	}
	h.wants(target4(2), equal("p0", "p1", "p2", "p3"))
	if h.share(target4(1)) != nil {
		t.Error("the foreign route was replaced")
	}
	if rules := h.IP("rule"); strings.Count(rules, "lookup 7000 proto 179") != 1 {
		t.Errorf("rules:\n%s", rules)
	}
	s.do(h.group(1, 3, 2, 1, 0), destination(target4(0), 2), destination(target6(0), 2), deleteDestination(target4(2)))
	d.audit()
	if err := d.Settle(); err != nil {
		t.Error(err)
	}
	if after := foreign(); after != before {
		t.Error(cmp.Diff(before, after))
	}
	crash(t, d)
	var removed Removed
	h.Must(func() (err error) { removed, err = Flush(h.config); return err })
	if removed.Rules != 2 || removed.Routes != 5 || // two, and three anchors
		removed.Groups == 0 || removed.Nexthops == 0 {
		t.Errorf("%+v", removed)
	}
	if after := foreign(); after != before {
		t.Error(cmp.Diff(before, after))
	}
	if text := h.Objects(); strings.Contains(text, "proto 179") {
		t.Errorf("left by a flush:\n%s", text)
	}
}

// TestAnyOrderEndsEqual programs one state in random orders, through other random states, and compares the resulting
// kernel state.
func TestAnyOrderEndsEqual(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	random1 := func() *farev1.Operation {
		switch random.IntN(5) {
		case 0:
			return subPortOp(fmt.Sprintf("p%d", random.IntN(4)), random.IntN(2) == 0)
		case 1, 2:
			return h.group(uint32(1+random.IntN(6)), uint32(random.IntN(4)), uint32(random.IntN(4)), uint32(random.IntN(9)), uint32(random.IntN(3)))
		case 3:
			return deleteDestination(target4(random.IntN(12)))
		default:
			if random.IntN(2) == 0 {
				return destination(target6(random.IntN(12)), uint32(1+random.IntN(6)))
			}
			return destination(target4(random.IntN(12)), uint32(1+random.IntN(6)))
		}
	}
	var want map[string]string
	for round := range gate.Count(t, gate.Kernel, 6, 12) {
		for range random.IntN(40) {
			s.try(random1()) // some name groups that do not exist
		}
		var groups, others []*farev1.Operation
		for i := range 4 {
			others = append(others, subPortOp(fmt.Sprintf("p%d", i), i != 2))
		}
		for i := range 12 {
			others = append(others, destination(target4(i), uint32(1+i%6)), destination(target6(i), uint32(1+i%5)))
		}
		for i := range 6 {
			groups = append(groups, h.group(uint32(1+i), uint32(1+i%2), uint32(i), 1, 2))
		}
		random.Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
		random.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
		s.do(append(groups, others...)...)
		got := h.state()
		if want == nil {
			want = got
		}
		if d := diff(got, want); d != "" {
			t.Fatalf("round %d: %s", round, d)
		}
		rest(t, d)
		before := sent(d.Stats())
		s.do(append(groups, others...)...)
		if n := sent(d.Stats()) - before; n != 0 {
			t.Errorf("round %d: the same again sent %d changes", round, n)
		}
	}
	if s := d.Stats(); s.Errors != 0 || s.Differences != 0 {
		t.Errorf("%+v", s)
	}
	// A small number of nexthop objects suffices for all these states.
	if n := d.Stats().NexthopObjects; n > 200 {
		t.Errorf("%d nexthop objects", n)
	}
	t.Logf("%+v", d.Stats())
}

// TestNoWayOut checks that a programmed destination never falls through to the default route, not even at the moment
// when the last carrier is lost.
func TestNoWayOut(t *testing.T) {
	h := newHost(t, 3)
	h.config.witnessTime = time.Hour
	h.forwarding.Planes = h.forwarding.Planes[:2]
	h.IP("route", "add", "default", "via", "10.1.2.2")
	h.IP("-6", "route", "add", "default", "via", "fd01:2::2")
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	stop, leaks := make(chan struct{}), make(chan error)
	conn := netnstest.In(h.Namespace, rtnl.Dial)
	defer conn.Close()
	links, err := h.conn.Links()
	if err != nil {
		t.Fatal(err)
	}
	out := uint32(slices.IndexFunc(links, func(l rtnl.Link) bool { return l.Name == "p2" }))
	out = uint32(links[out].Index)
	asked := make(chan int, 1)
	go func() {
		n := 0
		defer func() { asked <- n }()
		for {
			select {
			case <-stop:
				close(leaks)
				return
			default:
			}
			devices, err := conn.Landing([]rtnl.Query{{Destination: mustPrefix(target4(0)).Addr()}, {Destination: mustPrefix(target6(0)).Addr()}})
			n++
			if err == nil && slices.Contains(devices, out) {
				err = fmt.Errorf("a packet takes the default route: %v", devices)
			}
			if err != nil {
				leaks <- err
				close(leaks)
				return
			}
		}
	}()
	for range 5 {
		h.leaf.IP("link", "set", "p0", "down")
		h.leaf.IP("link", "set", "p1", "down")
		h.wants(target4(0), map[string]int{"blackhole": 1024})
		h.leaf.IP("link", "set", "p0", "up")
		h.leaf.IP("link", "set", "p1", "up")
		h.wants(target4(0), equal("p0", "p1"))
	}
	s.do(h.group(1))
	s.do(h.group(1, 1))
	close(stop)
	for err := range leaks {
		t.Error(err)
	}
	t.Logf("asked %d times; %+v", <-asked, d.Stats())
}

func TestNetworkNamespaceOfASubPort(t *testing.T) {
	h := newHost(t, 2)
	d := h.open()
	for name, ok := range map[string]bool{h.Name: true, h.Path(): true, h.leaf.Name: false, "no-such-namespace": false} {
		f := proto.CloneOf(h.forwarding)
		f.Planes[1].SubPorts[0].Netns = name
		err := d.SetForwarding(f)
		if (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
		if !ok && (!strings.Contains(err.Error(), "planes[1].sub_ports[0]") || !strings.Contains(err.Error(), "InvalidArgument")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []struct {
		config Config
		names  string
	}{
		{Config{Protocol: 4}, "protocol 4"}, {Config{AuditInterval: -1}, "audit interval"},
		{Config{Table: 9, ProbeTable: 9}, "probe table"},
	} {
		if _, err := Open(c.config); err == nil || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%+v: %v", c.config, err)
		}
	}
}

// TestObjectsAreMarked reads the objects with `ip` alone.
func TestObjectsAreMarked(t *testing.T) {
	h := newHost(t, 4)
	h.config.Protocol, h.config.Table, h.config.FirstID = 201, 4000, 70000
	_, c := h.start()
	h.some(program(t, c.server))
	var nexthops []map[string]any
	if err := json.Unmarshal([]byte(h.IP("-j", "nexthop")), &nexthops); err != nil {
		t.Fatal(err)
	}
	for _, n := range nexthops {
		if n["protocol"] != "201" || n["id"].(float64) < 70000 || n["id"].(float64) > 71000 {
			t.Errorf("%v", n)
		}
	}
	if len(nexthops) == 0 || len(h.state()) != 40 {
		t.Errorf("%d nexthops, %d routes", len(nexthops), len(h.state()))
	}
	if !maps.EqualFunc(h.state(), h.state(), func(a, b string) bool { return a == b && strings.Contains(a, "table 4000") }) {
		t.Error("routes are in another table")
	}
}

func TestCommitAfterObjectsVanish(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1))
	h.IP("nexthop", "flush")
	s.do(h.group(1, 1, 1, 1, 0), destination(target4(1), 1))
	h.wants(target4(0), equal("p0", "p1", "p2"))
	h.wants(target4(1), equal("p0", "p1", "p2"))
	if s := d.Stats(); s.Retries+s.Disturbances == 0 {
		t.Errorf("%+v", s)
	}
}
