package guard

import (
	"net/netip"
	"sync"
	"time"
)

// Family is an address family that can be negotiated.
type Family uint8

// The families. The zero value is none of them.
const (
	IPv4Unicast Family = 1 << iota // AFI 1, SAFI 1
	IPv6Unicast                    // AFI 2, SAFI 1
)

// String returns "ipv4" or "ipv6".
func (f Family) String() string {
	switch f {
	case IPv4Unicast:
		return "ipv4"
	case IPv6Unicast:
		return "ipv6"
	}
	return "unknown"
}

func (f Family) afi() byte {
	if f == IPv6Unicast {
		return 2
	}
	return 1
}

// familyOf returns the Family of an AFI and SAFI, or 0 for unsupported ones.
func familyOf(afi uint16, safi byte) Family {
	switch {
	case safi != 1:
		return 0
	case afi == 1:
		return IPv4Unicast
	case afi == 2:
		return IPv6Unicast
	}
	return 0
}

// FamilySet is a set of families.
type FamilySet uint8

// Has reports whether f is in the set.
func (s FamilySet) Has(f Family) bool { return f != 0 && uint8(s)&uint8(f) != 0 }

func (s FamilySet) with(f Family) FamilySet { return s | FamilySet(f) }

// DefaultMaxPrefixes is the value of Config.MaxPrefixes if that is zero.
const DefaultMaxPrefixes = 1 << 18

// Config configures the guard of one incarnation of a session. It is not
// changed after New.
type Config struct {
	LocalAS  uint32     // ours, not 0
	PeerAS   uint32     // the peer's; 0 accepts any but ours
	RouterID netip.Addr // our BGP identifier, IPv4

	Families        []Family // to negotiate; empty means IPv4Unicast
	ExtendedNextHop bool     // announce RFC 8950: IPv4 prefixes with an IPv6 next hop

	// Accept lists the ranges of accepted host routes; empty accepts none.
	Accept []netip.Prefix
	// NextHop reports whether an address, without zone, never IPv4-mapped, is
	// an acceptable next hop; nil accepts none. See OneOf.
	NextHop func(netip.Addr) bool

	// Own returns this server's present loopbacks as host prefixes, which the
	// guard does not change: a peer may send their routes back, which
	// TakeRefused does not count. nil means that there are none.
	Own func() []netip.Prefix

	// LocalNextHop4, LocalNextHop6 and LocalLinkLocal are the next hops that we
	// announce. Each may be invalid. An IPv4 prefix is sent with LocalNextHop4,
	// else with LocalNextHop6 or LocalLinkLocal if the extended next hop was
	// negotiated; an IPv6 prefix with LocalNextHop6, followed by LocalLinkLocal
	// if both are valid (RFC 2545, Section 3).
	LocalNextHop4, LocalNextHop6, LocalLinkLocal netip.Addr

	// AllowOwnAS is the permitted number of occurrences of LocalAS in an
	// AS_PATH; with 0 a route with it is a loop (RFC 4271, Section 9.1.2).
	AllowOwnAS int

	// MaxPrefixes is the number of prefixes that the session may hold, both
	// families together; 0 means DefaultMaxPrefixes.
	MaxPrefixes int

	// Deciding returns the index of the extended community, among several in
	// wire format, that decides the bandwidth of a route, or -1. It is called
	// for a route with more than MaxCommunities of them; if it is nil, the
	// first ones pass.
	Deciding func(communities [][8]byte) int
	// NonTransitive permits sending the non-transitive Link Bandwidth community
	// to another AS (RFC 10005, Section 3.1): for neighbors that read no other
	// form.
	NonTransitive bool

	Carrier  Carrier   // selects the extended communities that pass
	Counters *Counters // shared by the session's guards; nil disables counting
}

// OneOf returns a Config.NextHop that accepts the given addresses, zones ignored.
func OneOf(addresses ...netip.Addr) func(netip.Addr) bool {
	own := make([]netip.Addr, len(addresses))
	for i, a := range addresses {
		own[i] = a.Unmap().WithZone("")
	}
	return func(a netip.Addr) bool {
		for _, o := range own {
			if a == o {
				return true
			}
		}
		return false
	}
}

// Info is the result of the OPEN exchange.
type Info struct {
	PeerAS   uint32
	RouterID netip.Addr // the peer's BGP identifier
	// HoldTime is the smaller of both sides' (RFC 4271, Section 4.2); with 0
	// the session has no hold timer. While only one side has sent its OPEN, it
	// is that side's.
	HoldTime        time.Duration
	Families        FamilySet // in use
	FourOctetAS     bool      // the peer supports 4-octet AS numbers (RFC 6793)
	ExtendedNextHop bool      // both sides announced RFC 8950 for IPv4
	RouteRefresh    bool      // the peer supports ROUTE-REFRESH (RFC 2918)
	GracefulRestart bool      // the peer announced RFC 4724
	RestartTime     time.Duration
}

// state is the part of the session state machine (RFC 4271, Section 8.2.2) that
// determines which messages of the peer are permitted.
type state uint8

const (
	openSent    state = iota // OPEN expected
	openConfirm              // first KEEPALIVE expected
	established
)

// Guard filters one incarnation of a session. One goroutine calls FromPeer and
// one, not necessarily the same, calls FromSpeaker; any goroutine may call
// Info.
type Guard struct {
	config   Config
	families FamilySet
	counters *Counters

	in  inbound
	out outbound

	mu       sync.Mutex // guards the fields below
	info     Info
	ourHold  uint16 // seconds
	peerHold uint16
	weSpoke  bool // the speaker's OPEN went out
	peerOpen bool // the peer's OPEN was accepted
}

// New returns the guard of a fresh connection.
func New(config Config) *Guard {
	g := &Guard{config: config, counters: config.Counters}
	for _, f := range config.Families {
		g.families = g.families.with(f)
	}
	if g.families == 0 {
		g.families = FamilySet(IPv4Unicast)
	}
	if g.counters == nil {
		g.counters = new(Counters)
	}
	if g.config.MaxPrefixes <= 0 {
		g.config.MaxPrefixes = DefaultMaxPrefixes
	}
	g.in.init(g)
	g.out.init(g)
	return g
}

// Info returns the result of the OPEN exchange, and true once both OPENs have passed.
func (g *Guard) Info() (Info, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.infoLocked(), g.weSpoke && g.peerOpen
}

// infoLocked is Info for a caller that holds g.mu.
func (g *Guard) infoLocked() Info {
	info := g.info
	hold := g.peerHold
	if g.weSpoke && (!g.peerOpen || g.ourHold < hold) {
		hold = g.ourHold
	}
	info.HoldTime = time.Duration(hold) * time.Second
	return info
}
