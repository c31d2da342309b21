package interop

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

var updateHosts = flag.Bool("update-hosts", false, "rewrite the table of docs/operations/host.md")

// hostState is a state of server 0 that other programs make, with its effect without fared's check and the reason by
// which fared names it.
type hostState struct {
	what, effect, reason, remedy string
	driver                       string // empty: both
	silent                       bool   // packets do not arrive: from server 0 with outward, otherwise at server 0
	outward                      bool
	mixed                        bool   // packets arrive or not, depending on the leaf
	begin, end                   string // commands of sh in the namespace
}

const inputDrop = `table inet host { chain input { type filter hook input priority 0; policy drop
 ct state established,related accept
 iif lo accept
 meta l4proto { icmp, icmpv6 } accept
 tcp dport 22 accept
 %s
}
}`

func hostStates() []hostState {
	nft := func(rules string) string { return "nft -f - <<'X'\n" + rules + "\nX" }
	const gone = "nft delete table inet host"
	return []hostState{
		{what: "a sub-port with another MTU, even down", effect: "packets above the smaller MTU are dropped where a flow takes that sub-port", reason: "mtu", remedy: "the same MTU on all",
			begin: "ip link set p1l1 mtu 1400", end: "ip link set p1l1 mtu 1500"},
		{what: "a sub-port in a VRF or bridge", effect: "packets arrive by the other device: BFD and sessions over it fail", reason: "enslaved", remedy: "`ip link set DEVICE nomaster`", mixed: true,
			begin: "ip link add br0 type bridge && ip link set br0 up && ip link set p0l0 master br0 && ip link set p0l1 master br0 && ip link set p1l0 master br0 && ip link set p1l1 master br0",
			end:   "ip link del br0"},
		{what: "a loopback on no device", effect: "packets to it are not accepted", reason: "loopback", remedy: "`ip addr add LOOPBACK dev lo`", silent: true,
			begin: "ip addr del 10.255.0.1/32 dev lo", end: "ip addr add 10.255.0.1/32 dev lo"},
		{what: "`rp_filter` 1 (strict) on sub-ports", effect: "packets that arrive by a drained plane are dropped", reason: "rp-filter", remedy: "`net.ipv4.conf.all.rp_filter=2`",
			begin: "sysctl -qw net.ipv4.conf.p0l0.rp_filter=1 net.ipv4.conf.p1l1.rp_filter=1", end: "sysctl -qw net.ipv4.conf.p0l0.rp_filter=0 net.ipv4.conf.p1l1.rp_filter=0"},
		{what: "firewall: input drops all but ssh and answers", effect: "BFD is down on all sessions, no packet arrives", reason: "firewall-bfd", remedy: "[the snippets](#firewall)", silent: true,
			begin: nft(fmt.Sprintf(inputDrop, "")), end: gone},
		{what: "firewall: the same with BFD accepted", effect: "no packet arrives", reason: "firewall-input", remedy: "[the snippets](#firewall)", silent: true,
			begin: nft(fmt.Sprintf(inputDrop, "udp dport { 3784, 4784 } accept")), end: gone},
		{what: "firewall: output accepts by the names of sub-ports", effect: "sockets get EPERM: the packets leave by `fared0`", reason: "firewall-output", remedy: "accept `oifname fared0`", driver: "bpf", silent: true, outward: true,
			begin: nft(`table inet host { chain output { type filter hook output priority 0; policy drop; oifname { "lo", "p0l0", "p0l1", "p1l0", "p1l1" } accept
 udp dport 3784 accept
 tcp dport 179 accept
 meta l4proto { icmp, icmpv6 } accept
}
}`), end: gone},
		{what: "firewall: output drops the data ports", effect: "sockets get EPERM", reason: "firewall-output", remedy: "accept them", silent: true, outward: true,
			begin: nft(`table inet host { chain output { type filter hook output priority 0; udp dport { 4791, 4444 } drop; tcp dport 4793 drop; }
 }`), end: gone},
	}
}

// limitations returns what `fared status` names of the host, by reason.
func (d *fared) limitations() (map[string]*farev1.Limitation, error) {
	var st struct {
		Dataplane struct {
			Limitations []*farev1.Limitation `json:"limitations"`
		} `json:"dataplane"`
	}
	if err := d.status(&st); err != nil {
		return nil, err
	}
	out := map[string]*farev1.Limitation{}
	for _, x := range st.Dataplane.Limitations {
		out[x.Reason] = x
	}
	return out, nil
}

// TestHosts puts server 0 into states that other programs make, with both drivers: packets show the effect, `fared
// status` and `fared health` name the state until it ends, and packets flow again. -update-hosts writes the table of
// docs/operations/host.md from the run.
func TestHosts(t *testing.T) {
	gate.Slow(t, gate.Interop, "a dozen states of a host with packets")
	netnstest.Require(t, "nft")
	states := hostStates()
	took := make([]time.Duration, len(states))
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			f := newFabric(t, options{daemons: both(frr{}), bfd: fast, driver: driver, each: func(l *leaf) { l.cumulative = true }})
			f.up()
			for i, s := range states {
				if s.driver == "" || s.driver == driver {
					t.Run(s.what, func(t *testing.T) { took[i] = max(took[i], f.play(t, s)) })
				}
			}
		})
	}
	if *updateHosts && !t.Failed() {
		var table strings.Builder
		table.WriteString("| state of the host | effect | reason | shown after | remedy |\n|---|---|---|---|---|\n")
		for i, s := range states {
			what := s.what
			if s.driver != "" {
				what += ", driver `" + s.driver + "`"
			}
			fmt.Fprintf(&table, "| %s | %s | `%s` | %.1f s | %s |\n", what, s.effect, s.reason, took[i].Seconds(), s.remedy)
		}
		testbed.Table(t, filepath.Join("..", "docs", "operations", "host.md"), "TestHosts", table.String())
	}
}

// play puts server 0 into a state, and returns the time until fared has named it.
func (f *fabric) play(t *testing.T, s hostState) time.Duration {
	t.Helper()
	local := f.servers[0]
	run := func(script string) {
		t.Helper()
		local.ns.Run("sh", "-c", script)
	}
	from, to := f.servers[1], local
	if s.outward {
		from, to = to, from
	}
	named := func(want bool) error {
		all, err := local.fared.limitations()
		if err == nil && (all[s.reason] != nil) != want {
			err = fmt.Errorf("limitations %v, want %s: %t", all, s.reason, want)
		}
		return err
	}
	healthy := func() error {
		out, err := exec.Command(local.fared.binary, "health", "--socket", local.fared.socket).CombinedOutput()
		if err != nil || !strings.HasPrefix(string(out), "HEALTHY") {
			return fmt.Errorf("health: %v: %s", err, out)
		}
		return nil
	}
	netnstest.Eventually(t, within, func() error { return errors.Join(healthy(), f.flow(from, to, time.Second)) })
	begin := time.Now()
	run(s.begin)
	netnstest.Eventually(t, within, func() error { return named(true) })
	took := time.Since(begin)
	if healthy() == nil {
		t.Error("HEALTHY")
	}
	switch {
	case s.mixed:
	case s.silent:
		if f.flow(from, to, time.Second) == nil {
			t.Error("all packets arrive")
		}
	default:
		if err := f.flow(from, to, time.Minute); err != nil {
			t.Error(err)
		}
	}
	run(s.end)
	netnstest.Eventually(t, within, func() error { return errors.Join(named(false), healthy(), f.flow(from, to, time.Second)) })
	return took
}

// flow sends packets of 16 flows from one server to another, and returns an error unless all arrive within a limit.
func (f *fabric) flow(from, to *server, limit time.Duration) error {
	const flows = 16
	at := netip.AddrPortFrom(to.loopbacks[0].Addr(), roce)
	var receiver net.PacketConn
	if err := to.ns.Do(func() (err error) { receiver, err = net.ListenPacket("udp", at.String()); return err }); err != nil {
		return err
	}
	defer receiver.Close()
	for i := range flows {
		err := from.ns.Do(func() error {
			c, err := net.DialUDP("udp", &net.UDPAddr{IP: from.loopbacks[0].Addr().AsSlice(), Port: 50000 + i}, net.UDPAddrFromAddrPort(at))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte{byte(i)})
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := receiver.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	arrived, buf := map[byte]bool{}, make([]byte, 16)
	for len(arrived) < flows {
		n, _, err := receiver.ReadFrom(buf)
		if err != nil {
			return fmt.Errorf("%d of %d flows arrive: %w", len(arrived), flows, err)
		}
		if n == 1 {
			arrived[buf[0]] = true
		}
	}
	return nil
}
