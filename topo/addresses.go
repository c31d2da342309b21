package topo

import (
	"fmt"
	"net/netip"
	"strings"
)

// addressFiles returns the files by which a program of the operating system sets the addresses of a server: those of
// its cables, and the loopbacks on lo. A target without such a program has none.
func addressFiles(w NodeWiring, target Target) []File {
	switch target {
	case Networkd:
		return networkdFiles(w)
	case Netplan:
		return []File{{"60-fared.yaml", netplan(w)}}
	case Ifupdown:
		return []File{{"interfaces.d/fared", ifupdown(w)}}
	}
	return nil
}

// networkdFiles are files of systemd.network(5). Addresses of cables stay without carrier, which networkd would remove
// by default, and a cable without carrier does not delay network-online.target.
func networkdFiles(w NodeWiring) (all []File) {
	file := func(device, options string, addresses []netip.Prefix) {
		var t text
		t.line("# %s of the server %s: /etc/systemd/network", device, w.Node.Name)
		t.line("[Match]\nName=%s\n\n[Link]\nRequiredForOnline=no\n\n[Network]%s", device, options)
		for _, a := range addresses {
			t.line("Address=%s", a)
		}
		all = append(all, File{"network/10-fared-" + device + ".network", t.String()})
	}
	file("lo", "", w.Loopbacks)
	for _, d := range w.Devices {
		only := ""
		if len(d.Addrs) == 0 {
			only = "\nLinkLocalAddressing=ipv6"
		}
		file(d.Name, only+"\nIPv6AcceptRA=no\nConfigureWithoutCarrier=yes", d.Addrs)
	}
	return all
}

// netplan is a file of netplan, with renderer networkd, because NetworkManager does not set addresses of lo.
func netplan(w NodeWiring) string {
	var t text
	t.line("# The fabric's addresses of the server %s: /etc/netplan, mode 0600", w.Node.Name)
	t.line("network:\n  version: 2\n  ethernets:")
	device := func(name, options string, addresses []netip.Prefix) {
		quoted := make([]string, len(addresses))
		for i, a := range addresses {
			quoted[i] = fmt.Sprintf("%q", a)
		}
		t.line("    %q:\n      match: {name: %[1]q}\n      renderer: networkd\n      optional: true%s", name, options)
		if len(addresses) > 0 {
			t.line("      addresses: [%s]", strings.Join(quoted, ", "))
		} else {
			t.line("      link-local: [ipv6]")
		}
	}
	device("lo", "", w.Loopbacks)
	for _, d := range w.Devices {
		device(d.Name, "\n      accept-ra: false\n      ignore-carrier: true", d.Addrs)
	}
	return t.String()
}

// ifupdown is a file of interfaces(5) for ifupdown and ifupdown2. The stanzas of lo add to that in
// /etc/network/interfaces. Without duplicate address detection ifup of ifupdown does not wait for the carrier of each
// cable, and fail: an address is tentative without carrier. A command refuses router advertisements, because option
// accept_ra is one of method inet6 static alone, and ifupdown2 ignores it.
func ifupdown(w NodeWiring) string {
	var t text
	t.line("# The fabric's addresses of the server %s: /etc/network/interfaces.d", w.Node.Name)
	t.line("\nauto lo")
	for _, a := range w.Loopbacks {
		t.static("lo", a)
	}
	for _, d := range w.Devices {
		t.line("\nauto %s", d.Name)
		refuse := fmt.Sprintf("    pre-up [ ! -e %[1]s ] || echo 0 >%[1]s", "/proc/sys/net/ipv6/conf/"+d.Name+"/accept_ra")
		for _, a := range d.Addrs {
			t.static(d.Name, a)
			t.line("%s", refuse)
			if a.Addr().Is6() {
				t.line("    dad-attempts 0")
			}
		}
		if len(d.Addrs) == 0 { // the kernel gives the device its link-local address
			t.line("iface %s inet6 manual\n%s\n    up ip link set %[1]s up\n    down ip link set %[1]s down", d.Name, refuse)
		}
	}
	return t.String()
}

// static begins a stanza of interfaces(5) with an address.
func (t *text) static(device string, address netip.Prefix) {
	family := "inet"
	if address.Addr().Is6() {
		family = "inet6"
	}
	t.line("iface %s %s static\n    address %s", device, family, address)
}
