package fare

import (
	"fmt"
	"slices"
	"strings"
)

// Signals is a set of signs by which a neighbor's operator takes traffic off a route before the route ends: the route
// counts only for a destination that no other route reaches. Zero is the empty set.
type Signals uint8

// The signals. The first two are communities (RFC 1997), the last one is read from the AS path by the table.
const (
	SignalGracefulShutdown Signals = 1 << iota // GRACEFUL_SHUTDOWN, 65535:0 (RFC 8326)
	SignalStale                                // LLGR_STALE, 65535:6: kept of a session that has ended (RFC 9494)
	SignalPrepended                            // an AS repeated itself in the path
	signalCount            = int(iota)

	AllSignals = Signals(1<<signalCount - 1)
)

var signalNames = [signalCount]string{"graceful-shutdown", "llgr-stale", "prepended"}

var signalReasons = [signalCount]Reason{ReasonGracefulShutdown, ReasonStale, ReasonPrepended}

// signalCommunities are the well-known communities of the first signals: RFC 8326; RFC 9494, Section 3.2.
var signalCommunities = [...]uint32{0xffff0000, 0xffff0006}

// SignalOf returns the signal that a community of RFC 1997 is, or 0.
func SignalOf(community uint32) Signals {
	for i, c := range signalCommunities {
		if c == community {
			return 1 << i
		}
	}
	return 0
}

// Communities returns the communities of the signals that have one, or nil.
func (s Signals) Communities() (out []uint32) {
	for i, c := range signalCommunities {
		if s&(1<<i) != 0 {
			out = append(out, c)
		}
	}
	return out
}

// ParseSignals returns the set of the named signals, or an error for an unknown name.
func ParseSignals(names []string) (Signals, error) {
	var s Signals
	for _, name := range names {
		i := slices.Index(signalNames[:], name)
		if i < 0 {
			return 0, fmt.Errorf("signal %q: write one of %s", name, strings.Join(signalNames[:], ", "))
		}
		s |= 1 << i
	}
	return s, nil
}

// String returns the names, separated by commas.
func (s Signals) String() string {
	var names []string
	for i, name := range signalNames {
		if s&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// MarshalText returns [Signals.String].
func (s Signals) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText parses the output of [Signals.MarshalText].
func (s *Signals) UnmarshalText(text []byte) (err error) {
	*s = 0
	if len(text) > 0 {
		*s, err = ParseSignals(strings.Split(string(text), ","))
	}
	return err
}

// reason returns the reason of the first signal, or [ReasonUsed] for the empty set.
func (s Signals) reason() Reason {
	for i, r := range signalReasons {
		if s&(1<<i) != 0 {
			return r
		}
	}
	return ReasonUsed
}

// prepended reports whether an AS path was lengthened on purpose (RFC 4271, Section 9.1.2.2 a, makes it less
// preferred): the neighbor's AS stands at its start more than once, or another AS three times in a row. Two equal
// numbers elsewhere may be the work of as-override, and so may any number of the neighbor's AS if the path has no
// other.
func prepended(path []uint32, peerAS uint32) bool {
	if !slices.ContainsFunc(path, func(as uint32) bool { return as != peerAS }) {
		return false
	}
	run := 0
	for i, as := range path {
		if i == 0 || as != path[i-1] {
			run = 0
		}
		run++
		if run == 3 || run == 2 && i == 1 && as == peerAS {
			return true
		}
	}
	return false
}
