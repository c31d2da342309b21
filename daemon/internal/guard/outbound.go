package guard

import (
	"encoding/binary"
	"fmt"

	"github.com/fared/fared/fare"
)

// SpeakerFault is an invalid message of the speaker. The session must end; send
// Cease to the peer.
type SpeakerFault struct{ Cause *Notification }

func (f *SpeakerFault) Error() string {
	return fmt.Sprintf("bgp: the local speaker's message is invalid: %s", f.Cause.Detail)
}

// Unwrap returns the cause.
func (f *SpeakerFault) Unwrap() error { return f.Cause }

// outbound is the state of the direction from the speaker to the peer.
type outbound struct {
	framer  Framer
	err     error
	opened  bool // our OPEN went out
	tally   tally
	update  update
	emitter emitter
	// own4 and own6 are the configured next hops for IPv4 and IPv6.
	own4, own6 []byte
	marked     uint32 // see Guard.Marked
	marks      int    // prefixes of the current UPDATE that are marks
}

func (out *outbound) init(g *Guard) {
	out.update.families, out.update.width = g.families, 4
	out.own4 = octets(g.config.LocalNextHop4)
	out.own6 = append(octets(g.config.LocalNextHop6), octets(g.config.LocalLinkLocal)...)
	carrier, nonTransitive := g.config.Carrier, g.config.NonTransitive
	out.update.carrier = func(c [8]byte) ([8]byte, Reason) {
		if unwrapped, ok := carrier.Unwrap(c); ok {
			c = unwrapped
		} else if _, known := carrier.Wrap(c); !known {
			return c, CommunityUnlisted
		}
		// The non-transitive form is not sent to another AS (RFC 4360, Section 6) unless configured (RFC 10005, Section
		// 3.1).
		if c[0] == lbNonTransitive && c[1] == lbSubType && !nonTransitive {
			return c, CommunityNonTransitive
		}
		return c, None
	}
}

// FromSpeaker processes octets of the speaker, cut anywhere, and appends the messages for the peer to b, without marks
// (see Mark). The error is a *SpeakerFault and final: write the appended octets, then send the peer a Cease and close.
func (g *Guard) FromSpeaker(chunk, b []byte) ([]byte, error) {
	out := &g.out
	if out.err != nil {
		return b, out.err
	}
	for {
		msg, bad := out.framer.Next(&chunk)
		if msg == nil && bad == nil {
			return b, nil
		}
		reason := None
		if bad == nil {
			b, reason, bad = g.speakerMessage(msg, b)
		}
		if bad != nil {
			reason, out.err = bad.Reason, &SpeakerFault{Cause: bad}
		}
		if bad == nil && reason == MessageEmpty && out.marks > 0 {
			out.tally = tally{} // not counted: the message consists of marks only
			continue
		}
		out.tally.judge(Messages, reason)
		out.tally.flush(g.counters, Outbound)
		if bad != nil {
			return b, out.err
		}
	}
}

// speakerMessage processes one framed message of the speaker.
func (g *Guard) speakerMessage(msg, b []byte) ([]byte, Reason, *Notification) {
	out := &g.out
	body := msg[HeaderLen:]
	switch msg[18] {
	case TypeOpen:
		if out.opened {
			break
		}
		b, bad := g.openFromSpeaker(body, b, &out.tally)
		out.opened = bad == nil
		return b, None, bad
	case TypeUpdate:
		if info, both := g.Info(); both {
			return g.updateFromSpeaker(body, b, info)
		}
	case TypeNotification:
		return append(b, msg...), None, nil
	case TypeKeepalive:
		if out.opened {
			return append(b, msg...), None, nil
		}
	case TypeRouteRefresh:
		info, both := g.Info()
		family := familyOf(binary.BigEndian.Uint16(body), body[3])
		switch {
		case !both:
		case body[2] != 0 || !info.RouteRefresh || !info.Families.Has(family):
			return b, MessageRefresh, nil
		default:
			return appendRefresh(b, family), None, nil
		}
	}
	return b, None, notify(CodeFSMError, 0, nil, MessageUnexpected, "message is out of order")
}

// updateFromSpeaker rewrites one UPDATE for the peer.
func (g *Guard) updateFromSpeaker(body, b []byte, info Info) ([]byte, Reason, *Notification) {
	out := &g.out
	u, e := &out.update, &out.emitter
	u.families = info.Families
	if bad := u.parse(body, &out.tally); bad != nil {
		return b, None, bad
	}
	if family := u.endOfRIB(); u.families.Has(family) {
		return appendEndOfRIB(b, family), None, nil
	}
	e.reset()
	out.marks = 0
	out.withdraw(u.withdrawn, IPv4Unicast)
	out.withdraw(u.unreach.nlri, u.unreach.family)
	h := hops{v4: out.own4, v6: out.own6}
	if len(h.v4) == 0 && info.ExtendedNextHop {
		h.v4 = out.own6 // RFC 8950, Section 3
	}
	if len(u.nlri) > 0 || len(u.reach.nlri) > 0 {
		width := 2
		if info.FourOctetAS {
			width = 4
		}
		if u.wide[0]&0x40 != 0 && !g.config.NonTransitive { // not sent to another AS (RFC 4360, Section 6)
			u.wide = fare.IPv6Community{}
			out.tally.judge(Communities, CommunityNonTransitive)
		}
		if u.fault == None {
			e.describe(u, width)
		}
		out.announce(u.nlri, IPv4Unicast, h.v4)
		out.announce(u.reach.nlri, u.reach.family, h.of(u.reach.family))
	}
	before := len(b)
	if b = e.appendUpdates(b, h); len(b) == before {
		return b, MessageEmpty, nil
	}
	return b, None, nil
}

func (h hops) of(f Family) []byte {
	if f == IPv4Unicast {
		return h.v4
	}
	return h.v6
}

func (out *outbound) withdraw(nlri []byte, family Family) {
	reason := None
	if !out.update.families.Has(family) {
		reason = WithdrawFamily
	}
	for len(nlri) > 0 {
		n := prefixLen(nlri[0])
		if mark := markOf(nlri, family); mark != 0 {
			out.marked, nlri = mark, nlri[n:]
			out.marks++
			continue
		}
		if reason == None {
			out.emitter.withdraw(nlri[:n], family)
		}
		out.tally.judge(Withdrawals, reason)
		nlri = nlri[n:]
	}
}

// announce passes the prefixes, or withdraws them if they cannot be announced
// unchanged: the peer must not keep an earlier announcement.
func (out *outbound) announce(nlri []byte, family Family, hop []byte) {
	reason := out.update.fault
	if reason == None && len(hop) == 0 {
		reason = RouteNextHop
	}
	if !out.update.families.Has(family) {
		reason = RouteFamily
	}
	for len(nlri) > 0 {
		n := prefixLen(nlri[0])
		if markOf(nlri, family) != 0 {
			nlri = nlri[n:]
			out.marks++
			continue
		}
		switch reason {
		case None:
			out.emitter.announce(nlri[:n], family)
		case RouteFamily:
		default:
			out.emitter.withdraw(nlri[:n], family)
		}
		out.tally.judge(Routes, reason)
		nlri = nlri[n:]
	}
}
