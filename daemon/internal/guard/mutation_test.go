package guard

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/fared/fared/internal/testkit/gate"
)

// seeds returns good messages, and bad ones that are close to good.
func seeds() [][]byte {
	every := good4 + med + lb400 + "40 05 04 00000064 40 06 00 c0 07 08 0000fde9 01010101 c0 08 04 fde90001 " +
		"c0 20 0c 0000fde9 00000001 00000002 c0 63 02 0102 "
	return [][]byte{
		leafOpen(), leafOpen(capsBoth, capsBoth, capAS4, "40 0a 8078 0001 01 80 0002 01 80", "05 06 0001 0001 0002"),
		message(TypeOpen, octetsOf("04 fde9 005a 01010101 ff ff 0012  02 0006 01 04 0002 00 01  02 0006 41 04 0000fde9")),
		keepalive, endOf4, endOf6,
		updateOf(nil, octetsOf(good4), octetsOf(host4, other4)),
		updateOf(octetsOf(host4, other4), nil, nil),
		updateOf(nil, octetsOf(origin, pathLeaf, reach6), nil),
		updateOf(nil, octetsOf(unreach6), nil),
		updateOf(octetsOf(host4), octetsOf(every, reach6, unreach6), octetsOf(other4)),
		updateOf(nil, octetsOf(origin, "40 02 04 02 01 fde9", hopLeaf, "c0 11 06 02 01 0000fde9"), octetsOf(host4)),
		updateOf(nil, octetsOf("80 0e 1a 0001 01 10 fe800000000000000000000000000001 00 ", host4, origin, pathLeaf), nil),
		updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 0e 0001 02 04 0a000001 00 ", host4), nil),
		message(TypeRouteRefresh, octetsOf("0001 00 01")),
		message(TypeNotification, octetsOf("06 02 05 68656c6c6f")),
	}
}

// mutator creates messages for the guard alone; the same seed creates the same ones. No other software may receive
// them: they are arbitrary.
type mutator struct {
	*rand.Rand
	seeds [][]byte
	buf   []byte
}

// pieces are the attributes from which compose builds, good, odd and bad.
var pieces = [][]byte{
	octetsOf(origin), octetsOf(origin), octetsOf(pathLeaf), octetsOf(pathLeaf), octetsOf(hopLeaf), octetsOf(hopLeaf),
	octetsOf(med), octetsOf(lb400), octetsOf(reach6), octetsOf(reach6), octetsOf(unreach6),
	octetsOf("40 02 0a 02 02 0000fde9 0000fe4c"), octetsOf("40 02 04 02 01 fde9"), octetsOf("40 02 06 02 02 fde9 5ba0"),
	octetsOf("c0 11 06 02 01 fa56ea01"), octetsOf("40 05 04 00000064"), octetsOf("c0 07 06 fde9 01010101"), octetsOf("40 06 00"),
	octetsOf("c0 12 08 fa56ea01 01010101"), octetsOf("c0 08 04 fde90001"), octetsOf("c0 20 0c 0000fde9 00000001 00000002"),
	octetsOf("c0 10 18 4004fde9 5139a6e5 800f0101 01010190 0002fde900000001"), octetsOf("c0 63 02 0102"), octetsOf("80 63 01 00"),
	octetsOf("80 0e 1a 0001 01 10 fe800000000000000000000000000001 00 ", other4), octetsOf("80 0e 0e 0001 01 04 0a000001 00 ", host4),
	octetsOf("80 0e 0e 0001 02 04 0a000001 00 ", host4), octetsOf("40 03 04 0a000003"), octetsOf("80 0f 08 0001 01 ", host4),
}

// prefixes are those that compose announces and withdraws.
var prefixes = [][]byte{octetsOf(host4), octetsOf(host4), octetsOf(other4), octetsOf("20 0a020001"), octetsOf("18 0a0100"), octetsOf("00")}

// compose returns an UPDATE of valid structure with random attributes, order
// and values; three in four are complete.
func (m *mutator) compose(b []byte) []byte {
	pick := func(b []byte, from [][]byte, n int) []byte {
		for range m.IntN(n) {
			b = append(b, from[m.IntN(len(from))]...)
		}
		return b
	}
	b = append(beginMessage(b, TypeUpdate), 0, 0)
	start := len(b)
	b = pick(b, prefixes, 3)
	binary.BigEndian.PutUint16(b[start-2:], uint16(len(b)-start))
	b = append(b, 0, 0)
	start = len(b)
	if m.IntN(4) != 0 {
		b = append(append(append(b, pieces[0]...), pieces[2]...), pieces[4]...)
	}
	b = pick(b, pieces, 5)
	binary.BigEndian.PutUint16(b[start-2:], uint16(len(b)-start))
	if m.IntN(4) == 0 && len(b) > start {
		b[start+m.IntN(len(b)-start)] ^= 1 << m.IntN(8)
	}
	return endMessage(pick(b, prefixes, 4), 0)
}

// next returns a message with a few changes. In fifteen of sixteen cases its
// header is repaired, so that the change passes the framing.
func (m *mutator) next() []byte {
	if m.IntN(2) == 0 {
		m.buf = m.compose(m.buf[:0])
		return m.buf
	}
	b := append(m.buf[:0], m.seeds[m.IntN(len(m.seeds))]...)
	for range m.IntN(4) {
		at := HeaderLen + m.IntN(len(b)-HeaderLen+1)
		end := at + m.IntN(min(len(b)-at, 40)+1)
		switch m.IntN(6) {
		case 0: // flip a bit
			if at < len(b) {
				b[at] ^= 1 << m.IntN(8)
			}
		case 1: // set an octet to an edge of its range
			if at < len(b) {
				b[at] = [...]byte{0, 1, 2, 3, 4, 5, 16, 32, 33, 127, 128, 129, 254, 255}[m.IntN(14)]
			}
		case 2: // remove a piece
			b = append(b[:at], b[end:]...)
		case 3: // insert a piece of another message
			other := m.seeds[m.IntN(len(m.seeds))]
			from := m.IntN(len(other))
			piece := other[from:min(len(other), from+m.IntN(60))]
			b = append(b[:at], append(append([]byte(nil), piece...), b[at:]...)...)
		case 4: // double a piece
			b = append(b[:end], append(append([]byte(nil), b[at:end]...), b[end:]...)...)
		case 5: // insert an attribute of any type and length
			b = append(b[:at], append([]byte{byte(m.Uint32()), byte(m.Uint32()), byte(m.IntN(20))}, b[at:]...)...)
		}
	}
	if len(b) > MaxMessage {
		b = b[:MaxMessage]
	}
	if b[18] == TypeUpdate && len(b) >= 23 && m.IntN(2) == 0 {
		// repair the length of the attributes as well
		if n := int(binary.BigEndian.Uint16(b[19:])); n+23 <= len(b) && m.IntN(2) == 0 {
			binary.BigEndian.PutUint16(b[21+n:], uint16(m.IntN(len(b)-23-n+1)))
		} else {
			b[19], b[20] = 0, 0
			binary.BigEndian.PutUint16(b[21:], uint16(len(b)-23))
		}
	}
	binary.BigEndian.PutUint16(b[16:], uint16(len(b)))
	if m.IntN(16) == 0 {
		b[m.IntN(HeaderLen)] ^= 1 << m.IntN(8)
	}
	m.buf = b
	return b
}

// mutationsKey is the environment variable with another number of messages to try, such as 10000000.
const mutationsKey = "FARED_MUTATIONS"

// mutations returns the number of messages to try: n, or FARED_MUTATIONS.
func mutations(t *testing.T, n int) int {
	if s := os.Getenv(mutationsKey); s != "" {
		v, err := strconv.Atoi(s)
		if err != nil || v <= 0 {
			t.Fatalf("%s=%q: give a number of messages, such as 10000000", mutationsKey, s)
		}
		return v
	}
	return n
}

// variants returns the sessions that receive mutated messages.
func variants(counters *Counters) []func(testing.TB) *Guard {
	at := func(s state, extended bool, limit int, open []byte) func(testing.TB) *Guard {
		return func(t testing.TB) *Guard {
			c := testConfig()
			c.ExtendedNextHop, c.MaxPrefixes, c.Counters = extended, limit, counters
			if s == established {
				return establish(t, c, open)
			}
			g := New(c)
			if s == openConfirm {
				if _, err := g.FromPeer(open, nil); err != nil {
					t.Fatal(err)
				}
			}
			return g
		}
	}
	return []func(testing.TB) *Guard{
		at(established, false, 0, newLeaf), at(established, true, 3, newLeaf),
		at(established, true, 0, leafOpen(capsBoth)), at(established, false, 0, leafOpen(capAS4)),
		at(established, false, 0, leafOpen("01 04 0002 00 01", capAS4)),
		at(openSent, false, 0, nil), at(openConfirm, true, 0, newLeaf),
	}
}

// TestMutationsFromPeer checks that no input from a peer makes the guard panic,
// or emit other messages for the speaker than those that the guard composes;
// that the changes of routes are changes; and that everything is counted.
func TestMutationsFromPeer(t *testing.T) {
	counters := new(Counters)
	makers := variants(counters)
	guards, owners := make([]*Guard, len(makers)), make([]owner, len(makers))
	m := &mutator{Rand: rand.New(rand.NewPCG(1, 2)), seeds: seeds()}
	var out []byte
	var err error
	resets, changed, total := 0, 0, mutations(t, gate.Count(t, gate.Models, 100_000, 1_500_000))
	refused := map[[2]byte]int{}
	for i := range total {
		// mostly established sessions: the last two are not
		k := m.IntN(len(makers) - 2)
		if m.IntN(16) == 0 {
			k = len(makers) - 1 - m.IntN(2)
		}
		if guards[k] == nil {
			guards[k], owners[k] = makers[k](t), owner{}
		}
		msg := m.next()
		before := counters.Received(Inbound, Messages)
		out, err = guards[k].FromPeer(msg, out[:0])
		after := counters.Received(Inbound, Messages)
		if _, bad := parsed(out); bad != nil {
			t.Fatalf("message %d: %x\nmakes %x\nof which the speaker says %v", i, msg, out, bad)
		}
		if after > before+uint64(len(msg)/HeaderLen) {
			t.Fatalf("message %d: %x counts %d times", i, msg, after-before)
		}
		changes := guards[k].TakeChanges()
		changed += len(changes)
		if bad := owners[k].apply(changes); bad != nil {
			t.Fatalf("message %d: %x\n%v", i, msg, bad)
		}
		if err != nil {
			resets++
			var n *Notification
			var closed *PeerClosed
			if !errors.As(err, &n) && !errors.As(err, &closed) {
				t.Fatalf("message %d: untyped error %v", i, err)
			}
			if n != nil {
				if _, bad := parsed(n.AppendTo(nil)); bad != nil {
					t.Fatal(bad)
				}
				if bad := judgeReset(n, msg); bad != nil {
					t.Fatalf("message %d: %x\n%v", i, msg, bad)
				}
				refused[[2]byte{n.Code, n.Subcode}]++
			}
		}
		// An unrepaired length may leave half a message behind.
		if err != nil || guards[k].in.framer.n != 0 {
			guards[k] = nil
		}
	}
	checkSums(t, counters)
	if resets < total/10 || changed < total/8 {
		t.Errorf("%d resets, %d changes: the mutations exercise too little", resets, changed)
	}
	for _, r := range Reasons() {
		rare := r == CapabilityUnlisted && total < 300_000
		if r != CommunityExcess && r != CommunityNonTransitive && r != RouteOversize && !rare && counters.Dropped(Inbound, r) == 0 {
			t.Errorf("no mutation was dropped as %v", r)
		}
	}
	for _, kind := range [][2]byte{{CodeMessageHeaderError, 2}, {CodeUpdateMessageError, 1}, {CodeUpdateMessageError, 2}, {CodeUpdateMessageError, 9}, {CodeUpdateMessageError, 10},
		{CodeFSMError, 1}, {CodeFSMError, 2}, {CodeFSMError, 3}} {
		if refused[kind] == 0 {
			t.Errorf("no mutation was refused by NOTIFICATION %d/%d", kind[0], kind[1])
		}
	}
	t.Logf("%d messages: %d ends of a session, %d changes of routes", total, resets, changed)
}

// judgeReset checks the data of a NOTIFICATION for a message: the attribute for 3/2 and 3/9 (RFC 4271, Section 6.3),
// which is optional unless it is unknown, and the type for a message in the wrong state (RFC 6608, Section 4).
func judgeReset(n *Notification, msg []byte) error {
	switch {
	case n.Code == CodeUpdateMessageError && (n.Subcode == 2 || n.Subcode == 9):
		d := n.Data
		head, length := 3, 0
		if len(d) >= 4 && d[0]&flagExtendedLength != 0 {
			head, length = 4, int(binary.BigEndian.Uint16(d[2:]))
		} else if len(d) >= 3 {
			length = int(d[2])
		}
		if len(d) < 3 || len(d) != head+length || !bytes.Contains(msg, d) {
			return fmt.Errorf("the data %x is no attribute of the message", d)
		}
		if known := flagsOf[d[1]] != 0; known != (n.Subcode == 9) || !known && d[0]&flagOptional != 0 {
			return fmt.Errorf("the attribute %x is no reason for %d/%d", d, n.Code, n.Subcode)
		}
	case n.Code == CodeUpdateMessageError && len(n.Data) > 0, n.Code == CodeFSMError && !bytes.Equal(n.Data, msg[18:19]):
		return fmt.Errorf("%d/%d has the data %x", n.Code, n.Subcode, n.Data)
	}
	return nil
}

// TestMutationsFromSpeaker is the same for the direction to the peer: the
// speaker is trusted, but the guard must not panic, nor leak the non-transitive
// form.
func TestMutationsFromSpeaker(t *testing.T) {
	counters := new(Counters)
	makers := variants(counters)[:5]
	guards := make([]*Guard, len(makers))
	m := &mutator{Rand: rand.New(rand.NewPCG(3, 4)), seeds: append(seeds(), speakerOpen(),
		updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 10 18 8f00fe4c 5139a6e5 8f40fe4c 5139a6e5 4004fe4c 5139a6e5"), octetsOf(host4)))}
	var out []byte
	var err error
	for i := range mutations(t, gate.Count(t, gate.Models, 100_000, 1_500_000)) / 3 {
		k := m.IntN(len(makers))
		if guards[k] == nil {
			guards[k] = makers[k](t)
		}
		msg := m.next()
		out, err = guards[k].FromSpeaker(msg, out[:0])
		if bad := checkOutbound(out); bad != nil {
			t.Fatalf("message %d: %x\nmakes %x\n%v", i, msg, out, bad)
		}
		if err != nil || guards[k].out.framer.n != 0 {
			guards[k] = nil
		}
	}
	checkSums(t, counters)
	if counters.Dropped(Outbound, CommunityNonTransitive) == 0 || counters.Passed(Outbound, Communities) == 0 {
		t.Error("the mutations exercise no communities")
	}
}

// checkOutbound reads the output for the peer like the peer.
func checkOutbound(out []byte) error {
	all, err := frames(out)
	if err != nil {
		return err
	}
	for _, f := range all {
		if f[18] != TypeNotification { // its data is the speaker's
			if _, err := parsed(f); err != nil {
				return err
			}
		}
		if f[18] != TypeUpdate {
			continue
		}
		m, err := bgp.ParseBGPMessage(f)
		if err != nil {
			return err
		}
		for _, a := range m.Body.(*bgp.BGPUpdate).PathAttributes {
			switch a := a.(type) {
			case *bgp.PathAttributeNextHop:
				if a.Value.String() != "10.0.0.2" {
					return errors.New("next hop is not ours")
				}
			case *bgp.PathAttributeExtendedCommunities:
				// The library does not preserve the transitive bit, so examine the octets.
				for v := valueOf(f, attrExtended); len(v) > 0; v = v[8:] {
					if v[0] == lbNonTransitive && v[1] == lbSubType || v[0] == carrierType {
						return errors.New("non-transitive or wrapped community goes out")
					}
				}
			}
		}
	}
	return nil
}

// valueOf returns the value of an attribute in a canonical UPDATE.
func valueOf(f []byte, kind byte) []byte {
	n := int(binary.BigEndian.Uint16(f[19:]))
	attrs := f[23+n:]
	for len(attrs) > 0 {
		head, n := 3, int(attrs[2])
		if attrs[0]&flagExtendedLength != 0 {
			head, n = 4, int(binary.BigEndian.Uint16(attrs[2:]))
		}
		if attrs[1] == kind {
			return attrs[head : head+n]
		}
		attrs = attrs[head+n:]
	}
	return nil
}

func addSeeds(f *testing.F) {
	for i, s := range seeds() {
		f.Add(s, uint8(i))
	}
	m := &mutator{Rand: rand.New(rand.NewPCG(5, 6)), seeds: seeds()}
	for i := range 64 {
		f.Add(append([]byte(nil), m.next()...), uint8(i))
	}
}

func FuzzFromPeer(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, stream []byte, variant uint8) {
		counters := new(Counters)
		makers := variants(counters)
		whole := makers[int(variant)%len(makers)](t)
		second := newTwin(whole)
		out, err := whole.FromPeer(stream, nil)
		if _, bad := parsed(out); bad != nil {
			t.Fatal(bad)
		}
		checkSums(t, counters)
		changes := show(whole.TakeChanges())
		// octet by octet the result is the same
		single, got := makers[int(variant)%len(makers)](t), []byte(nil)
		all, held := []Change(nil), owner{}
		var err2 error
		for i := 0; i < len(stream) && err2 == nil; i++ {
			got, err2 = single.FromPeer(stream[i:i+1], got)
			all = append(all, single.TakeChanges()...)
		}
		if string(got) != string(out) || (err == nil) != (err2 == nil) || show(all) != changes {
			t.Fatalf("whole: %x %v %s\nin octets: %x %v %s", out, err, changes, got, err2, show(all))
		}
		if bad := held.apply(all); bad != nil {
			t.Fatal(bad)
		}
		// a single UPDATE has the twin's effect
		if !isUpdate(stream) || int(variant)%len(makers) >= 5 {
			return
		}
		if fine := second.update(stream[HeaderLen:]); fine != (err == nil) || fine && !maps.Equal(held, owner(second.table)) {
			t.Fatalf("guard: %v, %v\ntwin goes on: %v, %v", err, held, fine, second.table)
		}
	})
}

func FuzzFromSpeaker(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, stream []byte, variant uint8) {
		counters := new(Counters)
		makers := variants(counters)[:5]
		out, _ := makers[int(variant)%len(makers)](t).FromSpeaker(stream, nil)
		if bad := checkOutbound(out); bad != nil {
			t.Fatal(bad)
		}
		checkSums(t, counters)
	})
}
