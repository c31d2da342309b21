package topo

import (
	"strings"

	"github.com/fared/fared/fare"
)

// frrFiles returns the files of a leaf or spine with FRR, for /etc/frr.
func (f *Fabric) frrFiles(n *Node) []File {
	return []File{
		{"frr.conf", f.frrConfig(n)},
		{"daemons", f.frrDaemons()},
		{"vtysh.conf", "service integrated-vtysh-config\n"},
	}
}

// frrDaemons selects the daemons that FRR's init script starts, in addition to zebra and staticd, and makes them listen
// on loopback only.
func (f *Fabric) frrDaemons() string {
	bfdd := ""
	if f.BFD > 0 {
		bfdd = "bfdd=yes\nbfdd_options=\"   -A 127.0.0.1\"\n"
	}
	return `bgpd=yes
vtysh_enable=yes
zebra_options="  -A 127.0.0.1 -s 90000000"
bgpd_options="   -A 127.0.0.1"
staticd_options="-A 127.0.0.1"
` + bfdd
}

// frrTop is the limit of 32 bits of bytes per second.
const frrTop fare.Bandwidth = 8 << 32

// overflows reports whether FRR would have to sum more bandwidth than 32 bits of bytes a second hold.
func (f *Fabric) overflows() bool {
	return (f.Spec.Leaf == FRR || f.Spec.Spine == FRR) && f.sizes().fullest() > frrTop
}

// frrConfig returns frr.conf.
func (f *Fabric) frrConfig(n *Node) string {
	var t text
	t.line("! %s", f.title(n))
	if f.overflows() {
		t.line("! FRR through 10.7.0 sums Link Bandwidth in 32 bits of bytes a second: all fared of this fabric send thousandths (path_bandwidth.scale).")
	}
	t.line("frr defaults datacenter\nhostname %s", n.Name)
	// On recent kernels FRR 8 loses a member of a nexthop object's group after a flap, while vtysh still shows it.
	// Without nexthop objects zebra writes plain multipath routes.
	t.line("no zebra nexthop kernel enable")
	// Otherwise route-maps, and so the traffic, wait for further changes.
	t.line("bgp route-map delay-timer 0\n!")
	if f.BFD > 0 {
		// Without exit, because daemons that do not know BFD would parse it as their own.
		t.line("bfd\n profile CABLES\n  detect-multiplier %d\n  receive-interval %d\n  transmit-interval %d\n!", bfdMultiplier, f.BFD.Milliseconds(), f.BFD.Milliseconds())
	}
	for _, c := range f.At(n) {
		here, _ := c.At(n)
		t.line("interface %s", here.Device)
		for _, a := range here.Addrs() {
			word := "ip"
			if a.Is6() {
				word = "ipv6"
			}
			t.line(" %s address %s", word, OnCable(a))
		}
		t.line("exit\n!")
	}
	groups := f.peerGroups(n)
	for _, fam := range f.families4and6() {
		t.line("%s prefix-list LOOPBACKS seq 5 permit %s ge %d\n!", fam.word, f.loopbackNetwork(fam), fam.bits)
		t.line("route-map LOOPBACKS%s permit 10\n match %s address prefix-list LOOPBACKS\nexit\n!", fam.suffix, fam.word)
	}
	for _, g := range groups {
		if g == spines {
			t.line("! The spine receives the routes of another spine of the plane from the other leaves itself.")
			t.line("bgp as-path access-list VIA-SPINES seq 5 permit _%d_", f.SpineAS+uint32(n.Plane))
			for _, fam := range f.families4and6() {
				t.line("route-map TO-SPINES%s deny 5\n match as-path VIA-SPINES\nexit\n!", fam.suffix)
			}
		}
		t.line("! The bandwidths of all paths to a server are summed, and advertised as the bandwidth toward that server.")
		for _, fam := range f.families4and6() {
			t.line("route-map TO-%s%s permit 10\n match %s address prefix-list LOOPBACKS\n set extcommunity bandwidth cumulative\nexit\n!", strings.ToUpper(g), fam.suffix, fam.word)
		}
	}
	t.line("router bgp %d\n bgp router-id %s", n.AS, n.ID)
	t.line(" no bgp default ipv4-unicast\n bgp bestpath as-path multipath-relax\n coalesce-time 0\n timers bgp 3 9")
	for _, g := range groups {
		for _, session := range f.sessions() {
			fam := session[0]
			g := strings.ToUpper(g) + fam.suffix
			t.line(" neighbor %s peer-group\n neighbor %s advertisement-interval 0\n neighbor %s timers connect 1", g, g, g)
			if f.BFD > 0 {
				t.line(" neighbor %s bfd\n neighbor %s bfd profile CABLES", g, g)
			}
		}
	}
	for _, c := range f.At(n) {
		here, there := c.At(n)
		if f.unnumbered() {
			t.line(" neighbor %s interface v6only remote-as %d\n neighbor %s peer-group %s", here.Device, there.Node.AS, here.Device, strings.ToUpper(peerGroup(there.Node)))
			continue
		}
		for _, fam := range f.families4and6() {
			a := there.addr(fam)
			t.line(" neighbor %s remote-as %d\n neighbor %s peer-group %s%s", a, there.Node.AS, a, strings.ToUpper(peerGroup(there.Node)), fam.suffix)
		}
	}
	for _, fam := range f.families4and6() {
		t.line(" address-family %s unicast\n  maximum-paths 64", fam.name)
		for _, name := range groups {
			g := strings.ToUpper(name)
			if !f.unnumbered() {
				g += fam.suffix
			}
			t.line("  neighbor %s activate\n  neighbor %s route-map LOOPBACKS%s in\n  neighbor %s route-map TO-%s out", g, g, fam.suffix, g, g)
			if name == peerGroup(f.Server[0]) && f.SharedAS == SharedServers {
				t.line("  neighbor %s as-override", g)
			}
		}
		t.line(" exit-address-family")
	}
	t.line("exit\n!")
	t.line("end")
	return t.String()
}
