package guard

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/fared/fared/fare"
)

// inbound is the state of the direction from the peer.
type inbound struct {
	framer  Framer
	state   state
	err     error // why the direction is closed
	peerAS  uint32
	tally   tally
	update  update
	accept  ranges
	held    held
	refused refused
	changes []Change         // since the last call of TakeChanges
	last    *fare.Attributes // newest attributes, shared with the next route if it has equal ones

	ended     FamilySet // End-of-RIB has passed
	refreshed FamilySet // ROUTE-REFRESH has passed since the last call of Refresh
	deferred  FamilySet // ROUTE-REFRESH is held until the next call of Refresh
}

func (in *inbound) init(g *Guard) {
	in.accept = newRanges(g.config.Accept)
	in.held = newHeld(g.config.MaxPrefixes)
	in.refused.own = g.config.Own
	carrier, deciding := g.config.Carrier, g.config.Deciding
	if deciding != nil {
		in.update.deciding = func(communities []byte) int {
			list := make([][8]byte, len(communities)/8)
			for i := range list {
				list[i] = [8]byte(communities[8*i:])
			}
			return deciding(list)
		}
	}
	in.update.carrier = func(c [8]byte) ([8]byte, Reason) {
		if _, ok := carrier.Wrap(c); ok {
			return c, None
		}
		return c, CommunityUnlisted
	}
}

// FromPeer processes octets of the peer, cut anywhere. It appends the messages
// that the speaker must have to b: the OPEN, and each ROUTE-REFRESH that passes.
// TakeChanges returns the changes of the peer's routes. An error ends the
// session:
//   - *Notification: send it to the peer and close;
//   - *PeerClosed: close.
//
// After an error every call returns the same error and appends nothing.
func (g *Guard) FromPeer(chunk, b []byte) ([]byte, error) {
	in := &g.in
	if in.err != nil {
		return b, in.err
	}
	for {
		msg, bad := in.framer.Next(&chunk)
		if bad != nil {
			in.tally.judge(Messages, bad.Reason)
			in.tally.flush(g.counters, Inbound)
			in.err = bad
			return b, bad
		}
		if msg == nil {
			return b, nil
		}
		var reason Reason
		b, reason, in.err = g.message(msg, b)
		in.tally.judge(Messages, reason)
		in.tally.flush(g.counters, Inbound)
		if in.err != nil {
			return b, in.err
		}
	}
}

// Established reports whether the peer has confirmed our OPEN, and its UPDATEs
// are permitted. It is for the goroutine that calls FromPeer.
func (g *Guard) Established() bool { return g.in.state == established }

// message processes one framed message of the peer.
func (g *Guard) message(msg, b []byte) ([]byte, Reason, error) {
	in := &g.in
	kind, body := msg[18], msg[HeaderLen:]
	var bad *Notification
	reason := None
	switch {
	case kind == TypeNotification:
		// RFC 4271, Section 6.4: never answered.
		closed := peerClosed(body)
		if closed.Code == CodeOpenMessageError && closed.Subcode == OpenBadPeerAS {
			closed.Text = fmt.Sprintf("it does not expect our AS number, %d", g.config.LocalAS)
		}
		return b, MessageNotification, closed
	case kind == TypeOpen && in.state == openSent:
		if b, bad = g.openFromPeer(body, b, &in.tally); bad == nil {
			in.state = openConfirm
			info, _ := g.Info()
			in.peerAS = info.PeerAS
			in.update.families, in.update.width, in.update.extended = info.Families, 2, g.config.ExtendedNextHop
			if info.FourOctetAS {
				in.update.width = 4
			}
		}
	case kind == TypeKeepalive && in.state != openSent:
		in.state = established
	case kind == TypeUpdate && in.state == established:
		reason, bad = g.updateFromPeer(body)
	case kind == TypeRouteRefresh && in.state == established:
		// RFC 2918, Section 4; the sub-types of RFC 7313 are not announced.
		family := familyOf(binary.BigEndian.Uint16(body), body[3])
		if body[2] != 0 || !in.update.families.Has(family) {
			reason = MessageRefresh
			break
		}
		if in.refreshed.Has(family) {
			in.deferred, reason = in.deferred.with(family), MessageRepeated
			break
		}
		in.refreshed = in.refreshed.with(family)
		b = appendRefresh(b, family)
	default:
		// RFC 4271, Section 6.6; the sub-code is the state (RFC 6608, Section 3).
		bad = notify(CodeFSMError, byte(in.state)+1, []byte{kind}, MessageUnexpected, "message is out of order")
	}
	if bad != nil {
		return b, bad.Reason, bad
	}
	return b, reason, nil
}

// Refresh appends the deferred ROUTE-REFRESH messages of the peer, one per
// family, and lets the next of each family pass. Between two calls one per
// family passes: the speaker answers each with its whole table, and queues the
// part that the peer does not read. It is called by the goroutine of FromPeer.
func (g *Guard) Refresh(b []byte) []byte {
	in := &g.in
	if in.err != nil {
		return b
	}
	in.refreshed, in.deferred = in.deferred, 0
	return RequestRoutes(b, in.refreshed)
}

// RequestRoutes appends a ROUTE-REFRESH (RFC 2918, Section 3) for each family.
func RequestRoutes(b []byte, families FamilySet) []byte {
	for _, f := range [...]Family{IPv4Unicast, IPv6Unicast} {
		if families.Has(f) {
			b = appendRefresh(b, f)
		}
	}
	return b
}

func appendRefresh(b []byte, family Family) []byte {
	start := len(b)
	return endMessage(append(beginMessage(b, TypeRouteRefresh), 0, family.afi(), 0, 1), start)
}

// updateFromPeer checks one UPDATE and records the changes that it makes.
func (g *Guard) updateFromPeer(body []byte) (Reason, *Notification) {
	in := &g.in
	u := &in.update
	if bad := u.parse(body, &in.tally); bad != nil {
		return None, bad
	}
	if family := u.endOfRIB(); u.families.Has(family) {
		if in.ended.Has(family) {
			// The first one ended the initial update (RFC 4724, Section 2).
			return MessageRepeated, nil
		}
		in.ended = in.ended.with(family)
		in.changes = append(in.changes, Change{Ended: family})
		return None, nil
	}
	// RFC 4271, Section 3.1: a prefix in both fields is announced.
	passed := in.withdraw(u.withdrawn, IPv4Unicast)
	passed += in.withdraw(u.unreach.nlri, u.unreach.family)
	if len(u.nlri) > 0 || len(u.reach.nlri) > 0 {
		g.judgePath(u)
		n, bad := g.announce(u.nlri, IPv4Unicast, u.hop)
		if bad == nil {
			passed += n
			n, bad = g.announce(u.reach.nlri, u.reach.family, u.reach.hop)
		}
		if bad != nil {
			return None, bad
		}
		passed += n
	}
	if passed == 0 {
		return MessageEmpty, nil
	}
	return None, nil
}

// judgePath checks the AS_PATH of an announcement.
func (g *Guard) judgePath(u *update) {
	if u.fault != None {
		return
	}
	// RFC 4271, Section 6.3 and RFC 7606, Section 7.2: the leftmost AS must be
	// that of the external peer.
	if len(u.path) == 0 || u.path[0] != g.in.peerAS {
		u.blame(RouteFirstAS)
		return
	}
	own := 0
	for _, as := range u.path {
		if as == g.config.LocalAS {
			own++
		}
	}
	if own > g.config.AllowOwnAS {
		// RFC 4271, Section 9.1.2: a loop is not eligible.
		u.blame(RouteLoop)
	}
}

// withdraw removes the held ones among the prefixes and returns their number;
// it drops the others.
func (in *inbound) withdraw(nlri []byte, family Family) (passed int) {
	if len(nlri) > 0 && !in.update.families.Has(family) {
		for ; len(nlri) > 0; nlri = nlri[prefixLen(nlri[0]):] {
			in.tally.judge(Withdrawals, WithdrawFamily)
		}
		return 0
	}
	for len(nlri) > 0 {
		n := prefixLen(nlri[0])
		reason := WithdrawUnknown
		if in.held.remove(nlri[:n], family) {
			in.changes = append(in.changes, Change{Prefix: hostRoute(nlri[:n])})
			in.refused.held(hostRoute(nlri[:n]), -1)
			reason = None
			passed++
		} else if in.refused.any() {
			in.refused.remove(prefixOf(nlri[:n], family), family)
		}
		in.tally.judge(Withdrawals, reason)
		nlri = nlri[n:]
	}
	return passed
}

// announce checks each announced prefix: it passes it, drops it, or treats it
// as withdrawn. It returns the number of prefixes that it passed or withdrew. A
// Notification means that the session exceeds its limit.
func (g *Guard) announce(nlri []byte, family Family, hop []byte) (passed int, bad *Notification) {
	in := &g.in
	fault := in.update.fault
	if fault == None && len(nlri) > 0 && !g.isPeer(hop) {
		fault = RouteNextHop
	}
	var attrs *fare.Attributes // those of the UPDATE, once a route needs them
	for len(nlri) > 0 {
		n := prefixLen(nlri[0])
		prefix := nlri[:n]
		nlri = nlri[n:]
		reason := RouteFamily
		if in.update.families.Has(family) {
			reason = in.accept.judge(prefix, family)
		}
		if reason == None && fault != None {
			reason = fault
			if in.held.remove(prefix, family) {
				in.changes = append(in.changes, Change{Prefix: hostRoute(prefix)})
				in.refused.held(hostRoute(prefix), -1)
				passed++
			}
		}
		if reason != None {
			g.refuse(prefix, family, reason)
		} else {
			if in.refused.any() {
				in.refused.remove(hostRoute(prefix), family)
			}
			before := in.held.get(prefix)
			switch {
			case before == nil && in.held.full():
				in.tally.judge(Routes, RouteLimit)
				return passed, g.tooMany(family)
			case before == nil || attrs != before && !in.update.describes(before):
				if attrs == nil {
					attrs = in.attributes()
				}
				in.held.set(prefix, attrs)
				if before == nil {
					in.refused.held(hostRoute(prefix), 1)
				}
				in.changes = append(in.changes, Change{Prefix: hostRoute(prefix), Attrs: attrs, New: before == nil})
			case attrs == nil:
				attrs = before
			}
			passed++
		}
		in.tally.judge(Routes, reason)
	}
	return passed, nil
}

// isPeer reports whether a next hop of 4, 16 or 32 octets is the peer. If it
// consists of a global and a link-local address (RFC 2545, Section 3), one
// match suffices: without a global address the peer may repeat the link-local
// one or send zeros.
func (g *Guard) isPeer(hop []byte) bool {
	if g.config.NextHop == nil {
		return false
	}
	switch len(hop) {
	case 4:
		return g.config.NextHop(netip.AddrFrom4([4]byte(hop)))
	case 16:
		return g.config.NextHop(netip.AddrFrom16([16]byte(hop)).Unmap())
	case 32:
		return g.config.NextHop(netip.AddrFrom16([16]byte(hop)).Unmap()) ||
			g.config.NextHop(netip.AddrFrom16([16]byte(hop[16:])))
	}
	return false
}

// tooMany returns the Notification for a session beyond its limit: RFC 4271,
// Section 6.7; RFC 4486, Section 4: the data is AFI, SAFI and the upper bound.
func (g *Guard) tooMany(family Family) *Notification {
	data := binary.BigEndian.AppendUint32([]byte{0, family.afi(), 1}, uint32(g.config.MaxPrefixes))
	return notify(CodeCease, CeaseMaximumPrefixes, data, MessageLimit, "more prefixes than max_prefixes allows")
}
