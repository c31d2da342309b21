package wecmp

import (
	"errors"
	"fmt"
	"slices"
)

// Limits of a configuration and of its inputs.
const (
	MaxPlanes        = 64      // planes
	MaxSubPorts      = 1024    // sub-ports in one plane
	MaxSubPortsTotal = 4096    // sub-ports in all planes
	MaxSlots         = 128     // slots per pair, unless one per sub-port takes more
	MaxCapacity      = 1 << 53 // bit/s of one plane
	MaxGroupID       = 1 << 20 // group ids are slice indexes, so they must be small

	// Parts is the unit of shares: the shares of a reachable vector's slots sum to exactly this number (parts per
	// billion).
	Parts = 1_000_000_000
)

// Config is the configuration of an engine. NewEngine copies it.
type Config struct {
	Planes     []Plane    // 1..MaxPlanes
	Mode       Mode       // zero value: PerFlow
	Policy     Policy     // zero value: Reweight
	Addressing Addressing // zero value: Loopback
	// Slots is the number of queue pairs between a source and a destination. 0 means one per sub-port (per-flow) or
	// one per plane (per-packet). Fewer than that is an error: draft-xu-rtgwg-fare-in-sun-02, Section 3.1, "at least
	// one Queue Pair (QP) per sub-port must be established". The maximum is MaxSlots, or one per sub-port if that is
	// more.
	Slots int
	// Homes are the places of the slots in full health, one for each slot; nil means in turn. See Rehome.
	Homes    []Place
	Ordering Ordering // zero value: Weak
	// Hash maps a flow to a sub-port; nil means that the hash is unknown, and ports are spread uniformly.
	Hash Hasher
	// Protocol is the IP protocol of the flows, ProtocolUDP or ProtocolTCP; 0 means ProtocolUDP.
	Protocol uint8
	// Port is the destination port of the flows. 0 means PortRoCE, which is a UDP port; TCP flows require a value.
	Port uint16
	// MaxWeight and MaxWeightSum limit one weight and the sum of a vector's weights to the size of the data plane's
	// table; 0 means no limit other than that of uint32.
	MaxWeight, MaxWeightSum uint32
}

// Plane is one of the independent parallel networks.
type Plane struct {
	Name     string    // unique, not empty
	SubPorts []SubPort // 1..MaxSubPorts
}

// SubPort is one physical lane of a plane on this server.
type SubPort struct {
	Name string // unique in its plane, not empty
}

// Mode is the ordering requirement of queue pairs (draft-xu-rtgwg-fare-in-sun-02, Sections 3.1 and 3.2).
type Mode uint8

// The modes.
const (
	PerFlow   Mode = iota // requires order: a slot is bound to one sub-port
	PerPacket             // accepts reordering: a slot is bound to a plane and sprayed over its sub-ports
)

// Policy decides about the slots of a plane that fails.
type Policy uint8

// The policies.
const (
	Reweight Policy = iota // slots are parked with share 0; no slot ever leaves its home
	Remap                  // slots move, one by one, to where capacity is, and return on recovery
)

// Addressing is the kind of addresses between which queue pairs are created; it determines the scope in which source
// ports must be unique (draft-xu-rtgwg-fare-in-sun-02, Section 3.1).
type Addressing uint8

// The addressing modes.
const (
	Loopback       Addressing = iota // unique over all planes
	PortAddress                      // unique in the plane
	SubPortAddress                   // need not be unique
)

// Ordering is the guarantee that memory semantics need (draft-xu-rtgwg-fare-in-sun-02, Section 4).
type Ordering uint8

// The orderings.
const (
	Weak    Ordering = iota // any slot, weighted; the receiver reorders
	Partial                 // same hash key, same slot; fences wait for every slot
	Strong                  // same address, same slot, drained before it moves
)

var (
	modeNames       = []string{"per-flow", "per-packet"}
	policyNames     = []string{"reweight", "remap"}
	addressingNames = []string{"loopback", "port", "sub-port"}
	orderingNames   = []string{"weak", "partial", "strong"}
)

func nameOf[T ~uint8](v T, names []string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("invalid(%d)", v)
}

func parseName[T ~uint8](v *T, text []byte, names []string) error {
	i := slices.Index(names, string(text))
	if i < 0 {
		return fmt.Errorf("%q is not one of %q", text, names)
	}
	*v = T(i)
	return nil
}

// String returns "per-flow" or "per-packet".
func (m Mode) String() string { return nameOf(m, modeNames) }

// MarshalText returns String.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText parses the output of String.
func (m *Mode) UnmarshalText(text []byte) error { return parseName(m, text, modeNames) }

// String returns "reweight" or "remap".
func (p Policy) String() string { return nameOf(p, policyNames) }

// MarshalText returns String.
func (p Policy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText parses the output of String.
func (p *Policy) UnmarshalText(text []byte) error { return parseName(p, text, policyNames) }

// String returns "loopback", "port" or "sub-port".
func (a Addressing) String() string { return nameOf(a, addressingNames) }

// MarshalText returns String.
func (a Addressing) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText parses the output of String.
func (a *Addressing) UnmarshalText(text []byte) error { return parseName(a, text, addressingNames) }

// String returns "weak", "partial" or "strong".
func (o Ordering) String() string { return nameOf(o, orderingNames) }

// MarshalText returns String.
func (o Ordering) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText parses the output of String.
func (o *Ordering) UnmarshalText(text []byte) error { return parseName(o, text, orderingNames) }

// subPorts counts the sub-ports of all planes.
func (c *Config) subPorts() int {
	n := 0
	for _, p := range c.Planes {
		n += len(p.SubPorts)
	}
	return n
}

// slots returns the number of slots.
func (c *Config) slots() int {
	switch {
	case c.Slots != 0:
		return c.Slots
	case c.Mode == PerPacket:
		return len(c.Planes)
	}
	return c.subPorts()
}

// Validate returns all faults of the configuration, joined, or nil.
func (c *Config) Validate() error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if n := len(c.Planes); n < 1 || n > MaxPlanes {
		fault("planes: %d given: 1 to %d are possible", n, MaxPlanes)
	}
	names := make(map[string]bool)
	for i, p := range c.Planes {
		if p.Name == "" || names[p.Name] {
			fault("planes[%d]: name %q: give every plane a unique name", i, p.Name)
		}
		names[p.Name] = true
		if n := len(p.SubPorts); n < 1 || n > MaxSubPorts {
			fault("planes[%d] %q: %d sub-ports given: 1 to %d are possible", i, p.Name, n, MaxSubPorts)
		}
		devices := make(map[string]bool)
		for j, s := range p.SubPorts {
			if s.Name == "" || devices[s.Name] {
				fault("planes[%d].sub_ports[%d]: name %q: give every sub-port of a plane a unique name", i, j, s.Name)
			}
			devices[s.Name] = true
		}
	}
	if n := c.subPorts(); n > MaxSubPortsTotal {
		fault("planes: %d sub-ports in total: at most %d are possible", n, MaxSubPortsTotal)
	}
	for _, e := range []struct {
		field string
		value uint8
		names []string
	}{
		{"mode", uint8(c.Mode), modeNames}, {"policy", uint8(c.Policy), policyNames},
		{"addressing", uint8(c.Addressing), addressingNames}, {"ordering", uint8(c.Ordering), orderingNames},
	} {
		if int(e.value) >= len(e.names) {
			fault("%s: %d is not one of %q", e.field, e.value, e.names)
		}
	}
	least, per := c.subPorts(), "sub-port"
	if c.Mode == PerPacket {
		least, per = len(c.Planes), "plane"
	}
	if most := max(MaxSlots, least); c.Slots != 0 && (c.Slots < least || c.Slots > most) {
		fault("slots: %d given: each %s needs at least one, and %d are possible: use %d to %d, or 0 for %d",
			c.Slots, per, most, least, most, least)
	}
	if c.Homes != nil && errs == nil && len(newLayout(c).home) != c.slots() {
		fault("homes: %v given: each of the %d slots needs a place, and each place a slot", c.Homes, c.slots())
	}
	switch c.Protocol {
	case 0, ProtocolUDP:
	case ProtocolTCP:
		if c.Port == 0 {
			fault("port: TCP has no default port: set the destination port of the flows")
		}
	default:
		fault("protocol: %d given: use %d for UDP or %d for TCP", c.Protocol, ProtocolUDP, ProtocolTCP)
	}
	if err := checkTable(c.MaxWeightSum, c.subPorts()); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// checkTable returns an error if the table is too small for one entry per sub-port.
func checkTable(maxWeightSum uint32, subPorts int) error {
	if maxWeightSum != 0 && uint64(maxWeightSum) < uint64(subPorts) {
		return fmt.Errorf("max_weight_sum: %d is below 1 for each of %d sub-ports: use at least %d, or 0 for no limit",
			maxWeightSum, subPorts, subPorts)
	}
	return nil
}
