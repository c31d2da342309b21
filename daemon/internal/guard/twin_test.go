package guard

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/fared/fared/internal/testkit/gate"
)

// twin is a second reading of the rules for UPDATEs: it favors brevity over speed, and shares no code with the guard.
// Its table maps each held prefix to its AS path and communities, as show formats them.
type twin struct {
	Config
	extended, as4 bool
	families      FamilySet
	peer          uint32
	table         map[netip.Prefix]string
}

// newTwin returns the twin of an established guard.
func newTwin(g *Guard) *twin {
	info, _ := g.Info()
	return &twin{g.config, g.config.ExtendedNextHop, info.FourOctetAS, info.Families, info.PeerAS, map[netip.Prefix]string{}}
}

// cut reads prefixes of an address family; false means that they are malformed.
func cut(b []byte, octets int) (out []netip.Prefix, ok bool) {
	for len(b) > 0 {
		n := (int(b[0]) + 7) / 8
		if int(b[0]) > 8*octets || len(b) < 1+n {
			return nil, false
		}
		address := make([]byte, octets)
		copy(address, b[1:1+n])
		a, _ := netip.AddrFromSlice(address)
		out = append(out, netip.PrefixFrom(a, int(b[0])))
		b = b[1+n:]
	}
	return out, true
}

// numbers reads the AS numbers of a path of sequences.
func numbers(b []byte, width int) (out []uint32, ok bool) {
	for len(b) > 0 {
		if len(b) < 2 || b[0] != 2 || b[1] == 0 || len(b) < 2+int(b[1])*width {
			return nil, false
		}
		for i := range int(b[1]) {
			n := append(make([]byte, 4-width), b[2+i*width:2+(i+1)*width]...)
			out = append(out, binary.BigEndian.Uint32(n))
		}
		b = b[2+int(b[1])*width:]
	}
	return out, !slices.Contains(out, 0)
}

// width returns the octets of an AS number in AS_PATH.
func (w *twin) width() int {
	if w.as4 {
		return 4
	}
	return 2
}

// update applies the body of an UPDATE. It reports false if the UPDATE ends the session.
func (w *twin) update(body []byte) bool {
	n := int(binary.BigEndian.Uint16(body))
	if 4+n > len(body) {
		return false
	}
	gone, ok := cut(body[2:2+n], 4)
	m := int(binary.BigEndian.Uint16(body[2+n:]))
	if !ok || 4+n+m > len(body) {
		return false
	}
	attrs := body[4+n : 4+n+m]
	came, ok := cut(body[4+n+m:], 4)
	if !ok {
		return false
	}
	var (
		value                  = map[byte][]byte{}
		bad, others, elsewhere bool
		came6                  []netip.Prefix
		hopMP                  []byte
	)
	for len(attrs) > 0 {
		head := 3 + int(attrs[0]>>4&1)
		length := -1
		if len(attrs) >= head {
			length = int(attrs[2])
			if head == 4 {
				length = int(attrs[2])<<8 | int(attrs[3])
			}
		}
		if length < 0 || len(attrs) < head+length {
			bad, others = true, true
			break
		}
		flags, kind, v := attrs[0]>>6, attrs[1], attrs[head:head+length] // flags: 2 optional, 1 transitive
		attrs = attrs[head+length:]
		if _, twice := value[kind]; twice {
			if kind == 14 || kind == 15 {
				return false
			}
			continue
		}
		value[kind] = v
		others = others || kind != 15
		want, known := map[byte]byte{1: 1, 2: 1, 3: 1, 4: 2, 8: 3, 14: 2, 15: 2, 16: 3, 17: 3, 25: 3, 32: 3}[kind]
		if !known {
			if kind != 5 && kind != 6 && kind != 7 && flags < 2 {
				return false // RFC 4271, Section 6.3
			}
			continue
		}
		if flags != want {
			if kind == 17 {
				value[kind] = nil
			} else {
				bad = true
			}
		}
		switch kind {
		case 1:
			bad = bad || length != 1 || v[0] > 2
		case 2:
			_, ok := numbers(v, w.width())
			bad = bad || !ok
		case 4:
			bad = bad || length != 4
		case 8:
			bad = bad || length == 0 || length%4 != 0
		case 16:
			bad = bad || length == 0 || length%8 != 0
		case 25:
			bad = bad || length == 0 || length%20 != 0
		case 32:
			bad = bad || length == 0 || length%12 != 0
		case 14, 15:
			if length < 3 || kind == 14 && length < 5 {
				return false
			}
			four, six := bytes.Equal(v[:3], []byte{0, 1, 1}), bytes.Equal(v[:3], []byte{0, 2, 1})
			if !(four && w.families.Has(IPv4Unicast)) && !(six && w.families.Has(IPv6Unicast)) {
				elsewhere = elsewhere || kind == 14
				continue
			}
			octets, rest := 4, v[3:]
			if six {
				octets = 16
			}
			if kind == 14 {
				hop := int(v[3])
				if hop != 4 && hop != 16 && hop != 32 || hop == 4 && six || hop != 4 && four && !w.extended || 5+hop > length {
					return false
				}
				hopMP, rest = v[4:4+hop], v[5+hop:]
			}
			list, ok := cut(rest, octets)
			if !ok {
				return false
			}
			if kind == 14 {
				came6 = list
			} else {
				gone = append(gone, list...)
			}
		}
	}
	announces := len(came)+len(came6) > 0 || elsewhere
	if !announces && others && bad {
		return false
	}
	path, text, fine := w.attributes(value)
	bad = bad || !fine
	hop := value[3]
	bad = bad || len(came) > 0 && len(hop) != 4 || len(path) == 0 || path[0] != w.peer
	for _, p := range gone {
		delete(w.table, p)
	}
	return w.announce(came, text, bad || !w.near(hop)) && w.announce(came6, text, bad || !w.near(hopMP))
}

// attributes returns the AS path and the text of the attributes of a route, and whether it is usable.
func (w *twin) attributes(value map[byte][]byte) (path []uint32, text string, ok bool) {
	_, origin := value[1]
	raw, has := value[2]
	path, ok = numbers(raw, w.width())
	if !origin || !has || !ok {
		return path, "", false
	}
	// RFC 6793, Section 4.2.3
	aggregator, masked := value[7], false
	if _, as4 := value[18]; as4 && len(aggregator) == 6 {
		as := binary.BigEndian.Uint16(aggregator)
		masked = as != 0 && as != 23456
	}
	if longer, fine := numbers(value[17], 4); !w.as4 && fine && !masked && len(longer) <= len(path) {
		path = append(path[:len(path)-len(longer)], longer...)
	}
	own := 0
	for _, as := range path {
		text += fmt.Sprintf(" %d", as)
		if as == w.LocalAS {
			own++
		}
	}
	n := 0
	for list := value[16]; len(list) >= 8; list = list[8:] {
		kind := [2]byte(list)
		if kind == [2]byte{0, 4} || kind == [2]byte{0x40, 4} || kind == [2]byte{w.Carrier.FARE.Type, w.Carrier.FARE.SubType} {
			if n++; n <= MaxCommunities {
				text += fmt.Sprintf(" %x", list[:8])
			}
		}
	}
	text += wideText(value[25]) + signalText(value[8])
	return path, text, own <= w.AllowOwnAS && len(path) <= MaxASPath
}

// wideText returns the lowest extended Link Bandwidth among communities of 20 octets, as show does.
func wideText(communities []byte) (text string) {
	lowest := uint64(0)
	for list := communities; len(list) >= 20; list = list[20:] {
		if n := binary.BigEndian.Uint64(list[4:]); (list[0] == 2 || list[0] == 0x42) && list[1] == 6 && (text == "" || n < lowest) {
			text, lowest = fmt.Sprintf(" %x", list[:20]), n
		}
	}
	return text
}

// signalText returns the signals among communities, as show does.
func signalText(communities []byte) string {
	var found []string
	for _, x := range []struct{ community, name string }{{"ffff0000", "graceful-shutdown"}, {"ffff0006", "llgr-stale"}} {
		for at := 0; at+4 <= len(communities); at += 4 {
			if fmt.Sprintf("%x", communities[at:at+4]) == x.community {
				found = append(found, x.name)
				break
			}
		}
	}
	if found == nil {
		return ""
	}
	return " " + strings.Join(found, ",")
}

// near reports whether a next hop has an address of the peer.
func (w *twin) near(hop []byte) bool {
	for n := 16; len(hop) > 0; hop = hop[min(n, len(hop)):] {
		if a, ok := netip.AddrFromSlice(hop[:min(n, len(hop))]); ok && w.NextHop(a.Unmap()) {
			return true
		}
	}
	return false
}

// announce enters prefixes, or removes them if they are unusable. It reports false if the table would exceed its limit.
func (w *twin) announce(list []netip.Prefix, text string, unusable bool) bool {
	for _, p := range list {
		family := map[bool]Family{true: IPv4Unicast, false: IPv6Unicast}[p.Addr().Is4()]
		accepted := w.families.Has(family) && p.IsSingleIP() && !p.Addr().IsMulticast() && !p.Addr().Is4In6() &&
			slices.ContainsFunc(w.Accept, func(r netip.Prefix) bool { return r.Contains(p.Addr()) })
		switch _, held := w.table[p]; {
		case !accepted:
		case unusable:
			delete(w.table, p)
		case !held && len(w.table) == w.MaxPrefixes:
			return false
		default:
			w.table[p] = text
		}
	}
	return true
}

// owner is the table that the receiver of a guard's changes holds.
type owner map[netip.Prefix]string

// apply applies changes and checks that each one is a change.
func (o owner) apply(changes []Change) error {
	for _, c := range changes {
		text, held := o[c.Prefix]
		now := strings.TrimPrefix(show([]Change{c}), "+"+c.Prefix.String())
		switch {
		case c.Ended != 0:
		case c.Attrs == nil && !held, c.Attrs != nil && (c.New == held || held && text == now):
			return fmt.Errorf("%s (new: %v) is no change of %q", show([]Change{c}), c.New, text)
		case c.Attrs == nil:
			delete(o, c.Prefix)
		default:
			o[c.Prefix] = now
		}
	}
	return nil
}

// isUpdate reports whether a message is framed correctly and an UPDATE.
func isUpdate(msg []byte) bool {
	return len(msg) >= 23 && len(msg) <= MaxMessage && bytes.Equal(msg[:16], bytes.Repeat([]byte{0xff}, 16)) &&
		int(binary.BigEndian.Uint16(msg[16:])) == len(msg) && msg[18] == TypeUpdate
}

// TestUpdatesAgainstTwin checks that mutated UPDATEs leave the owner with the twin's table, or end the session when the
// twin does.
func TestUpdatesAgainstTwin(t *testing.T) {
	makers := variants(new(Counters))[:5]
	type pair struct {
		*Guard
		*twin
		owner
	}
	pairs := make([]*pair, len(makers))
	m := &mutator{Rand: rand.New(rand.NewPCG(7, 8)), seeds: seeds()}
	updates, resets, routes := 0, 0, 0
	total := mutations(t, gate.Count(t, gate.Models, 100_000, 1_500_000))
	for i := range total {
		k := m.IntN(len(makers))
		if pairs[k] == nil {
			g := makers[k](t)
			pairs[k] = &pair{g, newTwin(g), owner{}}
		}
		p, msg := pairs[k], m.next()
		if !isUpdate(msg) {
			continue
		}
		updates++
		fine := p.twin.update(msg[HeaderLen:])
		out, err := p.FromPeer(msg, nil)
		var n *Notification
		if errors.As(err, &n) == fine || err == nil != fine || len(out) > 0 {
			t.Fatalf("message %d: %x\nguard: %v, %d octets for the speaker; the twin goes on: %v", i, msg, err, len(out), fine)
		}
		if !fine {
			resets++
			pairs[k] = nil
			continue
		}
		before := maps.Clone(p.owner)
		changes := p.TakeChanges()
		routes += len(changes)
		if err := p.owner.apply(changes); err != nil {
			t.Fatalf("message %d: %x\n%v", i, msg, err)
		}
		if !maps.Equal(p.owner, owner(p.table)) {
			t.Fatalf("message %d: %x\nbefore %v\nguard  %v\ntwin   %v", i, msg, before, p.owner, p.table)
		}
	}
	if updates < total/2 || resets < total/20 || routes < total/6 {
		t.Errorf("%d UPDATEs, %d resets, %d changes: the mutations exercise too little", updates, resets, routes)
	}
	t.Logf("%d UPDATEs, %d ends of a session, %d changes", updates, resets, routes)
}

// TestRoutesAreThoseSent encodes random tables by GoBGP's library and cuts the stream anywhere. After each piece the
// owner has the table that the complete messages describe.
func TestRoutesAreThoseSent(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 9))
		g, c := session(t, nil, newLeaf)
		sent, now := map[netip.Prefix]string{}, owner{}
		var stream []byte
		var ends []int                        // of messages
		var tables []map[netip.Prefix]string  // after each message
		var pool [2][]bgp.AddrPrefixInterface // IPv4, IPv6
		prefixOf := map[string]netip.Prefix{} // by text
		for i := range 60 {
			four, six := fmt.Sprintf("10.1.0.%d", i), fmt.Sprintf("2001:db8:a::%x", i+1)
			pool[0] = append(pool[0], bgp.NewIPAddrPrefix(32, four))
			pool[1] = append(pool[1], bgp.NewIPv6AddrPrefix(128, six))
			prefixOf[four+"/32"], prefixOf[six+"/128"] = netip.MustParsePrefix(four+"/32"), netip.MustParsePrefix(six+"/128")
		}
		pick := func(family, n int) (list []bgp.AddrPrefixInterface) {
			for _, k := range r.Perm(60)[:n] {
				list = append(list, pool[family][k])
			}
			return list
		}
		plain := func(list []bgp.AddrPrefixInterface) (out []*bgp.IPAddrPrefix) {
			for _, p := range list {
				out = append(out, p.(*bgp.IPAddrPrefix))
			}
			return out
		}
		for range 200 {
			path := []uint32{65001}
			for range r.IntN(4) {
				path = append(path, 65200+r.Uint32N(3)*4_000_000)
			}
			text := ""
			for _, as := range path {
				text += fmt.Sprintf(" %d", as)
			}
			var communities []bgp.ExtendedCommunityInterface
			for range r.IntN(3) {
				v := []byte{4, 0xfd, 0xe9, 0x51, 0, 0, byte(r.IntN(4))}
				communities = append(communities, bgp.NewUnknownExtended(0, v))
				text += fmt.Sprintf(" 00%x", v)
			}
			attrs := []bgp.PathAttributeInterface{
				bgp.NewPathAttributeOrigin(0), bgp.NewPathAttributeNextHop("10.0.0.1"),
				bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, path)}),
			}
			if len(communities) > 0 {
				attrs = append(attrs, bgp.NewPathAttributeExtendedCommunities(communities))
			}
			var wide []byte
			for range r.IntN(3) * r.IntN(2) {
				wide = append(wide, []byte{2, 0x42, 2, 0}[r.IntN(4)], []byte{6, 6, 6, 2}[r.IntN(4)], 0, 0)
				wide = binary.BigEndian.AppendUint64(wide, uint64(r.IntN(4))<<32)
				wide = append(binary.BigEndian.AppendUint32(wide, 65001), 0, 0, 0, 0)
			}
			if len(wide) > 0 {
				attrs = append(attrs, bgp.NewPathAttributeUnknown(0xc0, 25, wide))
				text += wideText(wide)
			}
			var standard []uint32
			var octets []byte
			for range r.IntN(3) {
				c := []uint32{0xffff0000, 0xffff0006, 0xffff0001, 0xfde90000}[r.IntN(4)]
				standard, octets = append(standard, c), binary.BigEndian.AppendUint32(octets, c)
			}
			if len(standard) > 0 {
				attrs = append(attrs, bgp.NewPathAttributeCommunities(standard))
				text += signalText(octets)
			}
			var gone4, came4, gone6, came6 []bgp.AddrPrefixInterface
			if r.IntN(3) == 0 {
				gone4 = pick(0, 1+r.IntN(30))
			}
			if r.IntN(3) == 0 {
				gone6 = pick(1, 1+r.IntN(30))
				attrs = append(attrs, bgp.NewPathAttributeMpUnreachNLRI(gone6))
			}
			if r.IntN(2) == 0 {
				came4 = pick(0, 1+r.IntN(60))
			}
			if r.IntN(2) == 0 {
				came6 = pick(1, 1+r.IntN(60))
				attrs = append(attrs, bgp.NewPathAttributeMpReachNLRI("fe80::1", came6))
			}
			r.Shuffle(len(attrs), func(i, j int) { attrs[i], attrs[j] = attrs[j], attrs[i] })
			b, err := bgp.NewBGPUpdateMessage(plain(gone4), attrs, plain(came4)).Serialize()
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range slices.Concat(gone4, gone6) {
				delete(sent, prefixOf[p.String()])
			}
			for _, p := range slices.Concat(came4, came6) {
				sent[prefixOf[p.String()]] = text
			}
			stream = append(stream, b...)
			ends, tables = append(ends, len(stream)), append(tables, maps.Clone(sent))
		}
		for at, done := 0, 0; at < len(stream); {
			n := min(1+r.IntN(1<<r.IntN(14)), len(stream)-at)
			if _, err := g.FromPeer(stream[at:at+n], nil); err != nil {
				t.Fatal(err)
			}
			at += n
			for done < len(ends) && ends[done] <= at {
				done++
			}
			if err := now.apply(g.TakeChanges()); err != nil {
				t.Fatal(err)
			}
			want := owner{}
			if done > 0 {
				want = tables[done-1]
			}
			if !maps.Equal(now, want) {
				t.Fatalf("seed %d, after %d messages: got %v\nwant %v", seed, done, now, want)
			}
		}
		checkSums(t, c)
	}
}
