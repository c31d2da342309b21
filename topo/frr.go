package topo

import (
	"strings"

	"github.com/fared/fared/fare"
)

// frrFiles are those of a leaf or spine with FRR, for /etc/frr.
func (f *Fabric) frrFiles(n *Node, site Site) []File {
	return []File{
		{"frr.conf", f.frrConfig(n, site)},
		{"daemons", f.frrDaemons()},
		{"vtysh.conf", "service integrated-vtysh-config\n"},
	}
}

// frrDaemons says which of FRR's daemons its init script starts, beside zebra and staticd, and that they only listen on loopback.
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

// frrTop is what 32 bits of bytes per second hold.
const frrTop fare.Bandwidth = 8 << 32

// frrConfig is frr.conf.
func (f *Fabric) frrConfig(n *Node, site Site) string {
	var t text
	t.line("! %s", f.title(n))
	if site.scaled(f.Speed)*fare.Bandwidth(f.leafCables()) > frrTop {
		t.line("! FRR releases before July 2026 corrupt Link Bandwidth values above about 34 Gbit/s: use a later one at these speeds.")
	}
	t.line("frr defaults datacenter\nhostname %s", n.Name)
	// FRR 8 loses a member of a nexthop object's group after a flap on recent kernels, while vtysh still shows it: zebra shall
	// write plain multipath routes.
	t.line("no zebra nexthop kernel enable")
	// Route-maps otherwise wait for more changes, and so does the traffic.
	t.line("bgp route-map delay-timer 0\n!")
	if f.BFD > 0 {
		// Without exit: daemons that know no BFD would take it for their own.
		t.line("bfd\n profile CABLES\n  detect-multiplier %d\n  receive-interval %d\n  transmit-interval %d\n!", bfdMultiplier, f.BFD.Milliseconds(), f.BFD.Milliseconds())
	}
	for _, c := range f.At(n) {
		here, _ := c.At(n)
		t.line("interface %s\n ip address %s/31\nexit\n!", here.Device, here.Addr)
	}
	groups := f.groups(n)
	t.line("ip prefix-list LOOPBACKS seq 5 permit %s ge 32\n!", f.Loopbacks)
	t.line("route-map LOOPBACKS permit 10\n match ip address prefix-list LOOPBACKS\nexit\n!")
	for _, g := range groups {
		if g == spines {
			t.line("! A spine has from the other leaves itself what another spine of the plane says.")
			t.line("bgp as-path access-list VIA-SPINES seq 5 permit _%d_", f.SpineAS+uint32(n.Plane))
			t.line("route-map TO-SPINES deny 5\n match as-path VIA-SPINES\nexit\n!")
		}
		t.line("! What the paths to a server announce is added up, and passed on as the bandwidth toward that server.")
		t.line("route-map TO-%s permit 10\n match ip address prefix-list LOOPBACKS\n set extcommunity bandwidth cumulative\nexit\n!", strings.ToUpper(g))
	}
	t.line("router bgp %d\n bgp router-id %s", n.AS, n.ID)
	t.line(" no bgp default ipv4-unicast\n bgp bestpath as-path multipath-relax\n coalesce-time 0\n timers bgp 3 9")
	for _, g := range groups {
		g = strings.ToUpper(g)
		t.line(" neighbor %s peer-group\n neighbor %s advertisement-interval 0\n neighbor %s timers connect 1", g, g, g)
		if f.BFD > 0 {
			t.line(" neighbor %s bfd\n neighbor %s bfd profile CABLES", g, g)
		}
	}
	for _, c := range f.At(n) {
		_, there := c.At(n)
		t.line(" neighbor %s remote-as %d\n neighbor %s peer-group %s", there.Addr, there.Node.AS, there.Addr, strings.ToUpper(group(there.Node)))
	}
	t.line(" address-family ipv4 unicast\n  maximum-paths 64")
	for _, g := range groups {
		g = strings.ToUpper(g)
		t.line("  neighbor %s activate\n  neighbor %s route-map LOOPBACKS in\n  neighbor %s route-map TO-%s out", g, g, g, g)
	}
	t.line(" exit-address-family\nexit\n!")
	t.line("end")
	return t.String()
}
