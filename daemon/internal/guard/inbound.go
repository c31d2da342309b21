package guard

import (
	"encoding/binary"
	"net/netip"
)

// placeholders replace the next hop, which the speaker never uses because it is
// always the peer. They are from the documentation ranges of RFC 5737 and RFC
// 3849. The actual next hop may be an address that the speaker rejects, such as
// a loopback.
var placeholders = hops{
	v4: octets(netip.AddrFrom4([4]byte{192, 0, 2, 1})),
	v6: octets(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 1})),
}

// inbound is the state of the direction from the peer to the speaker.
type inbound struct {
	framer  Framer
	state   state
	err     error // why the direction is closed
	peerAS  uint32
	tally   tally
	update  update
	emitter emitter
	accept  ranges
	held    held

	ended     FamilySet // End-of-RIB has passed
	refreshed FamilySet // ROUTE-REFRESH has passed since the last call of Refresh
	deferred  FamilySet // ROUTE-REFRESH is held until the next call of Refresh
}

func (in *inbound) init(g *Guard) {
	in.accept = newRanges(g.config.Accept)
	in.held = newHeld(g.config.MaxPrefixes)
	carrier, deciding := g.config.Carrier, g.config.Deciding
	if deciding != nil {
		in.update.deciding = func(carried []byte) int {
			raw := make([][8]byte, len(carried)/8)
			for i := range raw {
				raw[i], _ = carrier.Unwrap([8]byte(carried[8*i:]))
			}
			return deciding(raw)
		}
	}
	in.update.carrier = func(c [8]byte) ([8]byte, Reason) {
		if wrapped, ok := carrier.Wrap(c); ok {
			return wrapped, None
		}
		return c, CommunityUnlisted
	}
}

// FromPeer processes octets of the peer, cut anywhere, and appends the
// canonical messages for the speaker to b. An error ends the session: first
// write the appended octets, which end with a NOTIFICATION for the speaker,
// then
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
			return appendSpeakerNotification(b, CodeCease, 0), bad
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
		return appendSpeakerNotification(b, closed.Code, closed.Subcode), MessageNotification, closed
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
		b = appendKeepalive(b)
	case kind == TypeUpdate && in.state == established:
		b, reason, bad = g.updateFromPeer(body, b)
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
		return appendSpeakerNotification(b, CodeCease, 0), bad.Reason, bad
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
	for _, f := range [...]Family{IPv4Unicast, IPv6Unicast} {
		if in.refreshed.Has(f) {
			b = appendRefresh(b, f)
		}
	}
	return b
}

func appendRefresh(b []byte, family Family) []byte {
	start := len(b)
	return endMessage(append(beginMessage(b, TypeRouteRefresh), 0, family.afi(), 0, 1), start)
}

// updateFromPeer checks one UPDATE and appends the remaining part of it. If
// nothing remains it appends a KEEPALIVE: an UPDATE restarts the hold timer
// (RFC 4271, Section 8.2.2), also that of the speaker, which does not receive
// the UPDATE.
func (g *Guard) updateFromPeer(body, b []byte) ([]byte, Reason, *Notification) {
	in := &g.in
	u, e := &in.update, &in.emitter
	if bad := u.parse(body, &in.tally); bad != nil {
		return b, None, bad
	}
	if family := u.endOfRIB(); u.families.Has(family) {
		if in.ended.Has(family) {
			// The first one ended the initial update (RFC 4724, Section 2).
			return appendKeepalive(b), MessageRepeated, nil
		}
		in.ended = in.ended.with(family)
		return appendEndOfRIB(b, family), None, nil
	}
	e.reset()
	in.withdraw(u.withdrawn, IPv4Unicast)
	in.withdraw(u.unreach.nlri, u.unreach.family)
	if len(u.nlri) > 0 || len(u.reach.nlri) > 0 {
		g.judgePath(u)
		if u.fault == None {
			e.describe(u, 4)
		}
		bad := g.announce(u.nlri, IPv4Unicast, u.hop)
		if bad == nil {
			bad = g.announce(u.reach.nlri, u.reach.family, u.reach.hop)
		}
		if bad != nil {
			return b, None, bad
		}
	}
	before := len(b)
	if b = e.appendUpdates(b, placeholders); len(b) == before {
		return appendKeepalive(b), MessageEmpty, nil
	}
	return b, None, nil
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

// withdraw passes the withdrawals of held prefixes and drops the others: the
// speaker would keep a trace of each of them forever.
func (in *inbound) withdraw(nlri []byte, family Family) {
	if len(nlri) > 0 && !in.update.families.Has(family) {
		for ; len(nlri) > 0; nlri = nlri[prefixLen(nlri[0]):] {
			in.tally.judge(Withdrawals, WithdrawFamily)
		}
		return
	}
	for len(nlri) > 0 {
		n := prefixLen(nlri[0])
		reason := WithdrawUnknown
		if in.held.remove(nlri[:n], family) {
			in.emitter.withdraw(nlri[:n], family)
			reason = None
		}
		in.tally.judge(Withdrawals, reason)
		nlri = nlri[n:]
	}
}

// announce checks each announced prefix: it passes it, drops it, or treats it
// as withdrawn. A Notification means that the session exceeds its limit.
func (g *Guard) announce(nlri []byte, family Family, hop []byte) *Notification {
	in := &g.in
	fault := in.update.fault
	if fault == None && len(nlri) > 0 && !g.isPeer(hop) {
		fault = RouteNextHop
	}
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
				in.emitter.withdraw(prefix, family)
			}
		}
		if reason == None {
			if !in.held.add(prefix) {
				in.tally.judge(Routes, RouteLimit)
				return g.tooMany(family)
			}
			in.emitter.announce(prefix, family)
		}
		in.tally.judge(Routes, reason)
	}
	return nil
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
