package guard

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestOnlyComposedMessagesReachTheSpeaker sends mutated messages in every state. The speaker receives no UPDATE, one
// OPEN that has no other capabilities than those in use, each with its length, and each ROUTE-REFRESH of a family in
// use. A second OPEN ends the session (RFC 4271, Section 6.6).
func TestOnlyComposedMessagesReachTheSpeaker(t *testing.T) {
	makers := variants(new(Counters))
	m := &mutator{Rand: rand.New(rand.NewPCG(15, 16)), seeds: seeds()}
	opens, refreshes, seconds := 0, 0, 0
	guards := make([]*Guard, len(makers))
	total := mutations(t, gate.Count(t, gate.Models, 100_000, 1_500_000)) / 2
	for i := range total {
		k := m.IntN(len(makers))
		if guards[k] == nil {
			guards[k] = makers[k](t)
		}
		g, msg := guards[k], m.next()
		before := g.in.state
		out, err := g.FromPeer(msg, nil)
		all, bad := frames(out)
		if bad != nil {
			t.Fatal(bad)
		}
		for _, f := range all {
			switch {
			case f[18] == TypeOpen && before == openSent:
				opens++
				checkComposed(t, f)
			case f[18] == TypeRouteRefresh && before == established && (bytes.Equal(f[HeaderLen:], []byte{0, 1, 0, 1}) || bytes.Equal(f[HeaderLen:], []byte{0, 2, 0, 1})):
				refreshes++
			default:
				t.Fatalf("message %d: %x\nthe speaker gets %x", i, msg, f)
			}
		}
		if head, _ := checkHeader(msg); head == len(msg) && msg[18] == TypeOpen && before != openSent {
			seconds++
			var n *Notification
			if !errors.As(err, &n) || n.Code != CodeFSMError || n.Subcode != byte(before)+1 {
				t.Fatalf("message %d: a second OPEN in state %d: %v", i, before, err)
			}
		}
		if err != nil || g.in.framer.n != 0 {
			guards[k] = nil
		}
	}
	if enough := total / 1000; opens < enough || refreshes < enough || seconds < enough {
		t.Errorf("%d OPENs, %d refreshes, %d second OPENs: the mutations exercise too little", opens, refreshes, seconds)
	}
}

// checkComposed checks the capabilities of an OPEN for the speaker.
func checkComposed(t *testing.T, open []byte) {
	t.Helper()
	m, err := bgp.ParseBGPMessage(open)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range m.Body.(*bgp.BGPOpen).OptParams {
		for _, c := range p.(*bgp.OptionParameterCapability).Capability {
			b, err := c.Serialize()
			if err != nil || len(b) < 2 {
				t.Fatal(err)
			}
			n := len(b) - 2
			if fits := map[bgp.BGPCapabilityCode]bool{bgp.BGP_CAP_MULTIPROTOCOL: n == 4, bgp.BGP_CAP_ROUTE_REFRESH: n == 0, bgp.BGP_CAP_GRACEFUL_RESTART: n%4 == 2,
				bgp.BGP_CAP_FOUR_OCTET_AS_NUMBER: n == 4}; !fits[c.Code()] {
				t.Fatalf("capability %x in %x", b, open)
			}
		}
	}
}
