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
	maxServerGPU = 8
)

// Software of a leaf or a spine.
const (
	Fared = "fared" // fared leaf
	FRR   = "frr"
	BIRD  = "bird"
)

// Values of Spec.Cabling.
const (
	Block = "block"
	Split = "split"
)

// Spec is a person's description of a fabric. The zero value of each field means its default; a file has the same keys
// in lower case (see [Parse]).
type Spec struct {
	// Name is the name of the fabric: lower-case letters, digits and dashes, at most 32; default "fabric".
	Name string
	// Planes is the number of planes, 1 to 64; default 4.
	Planes int
	// Leaves and Spines are the numbers per plane, 1 to 256 and 0 to 64; default 1 and 0.
	Leaves, Spines int
	// Servers is the number of GPU servers, 2 to 4096; default 8.
	Servers int
	// GPUs is the number of GPUs of a server, and so of its loopbacks, 1 to 8; default 1.
	GPUs int
	// GPUPorts is "shared" (default: every sub-port of a server serves all of its GPUs) or "own" (each GPU has SubPorts
	// sub-ports in every plane, which serve it alone).
	GPUPorts string
	// SubPorts is the number of sub-ports of a server, or of a GPU that owns its ports, in each plane; default 2, a
	// Y-cable.
	SubPorts int
	// Speed is the speed of a sub-port, in bit/s; default 400G.
	Speed fare.Bandwidth
	// Overrides lists the ports that differ from SubPorts and Speed; default none.
	Overrides Overrides
	// Devices is the pattern of the names of servers' devices, one for each sub-port. Placeholders are {p}, the plane's
	// number; {plane}, its name; {sub}, the sub-port's number in its port; {gpu}, the GPU that owns it; and {n}, which
	// numbers all sub-ports of the server from 0, by plane, GPU and sub-port. Default "{plane}.{sub}", or
	// "g{gpu}{plane}.{sub}" if GPUs own their ports.
	Devices string
	// UplinkSpeed is the speed of a leaf's cable to a spine, in bit/s; default: its servers' total speed, divided by
	// the spines.
	UplinkSpeed fare.Bandwidth
	// Cabling is "block" or "split"; default: split for several leaves without spines, otherwise block.
	Cabling string
	// Leaf and Spine are the software of leaves and spines: "fared" (default), "frr" or "bird".
	Leaf, Spine string
	// BFD is the time between two packets of BFD on every cable, of which three in a row may not be missing (RFC 5880),
	// 50ms to 2s; default: no BFD, and a silent neighbor is detected after the hold time.
	BFD time.Duration
	// RestartTime is the time for which leaves may keep the routes of a server whose control plane restarts
	// (bgp.restart_time; RFC 4724, Section 3), 1s to 4095s in whole seconds. Default: 1m behind FRR and BIRD, which
	// keep routes; none behind fared, which does not.
	RestartTime time.Duration
	// Mode, Policy and Ordering are the values of the servers' weights section; default: its defaults.
	Mode, Policy, Ordering string
	// ServerAS, LeafAS and SpineAS are the first AS numbers of each kind; default 4200001000, 4200010000 and
	// 4200060000.
	ServerAS, LeafAS, SpineAS uint32
	// SharedAS is "none" (default: each server has a separate AS number) or "servers" (all have ServerAS, and leaves
	// replace it in the AS paths that they send to servers).
	SharedAS string
	// Addresses selects the address families of cables and GPUs: "ipv4" (default), "ipv6" or "dual". A cable carries a
	// BGP session for each.
	Addresses string
	// Cables is "numbered" (default: each cable has a network) or "unnumbered": cables have IPv6 link-local addresses
	// alone, and one BGP session, whose lower end finds the upper one by router advertisements (RFC 4861, Section 4.2),
	// for the families of Addresses.
	Cables string
	// Underlay and Loopbacks are IPv4 networks; default 10.0.0.0/9 and 10.255.0.0/16. Servers have their BGP
	// identifiers in Loopbacks, also with IPv6 alone.
	Underlay, Loopbacks netip.Prefix
	// Underlay6 and Loopbacks6 are IPv6 networks; default fd00:10::/64 and fd00:255::/64. They are unique local, but
	// with a fixed Global ID, where RFC 4193, Section 3.2.1, requires a random one: a site that may be merged with
	// another should configure its own.
	Underlay6, Loopbacks6 netip.Prefix
}

// WithDefaults returns s with every default filled in.
func (s Spec) WithDefaults() Spec {
	def(&s.Name, "fabric")
	def(&s.Planes, 4)
	def(&s.Leaves, 1)
	def(&s.Servers, 8)
	def(&s.GPUs, 1)
	if s.GPUPorts == "" || s.GPUs == 1 && s.GPUPorts == Own { // "own" with one GPU is equivalent to "shared"
		s.GPUPorts = Shared
	}
	def(&s.SubPorts, 2)
	def(&s.Speed, 400*fare.Gigabit)
	if list, err := s.Overrides.canonical(); err == nil {
		s.Overrides = list
	}
	if s.owners() > 1 {
		def(&s.Devices, ownDevices)
	}
	def(&s.Devices, sharedDevices)
	if s.Cabling == "" {
		s.Cabling = Block
		if s.Leaves > 1 && s.Spines == 0 {
			s.Cabling = Split
		}
	}
	if s.UplinkSpeed == 0 && s.Spines > 0 && s.inRange(nil) {
		s.UplinkSpeed = fare.Bandwidth(uint64(s.sizes().fullest()) / uint64(s.Spines))
	}
	def(&s.Leaf, Fared)
	if s.Leaf != Fared {
		def(&s.RestartTime, defaultRestartTime)
	}
	def(&s.Spine, Fared)
	def(&s.Mode, "per-flow")
	def(&s.Policy, "reweight")
	def(&s.Ordering, "weak")
	def(&s.ServerAS, 4200001000)
	def(&s.LeafAS, 4200010000)
	def(&s.SpineAS, 4200060000)
	def(&s.SharedAS, SharedNone)
	def(&s.Addresses, IPv4)
	def(&s.Cables, Numbered)
	def(&s.Underlay6, netip.MustParsePrefix("fd00:10::/64"))
	def(&s.Loopbacks6, netip.MustParsePrefix("fd00:255::/64"))
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

func ceil(a, b int) int { return (a + b - 1) / b }

var fabricName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// Limits of a sub-port's speed. The sum in a plane must be below fare.MaxBandwidth.
const (
	minSpeed = fare.Kilobit
	maxSpeed = 8 * fare.Terabit
)

// unusable lists networks that fared's configuration rejects, for loopbacks or for both kinds of addresses.
var unusable = []struct {
	prefix   netip.Prefix
	underlay bool // allowed for cables: labs in one process use it
}{
	{netip.MustParsePrefix("0.0.0.0/8"), false},
	{netip.MustParsePrefix("127.0.0.0/8"), true},
	{netip.MustParsePrefix("169.254.0.0/16"), true},
	{netip.MustParsePrefix("224.0.0.0/3"), false},
}

// unusable6 lists the IPv6 networks that fared's configuration rejects: loopback and mapped addresses, link-local and
// multicast ones.
var unusable6 = []netip.Prefix{netip.MustParsePrefix("::/8"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8")}

// reservedAS lists the AS numbers that no speaker has: AS_TRANS (RFC 6793), 65535 (RFC 7300), and those reserved by
// IANA.
var reservedAS = []struct{ first, last uint64 }{{23456, 23456}, {65535, 65535}, {65552, 131071}}

// Problem is an error in one key of a Spec.
type Problem struct {
	Key    string // as in a file; "" if the problem concerns several keys
	Text   string
	Remedy string
}

// Error returns the problem in one line.
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

// Problems is an error with all problems of a Spec.
type Problems []Problem

// Error returns one line per problem.
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

// inRange reports whether the numbers allow counting a fabric, and passes those that do not to bad, unless bad is nil.
func (s *Spec) inRange(bad func(key, remedy, format string, args ...any)) bool {
	sound := true
	for _, n := range []struct {
		key             string
		value, low, top int
	}{
		{"planes", s.Planes, 1, config.MaxPlanes}, {"leaves", s.Leaves, 1, MaxLeaves}, {"spines", s.Spines, 0, MaxSpines},
		{"servers", s.Servers, 2, MaxServers}, {"gpus", s.GPUs, 1, maxServerGPU}, {"sub_ports", s.SubPorts, 1, config.MaxSubPorts},
	} {
		if n.value >= n.low && n.value <= n.top {
			continue
		}
		if sound = false; bad != nil {
			bad(n.key, fmt.Sprintf("use %d to %d", n.low, n.top), "%d is out of range", n.value)
		}
	}
	return sound
}

// Validate returns all problems of a Spec whose defaults are filled in; the error is of type Problems.
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

// validateKeys returns the problems of individual keys, and whether the keys are sound enough to compute with.
func (s Spec) validateKeys() (all Problems, sound bool) {
	bad := all.add
	if !fabricName.MatchString(s.Name) {
		bad("name", "use lower-case letters, digits and dashes, at most 32", "%q cannot name a fabric", s.Name)
	}
	sound = s.inRange(bad)
	word := func(key, value string, known ...string) {
		if !slices.Contains(known, value) {
			bad(key, "use "+strings.Join(known, ", "), "%q is not known", value)
		}
	}
	word("gpu_ports", s.GPUPorts, gpuPorts...)
	word("shared_as", s.SharedAS, sharings...)
	word("addresses", s.Addresses, families...)
	word("cables", s.Cables, numberings...)
	if s.unnumbered() && s.Leaf == BIRD && s.Spines > 0 {
		bad("cables", "use numbered, or other software on the leaves", "an unnumbered session of a BIRD leaf waits for its peer, and the spines wait for the leaf")
	}
	word("cabling", s.Cabling, cablings...)
	word("leaf", s.Leaf, software...)
	word("spine", s.Spine, software...)
	word("mode", s.Mode, modes...)
	word("policy", s.Policy, policies...)
	word("ordering", s.Ordering, orderings...)
	if s.Speed < minSpeed || s.Speed > maxSpeed {
		sound = false
		bad("speed", fmt.Sprintf("use %s to %s", minSpeed, maxSpeed), "%s is not a speed of a cable", s.Speed)
	}
	if s.BFD != 0 && (s.BFD < minBFD || s.BFD > maxBFD || s.BFD%time.Millisecond != 0) {
		bad("bfd", fmt.Sprintf("use whole milliseconds, %s to %s", minBFD, maxBFD), "%s is out of range", s.BFD)
	}
	if s.RestartTime < 0 || s.RestartTime > maxRestartTime || s.RestartTime%time.Second != 0 {
		bad("restart_time", fmt.Sprintf("use whole seconds, 1s to %s", maxRestartTime), "%s is out of range", s.RestartTime)
	}
	for _, p := range []struct {
		key    string
		prefix netip.Prefix
	}{{"underlay", s.Underlay}, {"loopbacks", s.Loopbacks}} {
		if !p.prefix.Addr().Is4() || p.prefix != p.prefix.Masked() {
			sound = false
			bad(p.key, "for example 10.0.0.0/9", "%s is not an IPv4 network", p.prefix)
			continue
		}
		for _, r := range unusable {
			if p.prefix.Overlaps(r.prefix) && !(r.underlay && p.key == "underlay") {
				bad(p.key, "for example 10.0.0.0/9", "%s has addresses of %s, which cannot be used here", p.prefix, r.prefix)
			}
		}
	}
	for _, p := range []struct {
		key, example string
		prefix       netip.Prefix
	}{{"underlay6", "fd00:10::/64", s.Underlay6}, {"loopbacks6", "fd00:255::/64", s.Loopbacks6}} {
		if !p.prefix.Addr().Is6() || p.prefix.Addr().Is4In6() || p.prefix != p.prefix.Masked() {
			sound = false
			bad(p.key, "for example "+p.example, "%s is not an IPv6 network", p.prefix)
			continue
		}
		for _, r := range unusable6 {
			if p.prefix.Overlaps(r) {
				bad(p.key, "for example "+p.example, "%s has addresses of %s, which cannot be used here", p.prefix, r)
			}
		}
	}
	return all, sound
}

// validateSize reports numbers that do not fit together.
func (s Spec) validateSize(bad func(key, remedy, format string, args ...any)) {
	if n := s.Servers * s.GPUs; n > MaxGPUs {
		bad("gpus", "use fewer servers or fewer GPUs of a server", "%d servers with %d GPUs are %d, more than %d", s.Servers, s.GPUs, n, MaxGPUs)
	}
	z := s.sizes()
	if n := slices.Max(z.server) * s.sessionsEach(); n > config.MaxSessions {
		bad("sub_ports", "use fewer planes or sub-ports", "a server would have %d sessions, more than %d", n, config.MaxSessions)
	} else if z.port > config.MaxSubPorts {
		bad("sub_ports", "use fewer sub-ports", "a server would have %d sub-ports in a plane, more than %d", z.port, config.MaxSubPorts)
	}
	s.validatePorts(z, bad)
	s.validateDevices(bad)
	if n := (slices.Max(z.leaf) + s.Spines) * s.sessionsEach(); n > config.MaxLeafSessions {
		bad("leaves", "use more leaves in a plane", "a leaf would have %d sessions, more than %d", n, config.MaxLeafSessions)
	}
	switch {
	case s.Cabling == Block && s.Leaves > s.Servers:
		bad("leaves", "use at most a leaf for each server", "%d leaves of a plane for %d servers", s.Leaves, s.Servers)
	case s.Cabling == Block && s.Leaves > 1 && s.Spines == 0:
		bad("spines", "give the plane a spine, or use cabling: split", "the %d leaves of a plane are not connected", s.Leaves)
	case s.Cabling == Split && s.Leaves > s.SubPorts:
		bad("leaves", "use at most a leaf for each sub-port", "%d leaves of a plane for %d sub-ports of a server", s.Leaves, s.SubPorts)
	case s.Cabling == Split && s.Spines > 0:
		bad("spines", "leave it out, or use cabling: block", "every server is wired to every leaf already")
	}
	if s.Spines == 0 && s.UplinkSpeed != 0 {
		bad("uplink_speed", "leave it out", "there are no spines")
	}
	if s.Spines > 0 && (s.UplinkSpeed < minSpeed || s.UplinkSpeed > fare.MaxBandwidth) {
		bad("uplink_speed", fmt.Sprintf("use %s to %s", minSpeed, fare.MaxBandwidth), "%s is not a speed of a cable", s.UplinkSpeed)
	}
	if s.Underlay.Overlaps(s.Loopbacks) {
		bad("loopbacks", "use another network", "%s overlaps the underlay %s", s.Loopbacks, s.Underlay)
	}
	if ids := netip.PrefixFrom(routerIDs, 16); ids.Overlaps(s.Loopbacks) {
		bad("loopbacks", "use another network", "%s overlaps %s, the network of router IDs", s.Loopbacks, ids)
	}
	if have, want := uint64(1)<<(32-s.Loopbacks.Bits()), uint64(s.Servers*s.GPUs+2); have < want {
		bad("loopbacks", "use a larger network", "%s has no room for %d GPUs", s.Loopbacks, s.Servers*s.GPUs)
	}
	if have, want := uint64(1)<<(32-s.Underlay.Bits()), uint64(s.Planes+1)<<s.planeBits(z); have < want {
		bad("underlay", "use a larger network", "%s has no room for %d addresses", s.Underlay, want)
	}
	if s.Underlay6.Overlaps(s.Loopbacks6) {
		bad("loopbacks6", "use another network", "%s overlaps the underlay %s", s.Loopbacks6, s.Underlay6)
	}
	if bits := 128 - s.Loopbacks6.Bits(); bits < 32 && 1<<bits < s.Servers*s.GPUs+2 {
		bad("loopbacks6", "use a larger network", "%s has no room for %d GPUs", s.Loopbacks6, s.Servers*s.GPUs)
	}
	if bits, want := 128-s.Underlay6.Bits(), uint64(s.Planes+1)<<s.planeBits(z); bits < 32 && uint64(1)<<bits < want {
		bad("underlay6", "use a larger network", "%s has no room for %d addresses", s.Underlay6, want)
	}
	servers := s.Servers
	if s.SharedAS == SharedServers {
		servers = 1
	}
	type span struct {
		key         string
		first, last uint64
	}
	spans := []span{
		{"server_as", uint64(s.ServerAS), uint64(s.ServerAS) + uint64(servers) - 1},
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
			bad(a.key, "use a private range (RFC 6996): 4200000000 to 4294967294", "%d to %d are not AS numbers", a.first, a.last)
		}
		for _, b := range spans[:i] {
			if a.first <= b.last && b.first <= a.last {
				bad(a.key, "choose disjoint ranges", "%d to %d overlap those of %s", a.first, a.last, b.key)
			}
		}
	}
}

// planeBits returns the number of address bits of a plane's cables: two addresses each, in blocks of at least 256.
func (s Spec) planeBits(z sizes) int {
	bits := 8
	for 1<<bits < 2*(z.plane+s.Leaves*s.Spines) {
		bits++
	}
	return bits
}

// Limits of the time between two packets of BFD: all software supports these values, and three packets take less than
// the hold time.
const (
	minBFD = 50 * time.Millisecond
	maxBFD = 2 * time.Second
)

// Restart times: the default behind leaves that keep routes, and the maximum of the capability's 12 bits.
const (
	defaultRestartTime = time.Minute
	maxRestartTime     = 4095 * time.Second
)

var errNotFound = errors.New("not found in this fabric")
