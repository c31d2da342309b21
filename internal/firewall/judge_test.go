package firewall

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// conditions are conditions and statements of rules, with their truth for the first packet of a data flow, as nft(8)
// defines them: v4 and v6 for packets that arrive, out for those of IPv4 that leave.
var conditions = []struct {
	text        string
	v4, v6, out truth
}{
	{"udp dport 4791", yes, yes, yes}, {"udp dport 4790", no, no, no}, {"udp dport != 4791", no, no, no}, {"udp dport != 4790", yes, yes, yes}, {"th dport 4791", yes, yes, yes},
	{"udp dport < 4791", no, no, no}, {"udp dport < 4792", yes, yes, yes}, {"udp dport < 5048", yes, yes, yes}, {"udp dport < 4535", no, no, no},
	{"udp dport <= 4791", yes, yes, yes}, {"udp dport <= 4790", no, no, no}, {"udp dport > 4791", no, no, no}, {"udp dport > 4790", yes, yes, yes},
	{"udp dport > 4535", yes, yes, yes}, {"udp dport >= 4791", yes, yes, yes}, {"udp dport >= 4792", no, no, no},
	{"udp dport 4791-5000", yes, yes, yes}, {"udp dport 4000-4791", yes, yes, yes}, {"udp dport 4792-5000", no, no, no}, {"udp dport 4000-4790", no, no, no},
	{"udp dport != 4000-4791", no, no, no}, {"udp dport != 4792-5000", yes, yes, yes},
	{"udp sport 5", maybe, maybe, maybe}, {"udp sport != 5", maybe, maybe, maybe}, {"udp sport >= 5", maybe, maybe, maybe}, {"udp sport != 5-9", maybe, maybe, maybe},
	{"tcp dport 4791", no, no, no}, {"meta l4proto udp", yes, yes, yes}, {"meta l4proto tcp", no, no, no}, {"ip protocol udp", yes, no, yes}, {"ip protocol tcp", no, no, no},
	{"ip6 nexthdr udp", no, yes, no}, {"ip6 nexthdr tcp", no, no, no}, {"meta nfproto ipv4", yes, no, yes}, {"meta protocol ip6", no, yes, no}, {"meta protocol ip", yes, no, yes},
	{"ip saddr 192.0.2.2", maybe, no, maybe}, {"ip6 daddr ::1", no, maybe, no}, {"ip ttl 64", maybe, no, maybe}, {"ip6 hoplimit > 1", no, maybe, no},
	// Parts of words: bytes before, after and within the known ones, and single bits.
	{"@th,16,8 0x12", yes, yes, yes}, {"@th,16,8 0xb7", no, no, no}, {"@th,24,8 0xb7", yes, yes, yes}, {"@th,8,24 0x0012b7", maybe, maybe, maybe}, {"@th,8,24 0x0012b6", no, no, no},
	{"@th,8,24 > 0x0012b6", maybe, maybe, maybe}, {"@th,8,24 != 0x0012b6", yes, yes, yes}, {"@th,8,24 < 0xff0000", maybe, maybe, maybe}, {"@th,16,24 > 0x12b600", yes, yes, yes}, {"@th,16,24 < 0x12b600", no, no, no}, {"@th,16,24 >= 0x12b700", maybe, maybe, maybe},
	{"udp dport & 0xff00 == 0x1200", yes, yes, yes}, {"udp dport & 0xff00 == 0x1300", no, no, no}, {"udp dport & 1 == 1", yes, yes, yes}, {"udp sport & 1 == 1", maybe, maybe, maybe},
	{"@th,0,32 & 0xffff == 4791", yes, yes, yes}, {"@th,0,32 & 0xffff == 4790", no, no, no}, {"@th,0,32 & 0x1ffff == 4791", maybe, maybe, maybe}, {"@th,0,32 & 0x1ffff == 4790", no, no, no},
	{"meta mark & 0xff == 1", maybe, maybe, maybe}, {"meta mark & 0xff == 0x100", no, no, no}, {"meta mark and 0xf0 or 0x0f == 0", no, no, no},
	// Devices.
	{"iifname eth0", yes, yes, no}, {"iifname eth00", no, no, no}, {`iifname "eth*"`, yes, yes, no}, {`iifname "eth1*"`, no, no, no}, {"iifname != eth0", no, no, yes}, {"iif eth0", yes, yes, no}, {"iif lo", no, no, no},
	{"oifname eth0", no, no, yes}, {"oif eth0", no, no, yes}, {"oif lo", no, no, no}, {"oif != lo", yes, yes, yes},
	{"meta pkttype host", yes, yes, maybe}, {"meta pkttype broadcast", no, no, maybe},
	// Conntrack.
	{"ct state new", yes, yes, yes}, {"ct state established,related", no, no, no}, {"ct state != established", yes, yes, yes}, {"ct state invalid,untracked", no, no, no}, {"ct state new,untracked", yes, yes, yes},
	{"ct status assured", no, no, no}, {"ct status dnat", no, no, no}, {"ct status != snat", yes, yes, yes}, {"ct mark 0", maybe, maybe, maybe}, {"ct mark set 1", yes, yes, yes},
	// Sets.
	{"udp dport { 1, 4791 }", yes, yes, yes}, {"udp dport { 1, 4790 }", no, no, no}, {"udp dport != { 1, 4791 }", no, no, no}, {"udp dport != { 1, 4790 }", yes, yes, yes},
	{"udp sport { 1, 4791 }", maybe, maybe, maybe}, {"udp sport != { 1, 4791 }", maybe, maybe, maybe},
	{"udp dport { 1-9, 4791-5000 }", yes, yes, yes}, {"udp dport { 1-9, 4792-5000 }", no, no, no}, {"udp dport { 4000-4790, 5000 }", no, no, no}, {"udp dport { 4000-4791, 5000 }", yes, yes, yes}, {"udp sport { 1-9, 20-29 }", maybe, maybe, maybe},
	{"udp dport . meta l4proto { 4791 . udp, 1 . tcp }", yes, yes, yes}, {"udp dport . meta l4proto { 4791 . tcp, 1 . udp }", no, no, no},
	{"udp sport . udp dport { 5 . 4791 }", maybe, maybe, maybe}, {"udp sport . udp dport { 5 . 4790 }", no, no, no}, {"udp dport . udp sport { 4790 . 5 }", no, no, no},
	{"udp dport . ip saddr { 4791 . 192.0.2.0/24 }", maybe, no, maybe}, {"udp dport . meta mark @ranges", maybe, maybe, maybe}, {"udp dport . ip protocol @singles", yes, no, yes}, {"udp dport . ip protocol @smaller", no, no, no}, {"udp dport . meta mark @marks", maybe, maybe, maybe},
	{"udp dport @none", no, no, no}, {"udp dport != @none", yes, yes, yes}, {"udp dport @some", yes, yes, yes}, {"udp dport @changing", maybe, maybe, maybe}, {"udp dport != @changing", maybe, maybe, maybe},
	{"meta mark set udp dport map { 4791 : 1 }", yes, yes, yes}, {"meta mark set udp dport map { 4790 : 1 }", no, no, no}, {"meta mark set udp sport map { 4791 : 1 }", maybe, maybe, maybe},
	// Statements, and conditions on other properties.
	{"counter", yes, yes, yes}, {"log", yes, yes, yes}, {"counter name c", yes, yes, yes}, {"meta mark set 1", yes, yes, yes}, {"meta nftrace set 1", yes, yes, yes},
	{"quota name q", maybe, maybe, maybe}, {"limit name l", maybe, maybe, maybe}, {"counter name udp dport map { 4791 : c }", maybe, maybe, maybe},
	{"limit rate 1/second", maybe, maybe, maybe}, {"quota over 1 bytes", maybe, maybe, maybe}, {"meta mark 0", maybe, maybe, maybe}, {"meta length > 1", maybe, maybe, maybe}, {"numgen random mod 2 == 0", maybe, maybe, maybe},
	{"fib saddr type local", maybe, maybe, maybe}, {"meta cpu 0", maybe, maybe, maybe},
}

// objects are those that conditions name.
const objects = `counter c { packets 0 bytes 0
}
quota q { over 1 bytes
}
limit l { rate 1000/second
}
set none { type inet_service
}
set some { type inet_service; elements = { 1, 4791 }
}
set changing { type inet_service; flags timeout; elements = { 4791 }
}
set ranges { typeof udp dport . meta mark; flags interval; elements = { 4791 . 1-5 }
}
set marks { typeof udp dport . meta mark; flags interval; elements = { 4790 . 1, 4791 . 1 }
}
set singles { typeof udp dport . ip protocol; flags interval; elements = { 4790 . udp, 4791 . udp }
}
set smaller { typeof udp dport . ip protocol; flags interval; elements = { 1 . udp, 4790 . udp }
}
map later { type inet_service : verdict; flags timeout
}
`

// TestConditions checks the truth of each condition by the results of Judge: in front of a drop and of an accept, with
// the opposite policy. One that holds makes the first certain, one that does not the second, and one that may hold
// none; the place is that of the rule or the policy.
func TestConditions(t *testing.T) {
	b := newBench(t)
	var text strings.Builder
	fmt.Fprintf(&text, "table inet f {\n%s", objects)
	for i, c := range conditions {
		fmt.Fprintf(&text, "chain drop%d {\ntype filter hook input priority 0; policy accept;\n%s drop\n}\nchain accept%d {\ntype filter hook input priority 0; policy drop;\n%s accept\n}\n", i, c.text, i, c.text)
	}
	if err := b.load(text.String() + "}\n"); err != nil {
		t.Fatal(err)
	}
	all := b.read()
	for i, c := range conditions {
		for _, p := range []struct {
			what   string
			packet Packet
			want   truth
		}{
			{"IPv4", Packet{In: "eth0", Index: b.index[0], Protocol: unix.IPPROTO_UDP, Port: dataPort}, c.v4},
			{"IPv6", Packet{In: "eth0", Index: b.index[0], IPv6: true, Protocol: unix.IPPROTO_UDP, Port: dataPort}, c.v6},
			{"outward", Packet{Out: "eth0", Index: b.index[0], Protocol: unix.IPPROTO_UDP, Port: dataPort}, c.out},
		} {
			verdict := func(chain, place string) bool {
				only := *all
				only.base = nil
				for _, c := range all.base {
					if c.name.chain == chain {
						c := *c
						if p.packet.Out != "" {
							c.hook = unix.NF_INET_LOCAL_OUT
						}
						only.base = append(only.base, &c)
					}
				}
				if len(only.base) != 1 {
					t.Fatalf("%d chains %s", len(only.base), chain)
				}
				got, drops := only.Judge(p.packet)
				if drops && !strings.HasPrefix(got, "table inet f, chain "+chain+", "+place) || !drops && got != "" {
					t.Errorf("%s, %s: place %q of %t", c.text, p.what, got, drops)
				}
				return drops
			}
			got := maybe
			switch drop, accept := verdict(fmt.Sprint("drop", i), "rule with handle "), verdict(fmt.Sprint("accept", i), "policy drop"); {
			case drop && accept:
				t.Errorf("%s, %s: it holds, and does not", c.text, p.what)
			case drop:
				got = yes
			case accept:
				got = no
			}
			if got != p.want {
				t.Errorf("%s, %s: truth %d, want %d", c.text, p.what, got, p.want)
			}
		}
	}
}

// TestVerdicts checks the certain result of rules that end in several verdicts, for a data packet that arrives: the
// rule that drops it, the policy, or none.
func TestVerdicts(t *testing.T) {
	b := newBench(t)
	const chains = `chain drops { drop
}
chain accepts { accept
}
chain returns { return
}
chain passes { udp dport 1 drop
}
chain perhaps { udp sport 1 accept
}
chain refuses { reject
}
chain back { return; drop
}
`
	const rule, policy, none = "rule with handle", "policy drop", ""
	cases := []struct{ rules, accept, drop string }{ // the results with policy accept, and with policy drop
		{"drop", rule, rule}, {"accept", none, none}, {"return; drop", none, policy}, {"continue", none, policy}, {"reject", rule, rule}, {"counter; accept; drop", none, none},
		{"jump drops", "chain drops, rule", "chain drops, rule"}, {"goto drops; accept", "chain drops, rule", "chain drops, rule"}, {"jump accepts; drop", none, none},
		{"jump returns; drop", rule, rule}, {"goto returns; drop", none, policy}, {"jump passes; drop", rule, rule}, {"goto passes; drop", none, policy}, {"jump refuses", "chain refuses, rule", "chain refuses, rule"},
		{"jump perhaps; drop", none, none}, {"goto perhaps", none, none}, {"jump back; drop", "chain c", "chain c"}, {"udp sport 1 drop; drop", rule, rule}, {"udp sport 1 accept; drop", none, none}, {"udp sport 1 return; drop", none, policy},
		{"udp sport 1 goto drops; drop", rule, rule}, {"udp sport 1 jump drops; accept", none, none}, {"udp sport 1 reject", none, policy}, {"udp sport 1 reject; drop", rule, rule},
		{"udp dport vmap { 4791 : drop }", rule, rule}, {"udp dport vmap { 4791 : accept }", none, none}, {"udp dport vmap { 4790 : drop }", none, policy}, {"udp dport vmap { 4791 : goto returns }; drop", none, policy},
		{"udp dport vmap { 4791 : continue, 1 : drop }; drop", rule, rule}, {"udp dport vmap { 1-9 : accept, 4000-5000 : drop }", rule, rule}, {"udp dport vmap { 1-9 : drop, 4000-5000 : accept }", none, none}, {"udp dport vmap { 1-9 : drop, 5000-6000 : drop }", none, policy},
		{"udp sport vmap { 1 : drop, 2 : drop }", none, none}, {"udp sport vmap { 1 : accept }; drop", none, none}, {"udp sport vmap { 1 : drop }; drop", rule, rule}, {"udp sport . udp dport vmap { 1 . 4790 : accept, 2 . 1 : accept }; drop", rule, rule},
		{"udp sport . udp dport vmap { 1 . 4791 : drop, 2 . 4791 : accept }; drop", none, none}, {"udp dport vmap { 1 : accept, * : drop }", none, none}, {"udp dport vmap @later; drop", none, none}, {"udp sport vmap { 1-9 : accept }; drop", none, none},
		{"meta l4proto udp tproxy ip to :1; drop", rule, rule}, {"meta l4proto udp tproxy ip to :1 accept", none, none}, {"meta l4proto udp tproxy ip to :1 drop", none, policy}, {"udp dport set 4790; drop", rule, rule}, {"udp dport set 4790; udp dport 4791 drop", none, policy}, {"udp dport 4791 drop; udp dport set 4790", rule, rule},
	}
	for _, c := range cases {
		for policyIs, want := range map[string]string{"accept": c.accept, "drop": c.drop} {
			hook := "input"
			if strings.Contains(c.rules, "tproxy") {
				hook = "prerouting"
			}
			text := fmt.Sprintf("table inet f {\n%s%schain c {\ntype filter hook %s priority 0; policy %s;\n%s\n}\n}\n", objects, chains, hook, policyIs, strings.ReplaceAll(c.rules, "; ", "\n"))
			if err := b.load(text); err != nil {
				t.Fatalf("%s: %v", c.rules, err)
			}
			place, drops := b.judge(b.read(), true, false, dataPort)
			if drops != (want != none) || !strings.Contains(place, want) || !drops && place != "" {
				t.Errorf("%s, policy %s: dropped %t by %q, want %q", c.rules, policyIs, drops, place, want)
			}
		}
	}
}

// The parts of hand-made rules, for what nft does not write.
func number(n uint32) []byte { return binary.BigEndian.AppendUint32(nil, n) }

func nested(kind uint16, b []byte) []byte {
	out := binary.NativeEndian.AppendUint16(nil, uint16(unix.SizeofNlAttr+len(b)))
	return append(append(binary.NativeEndian.AppendUint16(out, kind), b...), make([]byte, -len(b)&3)...)
}

func verdictOf(code int32, chain string) expression {
	v := nested(unix.NFTA_VERDICT_CODE, number(uint32(code)))
	if chain != "" {
		v = append(v, attribute(unix.NFTA_VERDICT_CHAIN, chain)...)
	}
	return expression{kind: "immediate", data: attributes{unix.NFTA_IMMEDIATE_DATA: nested(unix.NFTA_DATA_VERDICT, v)}}
}

func object(kind uint32) expression {
	return expression{kind: "objref", data: attributes{unix.NFTA_OBJREF_IMM_TYPE: number(kind)}}
}

func target(name string) expression {
	return expression{kind: "target", data: attributes{unix.NFTA_TARGET_NAME: append([]byte(name), 0)}}
}

// conntrackMatch is `-m conntrack --ctstate`, as struct xt_conntrack_mtinfo3 of the kernel.
func conntrackMatch(what, states uint16, invert bool) expression {
	info := make([]byte, 160)
	binary.NativeEndian.PutUint16(info[146:], what)
	if invert {
		binary.NativeEndian.PutUint16(info[148:], what)
	}
	binary.NativeEndian.PutUint16(info[150:], states)
	return expression{kind: "match", data: attributes{unix.NFTA_MATCH_NAME: []byte("conntrack\x00"), unix.NFTA_MATCH_INFO: info}}
}

// TestUnknownIsNotCertain checks rules that nft or this kernel does not write: those of iptables, of unknown
// expressions and of objects. Behind each is an accept with policy drop, and a drop with policy accept; only what the
// kernel is certain to do is certain.
func TestUnknownIsNotCertain(t *testing.T) {
	const newBit, established, untracked = 8, 2, 64
	type result struct{ drop, accept bool } // in front of a drop, of an accept
	for _, c := range []struct {
		what     string
		x        expression
		untracks bool
		want     result
	}{
		{"nothing", expression{kind: "counter"}, false, result{drop: true}},
		{"an unknown expression", expression{kind: "inner"}, false, result{}},
		{"a hash", expression{kind: "hash"}, false, result{}},
		{"a helper", object(unix.NFT_OBJECT_CT_HELPER), false, result{drop: true}},
		{"a time limit", object(unix.NFT_OBJECT_CT_TIMEOUT), false, result{drop: true}},
		{"an expectation", object(unix.NFT_OBJECT_CT_EXPECT), false, result{drop: true}},
		{"a security mark", object(unix.NFT_OBJECT_SECMARK), false, result{drop: true}},
		{"a limit of connections", object(unix.NFT_OBJECT_CONNLIMIT), false, result{}},
		{"a proxy", object(unix.NFT_OBJECT_SYNPROXY), false, result{}},
		{"NFLOG", target("NFLOG"), false, result{drop: true}},
		{"REJECT", target("REJECT"), false, result{drop: true, accept: true}},
		{"MASQUERADE", target("MASQUERADE"), false, result{}},
		{"DNAT", target("DNAT"), false, result{}},
		{"comment", expression{kind: "match", data: attributes{unix.NFTA_MATCH_NAME: []byte("comment\x00")}}, false, result{drop: true}},
		{"multiport", expression{kind: "match", data: attributes{unix.NFTA_MATCH_NAME: []byte("multiport\x00"), unix.NFTA_MATCH_INFO: make([]byte, 160)}}, false, result{}},
		{"new", conntrackMatch(1, newBit|established, false), false, result{drop: true}},
		{"not new", conntrackMatch(1, newBit, true), false, result{accept: true}},
		{"established", conntrackMatch(1, established, false), false, result{accept: true}},
		{"not established", conntrackMatch(1, established, true), false, result{drop: true}},
		{"by status", conntrackMatch(2, newBit, false), false, result{}},
		{"new, untracked", conntrackMatch(1, newBit, false), true, result{}},
		{"not new, untracked", conntrackMatch(1, newBit, true), true, result{}},
		{"either", conntrackMatch(1, newBit|untracked, false), true, result{drop: true}},
		{"established, untracked", conntrackMatch(1, established, false), true, result{accept: true}},
		{"an unknown set", expression{kind: "lookup", set: &set{}}, false, result{}},
		{"an unknown map", expression{kind: "lookup", set: &set{}, data: attributes{unix.NFTA_LOOKUP_DREG: number(unix.NFT_REG_VERDICT)}}, false, result{}},
		{"an unknown verdict", verdictOf(3, ""), false, result{}},
		{"an unknown chain", verdictOf(nftJump, "absent"), false, result{}},
	} {
		verdict := func(code int32, policyDrops bool) bool {
			ch := &chain{name: chainName{unix.NFPROTO_INET, "f", "c"}, hook: unix.NF_INET_LOCAL_IN, drops: policyDrops, rules: []rule{{1, []expression{c.x, verdictOf(code, "")}}}}
			rs := &Ruleset{base: []*chain{ch}, chains: map[chainName]*chain{ch.name: ch}, untracks: c.untracks}
			_, drops := rs.Judge(Packet{In: "eth0", Index: 2, Protocol: unix.IPPROTO_UDP, Port: dataPort})
			return drops
		}
		if got := (result{verdict(nfDrop, false), verdict(nfAccept, true)}); got != c.want {
			t.Errorf("%s: certain drops %+v, want %+v", c.what, got, c.want)
		}
	}
}

// TestRewrittenIsNotCertain checks that a drop behind a rule that may change the packet is not certain, in the same
// chain and in a later one, and one before it is.
func TestRewrittenIsNotCertain(t *testing.T) {
	nat := func(kind uint32) expression {
		return expression{kind: "nat", data: attributes{unix.NFTA_NAT_TYPE: number(kind), unix.NFTA_NAT_FAMILY: number(unix.NFPROTO_IPV4)}}
	}
	packetType := expression{kind: "meta", data: attributes{unix.NFTA_META_KEY: number(unix.NFT_META_PKTTYPE), unix.NFTA_META_SREG: number(1)}}
	for _, c := range []struct {
		what string
		x    expression
		v6   bool
		want bool // a later chain drops
	}{
		{"counter", expression{kind: "counter"}, false, true}, {"snat", nat(unix.NFT_NAT_SNAT), false, true}, {"dnat", nat(unix.NFT_NAT_DNAT), false, false}, {"dnat of another family", nat(unix.NFT_NAT_DNAT), true, true},
		{"redirect", expression{kind: "redir"}, false, false}, {"tproxy", expression{kind: "tproxy"}, false, false}, {"masquerade", expression{kind: "masq"}, false, true}, {"DNAT", target("DNAT"), false, false}, {"SNAT", target("SNAT"), false, true},
		{"queue", expression{kind: "queue"}, false, false}, {"packet type", packetType, false, false}, {"limit", expression{kind: "limit"}, false, true},
		{"payload", expression{kind: "payload", data: attributes{unix.NFTA_PAYLOAD_SREG: number(1)}}, false, false},
		{"mark", expression{kind: "meta", data: attributes{unix.NFTA_META_KEY: number(unix.NFT_META_MARK), unix.NFTA_META_SREG: number(1)}}, false, true},
	} {
		base := func(name string, priority int32, drops bool, x ...expression) *chain {
			ch := &chain{name: chainName{unix.NFPROTO_INET, "f", name}, hook: unix.NF_INET_LOCAL_IN, priority: priority, drops: drops}
			if x != nil {
				ch.rules = []rule{{1, x}}
			}
			return ch
		}
		for _, order := range []int32{-1, 1} {
			rs := &Ruleset{base: []*chain{base("drops", order, true), base("changes", 0, false, c.x)}}
			if _, drops := rs.Judge(Packet{In: "eth0", Index: 2, IPv6: c.v6, Protocol: unix.IPPROTO_UDP, Port: dataPort}); drops != (c.want || order < 0) {
				t.Errorf("%s, then %d: dropped %t", c.what, order, drops)
			}
		}
	}
}

// TestOrderOfPartlyKnownBytes checks that "less" and "greater" are certain only where every bit that decides is known.
func TestOrderOfPartlyKnownBytes(t *testing.T) {
	var r registers
	r.putBits(unix.NFT_REG32_00, []byte{5, 0, 0, 0}, []byte{0xff, 0x01, 0xff, 0xff})
	for _, c := range []struct {
		op   uint32
		than []byte
		want truth
	}{
		{unix.NFT_CMP_LT, []byte{5, 1}, maybe}, {unix.NFT_CMP_GT, []byte{5, 1}, maybe}, {unix.NFT_CMP_EQ, []byte{5, 1}, no}, {unix.NFT_CMP_NEQ, []byte{5, 1}, yes},
		{unix.NFT_CMP_LT, []byte{6, 1}, yes}, {unix.NFT_CMP_GT, []byte{4, 1}, yes}, {unix.NFT_CMP_LTE, []byte{4, 1}, no}, {unix.NFT_CMP_EQ, []byte{5, 2}, maybe},
	} {
		if got := r.compare(unix.NFT_REG32_00, c.op, c.than); got != c.want {
			t.Errorf("operator %d, % x: %v, want %v", c.op, c.than, got, c.want)
		}
	}
}

// TestDepth checks that a chain of as many jumps as the kernel accepts is evaluated, and that a loop, which it refuses,
// is not certain.
func TestDepth(t *testing.T) {
	for jumps, want := range map[int]bool{16: true, 17: false} {
		rs := &Ruleset{chains: map[chainName]*chain{}}
		for i := range jumps + 1 {
			c := &chain{name: chainName{unix.NFPROTO_INET, "f", fmt.Sprint(i)}, hook: noHook, rules: []rule{{uint64(i), []expression{verdictOf(nftJump, fmt.Sprint(i+1))}}}}
			if i == 0 {
				c.hook = unix.NF_INET_LOCAL_IN
				rs.base = append(rs.base, c)
			}
			if i == jumps {
				c.rules[0].expressions[0] = verdictOf(nfDrop, "")
			}
			rs.chains[c.name] = c
		}
		place, drops := rs.Judge(Packet{In: "eth0", Protocol: unix.IPPROTO_UDP, Port: dataPort})
		if drops != want || drops && place != "table inet f, chain 16, rule with handle 16" {
			t.Errorf("%d jumps: dropped %t by %q", jumps, drops, place)
		}
	}
}

// TestRegisters checks the bounds of registers: bytes behind the last one are unknown, a forgotten register leaves its
// neighbors, and an unknown comparison may hold.
func TestRegisters(t *testing.T) {
	var r registers
	four := []byte{1, 2, 3, 4}
	for i := range uint32(16) {
		r.put(unix.NFT_REG32_00+i, four)
	}
	r.put(unix.NFT_REG32_15, append(four, 5)) // longer than the register
	r.forget(unix.NFT_REG_2, 16)
	for i := range uint32(16) {
		want := yes
		if i >= 4 && i < 8 {
			want = maybe
		}
		if got := r.compare(unix.NFT_REG32_00+i, unix.NFT_CMP_EQ, four); got != want {
			t.Errorf("register %d: %d, want %d", i, got, want)
		}
	}
	if r.compare(unix.NFT_REG32_15, unix.NFT_CMP_EQ, append(four, 0)) != maybe || r.compare(unix.NFT_REG32_15+1, unix.NFT_CMP_EQ, four) != maybe || r.compare(unix.NFT_REG32_00, unix.NFT_CMP_EQ, nil) != maybe {
		t.Error("bytes behind the last register, or none, are compared")
	}
	if r.compare(unix.NFT_REG32_00, 77, four) != maybe {
		t.Error("an unknown comparison is certain")
	}
	r.forget(unix.NFT_REG_4, 99)
	if r.compare(unix.NFT_REG32_15, unix.NFT_CMP_EQ, four) != maybe {
		t.Error("the last register is still known")
	}
}
