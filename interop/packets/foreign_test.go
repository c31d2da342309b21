package packets

import (
	"errors"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/wecmp"
)

// TestForeignObjectsStay checks that routes, rules, nexthops, groups, queueing disciplines and filters of other
// programs stay unchanged: while the agent runs, after it is killed, and after its objects are removed. Finally none of
// its objects may be left.
func TestForeignObjectsStay(t *testing.T) {
	gate.Slow(t, gate.Packets, "for each driver and family; dataplane/linux.TestForeignIsLeftAlone judges one")
	each(t, func(t *testing.T, driver string, f family) {
		b := newBed(t, driver, f)
		n := b.Server
		// The agent's only sysctl that affects all nexthops changes how routes are listed.
		n.Sysctl("net.ipv4.nexthop_compat_mode=0")
		b.Resolve() // also waits for duplicate address detection, after which the kernel adds a route
		netnstest.Eventually(t, time.Minute, func() error {
			if s := n.IP("-6", "addr", "show", "tentative"); s != "" {
				return errors.New(s)
			}
			return nil
		})
		for _, line := range []string{
			"nexthop add id 77 via 172.16.0.1 dev p0.0 protocol static",
			"nexthop add id 78 via 172.16.1.1 dev p1.0 protocol static",
			"nexthop add id 79 group 77/78 type resilient buckets 32 protocol static",
			"route add 192.0.2.0/24 nhid 79 protocol static",
			"route add default via 172.16.3.1 dev p3.0",
			// The same prefix as one of the agent's routes, with another metric.
			"route add 10.255.1.0/32 via 172.16.0.1 dev p0.0 metric 4000 protocol static",
			"route add 198.51.100.0/24 via 172.16.0.1 dev p0.0 table 179 protocol static",
			"rule add from 203.0.113.0/24 lookup 5000 priority 900 protocol static",
			"-6 route add 2001:db8::/32 via fd00:16:1:0::2 dev p1.0",
			"link add foreign type ifb",
		} {
			n.IP(strings.Fields(line)...)
		}
		tc := func(args string) string {
			out := n.Run("tc", strings.Fields(args)...)
			return string(out)
		}
		tc("qdisc add dev p0.1 root tbf rate 400mbit burst 64k latency 50ms")
		tc("qdisc add dev p1.1 clsact")
		tc("filter add dev p1.1 egress protocol ip prio 7 u32 match ip dport 9 0xffff flowid 1:1")

		// world lists everything without the agent's mark.
		world := func() string {
			var s strings.Builder
			for _, list := range []string{"nexthop show", "-4 route show table all", "-6 route show table all", "-4 rule show", "-6 rule show"} {
				for line := range strings.Lines(n.IP(append([]string{"-N", "-d"}, strings.Fields(list)...)...)) {
					if !strings.Contains(line, "proto 179") {
						s.WriteString(line)
					}
				}
			}
			for line := range strings.Lines(n.IP("-o", "link", "show")) {
				// ip reports each name in /run/netns whose namespace another process is creating or deleting.
				if !strings.Contains(line, "fared0") && !strings.Contains(line, "Peer netns reference is invalid") {
					s.WriteString(strings.Split(line, " qlen")[0])
				}
			}
			for line := range strings.Lines(tc("qdisc show") + tc("filter show dev p1.1 egress")) {
				if !strings.Contains(line, "fared0") {
					s.WriteString(line)
				}
			}
			return s.String()
		}
		// same ignores entries that the kernel adds for the agent's devices.
		before := world()
		same := func(when string) {
			t.Helper()
			if now := world(); now != before {
				t.Errorf("%s:\n%s", when, difference(before, now))
			}
		}
		b.start()
		c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 20)
		for _, weights := range draftWeights {
			c.weigh(weights...)
			same("weights " + ratio(weights))
		}
		if !strings.Contains(n.IP("-N", "nexthop", "show"), "proto 179") {
			t.Fatal("the agent made no nexthop: this test has lost its subject")
		}
		b.agent.Kill()
		same("killed")
		b.start()
		same("started again")
		b.agent.Stop()
		same("stopped")
		n.Run(binary.Fared(t), append([]string{"dataplane", "--flush"}, b.flags(b.socket())...)...)
		same("flushed")
		for _, list := range []string{"nexthop show", "-4 route show table all", "-6 route show table all", "-4 rule show", "-6 rule show", "link show"} {
			for line := range strings.Lines(n.IP(append([]string{"-N", "-d"}, strings.Fields(list)...)...)) {
				if strings.Contains(line, "proto 179") || strings.Contains(line, "fared0") {
					t.Errorf("left after --flush: %s", line)
				}
			}
		}
	})
}

// difference returns the lines that only one of two texts has.
func difference(before, after string) string {
	var out strings.Builder
	for _, side := range []struct{ sign, of, not string }{{"-", before, after}, {"+", after, before}} {
		for line := range strings.Lines(side.of) {
			if !strings.Contains(side.not, line) {
				out.WriteString(side.sign + line)
			}
		}
	}
	return out.String()
}
