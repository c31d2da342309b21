package topo

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// Limits of a fabric.
const (
	MaxServers   = 4096
	MaxGPUs      = 16384 // of all servers
	MaxLeaves    = 256   // of a plane
	MaxSpines    = 64    // of a plane
	maxServerGPU = config.MaxLoopbacksPerFamily
)

// What may run on a leaf or a spine.
const (
	Fared = "fared" // fared leaf
	FRR   = "frr"
	BIRD  = "bird"
)

// The values of Spec.Cabling.
const (
	Block = "block"
	Split = "split"
)

// Spec is a fabric as a person describes it. The zero value of each field means its default; a file has the same keys in lower
// case (see [Parse]).
type Spec struct {
	// Name is what the fabric is called: lower-case letters, digits and dashes, at most 32; default "fabric".
	Name string
	// Planes is the number of planes, 1 to 64; default 4.
	Planes int
	// Leaves and Spines are how many each plane has, 1 to 256 and 0 to 64; default 1 and 0.
	Leaves, Spines int
	// Servers is the number of GPU servers, 2 to 4096; default 8.
	Servers int
	// GPUs is the number of GPUs of a server, and so of its loopbacks, 1 to 8; default 1.
	GPUs int
	// SubPorts is the number of sub-ports of a server in each plane, 1 to 64 over all planes; default 2, a Y-cable.
	SubPorts int
	// Speed is that of a sub-port, in bit/s; default 400G.
	Speed fare.Bandwidth
	// UplinkSpeed is that of a leaf's cable to a spine; default: what its servers can send, shared by the spines.
	UplinkSpeed fare.Bandwidth
	// Cabling is "block" or "split"; default: split for several leaves without spines, else block.
	Cabling string
	// Leaf and Spine are what runs there: "fared" (default), "frr" or "bird".
	Leaf, Spine string
	// BFD is the time between two packets of BFD on every cable, of which three in a row may not fail (RFC 5880), 50ms to 2s;
	// default: no BFD, and a silent neighbour is noticed after the hold time.
	BFD time.Duration
	// Mode, Policy and Ordering are the values of the servers' weights section; default: its defaults.
	Mode, Policy, Ordering string
	// ServerAS, LeafAS and SpineAS are the first AS numbers of each kind; default 4200001000, 4200010000 and 4200060000.
	ServerAS, LeafAS, SpineAS uint32
	// Underlay and Loopbacks are IPv4 networks; default 10.0.0.0/9 and 10.255.0.0/16.
	Underlay, Loopbacks netip.Prefix
}

// WithDefaults returns s with every default filled in.
func (s Spec) WithDefaults() Spec {
	def(&s.Name, "fabric")
	def(&s.Planes, 4)
	def(&s.Leaves, 1)
	def(&s.Servers, 8)
	def(&s.GPUs, 1)
	def(&s.SubPorts, 2)
	def(&s.Speed, 400*fare.Gigabit)
	if s.Cabling == "" {
		s.Cabling = Block
		if s.Leaves > 1 && s.Spines == 0 {
			s.Cabling = Split
		}
	}
	if s.UplinkSpeed == 0 && s.Spines > 0 {
		s.UplinkSpeed = fare.Bandwidth(uint64(s.leafCables()) * uint64(s.Speed) / uint64(s.Spines))
	}
	def(&s.Leaf, Fared)
	def(&s.Spine, Fared)
	def(&s.Mode, "per-flow")
	def(&s.Policy, "reweight")
	def(&s.Ordering, "weak")
	def(&s.ServerAS, 4200001000)
	def(&s.LeafAS, 4200010000)
	def(&s.SpineAS, 4200060000)
	def(&s.Underlay, netip.MustParsePrefix("10.0.0.0/9"))
	def(&s.Loopbacks, netip.MustParsePrefix("10.255.0.0/16"))
	return s
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// leafCables is how many cables of servers the fullest leaf has.
func (s Spec) leafCables() int {
	if s.Cabling == Split {
		return s.Servers * ceil(s.SubPorts, s.Leaves)
	}
	return ceil(s.Servers, s.Leaves) * s.SubPorts
}

func ceil(a, b int) int { return (a + b - 1) / b }

var fabricName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// The speeds that a sub-port may have. What they add up to in a plane has to be below fare.MaxBandwidth.
const (
	minSpeed = fare.Kilobit
	maxSpeed = 8 * fare.Terabit
)

// unusable are networks that fared's configuration refuses, for loopbacks or for both kinds of addresses.
var unusable = []struct {
	prefix   netip.Prefix
	underlay bool // cables may have its addresses: labs in one process do
}{
	{netip.MustParsePrefix("0.0.0.0/8"), false},
	{netip.MustParsePrefix("127.0.0.0/8"), true},
	{netip.MustParsePrefix("169.254.0.0/16"), true},
	{netip.MustParsePrefix("224.0.0.0/3"), false},
}

// reservedAS are the AS numbers that no speaker has: AS_TRANS (RFC 6793), 65535 (RFC 7300), and what IANA has reserved.
var reservedAS = []struct{ first, last uint64 }{{23456, 23456}, {65535, 65535}, {65552, 131071}}

// Problem is what is wrong with one key of a Spec; an error.
type Problem struct {
	Key    string // as in a file; "" when it is about several
	Text   string
	Remedy string
}

// Error is one line.
func (p Problem) Error() string {
	text := p.Text
	if p.Key != "" {
		text = p.Key + ": " + text
	}
	if p.Remedy != "" {
		text += "; " + p.Remedy
	}
	return text
}

// Problems are all that is wrong with a Spec; an error.
type Problems []Problem

// Error is one line a problem.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].Error()
	}
	return strings.Join(lines, "\n")
}

func (p *Problems) add(key, remedy, format string, args ...any) {
	*p = append(*p, Problem{key, fmt.Sprintf(format, args...), remedy})
}

// Validate says everything that is wrong with a Spec whose defaults are filled in; the error is Problems.
func (s Spec) Validate() error {
	all, sound := s.validateKeys()
	if sound {
		s.validateSize(all.add)
	}
	if len(all) == 0 {
		return nil
	}
	return all
}

// validateKeys says what is wrong with keys by themselves, and whether they are sound enough to compute with.
func (s Spec) validateKeys() (all Problems, sound bool) {
	bad := all.add
	if !fabricName.MatchString(s.Name) {
		bad("name", "use lower-case letters, digits and dashes, at most 32", "%q cannot name a fabric", s.Name)
	}
	sound = true
	within := func(key string, value, low, top int) {
		if value < low || value > top {
			sound = false
			bad(key, fmt.Sprintf("use %d to %d", low, top), "%d is out of range", value)
		}
	}
	within("planes", s.Planes, 1, config.MaxPlanes)
	within("leaves", s.Leaves, 1, MaxLeaves)
	within("spines", s.Spines, 0, MaxSpines)
	within("servers", s.Servers, 2, MaxServers)
	within("gpus", s.GPUs, 1, maxServerGPU)
	within("sub_ports", s.SubPorts, 1, config.MaxSubPorts)
	word := func(key, value string, known ...string) {
		if !slices.Contains(known, value) {
			bad(key, "use "+strings.Join(known, ", "), "%q is not known", value)
		}
	}
	word("cabling", s.Cabling, cablings...)
	word("leaf", s.Leaf, software...)
	word("spine", s.Spine, software...)
	word("mode", s.Mode, modes...)
	word("policy", s.Policy, policies...)
	word("ordering", s.Ordering, orderings...)
	if s.Speed < minSpeed || s.Speed > maxSpeed {
		sound = false
		bad("speed", fmt.Sprintf("use %s to %s", minSpeed, maxSpeed), "%s is no speed of a cable", s.Speed)
	}
	if s.BFD != 0 && (s.BFD < minBFD || s.BFD > maxBFD || s.BFD%time.Millisecond != 0) {
		bad("bfd", fmt.Sprintf("use whole milliseconds, %s to %s", minBFD, maxBFD), "%s is out of range", s.BFD)
	}
	for _, p := range []struct {
		key    string
		prefix netip.Prefix
	}{{"underlay", s.Underlay}, {"loopbacks", s.Loopbacks}} {
		if !p.prefix.Addr().Is4() || p.prefix != p.prefix.Masked() {
			sound = false
			bad(p.key, "for example 10.0.0.0/9", "%s is no IPv4 network", p.prefix)
			continue
		}
		for _, r := range unusable {
			if p.prefix.Overlaps(r.prefix) && !(r.underlay && p.key == "underlay") {
				bad(p.key, "for example 10.0.0.0/9", "%s has addresses of %s, which nothing may have here", p.prefix, r.prefix)
			}
		}
	}
	return all, sound
}

// validateSize says what numbers do not fit each other.
func (s Spec) validateSize(bad func(key, remedy, format string, args ...any)) {
	if n := s.Servers * s.GPUs; n > MaxGPUs {
		bad("gpus", "use fewer servers or fewer GPUs of a server", "%d servers with %d GPUs are %d, more than %d", s.Servers, s.GPUs, n, MaxGPUs)
	}
	if n := s.Planes * s.SubPorts; n > config.MaxSessions {
		bad("sub_ports", "use fewer planes or sub-ports", "%d planes with %d sub-ports are %d sessions a server, more than %d", s.Planes, s.SubPorts, n, config.MaxSessions)
	}
	if n := s.leafCables() + s.Spines; n > config.MaxLeafSessions {
		bad("leaves", "use more leaves in a plane", "a leaf would have %d sessions, more than %d", n, config.MaxLeafSessions)
	}
	switch {
	case s.Cabling == Block && s.Leaves > s.Servers:
		bad("leaves", "use at most a leaf for each server", "%d leaves of a plane for %d servers", s.Leaves, s.Servers)
	case s.Cabling == Block && s.Leaves > 1 && s.Spines == 0:
		bad("spines", "give the plane a spine, or use cabling: split", "nothing joins the %d leaves of a plane", s.Leaves)
	case s.Cabling == Split && s.Leaves > s.SubPorts:
		bad("leaves", "use at most a leaf for each sub-port", "%d leaves of a plane for %d sub-ports of a server", s.Leaves, s.SubPorts)
	case s.Cabling == Split && s.Spines > 0:
		bad("spines", "leave it out, or use cabling: block", "every server is wired to every leaf already")
	}
	if s.Spines == 0 && s.UplinkSpeed != 0 {
		bad("uplink_speed", "leave it out", "there are no spines")
	}
	if s.Spines > 0 && (s.UplinkSpeed < minSpeed || s.UplinkSpeed > fare.MaxBandwidth) {
		bad("uplink_speed", fmt.Sprintf("use %s to %s", minSpeed, fare.MaxBandwidth), "%s is no speed of a cable", s.UplinkSpeed)
	}
	if s.Underlay.Overlaps(s.Loopbacks) {
		bad("loopbacks", "use another network", "%s overlaps the underlay %s", s.Loopbacks, s.Underlay)
	}
	if ids := netip.PrefixFrom(routerIDs, 16); ids.Overlaps(s.Loopbacks) {
		bad("loopbacks", "use another network", "%s overlaps %s, which router IDs are of", s.Loopbacks, ids)
	}
	if have, want := uint64(1)<<(32-s.Loopbacks.Bits()), uint64(s.Servers*s.GPUs+2); have < want {
		bad("loopbacks", "use a larger network", "%s has no room for %d GPUs", s.Loopbacks, s.Servers*s.GPUs)
	}
	if have, want := uint64(1)<<(32-s.Underlay.Bits()), uint64(s.Planes+1)<<s.planeBits(); have < want {
		bad("underlay", "use a larger network", "%s has no room for %d addresses", s.Underlay, want)
	}
	type span struct {
		key         string
		first, last uint64
	}
	spans := []span{
		{"server_as", uint64(s.ServerAS), uint64(s.ServerAS) + uint64(s.Servers) - 1},
		{"leaf_as", uint64(s.LeafAS), uint64(s.LeafAS) + uint64(s.Planes*s.Leaves) - 1},
		{"spine_as", uint64(s.SpineAS), uint64(s.SpineAS) + uint64(s.Planes) - 1},
	}
	if s.Spines == 0 {
		spans = spans[:2]
	}
	for i, a := range spans {
		for _, r := range reservedAS {
			if a.first <= r.last && r.first <= a.last {
				bad(a.key, "use a private range (RFC 6996): 4200000000 to 4294967294", "%d to %d have %d, which is reserved", a.first, a.last, max(a.first, r.first))
			}
		}
		if a.first == 0 || a.last >= 1<<32-1 {
			bad(a.key, "use a private range (RFC 6996): 4200000000 to 4294967294", "%d to %d are no AS numbers", a.first, a.last)
		}
		for _, b := range spans[:i] {
			if a.first <= b.last && b.first <= a.last {
				bad(a.key, "choose ranges apart", "%d to %d overlap those of %s", a.first, a.last, b.key)
			}
		}
	}
}

// planeBits is how many bits the addresses of a plane's cables take: two each, in blocks of 256 at least.
func (s Spec) planeBits() int {
	bits := 8
	for 1<<bits < 2*(s.Servers*s.SubPorts+s.Leaves*s.Spines) {
		bits++
	}
	return bits
}

// The time between two packets of BFD is what every software takes, and three of them are less than the hold time.
const (
	minBFD = 50 * time.Millisecond
	maxBFD = 2 * time.Second
)

var errNotFound = errors.New("there is no such thing in this fabric")
