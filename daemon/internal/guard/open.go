package guard

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"
)

// ASTrans replaces an AS number that needs four octets (RFC 6793, Section 9).
const ASTrans = 23456

// Capability codes in use; all others are dropped.
const (
	CapabilityMultiprotocol   = 1  // RFC 4760, Section 8
	CapabilityRouteRefresh    = 2  // RFC 2918, Section 2
	CapabilityExtendedNextHop = 5  // RFC 8950, Section 4
	CapabilityGracefulRestart = 64 // RFC 4724, Section 3
	CapabilityFourOctetAS     = 65 // RFC 6793, Section 3
)

// Flags of the graceful restart capability (RFC 4724, Section 3).
const (
	FlagRestartState    = 0x8000 // R: the sender has restarted
	FlagForwardingState = 0x80   // F: the sender's data plane kept the family's routes
)

// open is a parsed OPEN.
type open struct {
	as       uint32 // from the capability if present, else from the fixed part
	hold     uint16 // seconds
	id       [4]byte
	families FamilySet // announced and configured; see parseOpen if none is announced

	fourOctetAS     bool
	routeRefresh    bool
	extendedNextHop bool // for IPv4 unicast
	restart         bool
	restartState    bool      // R bit
	restartTime     uint16    // seconds, 12 bits
	restartFamilies FamilySet // configured families of the capability
	forwarding      FamilySet // F bit
	seen            [4]uint64 // capability codes that occurred
	multiprotocol   bool      // any multiprotocol capability occurred
	capAS           uint32    // value of the 4-octet AS capability
}

// parseOpen parses the body of an OPEN (RFC 4271, Section 4.2). It checks the
// structure; acceptOpen checks the values.
func parseOpen(body []byte, configured FamilySet, t *tally) (*open, *Notification) {
	malformed := func(detail string) *Notification {
		// RFC 4271, Section 6.2: recognized but malformed: Unspecific.
		return notify(CodeOpenMessageError, 0, nil, MessageOpen, detail)
	}
	if body[0] != 4 {
		// RFC 4271, Section 6.2: the data is the version that we support.
		return nil, notify(CodeOpenMessageError, 1, []byte{0, 4}, MessageOpen, "BGP version is not 4")
	}
	o := &open{
		as:   uint32(binary.BigEndian.Uint16(body[1:])),
		hold: binary.BigEndian.Uint16(body[3:]),
		id:   [4]byte(body[5:9]),
	}
	params, wide := body[10:], 1
	length := int(body[9])
	// RFC 9072, Section 2: a first parameter of type 255 means that the actual
	// length follows in two octets, and that parameters have such lengths.
	if length != 0 && len(params) > 0 && params[0] == 255 {
		if len(params) < 3 {
			return nil, malformed("extended length of the optional parameters is truncated")
		}
		length, params, wide = int(binary.BigEndian.Uint16(params[1:])), params[3:], 2
	}
	if length != len(params) {
		return nil, malformed("length of the optional parameters does not match the message")
	}
	for len(params) > 0 {
		if len(params) < 1+wide {
			return nil, malformed("optional parameter is truncated")
		}
		kind, n := params[0], int(params[1])
		if wide == 2 {
			n = int(binary.BigEndian.Uint16(params[1:]))
		}
		params = params[1+wide:]
		if n > len(params) {
			return nil, malformed("optional parameter is longer than the message")
		}
		if kind != 2 {
			// RFC 4271, Section 6.2: Unsupported Optional Parameters.
			return nil, notify(CodeOpenMessageError, 4, nil, MessageOpen, "optional parameter is not a capability")
		}
		caps := params[:n]
		params = params[n:]
		for len(caps) > 0 {
			if len(caps) < 2 || int(caps[1]) > len(caps)-2 {
				return nil, malformed("capability is longer than its parameter")
			}
			reason := o.capability(caps[0], caps[2:2+int(caps[1])], configured)
			t.judge(Capabilities, reason)
			if reason == CapabilityMalformed {
				return nil, malformed("capability has an invalid length")
			}
			caps = caps[2+int(caps[1]):]
		}
	}
	if !o.multiprotocol {
		// RFC 4760, Section 8 requires the capability for every family except
		// the original one of BGP-4.
		o.families = configured & FamilySet(IPv4Unicast)
	}
	return o, nil
}

// capability processes one capability (RFC 5492, Section 4).
func (o *open) capability(code byte, value []byte, configured FamilySet) Reason {
	again := o.seen[code>>6]&(1<<(code&63)) != 0
	o.seen[code>>6] |= 1 << (code & 63)
	switch code {
	case CapabilityMultiprotocol:
		if len(value) != 4 {
			return CapabilityMalformed
		}
		o.multiprotocol = true
		f := familyOf(binary.BigEndian.Uint16(value), value[3])
		switch {
		case !configured.Has(f):
			return CapabilityFamily
		case o.families.Has(f):
			return CapabilityDuplicate
		}
		o.families = o.families.with(f)
	case CapabilityRouteRefresh:
		if len(value) != 0 {
			return CapabilityMalformed
		}
		o.routeRefresh = true
		if again {
			return CapabilityDuplicate
		}
	case CapabilityExtendedNextHop:
		if len(value)%6 != 0 {
			return CapabilityMalformed
		}
		for ; len(value) > 0; value = value[6:] {
			// RFC 8950, Section 4: NLRI AFI 2 octets, SAFI 2, next hop AFI 2.
			if [6]byte(value) == [6]byte{0, 1, 0, 1, 0, 2} {
				o.extendedNextHop = true
			}
		}
	case CapabilityGracefulRestart:
		if len(value)%4 != 2 {
			return CapabilityMalformed
		}
		// RFC 4724, Section 3: the last one of several counts.
		flags := binary.BigEndian.Uint16(value)
		o.restart, o.restartState, o.restartTime = true, flags&FlagRestartState != 0, flags&0x0fff
		o.restartFamilies, o.forwarding = 0, 0
		for v := value[2:]; len(v) > 0; v = v[4:] {
			f := familyOf(binary.BigEndian.Uint16(v), v[2])
			if !configured.Has(f) {
				continue
			}
			o.restartFamilies = o.restartFamilies.with(f)
			if v[3]&FlagForwardingState != 0 {
				o.forwarding = o.forwarding.with(f)
			}
		}
		if again {
			return CapabilityDuplicate
		}
	case CapabilityFourOctetAS:
		if len(value) != 4 {
			return CapabilityMalformed
		}
		as := binary.BigEndian.Uint32(value)
		if again && as != o.capAS {
			return CapabilityMalformed
		}
		o.fourOctetAS, o.capAS = true, as
		if again {
			return CapabilityDuplicate
		}
	default:
		return CapabilityUnlisted
	}
	return None
}

// acceptOpen checks the values of the peer's OPEN (RFC 4271, Section 6.2) and
// determines o.as.
func (g *Guard) acceptOpen(o *open) *Notification {
	refuse := func(subcode byte, data []byte, detail string) *Notification {
		return notify(CodeOpenMessageError, subcode, data, MessageOpen, detail)
	}
	if o.fourOctetAS {
		// RFC 6793, Section 4.1: the capability contains the AS; the fixed
		// field contains the same or AS_TRANS.
		if o.as != o.capAS && o.as != ASTrans {
			return refuse(2, nil, fmt.Sprintf("AS number is %d in the fixed part and %d in the 4-octet AS capability", o.as, o.capAS))
		}
		o.as = o.capAS
	}
	switch {
	case o.as == 0 || o.as == ASTrans:
		// RFC 7607, Section 2 and RFC 6793, Section 9: reserved AS numbers.
		return refuse(2, nil, "AS number is reserved")
	case o.as == g.config.LocalAS:
		// Every session is eBGP; see the design in doc.go.
		return refuse(2, nil, fmt.Sprintf("peer has the local AS number, %d: every session is external", o.as))
	case g.config.PeerAS != 0 && o.as != g.config.PeerAS:
		return refuse(2, nil, fmt.Sprintf("peer's AS number is %d, and the configured one (peer_as) is %d", o.as, g.config.PeerAS))
	case o.hold == 1 || o.hold == 2:
		// RFC 4271, Section 4.2: "MUST be either zero or at least three".
		return refuse(6, nil, "hold time under three seconds")
	case o.id == [4]byte{}:
		return refuse(3, nil, "BGP identifier is zero")
	case netip.AddrFrom4(o.id) == g.config.RouterID:
		// RFC 6286 would permit it between ASes, but here identifiers
		// distinguish the nodes.
		return refuse(3, nil, "peer has the local BGP identifier")
	case o.families == 0:
		// RFC 5492, Section 5: Unsupported Capability; the data lists the
		// missing ones.
		var data []byte
		for _, f := range [...]Family{IPv4Unicast, IPv6Unicast} {
			if g.families.Has(f) {
				data = append(data, CapabilityMultiprotocol, 4, 0, f.afi(), 0, 1)
			}
		}
		return refuse(7, data, "no common address family")
	}
	return nil
}

// appendOpen appends the canonical OPEN message of o: all capabilities in one
// optional parameter, in order of their code, always including the 4-octet AS.
func appendOpen(b []byte, o *open) []byte {
	start := len(b)
	b = beginMessage(b, TypeOpen)
	short := uint16(ASTrans)
	if o.as <= 0xffff {
		short = uint16(o.as)
	}
	b = append(b, 4)
	b = binary.BigEndian.AppendUint16(b, short)
	b = binary.BigEndian.AppendUint16(b, o.hold)
	b = append(b, o.id[:]...)
	b = append(b, 0, 2, 0) // lengths follow below
	params := len(b)
	for _, f := range [...]Family{IPv4Unicast, IPv6Unicast} {
		if o.families.Has(f) {
			b = append(b, CapabilityMultiprotocol, 4, 0, f.afi(), 0, 1)
		}
	}
	if o.routeRefresh {
		b = append(b, CapabilityRouteRefresh, 0)
	}
	if o.extendedNextHop {
		b = append(b, CapabilityExtendedNextHop, 6, 0, 1, 0, 1, 0, 2)
	}
	if o.restart {
		flags := o.restartTime & 0x0fff
		if o.restartState {
			flags |= FlagRestartState
		}
		b = append(b, CapabilityGracefulRestart, 2)
		length := len(b) - 1
		b = binary.BigEndian.AppendUint16(b, flags)
		for _, f := range [...]Family{IPv4Unicast, IPv6Unicast} {
			if !o.restartFamilies.Has(f) {
				continue
			}
			var forwarding byte
			if o.forwarding.Has(f) {
				forwarding = FlagForwardingState
			}
			b = append(b, 0, f.afi(), 1, forwarding)
			b[length] += 4
		}
	}
	b = append(b, CapabilityFourOctetAS, 4)
	b = binary.BigEndian.AppendUint32(b, o.as)
	b[params-1] = byte(len(b) - params)
	b[params-3] = byte(len(b) - params + 2)
	return endMessage(b, start)
}

// openFromPeer checks the peer's OPEN and appends the one for the speaker,
// without the extended next hop: the speaker only receives IPv4 next hops.
func (g *Guard) openFromPeer(body, b []byte, t *tally) ([]byte, *Notification) {
	o, bad := parseOpen(body, g.families, t)
	if bad == nil {
		bad = g.acceptOpen(o)
	}
	if bad != nil {
		return b, bad
	}
	o.restartFamilies &= o.families
	o.forwarding &= o.families
	extended := o.extendedNextHop && g.config.ExtendedNextHop && o.families.Has(IPv4Unicast)
	o.extendedNextHop = false

	g.mu.Lock()
	g.info = Info{
		PeerAS: o.as, RouterID: netip.AddrFrom4(o.id), Families: o.families,
		FourOctetAS: o.fourOctetAS, ExtendedNextHop: extended, RouteRefresh: o.routeRefresh,
		GracefulRestart: o.restart, RestartTime: time.Duration(o.restartTime) * time.Second,
	}
	g.peerHold, g.peerOpen = o.hold, true
	g.mu.Unlock()
	return appendOpen(b, o), nil
}

// openFromSpeaker appends our OPEN for the peer: the speaker's hold time and
// graceful restart capability, the rest from the configuration. The speaker's
// OPEN need not list the families of the restart as its own.
func (g *Guard) openFromSpeaker(body, b []byte, t *tally) ([]byte, *Notification) {
	o, bad := parseOpen(body, g.families, t)
	if bad != nil {
		return b, bad
	}
	o.as, o.families, o.extendedNextHop = g.config.LocalAS, g.families, g.config.ExtendedNextHop && g.families.Has(IPv4Unicast)
	if g.config.RouterID.Is4() {
		o.id = g.config.RouterID.As4()
	}
	g.mu.Lock()
	g.ourHold, g.weSpoke = o.hold, true
	g.mu.Unlock()
	return appendOpen(b, o), nil
}
