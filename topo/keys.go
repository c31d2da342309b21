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

// Key is a key of a fabric's file; commands have a flag for each, with dashes for underscores.
type Key struct {
	Name  string
	Usage string   // what it says, in a line
	Words []string // the values it may have; nil: others
	field func(*Spec) any
}

var (
	software  = []string{Fared, FRR, BIRD}
	cablings  = []string{Block, Split}
	modes     = []string{"per-flow", "per-packet"}
	policies  = []string{"reweight", "remap"}
	orderings = []string{"weak", "partial", "strong"}
)

var keys = []Key{
	{"name", "what the fabric is called", nil, func(s *Spec) any { return &s.Name }},
	{"planes", "planes", nil, func(s *Spec) any { return &s.Planes }},
	{"leaves", "leaves of a plane", nil, func(s *Spec) any { return &s.Leaves }},
	{"spines", "spines of a plane", nil, func(s *Spec) any { return &s.Spines }},
	{"servers", "GPU servers", nil, func(s *Spec) any { return &s.Servers }},
	{"gpus", "GPUs of a server", nil, func(s *Spec) any { return &s.GPUs }},
	{"sub_ports", "sub-ports of a server in each plane: 2 is a Y-cable", nil, func(s *Spec) any { return &s.SubPorts }},
	{"speed", "speed of a sub-port", nil, func(s *Spec) any { return &s.Speed }},
	{"uplink_speed", "speed of a leaf's cable to a spine (default what its servers can send, shared by the spines)", nil, func(s *Spec) any { return &s.UplinkSpeed }},
	{"cabling", "a server's cables in a plane go to one leaf (block) or to all (split) (default split where several leaves have no spine)", cablings, func(s *Spec) any { return &s.Cabling }},
	{"leaf", "what runs on leaves", software, func(s *Spec) any { return &s.Leaf }},
	{"spine", "what runs on spines", software, func(s *Spec) any { return &s.Spine }},
	{"bfd", "time between packets of BFD on every cable; absent: no BFD", nil, func(s *Spec) any { return &s.BFD }},
	{"mode", "how queue pairs are used", modes, func(s *Spec) any { return &s.Mode }},
	{"policy", "what becomes of a failed plane's slots", policies, func(s *Spec) any { return &s.Policy }},
	{"ordering", "which order packets keep", orderings, func(s *Spec) any { return &s.Ordering }},
	{"server_as", "AS number of the first server", nil, func(s *Spec) any { return &s.ServerAS }},
	{"leaf_as", "AS number of the first leaf", nil, func(s *Spec) any { return &s.LeafAS }},
	{"spine_as", "AS number of the spines of the first plane", nil, func(s *Spec) any { return &s.SpineAS }},
	{"underlay", "network of the cables' addresses", nil, func(s *Spec) any { return &s.Underlay }},
	{"loopbacks", "network of the GPUs' addresses", nil, func(s *Spec) any { return &s.Loopbacks }},
}

// Keys are all keys, in the order of Spec's fields.
func Keys() []Key { return append([]Key(nil), keys...) }

// Kind is what values look like: int, speed, network or word.
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
	}
	return "word"
}

// Default is the key's value where a file says nothing; "" for one that depends on other keys.
func (k Key) Default() string {
	if k.Name == "cabling" || k.Name == "uplink_speed" {
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

// Set reads a value into a Spec. It refuses what is not of the key's kind, and what would mean "default" there; whether the
// value fits is Validate's to say. The error is a Problem.
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
			return bad("for example "+k.example(), "%s is no whole number, or too large", quote(value))
		}
		*v, zero = int(n), n == 0 && v != &s.Spines // no spines is the default, and can be said
	case *uint32:
		n, err := strconv.ParseUint(value, 10, 32)
		if err != nil {
			return bad("for example "+k.example(), "%s is no AS number", quote(value))
		}
		*v, zero = uint32(n), n == 0
	case *fare.Bandwidth:
		b, err := fare.ParseBandwidth(value)
		if err != nil {
			return bad("write a number of bit/s with an optional unit, for example "+k.example(), "%s is no speed", quote(value))
		}
		if strings.Trim(value, "0123456789.") == "" {
			return bad("write "+value+"G for Gbit/s, or use M, T", "%s has no unit", quote(value))
		}
		*v, zero = b, b == 0
	case *time.Duration:
		d, err := time.ParseDuration(value)
		if err != nil {
			return bad("for example "+k.example(), "%s is no time", quote(value))
		}
		*v, zero = d, d == 0
	case *netip.Prefix:
		p, err := netip.ParsePrefix(value)
		if err != nil {
			return bad("for example "+k.example(), "%s is no network", quote(value))
		}
		*v = p
	}
	if zero {
		return bad("for example "+k.example()+", or leave it out", "%s is out of range", quote(value))
	}
	return nil
}

// quote shows a value of a file in an error, not more of it than a line holds.
func quote(value string) string {
	if r := []rune(value); len(r) > 40 {
		value = string(r[:40]) + "..."
	}
	return strconv.Quote(value)
}

// example is a value that a key may have.
func (k Key) example() string {
	switch k.Name {
	case "cabling":
		return Split
	case "uplink_speed":
		return "800G"
	case "bfd":
		return "100ms"
	}
	return k.Default()
}

// Text is the key's value in a Spec, as Set reads it; "" for one that stands for a default.
func (k Key) Text(s Spec) string {
	switch v := k.field(&s).(type) {
	case *string:
		return *v
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

// speedText writes a speed with a unit, which files have to have.
func speedText(b fare.Bandwidth) string {
	text := b.String()
	if last := text[len(text)-1]; last >= '0' && last <= '9' {
		text += "bps"
	}
	return text
}

// suggest says which key was meant by one that is not known.
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
