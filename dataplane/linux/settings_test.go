package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
)

func TestSettings(t *testing.T) {
	h := newHost(t, 2)
	var log logged
	h.config.Logger, h.config.AuditInterval = slog.New(slog.NewTextHandler(&log, nil)), time.Hour
	read := func(name string) string {
		out := h.Run("sysctl", "-n", name)
		return strings.TrimSpace(string(out))
	}
	d, _ := h.start()
	for name, want := range map[string]string{
		"net.ipv4.nexthop_compat_mode": "0", "net.ipv4.fib_multipath_hash_policy": "1", "net.ipv6.fib_multipath_hash_policy": "1",
		"net.ipv4.fib_multipath_hash_seed": fmt.Sprint(DefaultSeed),
	} {
		if got := read(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	changes := func(differences uint64, lines int) {
		t.Helper()
		before, logs := d.Stats(), len(log.lines("fib_multipath_hash_seed was changed"))
		d.audit()
		if s := d.Stats(); s.Differences-before.Differences != differences || s.Audits != before.Audits+1 || len(log.lines("fib_multipath_hash_seed was changed"))-logs != lines {
			t.Errorf("an audit: %+v, before %+v; logged %v; want %d differences and %d lines", s, before, log.lines("level="), differences, lines)
		}
	}
	changes(0, 0)
	h.Sysctl("net.ipv4.fib_multipath_hash_policy=0", "net.ipv4.nexthop_compat_mode=1", "net.ipv4.fib_multipath_hash_seed=42")
	changes(2, 1)
	release := exhaustDescriptors(t)
	d.audit()
	release()
	if lines := log.lines("cannot restore settings of the kernel"); len(lines) != 1 {
		t.Errorf("without descriptors: logged %q", lines)
	}
	if got := read("net.ipv4.fib_multipath_hash_policy"); got != "1" {
		t.Errorf("after an audit the policy is %s", got)
	}
	if err := d.SetForwarding(h.forwarding); err != nil {
		t.Fatal(err)
	}
	if f := d.Capabilities().FlowHash; f.Algorithm != computed || f.Seed != 42 {
		t.Errorf("with the seed of another program: %v", f)
	}
	// Policy 3 stays at a leaf alone, and with the fields of policy 1.
	leaf := proto.CloneOf(h.forwarding)
	leaf.Loopbacks, leaf.UdpPorts = nil, nil
	for _, set := range []struct {
		forwarding     *farev1.Forwarding
		fields, policy string
	}{{h.forwarding, "0x07", "1"}, {h.forwarding, "0x37", "1"}, {leaf, "0x07", "1"}, {leaf, "0x37", "3"}, {h.forwarding, "0x37", "1"}} {
		if err := d.SetForwarding(set.forwarding); err != nil {
			t.Fatal(err)
		}
		h.Sysctl("net.ipv4.fib_multipath_hash_fields="+set.fields, "net.ipv4.fib_multipath_hash_policy=3")
		d.audit()
		if got := read("net.ipv4.fib_multipath_hash_policy"); got != set.policy {
			t.Errorf("%d loopbacks: hash policy 3 of the fields %s became %s, want %s", len(set.forwarding.Loopbacks), set.fields, got, set.policy)
		}
	}
}

// TestSettingsAreRestored checks that a hash policy that another program sets, so that all flows of a pair take one
// path, is restored without an audit, and that the report of it names the setting.
func TestSettingsAreRestored(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	d, _ := h.start()
	var received reports
	d.Guard(received.report)
	for name, values := range map[string][2]string{
		"net.ipv4.fib_multipath_hash_policy": {"0", "1"}, "net.ipv6.fib_multipath_hash_policy": {"0", "1"}, "net.ipv4.nexthop_compat_mode": {"1", "0"},
	} {
		h.Sysctl(name + "=" + values[0])
		netnstest.Eventually(t, time.Minute, func() error {
			if out, err := h.Output("sysctl", "-n", name); err != nil || strings.TrimSpace(string(out)) != values[1] {
				return fmt.Errorf("%s is %s: %v", name, out, err)
			}
			return nil
		})
		all := received.settled(t)
		if want := name + " was " + values[0] + ", and is " + values[1] + " again"; len(all) != 2 || all[0].Intact || all[0].Message != want || all[1].Message != want {
			t.Errorf("reports %v, want one of %q and one of its end", all, want)
		}
	}
}

// limited returns the limitations that a Driver names.
func limited(d *Driver) (text string) {
	for _, f := range d.Limitations() {
		text += f.String()
	}
	return text
}

// TestStrictFilters checks that a strict reverse path filter of sub-ports, one of which has an alternative name in the
// configuration, is named while it lasts, and only where it is in force.
func TestStrictFilters(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	h.IP("link", "property", "add", "dev", "p1", "altname", "fabric1")
	h.forwarding.Planes[1].SubPorts[0].Device = "fabric1"
	d, _ := h.start()
	for _, step := range []struct{ set, want string }{
		{"all.rp_filter=0 p0.rp_filter=0 p1.rp_filter=0", ""},
		{"p1.rp_filter=1", " on p1: "},
		{"all.rp_filter=1 p1.rp_filter=0", " on p0, p1: "},
		{"p0.rp_filter=2", " on p1: "},
		{"all.rp_filter=2 p1.rp_filter=1", ""},
		{"all.rp_filter=0 p1.rp_filter=2", ""},
	} {
		for _, one := range strings.Fields(step.set) {
			h.Sysctl("net.ipv4.conf." + one)
		}
		d.restore() // as every second
		if got := limited(d); (got == "") != (step.want == "") || !strings.Contains(got, step.want) {
			t.Errorf("after %s: %q, want %q", step.set, got, step.want)
		}
	}
}

// TestFirewallIsNamed checks that rules of the firewall that drop BFD and data at sub-ports are named with the chain
// and the ports while they last, and that the device above the driver is the one that output rules are judged by.
func TestFirewallIsNamed(t *testing.T) {
	netnstest.Require(t, "nft")
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	h.forwarding.UdpPorts, h.forwarding.SlotProbePort = []uint32{4791, 4796}, 4796
	d, _ := h.start()
	named := func() string {
		d.restore() // as every second
		var got []string
		for _, f := range d.Limitations() {
			got = append(got, f.Reason)
		}
		return strings.Join(got, " ")
	}
	reasons := func(want string) {
		t.Helper()
		if got := named(); got != want {
			t.Errorf("limitations %q, want %q", d.Limitations(), want)
		}
	}
	nft := func(rules string) {
		t.Helper()
		h.Run("nft", rules)
	}
	reasons("")
	nft("add table inet f; add chain inet f in { type filter hook input priority 0; policy drop; }")
	reasons("firewall-bfd firewall-input")
	if got := d.Limitations()[0].String(); !strings.Contains(got, "UDP 3784") || !strings.Contains(got, "p0, p1") || !strings.Contains(got, "table inet f, chain in, policy drop") {
		t.Errorf("named as %q", got)
	}
	nft("add rule inet f in udp dport { 3784, 4791 } accept")
	reasons("")
	nft(`add chain inet f out { type filter hook output priority 0; policy drop; }; add rule inet f out oifname { p0, p1 } accept`)
	reasons("")
	d.SteeredBy("fared0")
	reasons("") // without that device nothing leaves
	netnstest.Veth(t, h.Namespace, "fared0", h.leaf, "far0")
	netnstest.Eventually(t, time.Minute, func() error { // the event of the new device arrives later
		if got := named(); got != "firewall-output" {
			return fmt.Errorf("limitations %q", got)
		}
		return nil
	})
	nft("delete table inet f")
	reasons("")
	nft("add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in udp dport 4791 drop")
	reasons("firewall-input") // although the probes pass
	nft("delete table inet f")
	reasons("")
}

// TestLimits checks that differing MTUs, sub-ports of a bridge (to which the kernel refers as to a VRF, by
// IFLA_MASTER), and absent loopbacks are named while they last.
func TestLimits(t *testing.T) {
	h := newHost(t, 3)
	h.config.AuditInterval = time.Hour
	h.IP("link", "add", "br0", "type", "bridge")
	h.IP("addr", "del", "10.255.0.1/32", "dev", "lo")
	d := h.open()
	h.IP("addr", "add", "10.255.0.1/32", "dev", "p0") // before the loopback is known; a loopback need not be on lo
	if err := d.SetForwarding(h.forwarding); err != nil {
		t.Fatal(err)
	}
	if got := limited(d); got != "" {
		t.Errorf("at first: %s", got)
	}
	for _, step := range []struct{ begin, end, names string }{
		{"link set p1 mtu 9000", "link set p1 mtu 1500", "different MTUs (1500 on p0, p2; 9000 on p1)"},
		{"link set p1 down mtu 9000", "link set p1 up mtu 1500", "different MTUs (1500 on p0, p2; 9000 on p1)"},
		{"link set p0 master br0", "link set p0 nomaster", "(p0 to br0)"},
		{"addr del 10.255.0.1/32 dev p0", "addr add 10.255.0.1/32 dev lo", "on no device (10.255.0.1/32)"},
		{"addr del fd00:255::1/128 dev lo", "addr add fd00:255::1/128 dev p2 nodad", "on no device (fd00:255::1/128)"},
	} {
		for _, line := range []string{step.begin, step.end} {
			h.IP(strings.Fields(line)...)
			netnstest.Eventually(t, time.Minute, func() error {
				d.restore() // as every second
				if got := limited(d); (got == "") != (line == step.end) || line == step.begin && !strings.Contains(got, step.names) {
					return fmt.Errorf("after %s: %q, want %q", line, got, step.names)
				}
				return nil
			})
		}
	}
}

// TestHashSurvivesATransientError checks that a Hello without a free file descriptor is refused as UNAVAILABLE and
// keeps the hash, and that the next Hello succeeds without writing the seed.
func TestHashSurvivesATransientError(t *testing.T) {
	h := newHost(t, 2)
	h.config.Logger = slog.New(slog.DiscardHandler) // periodic work may fail meanwhile, too
	h.Sysctl("net.ipv4.fib_multipath_hash_seed=42")
	d, _ := h.start()
	before := d.Capabilities().FlowHash
	if before.Algorithm != computed || before.Seed != 42 {
		t.Fatalf("the hash is %v", before)
	}
	release := exhaustDescriptors(t)
	err := d.SetForwarding(h.forwarding)
	release()
	if status.Code(err) != codes.Unavailable || !proto.Equal(d.Capabilities().FlowHash, before) {
		t.Errorf("without a descriptor: %v, the hash is %v", err, d.Capabilities().FlowHash)
	}
	if err := d.SetForwarding(h.forwarding); err != nil || !proto.Equal(d.Capabilities().FlowHash, before) {
		t.Errorf("with descriptors again: %v, the hash is %v", err, d.Capabilities().FlowHash)
	}
}

// exhaustDescriptors leaves the process without a free file descriptor until release is called.
func exhaustDescriptors(t *testing.T) (release func()) {
	t.Helper()
	return leaveDescriptors(t, 0)
}

// leaveDescriptors leaves the process that number of free file descriptors until release is called.
func leaveDescriptors(t *testing.T, free int) (release func()) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 256, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	var held []int
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == unix.EMFILE {
			break
		}
		if err != nil {
			t.Error(err)
			break
		}
		held = append(held, fd)
	}
	for range free {
		unix.Close(held[len(held)-1])
		held = held[:len(held)-1]
	}
	return sync.OnceFunc(func() {
		for _, fd := range held {
			unix.Close(fd)
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Error(err)
		}
	})
}

// TestTransitSettings checks that a node without loopbacks forwards transit packets and keeps its own hash seed.
func TestTransitSettings(t *testing.T) {
	h := newHost(t, 2)
	const v4, v6, seed = "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.ipv4.fib_multipath_hash_seed"
	settings := func() string {
		out := h.Run("sysctl", "-n", v4, v6, seed)
		return strings.Join(strings.Fields(string(out)), " ")
	}
	h.Sysctl(v4+"=0", v6+"=0")
	d := h.open()
	leaf := proto.CloneOf(h.forwarding)
	leaf.Loopbacks, leaf.UdpPorts = nil, nil
	onlyV4 := proto.CloneOf(leaf)
	for _, plane := range onlyV4.Planes {
		for _, sp := range plane.SubPorts {
			sp.NextHopV6 = ""
		}
	}
	d.audit()
	if got := settings(); got != "0 0 0" {
		t.Errorf("before anything is known: %s", got)
	}
	for _, step := range []struct {
		name       string
		forwarding *farev1.Forwarding
		want       string
	}{{"IPv4 alone", onlyV4, "1 0 0"}, {"both families", leaf, "1 1 0"}} {
		if err := d.SetForwarding(step.forwarding); err != nil {
			t.Fatal(err)
		}
		if got := settings(); got != step.want {
			t.Errorf("%s: %s, want %s", step.name, got, step.want)
		}
		if hash := d.Capabilities().FlowHash; hash != nil {
			t.Errorf("%s: source ports are to land by %v", step.name, hash)
		}
	}
	h.Sysctl(v4 + "=0")
	d.audit()
	if got := settings(); got != "1 1 0" || d.Stats().Differences != 1 {
		t.Errorf("after an audit: %s, %+v", got, d.Stats())
	}
	if err := d.SetForwarding(h.forwarding); err != nil {
		t.Fatal(err)
	}
	if got, want := settings(), fmt.Sprint("1 1 ", DefaultSeed); got != want || d.Capabilities().FlowHash.GetAlgorithm() != computed {
		t.Errorf("with loopbacks: %s, want %s; %v", got, want, d.Capabilities().FlowHash)
	}
}

// TestResolvedMeanwhile sets up a device while the kernel resolves a next hop: its requests stay broadcasts. While
// ucast_solicit was raised they went to the address 00:00:00:00:00:00 for seconds.
func TestResolvedMeanwhile(t *testing.T) {
	h := newHost(t, 1)
	h.leaf.IP("address", "flush", "dev", "p0")
	var requests, lost atomic.Int64
	defer packettap.Frames(t, h.leaf, "p0", func(frame []byte) {
		if binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_ARP {
			if requests.Add(1); [6]byte(frame) == [6]byte{} {
				lost.Add(1)
			}
		}
	})()
	d := h.open()
	resolve := func(n int64) {
		t.Helper()
		last := requests.Load() + n
		netnstest.Eventually(t, time.Minute, func() error {
			if err := h.SendWhole(netip.MustParseAddrPort("10.1.0.1:9"), netip.MustParseAddrPort("10.1.0.2:9"), 64); err != nil && !errors.Is(err, unix.EHOSTUNREACH) {
				return err
			}
			if at := requests.Load(); at < last {
				return fmt.Errorf("%d requests, want %d", at, last)
			}
			return nil
		})
	}
	resolve(1)
	if err := d.SetForwarding(h.forwarding); err != nil {
		t.Fatal(err)
	}
	if resolve(20); lost.Load() > 0 {
		t.Errorf("%d of %d requests to the address 00:00:00:00:00:00", lost.Load(), requests.Load())
	}
}

// TestNeighborSettings checks that the kernel repeats requests for next hops soon, and gives up as late as by default,
// on the devices of sub-ports alone, also of one with an alternative name and after another program has changed that,
// and that a name which is not a device's changes no file.
func TestNeighborSettings(t *testing.T) {
	h := newHost(t, 2)
	var names []string
	for _, family := range []string{"ipv4", "ipv6"} {
		for _, device := range []string{"p0", "p1", "lo"} {
			for _, name := range []string{"retrans_time_ms", "mcast_solicit", "mcast_resolicit"} {
				names = append(names, "net."+family+".neigh."+device+"."+name)
			}
		}
	}
	settings := func() string {
		out := h.Run("sysctl", append([]string{"-n"}, names...)...)
		var words []string
		for _, text := range strings.Fields(string(out)) {
			if ms, err := strconv.Atoi(text); err == nil && ms >= 10 && ms <= 20 { // a multiple of the kernel's tick
				text = "soon"
			}
			words = append(words, text)
		}
		return strings.Join(words, " ")
	}
	const want = "soon 300 300 soon 300 300 1000 3 0 soon 300 300 soon 300 300 1000 3 0"
	h.config.AuditInterval = time.Hour
	altname := func() { h.IP("link", "property", "add", "dev", "p1", "altname", "fabric1") }
	altname()
	h.forwarding.Planes[1].SubPorts[0].Device = "fabric1"
	d := h.open()
	if err := d.SetForwarding(h.forwarding); err != nil {
		t.Fatal(err)
	}
	if got := settings(); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	more := proto.CloneOf(h.forwarding)
	more.Planes[0].SubPorts = append(more.Planes[0].SubPorts, &farev1.ForwardingSubPort{Device: "absent"}, &farev1.ForwardingSubPort{Device: "../neigh/lo"})
	for _, forwarding := range []*farev1.Forwarding{more, h.forwarding} {
		if err := d.SetForwarding(forwarding); err != nil {
			t.Fatal(err)
		}
		if got := settings(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	h.IP("link", "del", "p1")
	h.wire(1) // a device with another index
	altname()
	netnstest.Eventually(t, time.Minute, func() error {
		if got := settings(); got != want {
			return fmt.Errorf("a new device of a sub-port: %s, want %s", got, want)
		}
		return nil
	})
	for _, step := range []struct {
		name string
		do   func() error
	}{{"Hello", func() error { return d.SetForwarding(h.forwarding) }}, {"audit", func() error { d.audit(); return nil }}} {
		h.Sysctl(names[0]+"=1000", names[10]+"=3", names[14]+"=2")
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		if got := settings(); got != want {
			t.Errorf("after %s: %s, want %s", step.name, got, want)
		}
	}
}
