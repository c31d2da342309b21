package speaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/daemon/internal/guard"
)

// Defaults of Config's zero values.
const (
	DefaultHoldTime     = 9 * time.Second
	DefaultConnectRetry = 5 * time.Second
	DefaultPort         = 179
)

// openTimeout bounds the OPEN exchange. RFC 4271, Section 8 suggests four
// minutes for slow peers; a leaf is one hop away.
const openTimeout = 10 * time.Second

// patienceToFind is the time without a router advertisement after which the status of an unnumbered session shows it.
const patienceToFind = 3 * time.Second

// Config configures a Speaker. It is not changed after New, but for the keys of BFD.
type Config struct {
	AS       uint32     // ours, not 0
	RouterID netip.Addr // our BGP identifier, IPv4

	// HoldTime is 0 (DefaultHoldTime) or 3 s to 65,535 s, whole seconds.
	HoldTime time.Duration
	// KeepaliveInterval is 0 (a third of HoldTime) or at least 1 s, whole seconds.
	KeepaliveInterval time.Duration
	// ConnectRetry is the longest wait between attempts; 0 means DefaultConnectRetry.
	ConnectRetry time.Duration
	// RestartTime, 0 to 4,095 s, whole seconds, is how long peers keep our
	// routes while fared restarts (RFC 4724). With 0 they keep none: the
	// capability is announced without families, for End-of-RIB only. See
	// doc.go.
	RestartTime time.Duration
	// MaxPrefixes is the number of prefixes that a session may announce; one
	// more ends it with Cease 6/1. 0 means guard.DefaultMaxPrefixes.
	MaxPrefixes int
	// AllowOwnAS is the permitted number of occurrences of AS in the path of a
	// route, 0 to 10; one more makes the route a loop.
	AllowOwnAS int
	// Accept lists the ranges of accepted host routes; empty accepts none.
	Accept []netip.Prefix
	// Carrier selects the extended communities that pass.
	Carrier guard.Carrier
	// IncreaseInterval is the least time between two rises of the bandwidth of
	// an advertised route; 0 means no limit. See pace.go.
	IncreaseInterval time.Duration
	// BFD protects every session; the zero value disables it. See bfd.go.
	BFD BFD

	Sessions []Session
}

// BFD configures BFD (RFC 5880). Interval is both DesiredMinTxInterval and RequiredMinRxInterval, in whole
// microseconds; 0 disables BFD. Multiplier, 1 to 255, is the number of consecutive missing packets that ends the
// session.
type BFD struct {
	Interval   time.Duration
	Multiplier int
}

// Session is one BGP session.
type Session struct {
	Name string // in logs and errors; unique

	// Peer is the leaf's address, with a zone if it is link-local. It is
	// unused, and may be invalid, if Unnumbered.
	Peer netip.Addr
	// Port is the port on which the peer listens, or on which we listen if Passive; 0 means 179.
	Port uint16
	// Local is our address. If it is invalid, the system chooses; a Passive
	// session then listens on the unspecified address.
	Local netip.Addr
	// PeerAS is the peer's AS; 0 accepts any but ours.
	PeerAS uint32

	// Device is the device of the sub-port. It is used if the peer is link-local, or Unnumbered, and by BFD.
	Device string
	// Netns is the name or path of the network namespace; empty means the current one.
	Netns string
	// Unnumbered takes the peer's address from Deps.Resolver, by Device.
	Unnumbered bool
	// Passive waits for the peer to connect.
	Passive bool
	// Password is the key of TCP MD5 signatures (RFC 2385); empty disables them.
	Password string
	// AO signs with TCP-AO (RFC 5925) instead of Password; the zero value
	// disables it. New returns an error if the kernel does not support it.
	AO AO
	// GTSMHops is the greatest permitted distance of the peer in hops, 1 to
	// 254, for the TTL check of RFC 5082; 0 disables the check.
	GTSMHops int
	// BFDAuth authenticates the session's BFD packets; the zero value disables it. SetBFDKeys replaces its keys.
	BFDAuth bfd.Auth
	// Families lists the families to negotiate; empty means IPv4.
	Families []Family
	// Accept lists the ranges of host routes accepted on this session, in place
	// of Config.Accept; empty means Config.Accept.
	Accept []netip.Prefix
	// ExtendedNextHop offers IPv4 routes with IPv6 next hops (RFC 8950).
	ExtendedNextHop bool
	// Deciding and NonTransitive are passed to guard.Config.
	Deciding      func(communities [][8]byte) int
	NonTransitive bool
	// PeerNextHops lists addresses of the peer, in addition to Peer, that are
	// valid as next hops of its routes.
	PeerNextHops []netip.Addr
	// SubnetNextHops accepts, as next hops of the peer's routes, the other hosts
	// of the subnets that Device has when the connection is made. See subnet.go.
	SubnetNextHops bool
	// NextHop4 and NextHop6 are the next hops of announced routes. If one is
	// invalid, it defaults to the connection's local address of that family.
	NextHop4, NextHop6 netip.Addr
}

// PeerResolver resolves the neighbor of an unnumbered session.
type PeerResolver interface {
	// Peer waits until the link-local address of the router on the device is
	// known and returns it with the device as zone.
	Peer(ctx context.Context, device, netns string) (netip.Addr, error)
}

// Deps are the Speaker's dependencies.
type Deps struct {
	// Log is not nil.
	Log *slog.Logger
	// Fatal is called when GoBGP reports a broken invariant. It must end the
	// process; not nil.
	Fatal func(error)
	// Resolver may be nil if no session is Unnumbered.
	Resolver PeerResolver
	// Attend takes and handles the pending events in the calling goroutine, and returns true, if the owner is idle: no
	// other goroutine has to be woken for them. If Attend returns false or is nil, the owner is notified by Ready.
	Attend func() bool
}

// withDefaults replaces zero values with their defaults.
func (c Config) withDefaults() Config {
	if c.HoldTime == 0 {
		c.HoldTime = DefaultHoldTime
	}
	if c.KeepaliveInterval == 0 {
		c.KeepaliveInterval = max(c.HoldTime/3, time.Second).Truncate(time.Second)
	}
	if c.ConnectRetry == 0 {
		c.ConnectRetry = DefaultConnectRetry
	}
	sessions := make([]Session, len(c.Sessions))
	copy(sessions, c.Sessions)
	for i := range sessions {
		s := &sessions[i]
		if s.Port == 0 {
			s.Port = DefaultPort
		}
		if len(s.Families) == 0 {
			s.Families = []Family{IPv4}
		}
	}
	c.Sessions = sessions
	return c
}

// maxPrefixes returns MaxPrefixes or its default.
func (c *Config) maxPrefixes() int {
	if c.MaxPrefixes > 0 {
		return c.MaxPrefixes
	}
	return guard.DefaultMaxPrefixes
}

// validate reports every error, each with its place and remedy.
func (c *Config) validate(d Deps) error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("speaker: "+format, args...)) }
	if d.Log == nil || d.Fatal == nil {
		bad("a logger and a function for fatal errors are needed")
	}
	if c.AS == 0 {
		bad("as: 0 is reserved; set this server's AS number")
	}
	if !c.RouterID.Is4() || c.RouterID.IsUnspecified() {
		bad("router_id: %v is not an IPv4 address; set one that is unique in the fabric", c.RouterID)
	}
	seconds := func(name string, v, least, most time.Duration) {
		if v != 0 && (v < least || v > most || v%time.Second != 0) {
			bad("%s: %v is not a whole number of seconds from %v to %v", name, v, least, most)
		}
	}
	// RFC 4271, Section 4.2: a hold time of one or two seconds is not allowed.
	// With zero a silent peer would never be detected.
	seconds("hold_time", c.HoldTime, 3*time.Second, 65535*time.Second)
	seconds("keepalive_interval", c.KeepaliveInterval, time.Second, 65535*time.Second)
	seconds("restart_time", c.RestartTime, time.Second, 4095*time.Second)
	if c.ConnectRetry < 0 {
		bad("connect_retry: %v is negative", c.ConnectRetry)
	}
	if len(c.Sessions) == 0 {
		bad("sessions: none; at least one is needed")
	}
	names := make(map[string]bool)
	accepting := make(map[string]string)
	for i := range c.Sessions {
		s := &c.Sessions[i]
		in := func(format string, args ...any) { bad("session %q: "+format, append([]any{s.Name}, args...)...) }
		switch {
		case s.Name == "":
			bad("session %d: it has no name", i)
		case names[s.Name]:
			in("the name is used twice")
		}
		names[s.Name] = true
		if s.Unnumbered {
			if s.Device == "" || d.Resolver == nil {
				in("unnumbered needs a device, and a resolver of its neighbor")
			}
		} else if !s.Peer.IsValid() || s.Peer.IsUnspecified() || s.Peer.IsMulticast() {
			in("peer %v is not a unicast address; set the leaf's address", s.Peer)
		} else if s.Peer.IsLinkLocalUnicast() && s.Peer.Is6() && s.Peer.Zone() == "" && s.Device == "" {
			in("peer %v is link-local; set the device of its link", s.Peer)
		}
		if s.Peer.IsValid() && s.Local.IsValid() && s.Peer.Is4() != s.Local.Is4() {
			in("local %v and peer %v are of different families", s.Local, s.Peer)
		}
		if s.GTSMHops < 0 || s.GTSMHops > 254 {
			in("gtsm_hops: %d is not from 0 to 254", s.GTSMHops)
		}
		if len(s.Password) > 80 { // TCP_MD5SIG_MAXKEYLEN
			in("password: %d octets, TCP MD5 takes at most 80", len(s.Password))
		}
		if s.Password != "" && s.Passive && s.Unnumbered {
			in("password: a listener needs the peer's address for the password; remove passive, or set the peer")
		}
		if len(s.AO.Key) > maxAOKey {
			in("tcp_ao: a key of %d octets, TCP-AO takes at most %d", len(s.AO.Key), maxAOKey)
		}
		if s.AO.Key != "" && s.Password != "" {
			in("tcp_ao and password: a segment has one signature; remove one of them")
		}
		if s.AO.Key != "" && s.Passive && s.Unnumbered {
			in("tcp_ao: a listener needs the peer's address for the key; remove passive, or set the peer")
		}
		if s.PeerAS == c.AS {
			in("peer_as: %d is the local AS; sessions are eBGP", s.PeerAS)
		}
		for _, f := range s.Families {
			if f != IPv4 && f != IPv6 {
				in("family %v is not ipv4 or ipv6", f)
			}
		}
		if s.Passive && !s.Unnumbered {
			key := listenKey(s).String() + " " + s.Peer.WithZone("").String()
			if other, ok := accepting[key]; ok {
				in("session %q already waits for %v on the same address; set another local address or port for one of them", other, s.Peer)
			}
			accepting[key] = s.Name
		}
	}
	return errors.Join(errs...)
}
