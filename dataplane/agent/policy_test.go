package agent

import (
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

func prefixesOf(texts ...string) (out []netip.Prefix) {
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func hostOf(text string) netip.Prefix {
	a := netip.MustParseAddr(text)
	return netip.PrefixFrom(a, a.BitLen())
}

// TestPolicyOfDestinations checks which destinations are permitted: without allowed prefixes all but those that hide
// part of the machine; with them only those inside; and a part of the machine only by a prefix as long as itself.
func TestPolicyOfDestinations(t *testing.T) {
	m := &machine{
		addresses: map[netip.Addr]bool{netip.MustParseAddr("192.168.1.10"): true, netip.MustParseAddr("10.255.0.1"): true, netip.MustParseAddr("fd00::1"): true},
		gateways:  map[netip.Addr]bool{netip.MustParseAddr("203.0.113.1"): true},
		networks: []network{
			{netip.MustParsePrefix("192.168.1.0/24"), rtnl.Link{Name: "mgmt"}}, {netip.MustParsePrefix("10.0.0.0/31"), rtnl.Link{Name: "eth0"}}, {netip.MustParsePrefix("fd01::/64"), rtnl.Link{Name: "mgmt"}},
			{netip.MustParsePrefix("192.168.0.0/16"), rtnl.Link{Name: "wide"}},
		},
	}
	for _, c := range []struct {
		destination string
		allow       []string
		want        string // part of the error, "" for a permitted destination
	}{
		{"10.255.0.2", nil, ""},
		{"fd00::2", nil, ""},
		{"8.8.8.8", nil, ""},
		{"127.0.0.53", nil, "destination 127.0.0.53/32 is a loopback address"},
		{"127.0.0.53", []string{"127.0.0.53/32"}, "a loopback address"},
		{"::1", nil, "the loopback address"},
		{"169.254.169.254", []string{"0.0.0.0/0"}, "a link-local address"},
		{"fe80::1", nil, "a link-local address"},
		{"0.0.0.0", nil, "RFC 1122"},
		{"::", nil, "the unspecified address"},
		{"255.255.255.255", nil, "the broadcast address"},
		{"192.168.1.10", nil, "an address of this machine: use another address, or permit it by --allow-prefix 192.168.1.10/32"},
		{"fd00::1", nil, "an address of this machine"},
		{"203.0.113.1", nil, "a gateway of this machine"},
		{"10.0.0.0", nil, "a gateway of this machine"},
		{"10.0.0.1", nil, ""}, // on the link of a sub-port
		{"192.168.1.77", nil, "in 192.168.1.0/24, the network of device mgmt, which is no sub-port: use another address, or permit it by --allow-prefix 192.168.1.0/24"},
		{"192.168.2.1", nil, "in 192.168.0.0/16, the network of device wide"},
		{"fd01::5", nil, "in fd01::/64, the network of device mgmt"},

		{"10.255.0.2", []string{"10.255.0.0/16"}, ""},
		{"8.8.8.8", []string{"10.255.0.0/16", "fd00::/64"}, "destination 8.8.8.8/32 is outside of the agent's --allow-prefix [10.255.0.0/16 fd00::/64]: add --allow-prefix 8.8.8.8/32"},
		{"fd00::2", []string{"10.255.0.0/16"}, "is outside"},
		{"192.168.1.77", []string{"192.168.1.0/24"}, ""},
		{"192.168.1.77", []string{"192.168.1.64/26"}, ""},
		{"192.168.1.77", []string{"192.168.0.0/16"}, "in 192.168.1.0/24"},
		{"192.168.1.77", []string{"0.0.0.0/0"}, "in 192.168.1.0/24"},
		{"192.168.1.10", []string{"192.168.1.0/24"}, "an address of this machine"},
		{"203.0.113.1", []string{"0.0.0.0/0", "203.0.113.1/32"}, ""},
	} {
		p := &policy{prefixes: prefixesOf(c.allow...)}
		p.machine.Store(m)
		p.hops.Store(&hops{devices: map[string]bool{"eth0": true}, nextHops: map[netip.Addr]bool{netip.MustParseAddr("10.0.0.0"): true}})
		err := p.Destination(hostOf(c.destination))
		if (err == nil) != (c.want == "") || err != nil && (status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s, allowed %v: %v, want %q", c.destination, c.allow, err, c.want)
		}
	}
}

// TestPolicyOfMatches checks that a match is compared in place of the name, and that a pattern covers the port of a
// function.
func TestPolicyOfMatches(t *testing.T) {
	for _, c := range []struct {
		allow, name, match string
		want               bool
	}{
		{"eth*", "eth0", "", true},
		{"eth*", "p0s0", "", false},
		{"pci:*", "p0s0", "pci:0000:3b:00.0", true},
		{"pci:*", "p0s0", "pci:0000:3b:00.0/p1", true},
		{"pci:0000:3b:00.0/*", "p0s0", "pci:0000:3b:00.0/p1", true},
		{"pci:0000:3b:00.0/*", "p0s0", "pci:0000:3b:00.0", false},
		{"mac:*", "p0s0", "pci:0000:3b:00.0", false},
		{"p0s0", "p0s0", "pci:0000:3b:00.0", false},
		{"*", "lo", "pci:0000:3b:00.0", false},
		{"rdma:mlx5_*", "p0s0", "rdma:mlx4_0/2", false},
		{"rdma:mlx*", "p0s0", "rdma:mlx4_0/2", true},
		{"name:eth?", "p0s0", "name:eth7", true},
		{"name:eth?", "p0s0", "name:eth*", false}, // selects eth10 too
		{"name:eth?", "p0s0", "name:eth?", true},
		{"name:eth[4-7]", "p0s0", "name:eth[4-7]", true},
		{"name:*", "p0s0", "name:eth[4-7]", true},
		{"*", "p0s0", "name:eth*", true},
		{"eth*", "p0s0", "name:eth*", false},
	} {
		if err := (&policy{devices: []string{c.allow}}).device(c.name, c.match); (err == nil) != c.want {
			t.Errorf("%s allows %s, match %q: %v, want %t", c.allow, c.name, c.match, err, c.want)
		}
	}
}

// TestPolicyOverTheWire checks that operations and Hellos beyond the policy are refused with PERMISSION_DENIED and the
// remedy, that all others are carried out, and that a journal that an agent with another policy wrote is restored only
// within the present one.
func TestPolicyOverTheWire(t *testing.T) {
	dir := t.TempDir()
	c := Config{Socket: filepath.Join(dir, "s"), Journal: filepath.Join(dir, "journal")}
	_, stop := run(t, c, &recorder{})
	loopback := &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: "127.0.0.53/32", Vector: 1}}}
	refused := program(t, plain(t, c.Socket), append(typicalState(), loopback)...)
	if len(refused) != 1 || refused[0].Id != 5 || codes.Code(refused[0].Code) != codes.PermissionDenied || !strings.Contains(refused[0].Message, "127.0.0.53/32 is a loopback address") {
		t.Fatalf("refused %v, want 127.0.0.53/32 alone", refused)
	}
	stop()

	c.AllowPrefixes, c.AllowDevices = prefixesOf("10.0.0.0/24"), []string{"dp*"}
	_, stop = run(t, c, &recorder{})
	if got := testbed.Snapshot(t, plain(t, c.Socket)); len(got.Destinations) != 1 || got.Destinations[0].Prefix != "10.0.0.1/32" {
		t.Errorf("restored %v, want 10.0.0.1/32 alone", got.Destinations)
	}
	refused = program(t, plain(t, c.Socket), typicalState()...)
	if len(refused) != 1 || refused[0].Id != 3 || !strings.Contains(refused[0].Message, "--allow-prefix 2001:db8::1/128") {
		t.Errorf("refused %v, want 2001:db8::1/128 alone", refused)
	}
	stop()

	for _, device := range []string{"lo", "eth9"} {
		hello := &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}
		hello.Forwarding.Planes[1].SubPorts[0].Device = device
		_, stop := run(t, c, &recorder{})
		before := testbed.Snapshot(t, plain(t, c.Socket))
		_, err := farev1.NewDataplaneServiceClient(plain(t, c.Socket)).Hello(t.Context(), hello)
		if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "planes[1].sub_ports[0]: device ") || !strings.Contains(err.Error(), device) {
			t.Errorf("a Hello with %s: %v", device, err)
		}
		if after := testbed.Snapshot(t, plain(t, c.Socket)); len(after.Destinations) != len(before.Destinations) {
			t.Errorf("a refused Hello with %s changed the state", device)
		}
		stop()
	}
}

// TestPolicyOfTheKernel reads a real machine: a management network with a default gateway, routes of other programs
// over several and over IPv6 gateways, and sub-ports, in a network namespace whose thread is not that of the later
// readings.
func TestPolicyOfTheKernel(t *testing.T) {
	netnstest.Require(t)
	ns, peer := netnstest.New(t), netnstest.New(t)
	for _, device := range []string{"eth0", "eth1", "mgmt"} {
		netnstest.Veth(t, ns, device, peer, device)
	}
	ns.Addr("eth0", "10.0.0.1/31")
	ns.Addr("eth1", "10.0.1.1/24")
	peer.Addr("mgmt")
	ns.Addr("mgmt", "192.168.1.10/24", "fd01::10/64")
	ns.IP("link", "set", "lo", "up")
	ns.IP("addr", "add", "10.255.0.1/32", "dev", "lo")
	ns.IP("nexthop", "add", "id", "7", "via", "192.168.1.1", "dev", "mgmt")
	ns.IP("route", "add", "default", "nhid", "7")
	if _, err := ns.Output("sysctl", "-w", "net.ipv4.nexthop_compat_mode=0"); err != nil { // as the agent does
		t.Fatal(err)
	}
	ns.IP("link", "property", "add", "dev", "eth1", "altname", "fabric1")
	ns.IP("-6", "route", "add", "default", "via", "fd01::1")
	ns.IP("route", "add", "198.51.100.0/24", "proto", "dhcp", "nexthop", "via", "192.168.1.2", "dev", "mgmt", "nexthop", "via", "10.0.1.3", "dev", "eth1")
	ns.IP("route", "add", "203.0.113.1", "dev", "mgmt", "scope", "link")
	ns.IP("route", "add", "198.18.0.0/15", "via", "inet6", "fd01::2", "dev", "mgmt")
	var p *policy
	ns.Must(func() (err error) {
		p, err = newPolicy(&Config{Driver: Linux})
		return err
	})
	defer p.close()
	forwarding := &farev1.Forwarding{Planes: []*farev1.ForwardingPlane{
		{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{{Device: "eth0", NextHopV4: "10.0.0.0"}}},
		{Plane: "p1", SubPorts: []*farev1.ForwardingSubPort{{Device: "fabric1", NextHopV4: "10.0.1.2"}}},
	}}
	check := func(want map[string]string) {
		t.Helper()
		for destination, text := range want {
			err := p.Destination(hostOf(destination))
			if (err == nil) != (text == "") || err != nil && !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v, want %q", destination, err, text)
			}
		}
	}
	if err := p.Forwarding(forwarding); err != nil {
		t.Fatal(err)
	}
	check(map[string]string{
		"10.255.0.2": "", "8.8.8.8": "", "fd00::2": "", "10.0.1.77": "", "198.51.100.7": "",
		"10.255.0.1": "an address of this machine", "10.0.0.1": "an address of this machine", "fd01::10": "an address of this machine",
		"192.168.1.1": "a gateway", "192.168.1.2": "a gateway", "10.0.1.3": "a gateway", "fd01::1": "a gateway", "fd01::2": "a gateway",
		"10.0.0.0": "a gateway", "10.0.1.2": "a gateway",
		"192.168.1.77": "in 192.168.1.0/24, the network of device mgmt", "203.0.113.1": "in 203.0.113.1/32, the network of device mgmt",
		"fd01::77": "in fd01::/64, the network of device mgmt",
	})
	// A later change of the machine counts from the next reading on; the device that is no sub-port any more is
	// protected at once.
	ns.Addr("mgmt", "172.16.0.1/16")
	if err := p.refresh(0); err != nil {
		t.Fatal(err)
	}
	forwarding.Planes = forwarding.Planes[:1]
	if err := p.Forwarding(forwarding); err != nil {
		t.Fatal(err)
	}
	check(map[string]string{"172.16.9.9": "the network of device mgmt", "10.0.1.77": "in 10.0.1.0/24, the network of device eth1"})
}

// TestPolicyIsChecked checks that invalid lists are errors of their field.
func TestPolicyIsChecked(t *testing.T) {
	for want, c := range map[string]Config{
		"AllowPrefixes: 10.255.0.1/16 has bits beyond its length: use 10.255.0.0/16": {Driver: Memory, AllowPrefixes: prefixesOf("10.255.0.1/16")},
		`AllowDevices: "eth[" is neither a device nor a pattern such as eth*`:        {Driver: Memory, AllowDevices: []string{"eth["}},
		`AllowDevices: "" is neither`:                                                {Driver: Memory, AllowDevices: []string{""}},
	} {
		if err := c.complete(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	p := &policy{devices: []string{"eth*", "ib0"}}
	var permitted []string
	for _, device := range []string{"eth0", "ib0", "ib1", "lo", "mgmt", "xeth0"} {
		if p.device(device, "") == nil {
			permitted = append(permitted, device)
		}
	}
	if !slices.Equal(permitted, []string{"eth0", "ib0"}) {
		t.Errorf("permitted %s", permitted)
	}
}
