package topo

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/spelling"
)

// Key is a key of a fabric's file; commands have a flag for each, with dashes instead of underscores.
type Key struct {
	Name  string
	Usage string   // description in one line
	Words []string // valid values; nil: not a list
	field func(*Spec) any
}

var (
	software   = []string{Fared, FRR, BIRD}
	cablings   = []string{Block, Split}
	gpuPorts   = []string{Shared, Own}
	families   = []string{IPv4, IPv6, Dual}
	numberings = []string{Numbered, Unnumbered}
	sharings   = []string{SharedNone, SharedServers}
	modes      = []string{"per-flow", "per-packet"}
	policies   = []string{"reweight", "remap"}
	orderings  = []string{"weak", "partial", "strong"}
)

var keys = []Key{
	{"name", "name of the fabric", nil, func(s *Spec) any { return &s.Name }},
	{"planes", "planes", nil, func(s *Spec) any { return &s.Planes }},
	{"leaves", "leaves of a plane", nil, func(s *Spec) any { return &s.Leaves }},
	{"spines", "spines of a plane", nil, func(s *Spec) any { return &s.Spines }},
	{"servers", "GPU servers", nil, func(s *Spec) any { return &s.Servers }},
	{"gpus", "GPUs of a server", nil, func(s *Spec) any { return &s.GPUs }},
	{"gpu_ports", "owner of ports: all GPUs of a server share them, or each GPU owns its ports", gpuPorts, func(s *Spec) any { return &s.GPUPorts }},
	{"sub_ports", "sub-ports of a server, or of a GPU that owns its ports, in each plane: 2 is a Y-cable", nil, func(s *Spec) any { return &s.SubPorts }},
	{"speed", "speed of a sub-port", nil, func(s *Spec) any { return &s.Speed }},
	{"overrides", "ports that differ, such as \"server2 speed=200G; */g1/p0 sub_ports=0\"", nil, func(s *Spec) any { return &s.Overrides }},
	{"devices", "names of servers' devices, such as eth{n} or mlx5_{n}; placeholders {p}, {plane}, {sub}, {gpu}, {n} (default {plane}.{sub}, and g{gpu}{plane}.{sub} where GPUs own their ports)", nil, func(s *Spec) any { return &s.Devices }},
	{"uplink_speed", "speed of a leaf's cable to a spine (default the sending rate of its servers, divided by the spines)", nil, func(s *Spec) any { return &s.UplinkSpeed }},
	{"cabling", "a server's cables in a plane go to one leaf (block) or to all (split) (default split where several leaves have no spine)", cablings, func(s *Spec) any { return &s.Cabling }},
	{"leaf", "software of the leaves", software, func(s *Spec) any { return &s.Leaf }},
	{"spine", "software of the spines", software, func(s *Spec) any { return &s.Spine }},
	{"bfd", "time between packets of BFD on every cable; without it, no BFD", nil, func(s *Spec) any { return &s.BFD }},
	{"restart_time", "how long leaves may keep the routes of a server whose control plane restarts (default 1m behind frr and bird; fared leaves keep none)", nil, func(s *Spec) any { return &s.RestartTime }},
	{"mode", "unit of traffic that is spread over planes: flows or packets", modes, func(s *Spec) any { return &s.Mode }},
	{"policy", "policy for a failed plane's slots", policies, func(s *Spec) any { return &s.Policy }},
	{"ordering", "memory ordering of queue pairs", orderings, func(s *Spec) any { return &s.Ordering }},
	{"server_as", "AS number of the first server", nil, func(s *Spec) any { return &s.ServerAS }},
	{"leaf_as", "AS number of the first leaf", nil, func(s *Spec) any { return &s.LeafAS }},
	{"spine_as", "AS number of the spines of the first plane", nil, func(s *Spec) any { return &s.SpineAS }},
	{"shared_as", "nodes that share one AS number", sharings, func(s *Spec) any { return &s.SharedAS }},
	{"addresses", "address families of the cables and the GPUs", families, func(s *Spec) any { return &s.Addresses }},
	{"cables", "addresses of cables: numbered, or unnumbered with IPv6 link-local addresses alone", numberings, func(s *Spec) any { return &s.Cables }},
	{"underlay", "network of the cables' addresses", nil, func(s *Spec) any { return &s.Underlay }},
	{"loopbacks", "network of the GPUs' addresses", nil, func(s *Spec) any { return &s.Loopbacks }},
	{"underlay6", "network of the cables' IPv6 addresses", nil, func(s *Spec) any { return &s.Underlay6 }},
	{"loopbacks6", "network of the GPUs' IPv6 addresses", nil, func(s *Spec) any { return &s.Loopbacks6 }},
}

// Keys returns all keys, in the order of Spec's fields.
func Keys() []Key { return append([]Key(nil), keys...) }

// Kind returns the form of the key's values: int, speed, network, duration, ports or word.
func (k Key) Kind() string {
	switch k.field(new(Spec)).(type) {
	case *int, *uint32:
		return "int"
	case *fare.Bandwidth:
		return "speed"
	case *netip.Prefix:
		return "network"
	case *time.Duration:
		return "duration"
	case *Overrides:
		return "ports"
	}
	return "word"
}

// Default returns the value of a key that a file omits, or "" if it depends on other keys.
func (k Key) Default() string {
	if k.Name == "cabling" || k.Name == "uplink_speed" || k.Name == "devices" {
		return ""
	}
	return k.Text(Spec{}.WithDefaults())
}

// findKey returns a key by its name, or nil.
func findKey(name string) *Key {
	for i := range keys {
		if keys[i].Name == name {
			return &keys[i]
		}
	}
	return nil
}

// Set parses a value into a Spec. It rejects values that are not of the key's kind, and the zero value, which would
// mean the default; Validate checks the rest. The error is a Problem.
func (k Key) Set(s *Spec, value string) error {
	bad := func(remedy, format string, args ...any) error {
		return Problem{k.Name, fmt.Sprintf(format, args...), remedy}
	}
	field := k.field(s)
	zero := false
	switch v := field.(type) {
	case *string:
		*v, zero = value, value == ""
	case *int:
		n, err := strconv.ParseInt(value, 10, 32)
		if err != nil {
			return bad("for example "+k.example(), "%s is not a whole number, or too large", quote(value))
		}
		*v, zero = int(n), n == 0 && v != &s.Spines // no spines is the default and may be written
	case *uint32:
		n, err := strconv.ParseUint(value, 10, 32)
		if err != nil {
			return bad("for example "+k.example(), "%s is not an AS number", quote(value))
		}
		*v, zero = uint32(n), n == 0
	case *fare.Bandwidth:
		b, err := fare.ParseBandwidth(value)
		if err != nil {
			return bad("write a number of bit/s with an optional unit, for example "+k.example(), "%s is not a speed", quote(value))
		}
		if strings.Trim(value, "0123456789.") == "" {
			return bad("write "+value+"G for Gbit/s, or use M, T", "%s has no unit", quote(value))
		}
		*v, zero = b, b == 0
	case *time.Duration:
		d, err := time.ParseDuration(value)
		if err != nil {
			return bad("for example "+k.example(), "%s is not a time", quote(value))
		}
		*v, zero = d, d == 0
	case *Overrides:
		list, err := Overrides(value).canonical()
		if err != nil {
			return bad("for example "+k.example(), "%v", err)
		}
		*v, zero = list, list == ""
	case *netip.Prefix:
		p, err := netip.ParsePrefix(value)
		if err != nil {
			return bad("for example "+k.example(), "%s is not a network", quote(value))
		}
		*v = p
	}
	if zero {
		return bad("for example "+k.example()+", or leave it out", "%s is out of range", quote(value))
	}
	return nil
}

// quote quotes a value of a file for an error, shortened to fit a line.
func quote(value string) string {
	if r := []rune(value); len(r) > 40 {
		value = string(r[:40]) + "..."
	}
	return strconv.Quote(value)
}

// example returns a valid value of the key.
func (k Key) example() string {
	switch k.Name {
	case "cabling":
		return Split
	case "uplink_speed":
		return "800G"
	case "bfd":
		return "100ms"
	case "devices":
		return `"eth{n}"`
	case "overrides":
		return `"server2 speed=200G; */p0 sub_ports=1"`
	}
	return k.Default()
}

// Text returns the key's value in a Spec in the form that Set parses, or "" for a value that means the default.
func (k Key) Text(s Spec) string {
	switch v := k.field(&s).(type) {
	case *string:
		return *v
	case *Overrides:
		return string(*v)
	case *int:
		if *v != 0 || v == &s.Spines {
			return strconv.Itoa(*v)
		}
	case *uint32:
		if *v != 0 {
			return strconv.FormatUint(uint64(*v), 10)
		}
	case *fare.Bandwidth:
		if *v != 0 {
			return speedText(*v)
		}
	case *netip.Prefix:
		if v.IsValid() {
			return v.String()
		}
	case *time.Duration:
		if *v != 0 {
			return v.String()
		}
	}
	return ""
}

// speedText formats a speed with a unit, which files require.
func speedText(b fare.Bandwidth) string {
	text := b.String()
	if last := text[len(text)-1]; last >= '0' && last <= '9' {
		text += "bps"
	}
	return text
}

// suggest returns the known key that resembles an unknown one, or all keys.
func suggest(name string) string {
	best, least := "", 2+len(name)/4
	for _, k := range keys {
		if d := spelling.Distance(strings.ToLower(strings.ReplaceAll(name, "-", "_")), k.Name, least); d < least {
			best, least = k.Name, d
		}
	}
	if best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	names := make([]string, len(keys))
	for i := range keys {
		names[i] = keys[i].Name
	}
	return "use " + strings.Join(names, ", ")
}
