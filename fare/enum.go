package fare

import (
	"fmt"
	"strings"
)

// Every enum of the package appears as text in configuration, recordings and
// output. The helpers here are the only code that converts them.

func enumName[E ~uint8](names []string, e E) string {
	if int(e) < len(names) {
		return names[e]
	}
	return fmt.Sprintf("unknown(%d)", uint8(e))
}

func enumText[E ~uint8](what string, names []string, e E) ([]byte, error) {
	if int(e) >= len(names) {
		return nil, fmt.Errorf("%s %d: must be below %d", what, uint8(e), len(names))
	}
	return []byte(names[e]), nil
}

func enumParse[E ~uint8](what string, names []string, text []byte, e *E) error {
	for i, name := range names {
		if name == string(text) {
			*e = E(i)
			return nil
		}
	}
	return fmt.Errorf("%s %q: write one of %s", what, text, strings.Join(names, ", "))
}

// MissingPolicy decides about a destination for which some usable paths carry a
// bandwidth and some do not. [AllMissingPolicy] decides if no path carries one.
type MissingPolicy uint8

// The policies, in configuration "local" (default), "equal", "skip".
//
// RFC 10005 asks for equal shares unless local policy differs. With equal
// shares, one neighbor that strips or garbles its values would discard the
// ratio of the other planes for every destination. So the default is
// MissingLocal: such a neighbor changes the share of its plane alone.
const (
	MissingLocal MissingPolicy = iota // a path without a value counts with its local link speed
	MissingEqual                      // every plane with a usable path gets the same share (RFC 10005)
	MissingSkip                       // a path without a value is not used
)

var missingNames = []string{"local", "equal", "skip"}

// String returns the word used in configuration.
func (p MissingPolicy) String() string { return enumName(missingNames, p) }

// MarshalText returns [MissingPolicy.String], or an error for an undefined
// value.
func (p MissingPolicy) MarshalText() ([]byte, error) {
	return enumText("missing bandwidth policy", missingNames, p)
}

// UnmarshalText parses the word used in configuration.
func (p *MissingPolicy) UnmarshalText(text []byte) error {
	return enumParse("missing bandwidth policy", missingNames, text, p)
}

// AllMissingPolicy decides about a destination for which no usable path carries
// a bandwidth.
type AllMissingPolicy uint8

// The policies, in configuration "local" (default), "equal".
const (
	AllMissingLocal AllMissingPolicy = iota // every path counts with its local link speed
	AllMissingEqual                         // every plane with a usable path gets the same share (RFC 10005)
)

var allMissingNames = []string{"local", "equal"}

// String returns the word used in configuration.
func (p AllMissingPolicy) String() string { return enumName(allMissingNames, p) }

// MarshalText returns [AllMissingPolicy.String], or an error for an undefined
// value.
func (p AllMissingPolicy) MarshalText() ([]byte, error) {
	return enumText("all missing policy", allMissingNames, p)
}

// UnmarshalText parses the word used in configuration.
func (p *AllMissingPolicy) UnmarshalText(text []byte) error {
	return enumParse("all missing policy", allMissingNames, text, p)
}

// ConflictPolicy decides about a destination that more than one origin announces
// (see [GroupView].Origins): by mistake, by theft, or on purpose (anycast).
type ConflictPolicy uint8

// The policies, in configuration "weigh" (default), "prefer-first", "drop".
const (
	ConflictWeigh       ConflictPolicy = iota // every route counts
	ConflictPreferFirst                       // of the visible origins only one counts: of those with a usable route, the one that has announced it longest
	ConflictDrop                              // the destination is unreachable
)

var conflictNames = []string{"weigh", "prefer-first", "drop"}

// String returns the word used in configuration.
func (p ConflictPolicy) String() string { return enumName(conflictNames, p) }

// MarshalText returns [ConflictPolicy.String], or an error for an undefined
// value.
func (p ConflictPolicy) MarshalText() ([]byte, error) {
	return enumText("conflict policy", conflictNames, p)
}

// UnmarshalText parses the word used in configuration.
func (p *ConflictPolicy) UnmarshalText(text []byte) error {
	return enumParse("conflict policy", conflictNames, text, p)
}

// ZeroPolicy decides about a destination whose usable paths all advertise zero.
type ZeroPolicy uint8

// The policies, in configuration "equal" (default), "unreachable".
const (
	ZeroEqual       ZeroPolicy = iota // every plane with a usable path gets the same share
	ZeroUnreachable                   // the destination is unreachable
)

var zeroNames = []string{"equal", "unreachable"}

// String returns the word used in configuration.
func (p ZeroPolicy) String() string { return enumName(zeroNames, p) }

// MarshalText returns [ZeroPolicy.String], or an error for an undefined value.
func (p ZeroPolicy) MarshalText() ([]byte, error) { return enumText("all zero policy", zeroNames, p) }

// UnmarshalText parses the word used in configuration.
func (p *ZeroPolicy) UnmarshalText(text []byte) error {
	return enumParse("all zero policy", zeroNames, text, p)
}

// UnprovedPolicy decides about planes that are avoided toward a destination (see [Avoid]).
type UnprovedPolicy uint8

// The policies, in configuration "report" (default), "avoid".
const (
	UnprovedReport UnprovedPolicy = iota // avoidances have no effect
	UnprovedAvoid                        // avoided planes are not used
)

var unprovedNames = []string{"report", "avoid"}

// String returns the word used in configuration.
func (p UnprovedPolicy) String() string { return enumName(unprovedNames, p) }

// MarshalText returns [UnprovedPolicy.String], or an error for an undefined value.
func (p UnprovedPolicy) MarshalText() ([]byte, error) {
	return enumText("unproved policy", unprovedNames, p)
}

// UnmarshalText parses the word used in configuration.
func (p *UnprovedPolicy) UnmarshalText(text []byte) error {
	return enumParse("unproved policy", unprovedNames, text, p)
}

// Role is the role of the machine that the table computes for.
type Role uint8

// The roles, in configuration "server" (default), "leaf".
const (
	RoleServer Role = iota // a stub that weighs planes and readvertises nothing
	RoleLeaf               // a transit node that advertises the recomputed bandwidth
)

var roleNames = []string{"server", "leaf"}

// String returns the word used in configuration.
func (r Role) String() string { return enumName(roleNames, r) }

// MarshalText returns [Role.String], or an error for an undefined value.
func (r Role) MarshalText() ([]byte, error) { return enumText("role", roleNames, r) }

// UnmarshalText parses the word used in configuration.
func (r *Role) UnmarshalText(text []byte) error { return enumParse("role", roleNames, text, r) }

// Encoding selects the community in which a session encodes bandwidth. Both are
// always decoded.
type Encoding uint8

// The encodings, in configuration "link-bandwidth" (default),
// "extended-community".
const (
	LinkBandwidth Encoding = iota // RFC 10005, transitive
	FARECommunity                 // administrator and Gbit/s, code point configurable
)

var encodingNames = []string{"link-bandwidth", "extended-community"}

// String returns the word used in configuration.
func (e Encoding) String() string { return enumName(encodingNames, e) }

// MarshalText returns [Encoding.String], or an error for an undefined value.
func (e Encoding) MarshalText() ([]byte, error) { return enumText("encoding", encodingNames, e) }

// UnmarshalText parses the word used in configuration.
func (e *Encoding) UnmarshalText(text []byte) error {
	return enumParse("encoding", encodingNames, text, e)
}

// Format is the number format of a session's Link Bandwidth communities.
type Format uint8

// The formats, in configuration "ieee754" (default), "uint32".
const (
	IEEE754 Format = iota // float32, bytes/s (RFC 10005)
	Uint32                // unsigned integer, bytes/s (FRR's disable-link-bw-encoding-ieee)
)

var formatNames = []string{"ieee754", "uint32"}

// String returns the word used in configuration.
func (f Format) String() string { return enumName(formatNames, f) }

// MarshalText returns [Format.String], or an error for an undefined value.
func (f Format) MarshalText() ([]byte, error) { return enumText("format", formatNames, f) }

// UnmarshalText parses the word used in configuration.
func (f *Format) UnmarshalText(text []byte) error { return enumParse("format", formatNames, text, f) }
