package firewall

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// Ports of the test: one for data, one for BFD.
const (
	dataPort = 4791
	bfdPort  = 3784
)

// bench is a host with a cable to a neighbor, and the judge: the kernel, by a packet.
type bench struct {
	t              *testing.T
	host, neighbor *netnstest.Namespace
	receiver       map[string]net.PacketConn // in the host and in the neighbor, by address and port
	marks          [2]int                    // packet sockets of the host and of the neighbor, which no rule concerns
	index          [2]int                    // of their devices
	source         int                       // the last source port: each packet is the first of its flow
}

const (
	hostAddress, neighborAddress = "192.0.2.1", "192.0.2.2"
	hostAddressV6, neighborV6    = "2001:db8::1", "2001:db8::2"
	markType                     = 0x88b5 // an EtherType for experiments (IEEE 802)
)

func newBench(t *testing.T) *bench {
	netnstest.Require(t, "nft")
	b := &bench{t: t, host: netnstest.New(t), neighbor: netnstest.New(t), receiver: map[string]net.PacketConn{}, source: 20000}
	netnstest.Cable(t, b.host, "eth0", hostAddress+"/24 "+hostAddressV6+"/64", b.neighbor, "far0", neighborAddress+"/24 "+neighborV6+"/64")
	for i, end := range []struct {
		ns     *netnstest.Namespace
		device string
		hosts  []string
	}{{b.host, "eth0", []string{hostAddress, hostAddressV6}}, {b.neighbor, "far0", []string{neighborAddress, neighborV6}}} {
		end.ns.Must(func() error {
			for _, host := range end.hosts {
				for _, port := range []int{dataPort, bfdPort} {
					at := netip.AddrPortFrom(netip.MustParseAddr(host), uint16(port)).String()
					c, err := net.ListenPacket("udp", at)
					if err != nil {
						return err
					}
					b.receiver[at] = c
					t.Cleanup(func() { c.Close() })
				}
			}
			device, err := net.InterfaceByName(end.device)
			if err != nil {
				return err
			}
			b.index[i] = device.Index
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(swapped(markType)))
			if err != nil {
				return err
			}
			b.marks[i] = fd
			t.Cleanup(func() { unix.Close(fd) })
			return errors.Join(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: swapped(markType), Ifindex: device.Index}),
				unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}))
		})
	}
	// Neighbor entries, so that rules about other protocols than UDP delay nothing, and both ends know that the cable
	// works.
	for _, address := range []string{neighborAddress, neighborV6} {
		b.host.IP("neigh", "replace", address, "lladdr", b.neighbor.Device("far0").HardwareAddr.String(), "dev", "eth0", "nud", "permanent")
	}
	for _, address := range []string{hostAddress, hostAddressV6} {
		b.neighbor.IP("neigh", "replace", address, "lladdr", b.host.Device("eth0").HardwareAddr.String(), "dev", "far0", "nud", "permanent")
	}
	return b
}

func swapped(n uint16) uint16 { return n<<8 | n>>8 }

// load replaces the rules of the host.
func (b *bench) load(rules string) error {
	return b.host.Do(func() error {
		c := exec.Command("nft", "-f", "-")
		c.Stdin = strings.NewReader("flush ruleset\n" + strings.ReplaceAll(rules, "; }", ";\n}\n"))
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// arrives sends a first packet of a new flow, into the host or out of it, and reports whether it arrived. A mark that
// follows it by the same cable, and that no rule concerns, shows that it would have arrived.
func (b *bench) arrives(inward, v6 bool, port int) bool {
	b.t.Helper()
	b.source++
	from, to, end := b.neighbor, hostAddress, 0
	own := neighborAddress
	if v6 {
		to, own = hostAddressV6, neighborV6
	}
	if !inward {
		from, to, own, end = b.host, own, to, 1
	}
	at := netip.AddrPortFrom(netip.MustParseAddr(to), uint16(port))
	payload := fmt.Appendf(nil, "%d", b.source)
	refused := false
	from.Must(func() error {
		runtime.LockOSThread() // packet and mark take the same queue
		defer runtime.UnlockOSThread()
		var cpus unix.CPUSet
		if err := unix.SchedGetaffinity(0, &cpus); err != nil {
			return err
		}
		one := unix.CPUSet{}
		for cpu := range 1024 {
			if cpus.IsSet(cpu) {
				one.Set(cpu)
				break
			}
		}
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return err
		}
		defer func() { _ = unix.SchedSetaffinity(0, &cpus) }()
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(own), Port: b.source}, net.UDPAddrFromAddrPort(at))
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Write(payload); errors.Is(err, unix.EPERM) {
			refused = true
		} else if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		return unix.Sendto(b.marks[1-end], payload, 0, &unix.SockaddrLinklayer{Protocol: swapped(markType), Ifindex: b.index[1-end], Halen: 6, Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}})
	})
	buf := make([]byte, 128)
	for {
		n, _, err := unix.Recvfrom(b.marks[end], buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			b.t.Fatalf("the mark did not arrive: %v", err)
		}
		if bytes.HasPrefix(buf[:n], payload) {
			break
		}
	}
	c := b.receiver[at.String()]
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		b.t.Fatal(err)
	}
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		b.t.Fatal(err)
	}
	arrived := false
	_ = raw.Read(func(fd uintptr) bool {
		for {
			n, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			if err != nil {
				return true
			}
			arrived = arrived || bytes.Equal(buf[:n], payload)
		}
	})
	if arrived && refused {
		b.t.Fatal("a packet that was refused arrived")
	}
	return arrived
}

// judge returns the result of Judge for the same packet.
func (b *bench) judge(rs *Ruleset, inward, v6 bool, port int) (string, bool) {
	p := Packet{In: "eth0", Index: b.index[0], IPv6: v6, Protocol: unix.IPPROTO_UDP, Port: uint16(port)}
	if !inward {
		p.In, p.Out = "", "eth0"
	}
	return rs.Judge(p)
}

func (b *bench) read() (rs *Ruleset) {
	b.t.Helper()
	b.host.Must(func() (err error) { rs, err = Read(); return err })
	return rs
}

// Rules as programs and guides write them.
var written = map[string]struct {
	rules string
	// in and out are the ports that the rules drop, each for IPv4 and IPv6, as the author of the rules means it.
	in, out string
	place   string
	unsure  bool // the kernel drops packets by properties that are not known here
}{
	"none": {rules: ""},
	"ssh and established": {rules: `table inet filter { chain input { type filter hook input priority 0; policy drop; ct state established,related accept; iif lo accept; tcp dport 22 accept; }
		chain output { type filter hook output priority 0; policy accept; } }`, in: "data4 data6 bfd4 bfd6", place: "table inet filter, chain input, policy drop"},
	"with our ports": {rules: `table inet filter { chain input { type filter hook input priority 0; policy drop; ct state vmap { established : accept, related : accept, invalid : drop };
		iifname { "eth0", "eth1" } udp dport { 3784, 4784, 4791 } accept; } }`},
	"one of our ports": {rules: `table inet filter { chain input { type filter hook input priority 0; policy drop; iifname "eth*" udp dport 3784 accept; } }`, in: "data4 data6", place: "policy drop"},
	"firewalld": {rules: `table inet firewalld {
		chain filter_INPUT { type filter hook input priority filter + 10; policy accept; ct state { established, related } accept; ct status dnat accept; iifname "lo" accept;
			ct state invalid drop; jump filter_INPUT_POLICIES; reject with icmpx admin-prohibited; }
		chain filter_INPUT_POLICIES { iifname "eth9" goto filter_IN_policy; jump filter_IN_public; }
		chain filter_IN_public { meta l4proto icmp accept; jump filter_IN_public_allow; return; }
		chain filter_IN_public_allow { tcp dport 22 accept; ip6 daddr fe80::/64 udp dport 546 accept; }
		chain filter_IN_policy { accept; } }`, in: "data4 data6 bfd4 bfd6", place: "table inet firewalld, chain filter_INPUT, rule with handle"},
	"outward by device": {rules: `table inet filter { chain output { type filter hook output priority 0; policy drop; oifname { "lo", "eth1" } accept; ct state established accept; } }`, out: "data4 data6 bfd4 bfd6", place: "chain output"},
	"outward, named":    {rules: `table inet filter { chain output { type filter hook output priority 0; policy drop; oifname "eth0" accept; } }`},
	"IPv6 alone":        {rules: `table ip6 filter { chain input { type filter hook input priority 0; policy drop; } }`, in: "data6 bfd6", place: "table ip6 filter"},
	"an earlier hook":   {rules: `table ip raw { chain pre { type filter hook prerouting priority raw; udp dport 4000-4999 drop; } }`, in: "data4", place: "chain pre, rule with handle"},
	"concatenated":      {rules: `table inet f { chain input { type filter hook input priority 0; policy drop; iifname . meta l4proto . udp dport { "eth0" . udp . 4791 } accept; } }`, in: "bfd4 bfd6", place: "chain input"},
	"a map":             {rules: `table inet f { chain bfd { drop; } chain input { type filter hook input priority 0; udp dport vmap { 3784 : jump bfd, 4791 : accept }; } }`, in: "bfd4 bfd6", place: "chain bfd"},
	"postrouting":       {rules: `table inet f { chain post { type filter hook postrouting priority 0; oif eth0 udp dport 4791 drop; } }`, out: "data4 data6", place: "chain post"},
	"two chains": {rules: `table inet a { chain input { type filter hook input priority 0; accept; }
}
table inet b { chain input { type filter hook input priority 10; udp dport 3784 reject; } }`, in: "bfd4 bfd6", place: "table inet b"},
	"negated":             {rules: `table inet f { chain input { type filter hook input priority 0; meta nfproto ipv4 udp dport != 3784 drop; udp dport != { 4000-5000 } meta nfproto ipv6 drop; } }`, in: "data4 bfd6", place: "rule with handle"},
	"other addresses":     {rules: `table inet f { chain input { type filter hook input priority 0; policy drop; ip saddr 192.0.2.0/24 accept; ip6 saddr 2001:db8::/32 accept; } }`},
	"a limit":             {rules: `table inet f { chain input { type filter hook input priority 0; policy drop; limit rate 1000/second accept; } }`},
	"source ports":        {rules: `table inet f { chain input { type filter hook input priority 0; policy drop; udp sport 1-70 accept; udp sport . udp dport { 20000 . 4791 } accept; } }`, unsure: true},
	"a gap":               {rules: `table inet f { chain input { type filter hook input priority 0; policy drop; udp dport { 1-3783, 3785-4790, 4792-65535 } accept; } }`, in: "data4 data6 bfd4 bfd6", place: "policy drop"},
	"to the end":          {rules: `table inet f { chain input { type filter hook input priority 0; policy accept; udp dport { 1-9, 3784-65535 } drop; } }`, in: "data4 data6 bfd4 bfd6", place: "rule with handle"},
	"packet types":        {rules: `table inet f { chain input { type filter hook input priority 0; policy drop; meta pkttype { broadcast, multicast } accept; } }`, in: "data4 data6 bfd4 bfd6", place: "policy drop"},
	"by index":            {rules: `table inet f { chain input { type filter hook input priority 0; policy drop; iif != eth0 accept; oif != 0 accept; meta l4proto != udp accept; } }`, in: "data4 data6 bfd4 bfd6", place: "policy drop"},
	"first of four bytes": {rules: `table inet f { chain input { type filter hook input priority 0; @th,0,32 & 0xffff == 4791 drop; @th,16,8 0x0e drop; } }`, in: "data4 data6 bfd4 bfd6", place: "rule with handle"},
	"a map of jumps":      {rules: `table inet f { chain a { return; } chain b { udp dport 3784 accept; } chain input { type filter hook input priority 0; policy drop; meta nfproto vmap { ipv4 : jump a, ipv6 : goto b }; } }`, in: "data4 data6 bfd4", place: "policy drop"},
	"a dynamic set":       {rules: `table inet f { set s { type ipv4_addr; flags dynamic,timeout; timeout 1m; } chain input { type filter hook input priority 0; policy drop; udp dport 4791 add @s { ip saddr } accept; meta nfproto ipv6 accept; udp dport 3784 accept; } }`},
	"untracked":           {rules: `table inet f { chain pre { type filter hook prerouting priority raw; udp dport 4791 notrack; } chain input { type filter hook input priority 0; policy drop; ct state untracked accept; } }`, unsure: true},
	"untracked, new":      {rules: `table inet f { chain pre { type filter hook prerouting priority raw; udp dport 4791 notrack; } chain input { type filter hook input priority 0; ct state new drop; ct status != dnat drop; } }`, unsure: true},
	"untracked, established": {rules: `table inet f { chain pre { type filter hook prerouting priority raw; udp dport 4791 notrack; } chain input { type filter hook input priority 0; policy drop; ct state established,related accept; } }`,
		in: "data4 data6 bfd4 bfd6", place: "policy drop"},
	"before conntrack":          {rules: `table inet f { chain pre { type filter hook prerouting priority raw; ct state new drop; ct mark 0 drop; } chain input { type filter hook input priority 0; ct state invalid drop; } }`},
	"before conntrack, invalid": {rules: `table inet f { chain pre { type filter hook prerouting priority raw; ct state invalid drop; } }`, unsure: true},
	"order unknown":             {rules: `table inet f { chain pre { type filter hook prerouting priority -200; ct state new drop; ct mark 0 drop; } }`, unsure: true},
	"after conntrack":           {rules: `table inet f { chain pre { type filter hook prerouting priority -199; ct state new udp dport 4791 drop; } }`, in: "data4 data6", place: "chain pre, rule with handle"},
	"a quota":                   {rules: `table inet f { quota q { over 1 bytes; } chain input { type filter hook input priority 0; quota name "q" drop; } }`, unsure: true},
	"a limit object":            {rules: `table inet f { limit l { rate 1000/second; } chain input { type filter hook input priority 0; policy drop; limit name "l" accept; } }`},
	"a counter":                 {rules: `table inet f { counter c { packets 0 bytes 0; } chain input { type filter hook input priority 0; counter name "c" udp dport 4791 drop; } }`, in: "data4 data6", place: "rule with handle"},
	"a map of counters":         {rules: `table inet f { counter c { packets 0 bytes 0; } chain input { type filter hook input priority 0; counter name ip saddr map { 192.0.2.77 : "c" } drop; } }`},
	"dnat": {rules: `table inet n { chain pre { type nat hook prerouting priority dstnat; udp dport 4791 dnat ip to 192.0.2.1:3784; }
	chain input { type filter hook input priority 0; policy drop; udp dport 3784 accept; } }`, in: "data6", place: "policy drop", unsure: true},
	"redirect": {rules: `table inet n { chain pre { type nat hook prerouting priority dstnat; ip saddr 192.0.2.0/24 udp dport 4791 redirect to :3784; }
	chain input { type filter hook input priority 0; policy drop; udp dport 3784 accept; } }`, in: "data6", place: "policy drop", unsure: true},
	"dnat later": {rules: `table inet n { chain pre { type filter hook prerouting priority mangle; udp dport 4791 drop; } chain nat { type nat hook prerouting priority dstnat; udp dport 4791 redirect to :3784; } }`,
		in: "data4 data6", place: "chain pre, rule with handle"},
	"snat": {rules: `table inet n { chain post { type nat hook postrouting priority srcnat; snat ip to 192.0.2.1; masquerade; } chain late { type filter hook postrouting priority 200; udp dport 4791 drop; } }`,
		out: "data4 data6", place: "chain late, rule with handle"},
	"another port":        {rules: `table inet f { chain pre { type filter hook prerouting priority mangle; udp dport 4791 udp dport set 3784; } chain input { type filter hook input priority 0; udp dport 4791 drop; } }`, unsure: true},
	"another packet type": {rules: `table inet f { chain pre { type filter hook prerouting priority mangle; meta pkttype set broadcast; } chain input { type filter hook input priority 0; meta pkttype host drop; } }`},
}

// TestWrittenRules checks rules as programs and guides write them: for IPv4 and IPv6, both directions and two ports,
// Judge names exactly the packets that their author means to drop, and the kernel drops those and no others.
func TestWrittenRules(t *testing.T) {
	b := newBench(t)
	for name, c := range written {
		t.Run(name, func(t *testing.T) {
			b.t = t
			if err := b.load(c.rules); err != nil {
				t.Fatal(err)
			}
			rs := b.read()
			b.packets(func(what string, inward, v6 bool, port int) {
				want := strings.Contains(c.out, what)
				if inward {
					want = strings.Contains(c.in, what)
				}
				place, drops := b.judge(rs, inward, v6, port)
				if drops != want || drops && !strings.Contains(place, c.place) {
					t.Errorf("%s, inward %t: dropped %t by %q, want %t by %q", what, inward, drops, place, want, c.place)
				}
				if !c.unsure && b.arrives(inward, v6, port) == want {
					t.Errorf("%s, inward %t: the kernel does not agree that dropped is %t", what, inward, want)
				}
			})
		})
	}
}

// packets calls f for each kind of packet.
func (b *bench) packets(f func(what string, inward, v6 bool, port int)) {
	for _, inward := range []bool{true, false} {
		for i, family := range []string{"4", "6"} {
			f("data"+family, inward, i == 1, dataPort)
			f("bfd"+family, inward, i == 1, bfdPort)
		}
	}
}

// TestIptables checks rules of iptables-nft.
func TestIptables(t *testing.T) {
	b := newBench(t)
	netnstest.Require(t, "iptables-nft")
	for _, args := range []string{
		"-A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT", "-A INPUT -p tcp --dport 22 -j ACCEPT", "-A INPUT -i lo -j ACCEPT",
		"-A INPUT -p udp --dport 3784 -m comment --comment BFD -j ACCEPT", "-A INPUT -j LOG", "-A INPUT -j REJECT",
		"-A OUTPUT -m conntrack --ctstate NEW -p udp --dport 4000:4791 -j DROP",
	} {
		b.host.Run("iptables-nft", strings.Fields(args)...)
	}
	rs := b.read()
	b.packets(func(what string, inward, v6 bool, port int) {
		want := what == "data4"
		if _, drops := b.judge(rs, inward, v6, port); drops != want {
			t.Errorf("%s, inward %t: dropped %t, want %t", what, inward, drops, want)
		}
		if b.arrives(inward, v6, port) == want {
			t.Errorf("%s, inward %t: the kernel does not agree that dropped is %t", what, inward, want)
		}
	})
}

// TestRandomRules compares Judge with the kernel for random rules: no packet that it calls dropped arrives, and without
// conditions on unknown properties every packet that it does not call dropped does.
func TestRandomRules(t *testing.T) {
	b := newBench(t)
	dropped, total := 0, 0
	for seed := range uint64(gate.Count(t, gate.Kernel, 150, 1500)) {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 4))}
		rules := g.ruleset()
		if seed%3 > 0 {
			rules = g.single()
		}
		if err := b.load(rules); strings.Contains(fmt.Sprint(err), "conflicting protocols specified") {
			continue
		} else if err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, rules)
		}
		rs := b.read()
		b.packets(func(what string, inward, v6 bool, port int) {
			place, drops := b.judge(rs, inward, v6, port)
			arrives := b.arrives(inward, v6, port)
			if drops && arrives || !drops && !arrives && !g.unknown {
				t.Fatalf("seed %d, %s, inward %t: dropped is %t (%s), and arrived is %t\n%s", seed, what, inward, drops, place, arrives, rules)
			}
			if total++; drops {
				dropped++
			}
		})
	}
	if dropped < total/10 || dropped > total*9/10 || total < 200 {
		t.Errorf("%d of %d packets were dropped: this test shows little", dropped, total)
	}
}

// generator makes random rules.
type generator struct {
	*rand.Rand
	unknown bool // a condition examines a property that Judge does not know
}

func (g *generator) pick(words ...string) string { return words[g.IntN(len(words))] }

// condition returns a condition that the family and the hook permit.
func (g *generator) condition(inward bool) string {
	device := "oif"
	if inward {
		device = "iif"
	}
	if g.IntN(12) == 0 {
		g.unknown = true
		return g.pick("meta mark 7", "ip saddr 192.0.2.0/24", "ip6 saddr 2001:db8::/32", "limit rate over 1000/second", "udp sport 1-30000", "meta skuid 0")
	}
	return g.pick(
		device+"name eth0", device+"name != eth0", device+`name "eth*"`, device+`name { lo, eth0 }`, device+" lo", device+"name != { lo, eth7 }",
		"udp dport 4791", "udp dport != 4791", "udp dport 3700-3800", "udp dport { 1, 3784 }", "udp dport { 1-9, 4700-4800 }", "udp dport != { 3784 }", "udp dport >= 4000",
		"tcp dport 4791", "meta l4proto udp", "meta l4proto { tcp, icmp }", "meta nfproto ipv4", "meta nfproto ipv6", "meta protocol ip", "ip protocol udp", "ip6 nexthdr udp", "ct status dnat", "ct status != snat", "ct status seen-reply,assured",
		"ct state new", "ct state established,related", "ct state { established, new }", "ct state != new", "th dport 4791",
		device+"name . udp dport { eth0 . 4791, lo . 3784 }", "meta nfproto . udp dport { ipv6 . 3784 }",
	)
}

func (g *generator) rule(inward bool, chains []string) string {
	var words []string
	for range g.IntN(3) {
		words = append(words, g.condition(inward))
	}
	switch verdict := g.pick("accept", "drop", "drop", "return", "continue", "counter", "jump", "goto", "vmap"); {
	case verdict == "vmap":
		words = append(words, "udp dport vmap { 3784 : "+g.pick("drop", "accept", "return")+", 4000-5000 : "+g.pick("drop", "accept", "continue")+" }")
	case verdict != "jump" && verdict != "goto":
		words = append(words, verdict)
	case len(chains) > 0:
		words = append(words, verdict+" "+g.pick(chains...))
	default:
		words = append(words, "drop")
	}
	return strings.Join(words, " ")
}

// single returns one rule for each direction, which decides alone.
func (g *generator) single() string {
	var out strings.Builder
	for _, hook := range []string{"input", "output"} {
		verdict, policy := "drop", "accept"
		if g.IntN(2) == 0 {
			verdict, policy = "accept", "drop"
		}
		conditions := g.condition(hook == "input")
		if g.IntN(3) == 0 {
			conditions += " " + g.condition(hook == "input")
		}
		fmt.Fprintf(&out, "table inet %s {\nchain c {\ntype filter hook %s priority 0; policy %s;\n%s %s\n}\n}\n", hook, hook, policy, conditions, verdict)
	}
	return out.String()
}

// ruleset returns two tables with chains that jump to later ones.
func (g *generator) ruleset() string {
	var out strings.Builder
	for table := range 2 {
		fmt.Fprintf(&out, "table inet t%d {\n", table)
		for _, hook := range []string{"input", "output"} {
			inward := hook == "input"
			for n := 2; n >= 0; n-- {
				var later []string
				for k := n + 1; k <= 2; k++ {
					later = append(later, fmt.Sprintf("%s%d", hook, k))
				}
				fmt.Fprintf(&out, "chain %s%d {\n", hook, n)
				if n == 0 {
					fmt.Fprintf(&out, "type filter hook %s priority %d; policy %s;\n", hook, g.IntN(20), g.pick("accept", "accept", "drop"))
				}
				for range 1 + g.IntN(3) {
					fmt.Fprintln(&out, g.rule(inward, later))
				}
				out.WriteString("}\n")
			}
		}
		out.WriteString("}\n")
	}
	return out.String()
}

// TestGeneration checks that the generation changes with the rules and only with them.
func TestGeneration(t *testing.T) {
	b := newBench(t)
	number := func() (n uint32) {
		b.host.Must(func() (err error) { n, err = Generation(); return err })
		return n
	}
	first := number()
	if again := number(); again != first {
		t.Errorf("generation %d, then %d without a change", first, again)
	}
	if err := b.load("table inet f { }"); err != nil {
		t.Fatal(err)
	}
	if number() == first {
		t.Error("the generation does not change with the rules")
	}
}

// FuzzJudge evaluates a rule of random attributes: whatever a kernel sends, nothing panics.
func FuzzJudge(f *testing.F) {
	for _, kind := range []string{"meta", "payload", "cmp", "bitwise", "range", "lookup", "immediate", "ct", "match", "target", "fib"} {
		f.Add(kind, attribute(1, "eth0"), attribute(2, "x"))
	}
	f.Fuzz(func(_ *testing.T, kind string, first, second []byte) {
		name := chainName{unix.NFPROTO_INET, "t", "c"}
		s := &set{found: true, flags: setInterval, elements: []element{{key: first}, {key: second, end: first}}}
		c := &chain{name: name, hook: unix.NF_INET_LOCAL_IN, drops: true, rules: []rule{{expressions: []expression{
			{kind: kind, data: parse(first), set: s}, {kind: kind, data: parse(second), set: s}, {kind: "lookup", data: parse(second), set: s},
		}}}}
		rs := &Ruleset{base: []*chain{c}, chains: map[chainName]*chain{name: c}}
		rs.Judge(Packet{In: "eth0", Index: 2, Protocol: unix.IPPROTO_UDP, Port: dataPort})
	})
}
