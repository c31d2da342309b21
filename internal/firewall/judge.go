package firewall

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Verdicts of nf_tables.h, as the kernel sends them.
const (
	nfDrop, nfAccept      = 0, 1
	nftReturn             = -5
	nftGoto, nftJump      = -4, -3
	nftBreak, nftContinue = -2, -1
)

// noHook marks a chain that is no base chain.
const noHook = -1

// The bits of "ct state" that a first packet may have: IP_CT_NEW, or IP_CT_UNTRACKED by notrack.
const (
	stateNew       = 1 << 3
	stateUntracked = 1 << 6
)

// conntrackPriority is NF_IP_PRI_CONNTRACK: chains up to it are called before conntrack knows the packet.
const conntrackPriority = -200

// statusDone are the bits of "ct status" by which the kernel notes that it has looked for a translation:
// IPS_SRC_NAT_DONE, IPS_DST_NAT_DONE.
const statusDone = 1<<7 | 1<<8

// maxDepth bounds jumps: NFT_JUMP_STACK_SIZE of the kernel, which refuses more.
const maxDepth = 16

// Ruleset is a copy of the rules of one network namespace.
type Ruleset struct {
	base   []*chain
	chains map[chainName]*chain
	sets   map[chainName]*set
	// translates: a rule translates addresses, so that a first packet may have that status. untracks: a rule exempts
	// packets from conntrack.
	translates, untracks bool
}

// Empty reports whether no chain is called for packets, so that none is dropped.
func (rs *Ruleset) Empty() bool { return len(rs.base) == 0 }

// chainName names a chain, or a set, of a table.
type chainName struct {
	family       uint8
	table, chain string
}

type chain struct {
	name     chainName
	hook     int // noHook: reached by jumps
	priority int32
	drops    bool // the policy
	rules    []rule
}

type rule struct {
	handle      uint64
	expressions []expression
}

type expression struct {
	kind string
	data attributes
	set  *set // of kind "lookup"
}

type set struct {
	found    bool // its elements are known
	flags    uint32
	elements []element
}

type element struct {
	key, end []byte
	flags    uint32
	verdict  []byte // attributes of a map of verdicts
}

// Packet is the first packet of a flow, with the properties that rules may examine. Other properties are unknown.
type Packet struct {
	// In is the device by which the packet arrived, Out that by which it leaves; exactly one is set. Each has its
	// index.
	In, Out  string
	Index    int
	IPv6     bool
	Protocol uint8 // unix.IPPROTO_UDP or IPPROTO_TCP
	Port     uint16
}

func (p *Packet) family() uint8 {
	if p.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// Judge reports whether the rules certainly drop the packet, with the place of the rule or policy.
func (rs *Ruleset) Judge(p Packet) (place string, drops bool) {
	hooks := []int{unix.NF_INET_LOCAL_OUT, unix.NF_INET_POST_ROUTING}
	if p.In != "" {
		hooks = []int{unix.NF_INET_PRE_ROUTING, unix.NF_INET_LOCAL_IN}
	}
	family := p.family()
	for _, hook := range hooks {
		var chains []*chain
		for _, c := range rs.base {
			if c.hook == hook && (c.name.family == family || c.name.family == unix.NFPROTO_INET) {
				chains = append(chains, c)
			}
		}
		slices.SortStableFunc(chains, func(a, b *chain) int { return cmp.Compare(a.priority, b.priority) })
		for _, c := range chains {
			w := walk{rules: rs, packet: p, tracked: c.priority > conntrackPriority}
			out := w.chain(c, 0)
			switch {
			case out&passes != 0 && c.drops:
				out = out&^passes | dropped
				w.note(c, "policy drop")
			case out&passes != 0:
				out = out&^passes | accepted
			}
			if out == dropped {
				return w.place, true
			}
			if w.rewritten {
				return "", false
			}
		}
	}
	return "", false
}

// outcome is a set of possible results.
type outcome uint8

const (
	accepted outcome = 1 << iota
	dropped
	passes // no verdict: the next rule, the calling chain, or the policy decides
)

// anything is the result of a rule that cannot be evaluated.
const anything = accepted | dropped | passes

// truth is the result of a condition.
type truth uint8

const (
	no truth = iota
	maybe
	yes
)

// walk evaluates chains for one packet.
type walk struct {
	rules     *Ruleset
	packet    Packet
	tracked   bool   // conntrack was called before
	rewritten bool   // a rule may have changed a known property of the packet
	place     string // of the last rule or policy that may drop
}

func (w *walk) note(c *chain, what string) {
	w.place = fmt.Sprintf("table %s %s, chain %s, %s", familyName[c.name.family], c.name.table, c.name.chain, what)
}

func (w *walk) noteRule(c *chain, r *rule) { w.note(c, fmt.Sprintf("rule with handle %d", r.handle)) }

// chain returns the possible results of a chain's rules, without its policy.
func (w *walk) chain(c *chain, depth int) outcome {
	if c == nil || depth > maxDepth {
		return anything
	}
	var all outcome
	for i := range c.rules {
		matched, out := w.rule(c, &c.rules[i], depth)
		if matched == no {
			continue
		}
		all |= out &^ passes
		if out&returns != 0 {
			all = all&^returns | passes
		}
		if matched == yes && out&passes == 0 {
			return all
		}
	}
	return all | passes
}

// returns is the result of a rule that ends its chain without a verdict. It never leaves chain.
const returns outcome = 1 << 7

// rule returns whether the rule matches, and the results if it does.
func (w *walk) rule(c *chain, r *rule, depth int) (truth, outcome) {
	var registers registers
	matched := yes
	for i := range r.expressions {
		x := &r.expressions[i]
		condition, out := w.expression(&registers, x, c, r, depth)
		matched = min(matched, condition)
		if matched == no {
			return no, 0
		}
		if out != 0 && out != passes {
			if out&dropped != 0 && x.kind != "immediate" && x.kind != "lookup" {
				w.noteRule(c, r)
			}
			return matched, out
		}
	}
	return matched, passes
}

// verdict returns the results of a verdict of a rule.
func (w *walk) verdict(b []byte, c *chain, r *rule, depth int) outcome {
	a := parse(b)
	to := w.rules.chains[chainName{c.name.family, c.name.table, a.text(unix.NFTA_VERDICT_CHAIN)}]
	switch int32(a.number(unix.NFTA_VERDICT_CODE)) {
	case nfDrop:
		w.noteRule(c, r)
		return dropped
	case nfAccept:
		return accepted
	case nftContinue, nftBreak:
		return passes
	case nftReturn:
		return returns
	case nftJump:
		return w.chain(to, depth+1)
	case nftGoto: // the end of that chain returns to the caller of this one
		out := w.chain(to, depth+1)
		if out&passes != 0 {
			out = out&^passes | returns
		}
		return out
	}
	return anything // queue and others
}

// expression evaluates one expression: whether the rule goes on, and its results if it is a verdict.
func (w *walk) expression(r *registers, x *expression, c *chain, of *rule, depth int) (truth, outcome) {
	d := x.data
	switch x.kind {
	case "counter", "log", "notrack", "last":
		return yes, 0
	case "reject":
		return yes, dropped
	case "masq":
		return yes, accepted
	case "nat", "redir":
		if family := d.number(unix.NFTA_NAT_FAMILY); x.kind == "nat" && family != unix.NFPROTO_INET && family != uint32(w.packet.family()) {
			return yes, 0 // nft_nat_inet_eval
		}
		w.rewritten = w.rewritten || x.kind == "redir" || d.number(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_DNAT // source addresses and ports are unknown anyway
		return yes, accepted
	case "tproxy": // it chooses the socket, and ends the rule without one
		w.rewritten = true
		return maybe, 0
	case "immediate":
		if v := parse(d[unix.NFTA_IMMEDIATE_DATA]); len(v[unix.NFTA_DATA_VERDICT]) > 0 {
			return yes, w.verdict(v[unix.NFTA_DATA_VERDICT], c, of, depth)
		}
		r.put(d.number(unix.NFTA_IMMEDIATE_DREG), d.value(unix.NFTA_IMMEDIATE_DATA))
		return yes, 0
	case "meta":
		if _, sets := d[unix.NFTA_META_SREG]; !sets {
			w.meta(r, d)
		} else if d.number(unix.NFTA_META_KEY) == unix.NFT_META_PKTTYPE {
			w.rewritten = true
		}
		return yes, 0
	case "ct":
		if _, sets := d[unix.NFTA_CT_SREG]; sets {
			return yes, 0
		}
		return w.conntrack(r, d), 0
	case "payload":
		if _, sets := d[unix.NFTA_PAYLOAD_SREG]; sets {
			w.rewritten = true
		} else {
			w.payload(r, d)
		}
		return yes, 0
	case "bitwise":
		r.bitwise(d)
		return yes, 0
	case "cmp":
		return r.compare(d.number(unix.NFTA_CMP_SREG), d.number(unix.NFTA_CMP_OP), d.value(unix.NFTA_CMP_DATA)), 0
	case "range":
		from := r.compare(d.number(unix.NFTA_RANGE_SREG), unix.NFT_CMP_GTE, d.value(unix.NFTA_RANGE_FROM_DATA))
		to := r.compare(d.number(unix.NFTA_RANGE_SREG), unix.NFT_CMP_LTE, d.value(unix.NFTA_RANGE_TO_DATA))
		inside := min(from, to)
		if d.number(unix.NFTA_RANGE_OP) == unix.NFT_RANGE_NEQ {
			inside = yes - inside
		}
		return inside, 0
	case "lookup":
		return w.lookup(r, x, c, of, depth)
	case "match": // an extension of iptables; newer versions write most of them as expressions of nftables
		return w.match(d.text(unix.NFTA_MATCH_NAME), d[unix.NFTA_MATCH_INFO]), 0
	case "target":
		switch d.text(unix.NFTA_TARGET_NAME) {
		case "REJECT":
			return yes, dropped
		case "LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "CT", "NOTRACK", "CLASSIFY":
			return yes, 0
		case "MASQUERADE", "SNAT":
			return yes, accepted
		}
		w.rewritten = true
		return yes, anything
	case "objref":
		switch d.number(unix.NFTA_OBJREF_IMM_TYPE) {
		case unix.NFT_OBJECT_COUNTER, unix.NFT_OBJECT_CT_HELPER, unix.NFT_OBJECT_CT_TIMEOUT, unix.NFT_OBJECT_CT_EXPECT, unix.NFT_OBJECT_SECMARK:
			return yes, 0
		case unix.NFT_OBJECT_QUOTA, unix.NFT_OBJECT_LIMIT, unix.NFT_OBJECT_CONNLIMIT:
			return maybe, 0
		}
		return maybe, anything // others, and maps of objects
	}
	*r = registers{}
	switch x.kind {
	case "limit", "quota", "connlimit", "dynset", "fib", "exthdr", "rt", "socket", "osf", "hash", "numgen", "xfrm", "byteorder": // conditions, and loads into a register
		return maybe, 0
	}
	w.rewritten = true // for example queue, by a program
	return maybe, anything
}

// lookup searches a set for the bytes of a register.
func (w *walk) lookup(r *registers, x *expression, c *chain, of *rule, depth int) (truth, outcome) {
	from := x.data.number(unix.NFTA_LOOKUP_SREG)
	_, toData := x.data[unix.NFTA_LOOKUP_DREG]
	if !x.set.found {
		if toData {
			return maybe, anything
		}
		return maybe, 0
	}
	found, verdict, any := x.set.contains(r, from)
	if toData {
		switch {
		case found == no:
			return no, 0
		case verdict == nil:
			if x.data.number(unix.NFTA_LOOKUP_DREG) != unix.NFT_REG_VERDICT {
				r.forget(x.data.number(unix.NFTA_LOOKUP_DREG), 16)
				return found, 0
			}
			return maybe, anything
		case any: // several elements may be meant
			return maybe, anything
		}
		return found, w.verdict(verdict, c, of, depth)
	}
	if x.data.number(unix.NFTA_LOOKUP_FLAGS)&unix.NFT_LOOKUP_F_INV != 0 {
		found = yes - found
	}
	return found, 0
}

// contains reports whether a set contains the bytes of a register, the verdict of that element, and whether several
// elements may be meant.
func (s *set) contains(r *registers, from uint32) (found truth, verdict []byte, several bool) {
	if s.flags&setInterval != 0 {
		return s.containsInterval(r, from)
	}
	for i := range s.elements {
		e := &s.elements[i]
		if e.key == nil { // an element for all other keys
			return maybe, nil, true
		}
		if t := r.compare(from, unix.NFT_CMP_EQ, e.key); t > no {
			several = several || found > no
			found, verdict = max(found, t), e.verdict
			if t == yes {
				return yes, e.verdict, false
			}
		}
	}
	return found, verdict, several
}

// containsInterval is contains for a set of intervals: the elements are the begins, and the ends, which are not inside.
func (s *set) containsInterval(r *registers, from uint32) (found truth, verdict []byte, several bool) {
	best := -1
	for i := range s.elements {
		e := &s.elements[i]
		if e.key == nil || e.end != nil && !bytes.Equal(e.key, e.end) {
			return maybe, nil, true
		}
		if e.end != nil { // concatenated fields, each a single value
			if t := r.compare(from, unix.NFT_CMP_EQ, e.key); t == yes {
				return yes, e.verdict, false
			} else if t == maybe {
				found, several = maybe, true
			}
			continue
		}
		switch r.compare(from, unix.NFT_CMP_GTE, e.key) {
		case maybe:
			return maybe, nil, true
		case yes:
			if best < 0 || bytes.Compare(s.elements[best].key, e.key) <= 0 {
				best = i
			}
		}
	}
	if best >= 0 && s.elements[best].flags&unix.NFT_SET_ELEM_INTERVAL_END == 0 {
		return yes, s.elements[best].verdict, false
	}
	return found, nil, several
}

// meta loads a property of the packet.
func (w *walk) meta(r *registers, d attributes) {
	to, p := d.number(unix.NFTA_META_DREG), &w.packet
	device := func(name string) {
		var b [unix.IFNAMSIZ]byte
		copy(b[:], name)
		r.put(to, b[:])
	}
	index := func(n int) { r.put(to, binary.NativeEndian.AppendUint32(nil, uint32(n))) }
	r.forget(to, 16)
	switch d.number(unix.NFTA_META_KEY) {
	case unix.NFT_META_IIFNAME:
		device(p.In)
	case unix.NFT_META_OIFNAME:
		device(p.Out)
	case unix.NFT_META_IIF:
		if p.In != "" {
			index(p.Index)
		} else {
			index(0)
		}
	case unix.NFT_META_OIF:
		if p.Out != "" {
			index(p.Index)
		} else {
			index(0)
		}
	case unix.NFT_META_L4PROTO:
		r.put(to, []byte{p.Protocol})
	case unix.NFT_META_NFPROTO:
		r.put(to, []byte{p.family()})
	case unix.NFT_META_PROTOCOL:
		if p.IPv6 {
			r.put(to, []byte{0x86, 0xdd})
		} else {
			r.put(to, []byte{0x08, 0x00})
		}
	case unix.NFT_META_PKTTYPE:
		if p.In != "" {
			r.put(to, []byte{unix.PACKET_HOST})
		}
	}
}

// conntrack loads a property of the packet's connection, and reports whether the rule goes on: it ends if there is no
// connection.
func (w *walk) conntrack(r *registers, d attributes) truth {
	to, exists := d.number(unix.NFTA_CT_DREG), yes
	if w.rules.untracks || !w.tracked {
		exists = maybe
	}
	r.forget(to, 16)
	bits := func(value, unknown uint32) {
		r.putBits(to, binary.NativeEndian.AppendUint32(nil, value), binary.NativeEndian.AppendUint32(nil, ^unknown))
	}
	switch key := d.number(unix.NFTA_CT_KEY); {
	case key == unix.NFT_CT_STATE && !w.tracked:
		return yes
	case key == unix.NFT_CT_STATE && exists == maybe:
		bits(0, stateNew|stateUntracked)
		return yes
	case key == unix.NFT_CT_STATE:
		bits(stateNew, 0)
	case key == unix.NFT_CT_STATUS && !w.rules.translates:
		bits(0, statusDone)
	}
	return exists
}

// payload loads a part of the packet.
func (w *walk) payload(r *registers, d attributes) {
	to, offset, size := d.number(unix.NFTA_PAYLOAD_DREG), d.number(unix.NFTA_PAYLOAD_OFFSET), d.number(unix.NFTA_PAYLOAD_LEN)
	r.forget(to, max(size, 16))
	known := map[uint32]byte{}
	switch base := d.number(unix.NFTA_PAYLOAD_BASE); {
	case w.rewritten: // an earlier rule may have changed it
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		known[2], known[3] = byte(w.packet.Port>>8), byte(w.packet.Port)
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER:
		known[9] = w.packet.Protocol // IPv4
		if w.packet.IPv6 {
			known = map[uint32]byte{6: w.packet.Protocol}
		}
	}
	for i := range min(size, registerBytes) {
		if b, ok := known[offset+i]; ok {
			r.set(to, i, b)
		}
	}
	for i := size; i%4 != 0 && i < registerBytes; i++ {
		r.set(to, i, 0)
	}
}

// match evaluates an extension of iptables.
func (w *walk) match(name string, info []byte) truth {
	const flags, inverted, states, byState = 146, 148, 150, 1 // struct xt_conntrack_mtinfo3, XT_CONNTRACK_STATE
	if name == "comment" {
		return yes
	}
	if name != "conntrack" || len(info) < states+2 || binary.NativeEndian.Uint16(info[flags:]) != byState || !w.tracked {
		return maybe
	}
	named, matched := binary.NativeEndian.Uint16(info[states:]), no
	if named&stateNew != 0 {
		matched = yes
	}
	if w.rules.untracks && (named&stateNew != 0) != (named&stateUntracked != 0) {
		matched = maybe
	}
	if binary.NativeEndian.Uint16(info[inverted:])&byState != 0 {
		matched = yes - matched
	}
	return matched
}

// registerBytes is the size of all registers.
const registerBytes = 64

// registerByte is a byte of which the bits in known are known; the others of value are 0.
type registerByte struct{ known, value byte }

// registers are the four registers of 16 bytes, or the same as sixteen of 4 bytes. Bits that were not loaded are
// unknown.
type registers [registerBytes]registerByte

// at returns the first byte of a register.
func at(register uint32) uint32 {
	if register >= unix.NFT_REG32_00 {
		return (register - unix.NFT_REG32_00) * 4
	}
	return (register - unix.NFT_REG_1) * 16
}

func (r *registers) set(register, i uint32, b byte) {
	if k := at(register) + i; k < registerBytes {
		r[k] = registerByte{0xff, b}
	}
}

// forget makes the bytes of a register unknown.
func (r *registers) forget(register, size uint32) {
	for k := at(register); k < min(at(register)+size, registerBytes); k++ {
		r[k] = registerByte{}
	}
}

// put loads bytes, and zeros up to the end of their last 4 bytes.
func (r *registers) put(register uint32, b []byte) {
	for i := range uint32((len(b) + 3) &^ 3) {
		if i < uint32(len(b)) {
			r.set(register, i, b[i])
		} else {
			r.set(register, i, 0)
		}
	}
}

// putBits loads bytes of which some bits are known.
func (r *registers) putBits(register uint32, b, known []byte) {
	for i := range b {
		if k := int(at(register)) + i; k < registerBytes {
			r[k] = registerByte{known[i], b[i] & known[i]}
		}
	}
}

// compare compares the bytes of a register with b, in network byte order.
func (r *registers) compare(register, op uint32, b []byte) truth {
	begin := at(register)
	if len(b) == 0 || begin >= registerBytes || int(begin)+len(b) > registerBytes {
		return maybe
	}
	equal, sign := yes, 0 // sign is that of the first difference, valid while all bytes before it are known
	for i, want := range b {
		switch have := r[int(begin)+i]; {
		case have.value^want&have.known == 0 && have.known != 0xff:
			equal = min(equal, maybe)
		case have.value != want&have.known:
			if equal == yes {
				sign = cmp.Compare(have.value, want)
			}
			if (equal == maybe || have.known != 0xff) && op != unix.NFT_CMP_EQ && op != unix.NFT_CMP_NEQ {
				return maybe
			}
			equal = no
		}
		if equal == no {
			break
		}
	}
	holds := func(ok bool) truth {
		if ok {
			return yes
		}
		return no
	}
	switch op {
	case unix.NFT_CMP_EQ:
		return equal
	case unix.NFT_CMP_NEQ:
		return yes - equal
	}
	if equal == maybe {
		return maybe
	}
	switch op {
	case unix.NFT_CMP_LT:
		return holds(sign < 0)
	case unix.NFT_CMP_LTE:
		return holds(sign <= 0)
	case unix.NFT_CMP_GT:
		return holds(sign > 0)
	case unix.NFT_CMP_GTE:
		return holds(sign >= 0)
	}
	return maybe
}

// bitwise computes (register & mask) ^ xor.
func (r *registers) bitwise(d attributes) {
	from, to, size := d.number(unix.NFTA_BITWISE_SREG), d.number(unix.NFTA_BITWISE_DREG), d.number(unix.NFTA_BITWISE_LEN)
	mask, xor := d.value(unix.NFTA_BITWISE_MASK), d.value(unix.NFTA_BITWISE_XOR)
	before := *r
	r.forget(to, size)
	if uint32(len(mask)) != size || uint32(len(xor)) != size { // shifts and operations of two registers
		return
	}
	for i := range size {
		k := at(from) + i
		if k >= registerBytes {
			return
		}
		if to := at(to) + i; to < registerBytes {
			known := before[k].known | ^mask[i]
			r[to] = registerByte{known, (before[k].value&mask[i] ^ xor[i]) & known}
		}
	}
}

// familyName has the names of nft for the families of tables.
var familyName = map[uint8]string{
	unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_ARP: "arp", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_NETDEV: "netdev",
}
