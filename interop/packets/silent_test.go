package packets

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// silence is a state of a node, made by a shell, with which packets of server 1 go wrong while weights stay in effect.
type silence struct {
	what, node, begin, end string
	want                   string   // one of these findings of server 1, but for the device: "PROBLEM PLANE/ DIRECTION"
	hints                  []string // parts of cause and remedy
}

// another is the table of a foreign route to a server's loopback.
const another = "ip route add 10.255.0.0/16 via $(ip -4 neigh show dev p0.0 | head -n 1 | cut -d' ' -f1) dev p0.0 table 77"

var silences = []silence{
	{"a rule of another program for some source ports", "server1", another + "; ip rule add priority 1 ipproto udp sport 49152-57343 lookup 77",
		"ip rule delete priority 1; ip route flush table 77", "wrong-sub-port p1/ ours", []string{"has precedence", "ip rule"}},
	{"a neighbor with a wrong address, set by hand", "server1", "ip neigh replace 10.0.1.3 lladdr 02:00:00:00:00:01 dev p0.1 nud permanent",
		"ip neigh delete 10.0.1.3 dev p0.1", "lost p0/ ours", []string{"10.0.1.3 on p0.1 was set by hand"}},
	{"a policy of IPsec", "server1", "ip xfrm policy add dir out dst 10.255.0.2/32 proto udp action block", "ip xfrm policy flush",
		"not-sent p1/ ours", []string{"firewall", "port 4796"}},
	{"a port of the leaf that does not forward", "leaf1", "sysctl -qw net.ipv4.conf.s1/0.forwarding=0", "sysctl -qw net.ipv4.conf.s1/0.forwarding=1",
		"lost p1/ ours", []string{"the leaf does not forward"}},
	{"a leaf with another server's route", "leaf1", "ip route add 10.255.0.2/32 $(ip route show 10.255.0.3 | grep -o 'nhid [0-9]*') table 77; ip rule add priority 50 to 10.255.0.2 lookup 77",
		"ip rule delete priority 50; ip route flush table 77", "lost p1/ ours", []string{"the leaf does not forward"}},
}

// TestSilences begins states that other programs and leaves make: server 1 names each with its plane and a hint.
func TestSilences(t *testing.T) {
	gate.Slow(t, gate.Packets, "a fabric with both drivers; the gate has the judgments in virtual time")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			l := newProofLab(t, driver)
			for _, s := range silences {
				l.suffer(s)
			}
			l.reversePath()
		})
	}
}

// suffer begins a state, waits for its finding, and ends it.
func (l *proofLab) suffer(s silence) {
	l.t.Helper()
	l.Node(s.node).Run("sh", "-ec", s.begin)
	l.awaitHints(s)
	l.Node(s.node).Run("sh", "-ec", s.end)
	l.await("")
}

func (l *proofLab) awaitHints(s silence) {
	l.t.Helper()
	took := netnstest.Eventually(l.t, 2*time.Minute, func() error {
		st, err := l.fabric.GetStatus(l.t.Context(), &farev1.GetStatusRequest{})
		if err != nil {
			return err
		}
		for _, f := range st.GetProof().GetFindings() {
			hint := f.Cause + " | " + f.Remedy
			if fmt.Sprintf("%s %s/ %s", f.Problem, f.Plane, f.Direction) == s.want && !slices.ContainsFunc(s.hints, func(h string) bool { return !strings.Contains(hint, h) }) {
				return nil
			}
		}
		return fmt.Errorf("%s: findings %v, want %s with %q", s.what, st.GetProof().GetFindings(), s.want, s.hints)
	})
	l.t.Logf("%s: %q after %v", s.what, s.want, took.Round(10*time.Millisecond))
}

// reversePath lets server 2 have no way to server 1 by plane 1, and a strict reverse path filter there: it drops what
// server 1 sends by plane 1. Server 1 names the plane, and the filter among the causes; server 2 names its filter.
func (l *proofLab) reversePath() {
	l.t.Helper()
	l.replace("server2", "peer: 10.0.2.", "accept: [10.255.0.3/32], peer: 10.0.2.")
	l.awaitWeights("server2", 1, 0, 1, 1)
	l.await("")
	peer := l.Node("server2")
	peer.Run("sysctl", "-qw", "net.ipv4.conf.p1/0.rp_filter=1", "net.ipv4.conf.p1/1.rp_filter=1")
	l.awaitHints(silence{what: "a strict rp_filter", want: "lost p1/ ours", hints: []string{"the peer drops them", "rp_filter"}})
	other := farev1.NewFabricServiceClient(testbed.Dial(l.t, l.Socket("server2")))
	netnstest.Eventually(l.t, time.Minute, func() error {
		st, err := other.GetStatus(l.t.Context(), &farev1.GetStatusRequest{})
		if err != nil {
			return err
		}
		all := st.GetDataplane().GetLimitations()
		if !slices.ContainsFunc(all, func(x *farev1.Limitation) bool {
			return x.Reason == "rp-filter" && strings.Contains(x.Text, "p1.0, p1.1")
		}) {
			return fmt.Errorf("limitations %v", all)
		}
		return nil
	})
	if n := strings.Fields(peer.Run("nstat", "-azs", "TcpExtIPReversePathFilter")); !slices.Contains(n, "TcpExtIPReversePathFilter") || slices.Contains(n, "0") {
		l.t.Errorf("the filter of server 2 has dropped nothing: %q", n)
	}
	peer.Run("sysctl", "-qw", "net.ipv4.conf.p1/0.rp_filter=0", "net.ipv4.conf.p1/1.rp_filter=0")
	l.await("")
}

// replace replaces a text in the configuration of a server, and reloads it.
func (l *proofLab) replace(server, old, text string) {
	l.t.Helper()
	path := l.configuration(server)
	b, err := os.ReadFile(path)
	if err == nil && !strings.Contains(string(b), old) {
		err = fmt.Errorf("no %q in %s", old, b)
	}
	if err == nil {
		err = os.WriteFile(path, []byte(strings.ReplaceAll(string(b), old, text)), 0o600)
	}
	if err == nil {
		_, err = farev1.NewFabricServiceClient(testbed.Dial(l.t, l.Socket(server))).Reload(l.t.Context(), &farev1.ReloadRequest{})
	}
	if err != nil {
		l.t.Fatal(err)
	}
}
