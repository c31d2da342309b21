package pods

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// server has two GPUs with separate ports in two planes.
func server() *farev1.Forwarding {
	return &farev1.Forwarding{
		Planes: []*farev1.ForwardingPlane{
			{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{{Device: "a0", NextHopV4: "192.0.2.1"}, {Device: "b0"}}},
			{Plane: "p1", SubPorts: []*farev1.ForwardingSubPort{{Device: "a1"}, {Device: "b1"}}},
		},
		Loopbacks: []string{"10.0.0.1/32", "10.0.0.2/32"}, UdpPorts: []uint32{4791},
		SourceGroups: []*farev1.SourceGroup{
			{Loopbacks: []string{"10.0.0.1/32"}, Devices: []string{"a0", "a1"}}, {Loopbacks: []string{"10.0.0.2/32"}, Devices: []string{"b0", "b1"}},
		},
	}
}

func describe(r *restriction) string {
	if r == nil {
		return "none"
	}
	var all []string
	for _, plane := range r.forwarding.Planes {
		for _, sp := range plane.SubPorts {
			all = append(all, plane.Plane+" "+sp.Device+" "+sp.NextHopV4)
		}
	}
	for _, g := range r.forwarding.SourceGroups {
		all = append(all, fmt.Sprint(g.Loopbacks, g.Devices))
	}
	return strings.Join(append(all, fmt.Sprint(r.forwarding.Loopbacks, r.sources)), "; ")
}

// TestRestrict checks which sub-ports and source groups a namespace gets, by its devices and addresses.
func TestRestrict(t *testing.T) {
	for _, c := range []struct {
		devices   map[string]string
		addresses []string
		want      string
	}{
		{map[string]string{"a0": "net0", "a1": "net1"}, []string{"10.9.9.9", "fd00::9/128"}, "p0 net0 192.0.2.1; p1 net1 ; [10.9.9.9/32 fd00::9/128] map[10.0.0.1/32:]"},
		{map[string]string{"b1": "net1"}, []string{"10.9.9.9"}, "p1 net1 ; [10.9.9.9/32] map[10.0.0.2/32:]"},
		{map[string]string{"a0": "x", "b0": "y"}, []string{"10.9.9.9"}, "p0 x 192.0.2.1; [10.9.9.9/32] map[10.0.0.1/32:]"},
		{map[string]string{"a0": "x", "b0": "y"}, []string{"10.0.0.2"}, "p0 y ; [10.0.0.2/32] map[10.0.0.2/32:]"},
		{map[string]string{"a0": "x", "b0": "y"}, []string{"10.0.0.2", "10.9.9.9"}, "p0 x 192.0.2.1; p0 y ; [10.9.9.9/32] [x]; [10.0.0.2/32] [y]; " +
			"[10.9.9.9/32 10.0.0.2/32] map[10.0.0.1/32:10.9.9.9/32 10.0.0.2/32:10.0.0.2/32]"},
		{map[string]string{"c0": "x"}, []string{"10.9.9.9"}, "none"},
		{map[string]string{"a0": "x"}, nil, "none"},
	} {
		addresses, err := hostPrefixes(c.addresses)
		if err != nil {
			t.Fatal(err)
		}
		if got := describe(restrict(server(), c.devices, addresses)); got != c.want {
			t.Errorf("%v %v:\n%s, want\n%s", c.devices, c.addresses, got, c.want)
		}
	}
}

// TestRestrictVector checks members and shares, which keep their ratios.
func TestRestrictVector(t *testing.T) {
	host := server()
	host.SourceGroups = nil
	whole := &farev1.Vector{Id: 3}
	for i, device := range []string{"a0", "b0", "a1", "b1"} {
		plane := fmt.Sprintf("p%d", i/2)
		whole.Members = append(whole.Members, &farev1.VectorMember{Plane: plane, Device: device, Weight: uint32(1 + i%2)})
		whole.Slots = append(whole.Slots, &farev1.VectorSlot{Slot: uint32(i), Plane: plane, Device: device, SharePpb: []uint32{166666667, 333333333, 166666667, 333333333}[i]})
	}
	none := &farev1.Vector{Id: 4, Slots: []*farev1.VectorSlot{{Plane: "p0", Device: "a0"}}}
	text := func(v *farev1.Vector) (out string) {
		for _, m := range v.GetMembers() {
			out += fmt.Sprintf("%s %d, ", m.Device, m.Weight)
		}
		for _, s := range v.GetSlots() {
			out += fmt.Sprintf("%d %s %d, ", s.Slot, s.Device, s.SharePpb)
		}
		return out
	}
	all := map[string]string{"a0": "a0", "b0": "b0", "a1": "a1", "b1": "b1"}
	for _, c := range []struct {
		devices map[string]string
		v       *farev1.Vector
		want    string
	}{
		{all, whole, text(whole)},
		{map[string]string{"a0": "x", "b1": "y"}, whole, "x 1, y 2, 0 x 333333334, 1 y 666666666, "},
		{map[string]string{"a0": "x", "b0": "y", "a1": "z"}, whole, "x 1, y 2, z 1, 0 x 250000001, 1 y 499999999, 2 z 250000000, "},
		{map[string]string{"a0": "x"}, none, "0 x 0, "},
	} {
		r := restrict(host, c.devices, []netip.Prefix{netip.MustParsePrefix("10.9.9.9/32")})
		got := r.vector(c.v)
		if text(got) != c.want {
			t.Errorf("%v: %s, want %s", c.devices, text(got), c.want)
		}
		var sum uint32
		for _, s := range got.Slots {
			sum += s.SharePpb
		}
		if len(got.Members) > 0 && sum != shareSum {
			t.Errorf("%v: shares sum to %d", c.devices, sum)
		}
	}
	if v := restrict(server(), all, []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32")}).vector(&farev1.Vector{Id: 1, Source: "10.0.0.2/32"}); v != nil {
		t.Error("a vector of another source group: ", v)
	}
}

// TestRestrictDestination checks the names of destinations, and that an address of the pod is none.
func TestRestrictDestination(t *testing.T) {
	r := restrict(server(), map[string]string{"a0": "x"}, []netip.Prefix{netip.MustParsePrefix("10.9.9.9/32")})
	for _, c := range []struct {
		source, prefix string
		concerned      bool
	}{
		{"10.0.0.1/32", "10.1.1.1/32", true}, {"10.0.0.2/32", "10.1.1.1/32", false}, {"10.0.0.1/32", "10.9.9.9/32", false},
	} {
		key := contract.DestinationKey{Source: netip.MustParsePrefix(c.source), Prefix: netip.MustParsePrefix(c.prefix)}
		set, deleted := r.destination(key, 7), r.destination(key, 0)
		if d := set.GetSetDestination(); d.GetPrefix() != "" != c.concerned || c.concerned && (d.Vector != 7 || d.Source != "" || d.Prefix != c.prefix) {
			t.Errorf("%v: %v", c, set)
		}
		if d := deleted.GetDeleteDestination(); d.GetPrefix() != "" != c.concerned {
			t.Errorf("%v: %v", c, deleted)
		}
	}
}

// TestFinder checks by which rules a device has a sub-port.
func TestFinder(t *testing.T) {
	f := &finder{
		host:    []rtnl.Hardware{{Index: 5, Name: "eth0"}, {Index: 6, Name: "ens1f0", AltNames: "p1.0", Bus: "pci", Parent: "0000:3b:00.0"}},
		names:   []string{"eth0", "p1.0"},
		all:     map[string]bool{"eth0": true, "p1.0": true, "eth9": true},
		present: map[string]bool{"eth0": true, "ens1f0": true, "p1.0": true}, hostID: 3,
		function: func(pci string) string {
			if pci == "0000:3b:02.1" {
				return "0000:3b:00.0"
			}
			return ""
		},
	}
	for _, c := range []struct {
		what           string
		h              rtnl.Hardware
		found, byNamed string
	}{
		{"macvlan", rtnl.Hardware{Name: "net1", Kind: "macvlan", Lower: 5, Space: 3}, "eth0", "eth0"},
		{"above another namespace's device", rtnl.Hardware{Name: "net1", Kind: "macvlan", Lower: 5, Space: 2}, "", ""},
		{"above a device of the pod", rtnl.Hardware{Name: "net1", Kind: "vlan", Lower: 5, Space: -1}, "", ""},
		{"a veth's peer", rtnl.Hardware{Name: "net1", Kind: "veth", Lower: 5, Space: 3}, "", ""},
		{"virtual function", rtnl.Hardware{Name: "net1", Bus: "pci", Parent: "0000:3b:02.1"}, "p1.0", "p1.0"},
		{"another function", rtnl.Hardware{Name: "net1", Bus: "pci", Parent: "0000:3b:02.2"}, "", ""},
		{"a pod's eth0", rtnl.Hardware{Name: "eth0", Kind: "veth", Lower: 9, Space: 3}, "", "eth0"},
		{"moved from the host", rtnl.Hardware{Name: "x", AltNames: "eth9"}, "eth9", "eth9"},
	} {
		if found, named := f.of(&c.h, false), f.of(&c.h, true); found != c.found || named != c.byNamed {
			t.Errorf("%s: %q, named %q; want %q, %q", c.what, found, named, c.found, c.byNamed)
		}
	}
}

// TestHostPrefixes checks accepted and refused addresses.
func TestCommon(t *testing.T) {
	address := func(device int, a string) rtnl.Address {
		return rtnl.Address{Device: device, Addr: netip.MustParseAddr(a)}
	}
	for name, c := range map[string]struct {
		all  []rtnl.Address
		want string
	}{
		"one of each device":              {[]rtnl.Address{address(2, "172.16.0.9"), address(3, "172.16.1.9")}, "[172.16.0.9/32 172.16.1.9/32]"},
		"one at all devices":              {[]rtnl.Address{address(2, "172.16.0.9"), address(2, "10.0.0.1"), address(3, "172.16.1.9"), address(3, "10.0.0.1")}, "[10.0.0.1/32]"},
		"of the loopback device":          {[]rtnl.Address{address(1, "10.0.0.1"), address(2, "172.16.0.9")}, "[10.0.0.1/32]"},
		"of IPv4 alone":                   {[]rtnl.Address{address(1, "10.0.0.1"), address(2, "172.16.0.9"), address(2, "fd00::9"), address(3, "fd01::9")}, "[10.0.0.1/32 fd00::9/128 fd01::9/128]"},
		"the only one of the only device": {[]rtnl.Address{address(2, "10.0.0.1")}, "[10.0.0.1/32]"},
	} {
		if got := fmt.Sprint(common(c.all, func(a rtnl.Address) bool { return a.Device == 1 })); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func TestHostPrefixes(t *testing.T) {
	got, err := hostPrefixes([]string{"10.0.0.1", "10.0.0.1/32", "::ffff:10.0.0.2", "fd00::1/128"})
	if want := []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32"), netip.MustParsePrefix("fd00::1/128")}; err != nil || !slices.Equal(got, want) {
		t.Error(got, err)
	}
	for _, text := range []string{"", "x", "10.0.0.0/24", "0.0.0.0", "224.0.0.1", "fe80::1", "fd00::1%eth0"} {
		if got, err := hostPrefixes([]string{text}); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}
