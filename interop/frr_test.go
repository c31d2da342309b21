package interop

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/testbed"
)

// frr runs zebra and bgpd, without watchfrr and in separate directories per leaf. root is that of testbed.FRR.
type frr struct{ root string }

// frr10 is FRR 10.3, of Debian 13.
var frr10 = frr{root: testbed.Unpacked("trixie", "frr")}

func (d frr) tools() []string {
	f := testbed.FRR{Root: d.root}
	return programs(f.Command("zebra"), f.Command("bgpd"), f.Command("bfdd"), f.Command("vtysh"))
}

// programs returns the files among the words of commands.
func programs(commands ...[]string) (files []string) {
	for _, words := range commands {
		files = append(files, words[0], words[len(words)-1])
	}
	return files
}

func (d frr) start(t *testing.T, l *leaf) {
	t.Helper()
	// On recent kernels this FRR loses a member of a nexthop group after a flap, while
	// vtysh still shows it, so zebra writes plain multipath routes.
	var options []string
	if l.replaces {
		options = append(options, "--v6-rr-semantics")
	}
	d.run(t, l, "zebra", "hostname "+l.name+"\nno zebra nexthop kernel enable\n", options...)
	if l.bfd > 0 {
		d.run(t, l, "bfdd", frrBFD(l.bfd))
	}
	d.run(t, l, "bgpd", frrConfig(l))
}

// run starts a daemon of the leaf.
func (d frr) run(t *testing.T, l *leaf, name, config string, options ...string) {
	t.Helper()
	f := testbed.FRR{Sockets: filepath.Join(l.dir, "run"), Root: d.root, Start: l.ns.Start}
	l.running = append(l.running, f.Daemon(t, name, writeFile(t, l.dir, name+".conf", config), options...))
}

// restart ends bgpd, calls between, and starts bgpd, while zebra continues.
func (d frr) restart(t *testing.T, l *leaf, kill bool, between func()) {
	t.Helper()
	last := len(l.running) - 1
	if kill {
		l.running[last].Kill()
	} else {
		l.running[last].Stop()
	}
	l.running = l.running[:last]
	between()
	d.run(t, l, "bgpd", frrConfig(l))
}

func frrConfig(l *leaf) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("frr defaults datacenter\nhostname %s", l.name)
	line("bgp route-map delay-timer 0") // otherwise route-maps wait five seconds for further changes
	line("router bgp %d\n bgp router-id %s", l.as, l.routerID)
	line(" no bgp ebgp-requires-policy\n no bgp default ipv4-unicast")
	if l.shutdown {
		line(" bgp graceful-shutdown")
	}
	if l.keeps {
		line(" bgp graceful-restart\n bgp graceful-restart preserve-fw-state")
	}
	if l.confederation != 0 {
		line(" bgp confederation identifier %d", l.confederation)
		for _, p := range l.peers {
			if p.server == nil {
				line(" bgp confederation peers %d", p.as)
			}
		}
	}
	line(" bgp bestpath as-path multipath-relax\n coalesce-time 0\n timers bgp 1 %d", int(holdTime(l.bfd).Seconds()))
	type neighbor struct {
		name     string
		families []string
		server   bool
	}
	var all []neighbor
	for _, p := range l.peers {
		begin := len(all)
		if p.unnumbered {
			line(" neighbor %s interface remote-as external", p.device)
			all = append(all, neighbor{p.device, []string{"ipv4", "ipv6"}, p.server != nil})
		} else {
			for i, family := range []string{"ipv4", "ipv6"} {
				line(" neighbor %s remote-as %d", p.remote[i], p.as)
				all = append(all, neighbor{p.remote[i].String(), []string{family}, p.server != nil})
			}
		}
		for _, n := range all[begin:] {
			line(" neighbor %s timers connect 1\n neighbor %s advertisement-interval 0", n.name, n.name)
			if l.bfd > 0 {
				line(" neighbor %s bfd\n neighbor %s bfd profile fast", n.name, n.name)
			}
			if l.uint32 && n.server {
				line(" neighbor %s disable-link-bw-encoding-ieee", n.name)
			}
			if l.extended && n.server {
				line(" neighbor %s extended-link-bandwidth", n.name)
			}
		}
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		line(" address-family %s unicast\n  maximum-paths 16", family)
		for _, n := range all {
			if slices.Contains(n.families, family) {
				line("  neighbor %s activate", n.name)
				if n.server && l.policy != "" {
					line("  neighbor %s %s", n.name, l.policy)
				}
				if !n.server && l.confederation != 0 {
					line("  neighbor %s next-hop-self", n.name)
				}
				if n.server && l.strip {
					line("  no neighbor %s send-community extended", n.name)
				}
				if n.server && l.cumulative {
					line("  neighbor %s route-map TO-SERVERS out", n.name)
				}
			}
		}
		line(" exit-address-family")
	}
	line("exit")
	if l.cumulative {
		line("route-map TO-SERVERS permit 10\n set extcommunity bandwidth cumulative\nexit")
	}
	return b.String()
}

func (d frr) show(l *leaf, command string, into any) error {
	words := append(testbed.FRR{Root: d.root}.Command("vtysh"), "--vty_socket", filepath.Join(l.dir, "run"), "-c", "show "+command+" json")
	out, err := exec.Command(words[0], words[1:]...).Output()
	if err != nil {
		return fmt.Errorf("vtysh show %s: %w", command, err)
	}
	if err := json.Unmarshal(out, into); err != nil {
		return fmt.Errorf("vtysh show %s: %w\n%s", command, err, out)
	}
	return nil
}

func (d frr) established(l *leaf) (int, error) {
	var summary map[string]struct {
		Peers map[string]struct {
			State string
		}
	}
	if err := d.show(l, "bgp summary", &summary); err != nil {
		return 0, err
	}
	up := map[string]bool{} // a peer with both families is in both
	for _, family := range summary {
		for name, p := range family.Peers {
			if p.State == "Established" {
				up[name] = true
			}
		}
	}
	return len(up), nil
}

func (d frr) paths(l *leaf, prefix netip.Prefix) ([]path, error) {
	family := map[bool]string{true: "ipv4", false: "ipv6"}[prefix.Addr().Is4()]
	var answer frrRoute
	if err := d.show(l, "bgp "+family+" unicast "+prefix.String(), &answer); err != nil {
		return nil, err
	}
	return answer.paths()
}

// frrRoute is bgpd's information on a prefix; {} if it has none.
type frrRoute struct {
	Paths []struct {
		Peer struct {
			PeerID    string `json:"peerId"`
			Interface string
		}
		ExtendedCommunity struct{ String string }
	}
}

func (r frrRoute) paths() ([]path, error) {
	var out []path
	for _, p := range r.Paths {
		n := path{from: p.Peer.PeerID}
		if p.Peer.Interface != "" {
			n.from = p.Peer.Interface
		}
		// "LB:65101:500000000 (4.000 Gbps) RT:1:2"
		words := strings.Fields(p.ExtendedCommunity.String)
		for i, w := range words {
			switch {
			case strings.HasPrefix(w, "("), i > 0 && strings.HasPrefix(words[i-1], "("):
			case strings.HasPrefix(w, "LB:"):
				var b linkBandwidth
				if _, err := fmt.Sscanf(w, "LB:%d:%d", &b.as, &b.bps); err != nil {
					return nil, fmt.Errorf("FRR shows %q: %w", w, err)
				}
				b.bps *= 8
				b.kind = -1
				n.bandwidths = append(n.bandwidths, b)
			default:
				n.other = append(n.other, w)
			}
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b path) int { return strings.Compare(a.from, b.from) })
	return out, nil
}

func TestReadFRR(t *testing.T) {
	const output = `{"prefix":"10.255.0.1/32","paths":[
		{"peer":{"peerId":"fe80::2","interface":"srv0-1"},"extendedCommunity":{"string":"RT:1:2 LB:23456:250000000 (2.000 Gbps)"}},
		{"peer":{"peerId":"10.0.0.1"},"extendedCommunity":{"string":"LB:65101:500000000 (4.000 Gbps)"}},
		{"peer":{"peerId":"10.0.0.3"}}]}`
	var r frrRoute
	if err := json.Unmarshal([]byte(output), &r); err != nil {
		t.Fatal(err)
	}
	got, err := r.paths()
	want := "[10.0.0.1 [AS 65101, 4000000000 bit/s, type -0x1] [] 10.0.0.3 [] [] srv0-1 [AS 23456, 2000000000 bit/s, type -0x1] [RT:1:2]]"
	if fmt.Sprint(got) != want || err != nil {
		t.Errorf("got  %v, %v\nwant %s", got, err, want)
	}
}
