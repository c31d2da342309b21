package fare

import (
	"fmt"
	"strings"
)

// Every enum of the package is written as text in configuration, recordings
// and output; the helpers here are the one place that does it.

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

// MissingPolicy says what to do with a destination for which some usable
// paths carry a bandwidth and some do not. When none does, local link speed
// counts whatever the policy.
type MissingPolicy uint8

// The policies, in configuration "equal" (default), "local", "skip".
const (
	MissingEqual MissingPolicy = iota // every plane with a usable path gets the same (RFC 10005's default)
	MissingLocal                      // a path without a value counts with its local link speed
	MissingSkip                       // a path without a value is not used
)

var missingNames = []string{"equal", "local", "skip"}

// String is the word used in configuration.
func (p MissingPolicy) String() string { return enumName(missingNames, p) }

// MarshalText is [MissingPolicy.String]; an undefined value is an error.
func (p MissingPolicy) MarshalText() ([]byte, error) {
	return enumText("missing bandwidth policy", missingNames, p)
}

// UnmarshalText reads the word used in configuration.
func (p *MissingPolicy) UnmarshalText(text []byte) error {
	return enumParse("missing bandwidth policy", missingNames, text, p)
}

// ZeroPolicy says what to do with a destination all of whose usable paths
// advertise zero.
type ZeroPolicy uint8

// The policies, in configuration "equal" (default), "unreachable".
const (
	ZeroEqual       ZeroPolicy = iota // every plane with a usable path gets the same
	ZeroUnreachable                   // the destination is unreachable
)

var zeroNames = []string{"equal", "unreachable"}

// String is the word used in configuration.
func (p ZeroPolicy) String() string { return enumName(zeroNames, p) }

// MarshalText is [ZeroPolicy.String]; an undefined value is an error.
func (p ZeroPolicy) MarshalText() ([]byte, error) { return enumText("all zero policy", zeroNames, p) }

// UnmarshalText reads the word used in configuration.
func (p *ZeroPolicy) UnmarshalText(text []byte) error {
	return enumParse("all zero policy", zeroNames, text, p)
}

// Role is what the table computes for.
type Role uint8

// The roles, in configuration "server" (default), "leaf".
const (
	RoleServer Role = iota // a stub that weighs planes and passes nothing on
	RoleLeaf               // a transit node that advertises what it recomputed
)

var roleNames = []string{"server", "leaf"}

// String is the word used in configuration.
func (r Role) String() string { return enumName(roleNames, r) }

// MarshalText is [Role.String]; an undefined value is an error.
func (r Role) MarshalText() ([]byte, error) { return enumText("role", roleNames, r) }

// UnmarshalText reads the word used in configuration.
func (r *Role) UnmarshalText(text []byte) error { return enumParse("role", roleNames, text, r) }

// Encoding is the community in which a session writes bandwidth. Both are
// always read.
type Encoding uint8

// The encodings, in configuration "link-bandwidth" (default),
// "extended-community".
const (
	LinkBandwidth Encoding = iota // RFC 10005, transitive
	FARECommunity                 // administrator and Gbit/s, code point configurable
)

var encodingNames = []string{"link-bandwidth", "extended-community"}

// String is the word used in configuration.
func (e Encoding) String() string { return enumName(encodingNames, e) }

// MarshalText is [Encoding.String]; an undefined value is an error.
func (e Encoding) MarshalText() ([]byte, error) { return enumText("encoding", encodingNames, e) }

// UnmarshalText reads the word used in configuration.
func (e *Encoding) UnmarshalText(text []byte) error {
	return enumParse("encoding", encodingNames, text, e)
}

// Format is how a session's Link Bandwidth communities carry their number.
type Format uint8

// The formats, in configuration "ieee754" (default), "uint32".
const (
	IEEE754 Format = iota // float32, bytes/s (RFC 10005)
	Uint32                // unsigned integer, bytes/s (FRR's disable-link-bw-encoding-ieee)
)

var formatNames = []string{"ieee754", "uint32"}

// String is the word used in configuration.
func (f Format) String() string { return enumName(formatNames, f) }

// MarshalText is [Format.String]; an undefined value is an error.
func (f Format) MarshalText() ([]byte, error) { return enumText("format", formatNames, f) }

// UnmarshalText reads the word used in configuration.
func (f *Format) UnmarshalText(text []byte) error { return enumParse("format", formatNames, text, f) }
