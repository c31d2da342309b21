package linux

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// equal returns an equal division of all buckets among the named sub-ports.
func equal(devices ...string) map[string]int {
	shares := map[string]int{}
	for i, d := range devices {
		shares[d] = testBuckets/len(devices) + map[bool]int{true: 1}[i < testBuckets%len(devices)]
	}
	return shares
}

func TestLinksComeAndGo(t *testing.T) {
	h := newHost(t, 4)
	_, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), h.group(2, 0, 0, 0, 1),
		destination(target4(0), 1), destination(target6(0), 1), destination(target4(1), 2), destination(target6(1), 2))
	all, three := equal("p0", "p1", "p2", "p3"), equal("p0", "p1", "p2")
	before := h.state()
	for _, c := range []struct {
		what       string
		away, back func()
	}{
		{"carrier", func() { h.leaf.IP("link", "set", "p3", "down") }, func() { h.leaf.IP("link", "set", "p3", "up") }},
		{"down", func() { h.IP("link", "set", "p3", "down") }, func() { h.IP("link", "set", "p3", "up") }},
		{"renamed", func() { h.IP("link", "set", "p3", "name", "other") }, func() { h.IP("link", "set", "other", "name", "p3") }},
		{"deleted", func() { h.IP("link", "del", "p3") }, func() { h.wire(3) }},
		{"moved", func() { h.IP("link", "set", "p3", "netns", h.leaf.Name, "name", "away") }, func() {
			h.leaf.IP("link", "set", "away", "netns", h.Name, "name", "p3")
			h.Addr("p3", "10.1.3.1/24", "fd01:3::1/64")
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			c.away()
			h.wants(target4(0), three)
			h.wants(target6(0), three)
			h.wants(target4(1), map[string]int{"blackhole": 1024})
			h.wants(target6(1), map[string]int{"blackhole": 1024})
			c.back()
			h.wants(target4(0), all)
			h.wants(target6(0), all)
			h.wants(target4(1), map[string]int{"p3": 1024})
			h.wants(target6(1), map[string]int{"p3": 1024})
			netnstest.Eventually(t, time.Minute, func() error {
				if d := diff(h.state(), before); d != "" {
					return fmt.Errorf("%s", d)
				}
				return nil
			})
			// An IPv6 route added while its group had only the loopback member rejects packets permanently, so the test
			// queries the kernel.
			for _, dst := range []string{target4(1), target6(1)} {
				text := h.IP("route", "get", strings.TrimSuffix(strings.TrimSuffix(dst, "/32"), "/128"))
				if !strings.Contains(text, "dev p3") {
					t.Errorf("%s", text)
				}
			}
		})
	}
	t.Run("MTU", func(t *testing.T) {
		h.IP("link", "set", "p3", "mtu", "1400")
		h.wants(target4(0), all)
	})
}

// TestAlternativeName checks that a sub-port whose device is an alternative name carries its share, also after the
// device was renamed, until the name is removed, and again once it returns.
func TestAlternativeName(t *testing.T) {
	h := newHost(t, 4)
	h.IP("link", "set", "p3", "name", "port3")
	h.IP("link", "property", "add", "dev", "port3", "altname", "p3")
	_, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	wants := func(shares map[string]int) {
		t.Helper()
		h.wants(target4(0), shares)
		h.wants(target6(0), shares)
	}
	wants(equal("p0", "p1", "p2", "port3"))
	h.IP("link", "set", "port3", "name", "other")
	h.IP("link", "property", "del", "dev", "other", "altname", "p3")
	wants(equal("p0", "p1", "p2"))
	h.IP("link", "property", "add", "dev", "other", "altname", "p3")
	wants(equal("p0", "p1", "p2", "other"))
}

// TestLostCarrierIsRedistributedAtOnce checks that a lost carrier costs one message for each group, without the control
// plane, and that the control plane's answer costs one more only if its weights differ from the remaining ones.
func TestLostCarrierIsRedistributedAtOnce(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 2, 3, 2), destination(target4(0), 1), destination(target6(0), 1))
	rest(t, d)
	before := d.Stats()
	h.leaf.IP("link", "set", "p1", "down")
	left := map[string]int{"p0": 171, "p2": 512, "p3": 341}
	h.wants(target4(0), left)
	h.wants(target6(0), left)
	rest(t, d)
	if s := d.Stats(); s.MovedByKernel != before.MovedByKernel+2 || s.Groups != before.Groups+2 || s.Errors != 0 {
		t.Errorf("%+v after %+v", s, before)
	}
	if d.audit(); d.Stats().Differences != 0 {
		t.Errorf("the kernel has other buckets than the plan: %+v", d.Stats())
	}
	before = d.Stats()
	s.do(subPortOp("p1", false), h.group(1, 2, 0, 6, 4))
	if s := d.Stats(); sent(s) != sent(before) {
		t.Errorf("equal weights cost %d messages", sent(s)-sent(before))
	}
	s.do(h.group(1, 1, 0, 2, 1))
	h.wants(target4(0), map[string]int{"p0": 256, "p2": 512, "p3": 256})
	if s := d.Stats(); s.Groups != before.Groups+2 {
		t.Errorf("other weights cost %d messages for 2 groups", s.Groups-before.Groups)
	}
	// The sub-port returns, but the control plane does not use it yet.
	h.leaf.IP("link", "set", "p1", "up")
	h.carriers(4)
	s.do(h.group(1, 1, 1, 1, 1))
	h.wants(target4(0), equal("p0", "p2", "p3"))
	s.do(subPortOp("p1", true))
	h.wants(target4(0), equal("p0", "p1", "p2", "p3"))
}

// TestLostCarriersOfAllSubPorts loses and restores the carriers of all sub-ports, one by one and together.
func TestLostCarriersOfAllSubPorts(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	all := []string{"p0", "p1", "p2", "p3"}
	set := func(state string, devices ...string) {
		var lines []string
		for _, device := range devices {
			lines = append(lines, fmt.Sprintf("link set %s %s", device, state))
		}
		batch(t, h.leaf, lines)
	}
	wants := func(shares map[string]int) {
		t.Helper()
		h.wants(target4(0), shares)
		h.wants(target6(0), shares)
		rest(t, d)
	}
	for range 3 {
		for i, device := range all[:3] {
			set("down", device)
			wants(equal(all[i+1:]...))
		}
		set("down", "p3")
		wants(map[string]int{"blackhole": testBuckets})
		set("up", all...)
		wants(equal(all...))
		set("down", "p0", "p2", "p3")
		wants(equal("p1"))
		set("up", "p2", "p3", "p0")
		set("down", all...)
		wants(map[string]int{"blackhole": testBuckets})
		set("up", all...)
		wants(equal(all...))
		for _, dst := range []string{target4(0), target6(0)} { // an IPv6 route may reject packets although its group carries them
			address, _, _ := strings.Cut(dst, "/")
			if text := h.IP("route", "get", address); !strings.Contains(text, "dev p") {
				t.Errorf("%s", text)
			}
		}
	}
}

func TestDrainMovesAtOnce(t *testing.T) {
	h := newHost(t, 4)
	_, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), h.group(2, 1), destination(target4(0), 1), destination(target6(0), 1), destination(target4(1), 2))
	s.do(subPortOp("p0", false))
	for dst, want := range map[string]map[string]int{target4(0): equal("p1", "p2", "p3"), target6(0): equal("p1", "p2", "p3"), target4(1): {"blackhole": 1024}} {
		if got := h.share(dst); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", dst, got, want)
		}
	}
}

func TestLostNewsOfLinks(t *testing.T) {
	h := newHost(t, 4)
	h.config.watchBuffer = 1
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	before := h.state()
	for round := 0; d.Stats().Overruns == 0; round++ {
		if round == 100 {
			t.Fatal("nothing was lost")
		}
		var lines []string
		for i := range 400 {
			lines = append(lines, fmt.Sprintf("link set p%d mtu %d", i%4, 1400+i%97))
		}
		lines = append(lines, "link set p2 down", "link set p2 up", "link set p1 down")
		batch(h.t, h.Namespace, lines)
		h.wants(target4(0), equal("p0", "p2", "p3"))
		batch(h.t, h.Namespace, []string{"link set p1 up"})
		netnstest.Eventually(t, time.Minute, func() error {
			if d := diff(h.state(), before); d != "" {
				return fmt.Errorf("%s", d)
			}
			return nil
		})
	}
}

// batch runs lines of `ip -batch` in a namespace, in one process.
func batch(t testing.TB, n *netnstest.Namespace, lines []string) {
	t.Helper()
	n.Run("sh", "-c", "ip -batch - <<'EOF'\n"+strings.Join(lines, "\n")+"\nEOF")
}

func TestIPv4OverIPv6(t *testing.T) {
	h := newHost(t, 3)
	for _, plane := range h.forwarding.Planes {
		plane.SubPorts[0].NextHopV4 = ""
	}
	h.forwarding.Planes[1].SubPorts[0].NextHopV6 = "fe80::1"
	_, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 2), destination(target4(0), 1), destination(target6(0), 1))
	want := map[string]int{"p0": 256, "p1": 256, "p2": 512}
	h.wants(target4(0), want)
	h.wants(target6(0), want)
	if text := h.state()["10.255.1.1"]; !strings.Contains(text, "fe80::1@p1") {
		t.Error(text)
	}
	if text := h.IP("route", "get", "10.255.1.1"); !strings.Contains(text, "via inet6 f") {
		t.Error(text)
	}
}

// TestHelloAgain changes next hops in place, and sub-ports together with their order.
func TestHelloAgain(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	first := d.Stats()
	c.hello(h.forwarding)
	if n := sent(d.Stats()) - sent(first); n != 0 {
		t.Errorf("the same Hello sent %d changes", n)
	}
	again := proto.CloneOf(h.forwarding)
	again.Planes[1].SubPorts[0].NextHopV4 = "10.1.1.7"
	c.hello(again)
	second := d.Stats()
	if second.Groups != first.Groups || second.Routes != first.Routes || second.Nexthops == first.Nexthops {
		t.Errorf("another next hop: %+v after %+v", second, first)
	}
	if text := h.state()["10.255.1.1"]; !strings.Contains(text, "10.1.1.7@p1*256") || strings.Contains(text, "10.1.1.2@") {
		t.Error(text)
	}
	if n := second.Nexthops - first.Nexthops; n != uint64(len(h.pool(t, "p1"))-1) { // the IPv6 next hop is as it was
		t.Errorf("another next hop: %d changes of nexthop objects %v", n, h.pool(t, "p1"))
	}
	h.counted(d)
	// A starting control plane does not know the next hop of an unnumbered session yet, so the sub-port keeps its
	// present one.
	again.Planes[2].SubPorts[0].NextHopV4, again.Planes[2].SubPorts[0].NextHopV6 = "", ""
	c.hello(proto.CloneOf(again))
	if n := sent(d.Stats()) - sent(second); n != 0 {
		t.Errorf("a Hello without a next hop sent %d changes", n)
	}
	h.wants(target4(0), equal("p0", "p1", "p2", "p3"))
	h.wants(target6(0), equal("p0", "p1", "p2", "p3"))
	if err := d.SetForwarding(again); err != nil { // without the server, which fills in the present next hop
		t.Fatal(err)
	}
	h.wants(target4(0), equal("p0", "p1", "p3"))
	h.wants(target6(0), equal("p0", "p1", "p3"))
	c.hello(h.forwarding)
	h.wants(target4(0), equal("p0", "p1", "p2", "p3"))
	// IPv4 by the IPv6 next hop of one sub-port, and back.
	mixed := proto.CloneOf(h.forwarding)
	mixed.Planes[0].SubPorts[0].NextHopV4 = ""
	c.hello(mixed)
	if text := h.state()["10.255.1.1"]; !strings.Contains(text, "fd01:0::2@p0*256") && !strings.Contains(text, "fd01::2@p0*256") || strings.Contains(text, "10.1.0.2@") {
		t.Error(text)
	}
	c.hello(h.forwarding)
	if text := h.state()["10.255.1.1"]; !strings.Contains(text, "10.1.0.2@p0*256") || strings.Contains(text, "fd01:") {
		t.Error(text)
	}
	h.counted(d)
	// Equal sub-ports in another order have each other's buckets.
	swapped := proto.CloneOf(h.forwarding)
	swapped.Planes[0], swapped.Planes[1] = swapped.Planes[1], swapped.Planes[0]
	if c.hello(swapped); !strings.Contains(h.state()["10.255.1.1"], ": 10.1.1.2@p1*256 10.1.0.2@p0*256 ") {
		t.Error(h.state()["10.255.1.1"])
	}
	c.hello(h.forwarding)
	h.counted(d)

	fewer := proto.CloneOf(h.forwarding)
	fewer.Planes = []*farev1.ForwardingPlane{fewer.Planes[3], fewer.Planes[1]}
	c.hello(fewer)
	h.wants(target4(0), equal("p3", "p1"))
	for _, n := range h.pool(t, "p0") {
		t.Errorf("left of a sub-port that is no more: %s", n)
	}
	absent := proto.CloneOf(h.forwarding)
	absent.Planes[0].SubPorts[0].Device = "later"
	c.hello(absent)
	h.forwarding = absent
	s.do(h.group(1, 1, 1, 1, 1))
	h.wants(target4(0), equal("p1", "p2", "p3"))
	h.IP("link", "set", "p0", "name", "later")
	h.wants(target4(0), equal("later", "p1", "p2", "p3"))
}

// pool lists the nexthop objects on a device.
func (h *host) pool(t testing.TB, device string) (lines []string) {
	for _, line := range strings.Split(h.IP("nexthop"), "\n") {
		if strings.Contains(line, "dev "+device+" ") {
			lines = append(lines, line)
		}
	}
	return lines
}

// witnesses counts the group members without a bucket, except for the loopback.
func (h *host) witnesses() (n int) {
	h.t.Helper()
	all := h.objects()
	for _, g := range all {
		if len(g.Members) < 2 {
			continue
		}
		buckets, err := h.conn.Buckets(g.ID)
		if err != nil {
			h.t.Fatal(err)
		}
		n--
		for _, m := range g.Members {
			if !slices.Contains(buckets, m.ID) {
				n++
			}
		}
	}
	return n
}

// TestDrainCostsOneMessageAGroup also checks that weights equivalent to the kernel's current division cost no message.
func TestDrainCostsOneMessageAGroup(t *testing.T) {
	h := newHost(t, 4)
	h.config.witnessTime, h.config.inPlace = time.Hour, true
	d, c := h.start()
	s := program(t, c.server)
	for g := range 5 {
		s.do(h.group(uint32(g+1), 1, 1, 1, uint32(g+1)), destination(target4(g), uint32(g+1)))
	}
	groups := func(ops ...*farev1.Operation) uint64 {
		before := d.Stats()
		s.do(ops...)
		return d.Stats().Groups - before.Groups
	}
	if n := groups(subPortOp("p0", false)); n != 5 {
		t.Errorf("a lost sub-port cost %d messages for 5 groups", n)
	}
	if n := h.witnesses(); n != 5 {
		t.Errorf("%d witnesses in 5 groups", n)
	}
	if n := groups(h.group(1, 0, 1, 1, 1), h.group(2, 0, 2, 2, 4), h.group(3, 7, 1, 1, 3)); n != 0 {
		t.Errorf("weights that the kernel has already cost %d messages", n)
	}
	// The loss of a witness's carrier moves no bucket.
	h.IP("link", "set", "p0", "down")
	h.carriers(3)
	if n := groups(h.group(4, 9, 1, 1, 4)); n != 0 || d.Stats().MovedByKernel != 0 {
		t.Errorf("%d messages, %+v", n, d.Stats())
	}
	if n := h.witnesses(); n != 0 {
		t.Errorf("%d witnesses are left of a device that is down", n)
	}
	if n := groups(subPortOp("p1", false)); n != 5 {
		t.Errorf("a lost sub-port cost %d messages for 5 groups", n)
	}
}

func TestWitnessesLeave(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	s.do(subPortOp("p0", false))
	netnstest.Eventually(t, time.Minute, func() error {
		if n := h.witnesses(); n != 0 {
			return fmt.Errorf("%d witnesses", n)
		}
		return nil
	})
	h.wants(target4(0), equal("p1", "p2", "p3"))
	h.wants(target6(0), equal("p1", "p2", "p3"))
	rest(t, d)
	n := sent(d.Stats())
	d.audit()
	if s := d.Stats(); sent(s) != n || s.Differences != 0 {
		t.Errorf("%+v", s)
	}
}

// TestRestartWithWitnesses checks that a process recognizes the witnesses of a killed one.
func TestRestartWithWitnesses(t *testing.T) {
	h := newHost(t, 4)
	h.config.inPlace = true
	h.config.witnessTime = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), h.group(2, 5, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1), destination(target4(1), 2))
	s.do(h.group(1, 2, 1, 1, 1), h.group(2, 1, 2, 1, 1))
	s.do(subPortOp("p0", false))
	before, text, journal := h.state(), h.IP("-d", "nexthop"), c.snapshot()
	if n := h.witnesses(); n != 3 {
		t.Errorf("%d witnesses", n)
	}
	crash(t, d)
	d, c = h.restart(journal)
	d.audit()
	if s := d.Stats(); sent(s) != 0 || s.Errors != 0 || s.Differences != 0 {
		t.Errorf("%+v", s)
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	if h.IP("-d", "nexthop") != text {
		t.Error("nexthop objects changed")
	}
	program(t, c.server).do(subPortOp("p0", true))
	h.balanced(target4(0), []uint32{2, 1, 1, 1})
	h.balanced(target4(1), []uint32{1, 2, 1, 1})
}
