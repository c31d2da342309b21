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
	MaxSlots         = 128     // slots a pair, unless one per sub-port takes more
	MaxCapacity      = 1 << 53 // bit/s of one plane
	MaxGroupID       = 1 << 20 // group ids are small: they index a slice

	// Parts is the unit of shares: the shares of a reachable vector's slots sum to exactly this many parts per billion.
	Parts = 1_000_000_000
)

// Config says what an engine works with. It is read once, by NewEngine.
type Config struct {
	Planes     []Plane    // 1..MaxPlanes
	Mode       Mode       // zero value: PerFlow
	Policy     Policy     // zero value: Reweight
	Addressing Addressing // zero value: Loopback
	// Slots is the number of queue pairs between a source and a destination. 0: one per sub-port (per-flow) or one per
	// plane (per-packet). Fewer than that is an error: draft-xu-rtgwg-fare-in-sun-02, Section 3.1, "at least one Queue
	// Pair (QP) per sub-port must be established". At most MaxSlots, unless one per sub-port already is more.
	Slots    int
	Ordering Ordering // zero value: Weak
	// Hash maps a flow to a sub-port. nil: unknown, ports are spread uniformly.
	Hash Hasher
	// Protocol is the IP protocol of the flows: ProtocolUDP or ProtocolTCP. 0: ProtocolUDP.
	Protocol uint8
	// Port is the destination port of the flows. 0: PortRoCE, which is UDP's; flows of TCP need one.
	Port uint16
	// MaxWeight and MaxWeightSum bound one weight and the sum of a vector's weights, as the table they are meant for
	// demands. 0: no bound but that of uint32.
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

// Mode says what a queue pair can bear (draft-xu-rtgwg-fare-in-sun-02, Sections 3.1 and 3.2).
type Mode uint8

// The modes.
const (
	PerFlow   Mode = iota // in order: a slot is bound to one sub-port
	PerPacket             // accepts reordering: a slot is bound to a plane and sprayed over its sub-ports
)

// Policy says what becomes of the slots of a plane that fails.
type Policy uint8

// The policies.
const (
	Reweight Policy = iota // they are parked with share 0; no slot ever leaves its home
	Remap                  // they move, one by one, to where capacity is, and return when it recovers
)

// Addressing says between which addresses queue pairs are set up; it decides how far source ports must differ
// (draft-xu-rtgwg-fare-in-sun-02, Section 3.1).
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
		return fmt.Errorf("%q is none of %q", text, names)
	}
	*v = T(i)
	return nil
}

// String returns "per-flow" or "per-packet".
func (m Mode) String() string { return nameOf(m, modeNames) }

// MarshalText writes what String returns.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText reads what String returns.
func (m *Mode) UnmarshalText(text []byte) error { return parseName(m, text, modeNames) }

// String returns "reweight" or "remap".
func (p Policy) String() string { return nameOf(p, policyNames) }

// MarshalText writes what String returns.
func (p Policy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what String returns.
func (p *Policy) UnmarshalText(text []byte) error { return parseName(p, text, policyNames) }

// String returns "loopback", "port" or "sub-port".
func (a Addressing) String() string { return nameOf(a, addressingNames) }

// MarshalText writes what String returns.
func (a Addressing) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText reads what String returns.
func (a *Addressing) UnmarshalText(text []byte) error { return parseName(a, text, addressingNames) }

// String returns "weak", "partial" or "strong".
func (o Ordering) String() string { return nameOf(o, orderingNames) }

// MarshalText writes what String returns.
func (o Ordering) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText reads what String returns.
func (o *Ordering) UnmarshalText(text []byte) error { return parseName(o, text, orderingNames) }

// subPorts counts the sub-ports of all planes.
func (c *Config) subPorts() int {
	n := 0
	for _, p := range c.Planes {
		n += len(p.SubPorts)
	}
	return n
}

// Validate returns every fault of the configuration, joined; nil when there is none.
func (c *Config) Validate() error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if n := len(c.Planes); n < 1 || n > MaxPlanes {
		fault("planes: %d given: 1 to %d are possible", n, MaxPlanes)
	}
	names := make(map[string]bool)
	for i, p := range c.Planes {
		if p.Name == "" || names[p.Name] {
			fault("planes[%d]: name %q: give every plane a name of its own", i, p.Name)
		}
		names[p.Name] = true
		if n := len(p.SubPorts); n < 1 || n > MaxSubPorts {
			fault("planes[%d] %q: %d sub-ports given: 1 to %d are possible", i, p.Name, n, MaxSubPorts)
		}
		devices := make(map[string]bool)
		for j, s := range p.SubPorts {
			if s.Name == "" || devices[s.Name] {
				fault("planes[%d].sub_ports[%d]: name %q: give every sub-port of a plane a name of its own", i, j, s.Name)
			}
			devices[s.Name] = true
		}
	}
	if n := c.subPorts(); n > MaxSubPortsTotal {
		fault("planes: %d sub-ports in all of them: at most %d are possible", n, MaxSubPortsTotal)
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
			fault("%s: %d is none of %q", e.field, e.value, e.names)
		}
	}
	least, per := c.subPorts(), "sub-port"
	if c.Mode == PerPacket {
		least, per = len(c.Planes), "plane"
	}
	if most := max(MaxSlots, least); c.Slots != 0 && (c.Slots < least || c.Slots > most) {
		fault("slots: %d given: at least one per %s is needed and %d are possible: choose %d to %d, or 0 for %d",
			c.Slots, per, most, least, most, least)
	}
	switch c.Protocol {
	case 0, ProtocolUDP:
	case ProtocolTCP:
		if c.Port == 0 {
			fault("port: TCP has none of its own: give the destination port of the flows")
		}
	default:
		fault("protocol: %d given: use %d for UDP or %d for TCP", c.Protocol, ProtocolUDP, ProtocolTCP)
	}
	if err := checkTable(c.MaxWeightSum, c.subPorts()); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// checkTable refuses a table too small for every sub-port to have its entry.
func checkTable(maxWeightSum uint32, subPorts int) error {
	if maxWeightSum != 0 && uint64(maxWeightSum) < uint64(subPorts) {
		return fmt.Errorf("max_weight_sum: %d is less than one for each of %d sub-ports: give at least %d, or 0 for no bound",
			maxWeightSum, subPorts, subPorts)
	}
	return nil
}
