package hostcheck

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestMachine checks a machine with two sub-ports, one of them configured by an alternative name, and a steering device
// of another name than the default: each state has a finding with the kernel's names, which rules and sysctls need.
func TestMachine(t *testing.T) {
	netnstest.Require(t, "nft")
	ns, leaf := netnstest.New(t), netnstest.New(t)
	for _, device := range []string{"e0", "e1"} {
		netnstest.Veth(t, ns, device, leaf, "l"+device)
	}
	ns.Addr("e0", "10.1.0.1/31")
	ns.Addr("e1", "10.1.0.1/31") // an address may be on several devices
	ns.Addr("lo", "10.255.0.1/32")
	ns.IP("link", "property", "add", "dev", "e0", "altname", "fabric0")
	netnstest.Veth(t, ns, "steer7", leaf, "lsteer7")
	ns.IP("link", "set", "steer7", "alias", "an anchor")
	use := func() *Use {
		u := &Use{
			Devices: []string{"fabric0", "e1"}, SteeringAlias: "an anchor", Local: map[string][]netip.Addr{"fabric0": {netip.MustParseAddr("10.1.0.1")}},
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.255.0.1/32")},
		}
		u.NextHops, u.Loopbacks, u.UDPPorts = [2]bool{true, false}, [2]bool{true, false}, []uint16{4791}
		return u
	}
	examine := func(u *Use) (out string) {
		t.Helper()
		if err := ns.Do(func() error {
			found, err := Machine(u)
			for _, f := range found {
				if f.Reason != ReasonNetworkd { // of this machine
					out += f.Reason + ": " + f.String() + "\n"
				}
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return out
	}
	if got := examine(use()); got != "" {
		t.Errorf("at first: %s", got)
	}
	for _, c := range []struct{ begin, end, want string }{
		{"ip link set e0 down", "ip link set e0 up", "device: e0 is down; ip link set e0 up"},
		{"ip addr del 10.1.0.1/31 dev e0", "ip addr add 10.1.0.1/31 dev e0", "local: 10.1.0.1, the local address of a session, is not on e0"},
		{"ip link set e0 mtu 9000", "ip link set e0 mtu 1500", "mtu: sub-ports have different MTUs (1500 on e1; 9000 on e0)"},
		{"ip link property del dev e0 altname fabric0", "ip link property add dev e0 altname fabric0", "device: there is no device fabric0;"},
		{"sysctl -qw net.ipv4.conf.e0.rp_filter=1", "sysctl -qw net.ipv4.conf.e0.rp_filter=0", "rp-filter: net.ipv4.conf.*.rp_filter is 1 (strict) on e0:"},
		{"nft 'add table ip f; add chain ip f in { type filter hook input priority 0; }; add rule ip f in iifname e0 udp dport 3784 drop'", "nft delete table ip f", "accept them before: iifname { e0 } udp dport 3784 accept"},
		{"nft 'add table ip f; add chain ip f out { type filter hook output priority 0; policy drop; }; add rule ip f out oifname { e0, e1 } accept'", "nft delete table ip f", "accept them before: oifname { steer7 } udp dport 4791 accept"},
	} {
		for _, line := range []string{c.begin, c.end} {
			if out, err := ns.Output("sh", "-c", line); err != nil {
				t.Fatalf("%s: %v: %s", line, err, out)
			}
			if got := examine(use()); line == c.begin && (!strings.Contains(got, c.want) || strings.Count(got, "\n") != 1) || line == c.end && got != "" {
				t.Errorf("%s: %q, want %q", line, got, c.want)
			}
		}
	}
	// A filter of IPv4 drops nothing on a machine that uses IPv6 alone.
	if out, err := ns.Output("sysctl", "-qw", "net.ipv4.conf.all.rp_filter=1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, c := range []struct{ hops, loopbacks, named bool }{{false, false, false}, {true, false, true}, {false, true, true}} {
		u := use()
		u.NextHops, u.Loopbacks = [2]bool{c.hops, true}, [2]bool{c.loopbacks, true}
		if got := examine(u); strings.HasPrefix(got, "rp-filter: ") != c.named {
			t.Errorf("IPv4 next hops %t, loopbacks %t: %q", c.hops, c.loopbacks, got)
		}
	}
}
