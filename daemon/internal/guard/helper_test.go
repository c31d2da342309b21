package guard

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/fared/fared/fare"
)

// octetsOf joins hexadecimal fields; blanks separate them for the reader.
func octetsOf(fields ...string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(strings.Join(fields, "")), ""))
	if err != nil {
		panic(err) // a mistake in the test itself
	}
	return b
}

// message prepends a header to a body.
func message(kind byte, body []byte) []byte {
	b := append(beginMessage(nil, kind), body...)
	return endMessage(b, 0)
}

// updateOf returns an UPDATE with the three fields.
func updateOf(withdrawn, attrs, nlri []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(withdrawn)))
	b = append(b, withdrawn...)
	b = binary.BigEndian.AppendUint16(b, uint16(len(attrs)))
	return message(TypeUpdate, append(append(b, attrs...), nlri...))
}

var (
	keepalive = message(TypeKeepalive, nil)
	endOf4    = appendEndOfRIB(nil, IPv4Unicast)
	endOf6    = appendEndOfRIB(nil, IPv6Unicast)
)

// testConfig returns the configuration of the tests. The leaf is AS 65001,
// 10.0.0.1 and fe80::1, identifier 1.1.1.1; we are AS 65100, 10.0.0.2 and
// 2001:db8:1::2, identifier 2.2.2.2.
func testConfig() Config {
	return Config{
		LocalAS: 65100, PeerAS: 65001, RouterID: netip.MustParseAddr("2.2.2.2"),
		Families:      []Family{IPv4Unicast, IPv6Unicast},
		Accept:        []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("2001:db8:a::/48")},
		NextHop:       OneOf(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fe80::1%eth0")),
		LocalNextHop4: netip.MustParseAddr("10.0.0.2"), LocalNextHop6: netip.MustParseAddr("2001:db8:1::2"),
		Carrier:  Carrier{FARE: CodePoint{0x80, 0x0f}},
		Counters: new(Counters),
	}
}

const (
	capsBoth = "01 04 0001 00 01  01 04 0002 00 01  02 00 "
	capAS4   = "41 04 0000fde9 "
)

// leafOpen returns the leaf's OPEN with these capabilities in one parameter.
func leafOpen(caps ...string) []byte {
	c := octetsOf(caps...)
	body := octetsOf("04 fde9 005a 01010101")
	if len(c) == 0 {
		return message(TypeOpen, append(body, 0))
	}
	body = append(body, byte(len(c)+2), 2, byte(len(c)))
	return message(TypeOpen, append(body, c...))
}

// speakerOpen returns the embedded speaker's OPEN.
func speakerOpen() []byte {
	m := bgp.NewBGPOpenMessage(65100, 9, "9.9.9.9", []bgp.OptionParameterInterface{
		bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
			bgp.NewCapRouteRefresh(),
			bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC),
			bgp.NewCapFourOctetASNumber(65100),
			bgp.NewCapGracefulRestart(true, true, 120, []*bgp.CapGracefulRestartTuple{bgp.NewCapGracefulRestartTuple(bgp.RF_IPv4_UC, true)}),
			bgp.NewCapFQDN("host", "domain"),
		})})
	b, err := m.Serialize()
	if err != nil {
		panic(err)
	}
	return b
}

// establish returns a guard whose session is up.
func establish(t testing.TB, c Config, open []byte) *Guard {
	t.Helper()
	g := New(c)
	if _, err := g.FromSpeaker(append(speakerOpen(), keepalive...), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := g.FromPeer(append(bytes.Clone(open), keepalive...), nil); err != nil {
		t.Fatal(err)
	}
	if _, ok := g.Info(); !ok {
		t.Fatal("session is not settled")
	}
	return g
}

// frames cuts a stream into messages.
func frames(stream []byte) ([][]byte, error) {
	var all [][]byte
	r, buf := bytes.NewReader(stream), new([MaxMessage]byte)
	for r.Len() > 0 {
		m, err := ReadMessage(r, buf)
		if err != nil {
			return nil, err
		}
		all = append(all, bytes.Clone(m))
	}
	return all, nil
}

var bothFamilies = map[bgp.RouteFamily]bgp.BGPAddPathMode{bgp.RF_IPv4_UC: 0, bgp.RF_IPv6_UC: 0}

// parsed parses the guard's output like the embedded speaker: every message must be parsable and every UPDATE valid
// without a remark. Octets of a peer are no input for it.
func parsed(stream []byte) (messages []*bgp.BGPMessage, err error) {
	all, err := frames(stream)
	if err != nil {
		return nil, err
	}
	for _, f := range all {
		m, err := bgp.ParseBGPMessage(f)
		if err != nil {
			return nil, fmt.Errorf("%x: %w", f, err)
		}
		if u, ok := m.Body.(*bgp.BGPUpdate); ok {
			if ok, err := bgp.ValidateUpdateMsg(u, bothFamilies, true, false, false); !ok {
				return nil, fmt.Errorf("%x: %w", f, err)
			}
		}
		messages = append(messages, m)
	}
	return messages, nil
}

// checkSums asserts received = passed + each reason.
func checkSums(t testing.TB, c *Counters) {
	t.Helper()
	for _, d := range []Direction{Inbound, Outbound} {
		for _, u := range Units() {
			sum := c.Passed(d, u)
			for _, r := range Reasons() {
				if r.Unit() == u {
					sum += c.Dropped(d, r)
				}
			}
			if got := c.Received(d, u); got != sum {
				t.Errorf("%v %v: received %d, but passed and dropped make %d", d, u, got, sum)
			}
		}
	}
}

// show formats changes: "+prefix AS AS... community...", "-prefix" or "end family", separated by ", ".
func show(changes []Change) string {
	var all []string
	for _, c := range changes {
		var s strings.Builder
		switch {
		case c.Ended != 0:
			fmt.Fprintf(&s, "end %v", c.Ended)
		case c.Attrs == nil:
			fmt.Fprintf(&s, "-%v", c.Prefix)
		default:
			fmt.Fprintf(&s, "+%v", c.Prefix)
			for _, as := range c.Attrs.ASPath {
				fmt.Fprintf(&s, " %d", as)
			}
			for _, community := range c.Attrs.Communities {
				fmt.Fprintf(&s, " %x", community[:])
			}
			if c.Attrs.Extended != (fare.IPv6Community{}) {
				fmt.Fprintf(&s, " %x", c.Attrs.Extended[:])
			}
			if c.Attrs.Signals != 0 {
				s.WriteString(" " + c.Attrs.Signals.String())
			}
		}
		all = append(all, s.String())
	}
	return strings.Join(all, ", ")
}

// attributes of a good route, field by field
const (
	origin   = "40 01 01 00 "
	pathLeaf = "40 02 06 02 01 0000fde9 "
	hopLeaf  = "40 03 04 0a000001 "
	med      = "80 04 04 00000064 "
	lb400    = "c0 10 08 0004 fde9 5139a6e5 " // 0x00/0x04
	good4    = origin + pathLeaf + hopLeaf
	host4    = "20 0a010001 "
	other4   = "20 0a010002 "
	host6    = "80 20010db8000a00000000000000000001 "
	// MP_REACH of host6 with the leaf's link-local address
	reach6   = "80 0e 26 0002 01 10 fe800000000000000000000000000001 00 " + host6
	unreach6 = "80 0f 14 0002 01 " + host6
)
