package speaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
)

// Defaults of Config's zero values.
const (
	DefaultHoldTime     = 9 * time.Second
	DefaultConnectRetry = 5 * time.Second
	DefaultReread       = time.Minute
	DefaultPort         = 179
)

// openTimeout bounds the exchange of OPENs. RFC 4271, Section 8 suggests four
// minutes for slow peers; a leaf is one hop away.
const openTimeout = 10 * time.Second

// Config is what the speaker is to do. It is not changed after New.
type Config struct {
	AS       uint32     // ours, not 0
	RouterID netip.Addr // our BGP identifier, IPv4

	// HoldTime is 0 (DefaultHoldTime) or 3 s to 65,535 s, whole seconds.
	HoldTime time.Duration
	// KeepaliveInterval is 0 (a third of HoldTime) or at least 1 s, whole seconds.
	KeepaliveInterval time.Duration
	// ConnectRetry is the longest wait between attempts; 0: DefaultConnectRetry.
	ConnectRetry time.Duration
	// RestartTime, 0 to 4,095 s, whole seconds, makes every session announce
	// graceful restart (RFC 4724): 0 does not. See doc.go for what that does.
	RestartTime time.Duration
	// MaxPrefixes is how many prefixes a session may bring; one more ends it
	// with Cease 6/1. 0: guard.DefaultMaxPrefixes.
	MaxPrefixes int
	// Accept are the ranges of host routes that are read; empty: none is.
	Accept []netip.Prefix
	// Carrier names the extended communities that pass.
	Carrier guard.Carrier
	// BFD protects every session once it is established; zero: none is. See bfd.go.
	BFD BFD
	// Reread is how often what GoBGP holds is compared with what was
	// delivered; 0: DefaultReread, negative: never.
	Reread time.Duration

	Sessions []Session
}

// BFD are the timers of BFD (RFC 5880). Interval is how often packets are sent at most, and taken at most, whole microseconds; 0:
// no BFD. Multiplier is how many in a row may be missing, 1 to 255.
type BFD struct {
	Interval   time.Duration
	Multiplier int
}

// Session is one BGP session.
type Session struct {
	Name string // in logs and errors; unique

	// Peer is the leaf's address, with a zone if it is link-local. It is
	// not used, and may be invalid, if Unnumbered.
	Peer netip.Addr
	// Port is where the peer listens, or where we do if Passive; 0: 179.
	Port uint16
	// Local is our end; invalid: the system chooses, or for Passive the
	// unspecified address.
	Local netip.Addr
	// PeerAS is the peer's; 0: any but ours.
	PeerAS uint32

	// Device is the sub-port's; used if the peer is link-local, or Unnumbered, and by BFD.
	Device string
	// Netns is the name or path of the network namespace; empty: this one.
	Netns string
	// Unnumbered: the peer's address is what Deps.Resolver finds on Device.
	Unnumbered bool
	// Passive: the peer connects to us.
	Passive bool
	// Password for TCP MD5 signatures (RFC 2385); empty: none.
	Password string
	// GTSMHops is how many hops away the peer may be for the TTL check of
	// RFC 5082, 1 to 254; 0: no check.
	GTSMHops int
	// Families to negotiate; empty: IPv4.
	Families []Family
	// ExtendedNextHop offers IPv4 routes with IPv6 next hops (RFC 8950).
	ExtendedNextHop bool
	// PeerNextHops are addresses of the peer, besides Peer, that its routes
	// may name as next hop.
	PeerNextHops []netip.Addr
	// NextHop4 and NextHop6 are the next hops of what we announce; invalid:
	// the connection's local address if it is of that family.
	NextHop4, NextHop6 netip.Addr
}

// PeerResolver finds the neighbour of an unnumbered session.
type PeerResolver interface {
	// Peer waits until the link-local address of the router on the device
	// is known and returns it with the device as zone.
	Peer(ctx context.Context, device, netns string) (netip.Addr, error)
}

// Deps are what the speaker needs from outside.
type Deps struct {
	// Log is not nil.
	Log *slog.Logger
	// Fatal is called when GoBGP reports a broken invariant. It has to end
	// the process; not nil.
	Fatal func(error)
	// Resolver may be nil if no session is Unnumbered.
	Resolver PeerResolver
}

// withDefaults fills in what is zero.
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
	if c.Reread == 0 {
		c.Reread = DefaultReread
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

// validate reports everything that is wrong, each with its place and remedy.
func (c *Config) validate(d Deps) error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("speaker: "+format, args...)) }
	if d.Log == nil || d.Fatal == nil {
		bad("a logger and a function for fatal errors are needed")
	}
	if c.AS == 0 {
		bad("as: 0 is nobody's; give this server's AS number")
	}
	if !c.RouterID.Is4() || c.RouterID.IsUnspecified() {
		bad("router_id: %v is not an IPv4 address; give one that is unique in the fabric", c.RouterID)
	}
	seconds := func(name string, v, least, most time.Duration) {
		if v != 0 && (v < least || v > most || v%time.Second != 0) {
			bad("%s: %v is not a whole number of seconds from %v to %v", name, v, least, most)
		}
	}
	// RFC 4271, Section 4.2: a hold time of one or two seconds is not allowed;
	// zero would mean that a silent peer is never noticed.
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
				in("unnumbered needs a device, and a resolver of its neighbour")
			}
		} else if !s.Peer.IsValid() || s.Peer.IsUnspecified() || s.Peer.IsMulticast() {
			in("peer %v is not an address; give the leaf's", s.Peer)
		} else if s.Peer.IsLinkLocalUnicast() && s.Peer.Is6() && s.Peer.Zone() == "" && s.Device == "" {
			in("peer %v is link-local; name the device it is on", s.Peer)
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
			in("password: a listener needs the peer's address for it; let the session connect, or name the peer")
		}
		if s.PeerAS == c.AS {
			in("peer_as: %d is our own; sessions are eBGP", s.PeerAS)
		}
		for _, f := range s.Families {
			if f != IPv4 && f != IPv6 {
				in("family %v is not ipv4 or ipv6", f)
			}
		}
		if s.Passive && !s.Unnumbered {
			key := listenKey(s).String() + " " + s.Peer.WithZone("").String()
			if other, ok := accepting[key]; ok {
				in("session %q already waits for %v on the same address; give one of them another local address or port", other, s.Peer)
			}
			accepting[key] = s.Name
		}
	}
	return errors.Join(errs...)
}
