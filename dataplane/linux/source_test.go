package linux

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/wecmp"
)

// gpus is a host whose loopbacks use separate sub-ports: A uses p0 to p2, B p2 to p5, C p5.
func gpus(t testing.TB) *host {
	h := newHost(t, 6)
	h.config.AuditInterval = time.Hour
	h.forwarding.Loopbacks = []string{
		"10.255.0.1/32", "fd00:255::1/128", "10.255.0.2/32", "fd00:255::2/128", "10.255.0.3/32", "fd00:255::3/128",
	}
	h.Addr("lo", h.forwarding.Loopbacks[2:]...)
	h.forwarding.SourceGroups = []*farev1.SourceGroup{
		{Loopbacks: h.forwarding.Loopbacks[:2], Devices: []string{"p0", "p1", "p2"}},
		{Loopbacks: h.forwarding.Loopbacks[2:4], Devices: []string{"p2", "p3", "p4", "p5"}},
		{Loopbacks: h.forwarding.Loopbacks[4:], Devices: []string{"p5"}},
	}
	return h
}

// of assigns an operation to a source group.
func of(source string, op *farev1.Operation) *farev1.Operation {
	switch o := op.Op.(type) {
	case *farev1.Operation_SetVector:
		o.SetVector.Source = source
	case *farev1.Operation_SetDestination:
		o.SetDestination.Source = source
	case *farev1.Operation_DeleteDestination:
		o.DeleteDestination.Source = source
	}
	return op
}

// Names of the source groups of gpus.
const sourceA, sourceB, sourceC = "10.255.0.1/32", "10.255.0.2/32", "10.255.0.3/32"

// someSources programs two destinations for every source group: A 1:1:2, B 3:1:1:1, C its only sub-port.
func (h *host) someSources(s *stream) {
	s.do(of(sourceA, h.group(1, 1, 1, 2)), of(sourceB, h.group(2, 0, 0, 3, 1, 1, 1)), of(sourceC, h.group(3, 0, 0, 0, 0, 0, 1)))
	for i, source := range []string{sourceA, sourceB, sourceC} {
		s.do(of(source, destination(target4(0), uint32(i+1))), of(source, destination(target6(0), uint32(i+1))))
	}
}

// split fails unless packets from a source leave in a ratio of sub-ports, within five standard deviations.
func (e *ends) split(source, to string, want map[string]float64) error {
	e.t.Helper()
	const flows = 1024
	got, sum := e.send(source, to, flows), 0.0
	for _, w := range want {
		sum += w
	}
	for device := range got {
		if want[device] == 0 {
			return fmt.Errorf("packets from %s to %s: %v; %s is none of %v", source, to, got, device, want)
		}
	}
	for device, w := range want {
		expect := flows * w / sum
		if math.Abs(float64(got[device])-expect) > 5*math.Sqrt(expect*(1-w/sum))+expect/100+2 {
			return fmt.Errorf("packets from %s to %s: %v; %.0f of them are %s's", source, to, got, expect, device)
		}
	}
	return nil
}

var (
	splitA = map[string]float64{"p0": 1, "p1": 1, "p2": 2}
	splitB = map[string]float64{"p2": 3, "p3": 1, "p4": 1, "p5": 1}
	splitC = map[string]float64{"p5": 1}
)

// sourcesSplit checks all source groups, both families, and packets from no loopback.
func (e *ends) sourcesSplit(a, b, c map[string]float64) error {
	e.t.Helper()
	for _, step := range []struct {
		from4, from6 string
		want         map[string]float64
	}{
		{"10.255.0.1", "fd00:255::1", a}, {"10.255.0.2", "fd00:255::2", b}, {"10.255.0.3", "fd00:255::3", c},
		{"0.0.0.0", "::", a}, {"10.1.4.1", "fd01:4::1", a},
	} {
		if err := e.split(step.from4, target4(0), step.want); err != nil {
			return err
		}
		if err := e.split(step.from6, target6(0), step.want); err != nil {
			return err
		}
	}
	return nil
}

// TestNumberOfAnotherSource checks that a group number that moves to another source group within a batch, before the
// kernel group of the first one is removed, carries packets of the new source group only.
func TestNumberOfAnotherSource(t *testing.T) {
	h := gpus(t)
	d, c := h.start()
	defer crash(t, d)
	s := program(t, c.server)
	h.someSources(s)
	e := h.tap()
	s.do(of(sourceA, deleteDestination(target4(0))), of(sourceA, deleteDestination(target6(0))), deleteGroupOp(1),
		of(sourceB, h.group(1, 0, 0, 1, 0, 0, 2)), of(sourceB, destination(target4(1), 1)), of(sourceB, destination(target6(1), 1)))
	for from, to := range map[string]string{"10.255.0.2": target4(1), "fd00:255::2": target6(1)} {
		if err := e.split(from, to, map[string]float64{"p2": 1, "p5": 2}); err != nil {
			t.Error(err)
		}
	}
	if err := e.split("10.255.0.2", target4(0), splitB); err != nil {
		t.Error(err)
	}
}

// TestSourceGroups checks that packets of each source group leave through its sub-ports in the ratio of its groups,
// through link failures, changed weights, rules removed by other programs, restarts and new source groups.
func TestSourceGroups(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "packets of source groups go by the weights of each")
	h := gpus(t)
	d, c := h.start()
	var received reports
	d.Guard(received.report)
	s := program(t, c.server)
	h.someSources(s)
	if err := d.Settle(); err != nil {
		t.Fatal(err)
	}
	e := h.tap()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	must(e.sourcesSplit(splitA, splitB, splitC))

	// A failed link affects only its own source groups.
	h.leaf.IP("link", "set", "p0", "down")
	netnstest.Eventually(t, time.Minute, func() error {
		return e.sourcesSplit(map[string]float64{"p1": 1, "p2": 2}, splitB, splitC)
	})
	h.leaf.IP("link", "set", "p0", "up")
	netnstest.Eventually(t, time.Minute, func() error { return e.sourcesSplit(splitA, splitB, splitC) })
	s.do(of(sourceB, h.group(2, 0, 0, 1)))
	must(e.sourcesSplit(splitA, map[string]float64{"p2": 1}, splitC))
	s.do(of(sourceB, h.group(2, 0, 0, 3, 1, 1, 1)))

	// Another program removes the rules.
	for _, family := range []string{"-4", "-6"} {
		received.take()
		h.IP(family, "rule", "del", "from", map[string]string{"-4": "10.255.0.2", "-6": "fd00:255::2"}[family])
		received.settled(t)
		must(e.sourcesSplit(splitA, splitB, splitC))
	}
	received.take()
	table := d.state.want.sources[mustPrefix(sourceC)].table
	h.IP("route", "flush", "table", fmt.Sprint(table))
	received.settled(t)
	netnstest.Eventually(t, time.Minute, func() error { return e.sourcesSplit(splitA, splitB, splitC) })
	rest(t, d)

	h.unready(d)
	before, rules, journal := h.Objects(), h.IP("rule")+h.IP("-6", "rule"), c.snapshot()
	for _, all := range []*farev1.SnapshotResponse{journal, nil} { // without a journal the kernel state is used
		crash(t, d)
		d, c = h.restart(all)
		if n := sent(d.Stats()); n != 0 {
			t.Errorf("a restart sent %d changes: %+v", n, d.Stats())
		}
		if got := h.Objects(); got != before {
			t.Errorf("after a restart\n%s\nbefore\n%s", got, before)
		}
	}
	if got := h.IP("rule") + h.IP("-6", "rule"); got != rules {
		t.Errorf("rules after restarts\n%s\nbefore\n%s", got, rules)
	}
	must(e.sourcesSplit(splitA, splitB, splitC))

	t.Run("others", func(t *testing.T) { otherSources(t, h, d, c, e) })
	crash(t, d)
	var removed Removed
	must(h.Do(func() (err error) {
		removed, err = Flush(h.config)
		return err
	}))
	if text := h.Objects() + h.IP("rule") + h.IP("-6", "rule"); strings.Contains(text, "proto 179") || removed.Routes == 0 {
		t.Errorf("left by a flush %+v:\n%s", removed, text)
	}
}

// otherSources sends further Hellos: B first, no source groups, and the original ones.
func otherSources(t *testing.T, h *host, d *Driver, c *client, e *ends) {
	s := program(t, c.server)
	first := proto.CloneOf(h.forwarding)
	f := proto.CloneOf(h.forwarding)
	f.Loopbacks = slices.Concat(first.Loopbacks[2:4], first.Loopbacks[:2], first.Loopbacks[4:])
	f.SourceGroups = []*farev1.SourceGroup{first.SourceGroups[1], first.SourceGroups[0], first.SourceGroups[2]}
	c.hello(f)
	for _, step := range []struct {
		from string
		want map[string]float64
	}{{"10.255.0.1", splitA}, {"10.255.0.2", splitB}, {"10.255.0.3", splitC}, {"0.0.0.0", splitB}} {
		if err := e.split(step.from, target4(0), step.want); err != nil {
			t.Error("B is first:", err)
		}
	}

	// Without source groups, the programmed state of the first one serves all packets until it is replaced.
	f = proto.CloneOf(first)
	f.SourceGroups = nil
	c.hello(f)
	if rules := h.IP("rule") + h.IP("-6", "rule"); strings.Contains(rules, "proto 179") {
		t.Errorf("no source groups, and rules\n%s", rules)
	}
	s.do(h.group(9, 1, 1, 1, 1, 1, 1), destination(target4(0), 9), destination(target6(0), 9))
	for _, source := range []string{sourceA, sourceB, sourceC} {
		s.do(of(source, deleteDestination(target4(0))), of(source, deleteDestination(target6(0))))
	}
	s.do(deleteGroupOp(1), deleteGroupOp(2), deleteGroupOp(3))
	all := map[string]float64{"p0": 1, "p1": 1, "p2": 1, "p3": 1, "p4": 1, "p5": 1}
	if err := e.sourcesSplit(all, all, all); err != nil {
		t.Error("no source groups:", err)
	}
	if n := len(h.state()); n != 2 {
		t.Errorf("%d routes, want two: %v", n, h.state())
	}
	c.hello(first)
	h.someSources(s)
	s.do(deleteDestination(target4(0)), deleteDestination(target6(0)), deleteGroupOp(9))
	if err := e.sourcesSplit(splitA, splitB, splitC); err != nil {
		t.Error("source groups again:", err)
	}
	if got := d.Stats(); got.Errors != 0 || got.Differences != 0 {
		t.Errorf("%+v", got)
	}
}

// TestSourceGroupsOutsideMain checks that the rules of source groups precede the rule that leads to a separate data
// plane table.
func TestSourceGroupsOutsideMain(t *testing.T) {
	h := gpus(t)
	h.config.Table = 7000
	_, c := h.start()
	h.someSources(program(t, c.server))
	if err := h.tap().sourcesSplit(splitA, splitB, splitC); err != nil {
		t.Error(err)
	}
}

// TestLandingOfASourceGroup checks that Landing for a source names the sub-ports of its source group and matches the
// kernel's placement, and that the placement computed from FlowHash with the homes of the source group matches too.
func TestLandingOfASourceGroup(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	h := gpus(t)
	d, c := h.start()
	s := program(t, c.server)
	h.someSources(s)
	devices := map[uint32]string{}
	links, err := h.conn.Links()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		devices[uint32(l.Index)] = l.Name
	}
	hash := d.Capabilities().FlowHash
	if hash.GetAlgorithm() != computed {
		t.Fatal(hash)
	}
	for i, g := range h.forwarding.SourceGroups {
		for f, to := range []string{target4(0), target6(0)} {
			source, destination := mustPrefix(g.Loopbacks[f]).Addr(), mustPrefix(to).Addr()
			answer, err := c.server.Landing(context.Background(), &farev1.LandingRequest{
				Source: source.String(), Destination: destination.String(), DestinationPort: wecmp.PortRoCE,
			})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(answer.Devices, g.Devices) {
				t.Errorf("from %v: devices %v, want %v", source, answer.Devices, g.Devices)
			}
			lands := lastingPorts(hash, len(g.Devices), wecmp.ProtocolUDP, source, destination)
			var queries []rtnl.Query
			var want []string
			for j, ports := range lands {
				for _, port := range ports {
					if answered := int(answer.SubPortOfPort[port-wecmp.MinPort]); answered != j+1 {
						t.Fatalf("from %v port %d: Landing answers %d, computed %d", source, port, answered, j+1)
					}
					queries = append(queries, rtnl.Query{Source: source, Destination: destination, IPProto: 17, Sport: port, Dport: wecmp.PortRoCE})
					want = append(want, g.Devices[j])
				}
			}
			paths, err := h.conn.Paths(queries)
			if err != nil {
				t.Fatal(err)
			}
			seen := map[string]bool{}
			for k, path := range paths {
				if got := devices[path.Device]; got != want[k] {
					t.Fatalf("from %v port %d: %s, want %s", source, queries[k].Sport, got, want[k])
				}
				seen[want[k]] = true
			}
			if len(seen) != len(g.Devices) {
				t.Errorf("source group %d: ports land on %v", i, slices.Collect(maps.Keys(seen)))
			}
		}
	}
}
