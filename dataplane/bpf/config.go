package bpf

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
)

// The defaults of Config.
const (
	DefaultDevice          = "fared0"
	DefaultPinDir          = "/sys/fs/bpf/fared"
	DefaultProtocol        = 179
	DefaultTable           = 179
	DefaultPriority        = 1790
	DefaultSUNHType        = 0x885b
	DefaultMaxGroups       = 65536
	DefaultMaxDestinations = 65536
	DefaultMaxPairs        = 262144
	DefaultMaxSlotCounters = 131072
)

// Config says what Steering may call its own. The zero value is usable.
type Config struct {
	// Device is the anchor's name. Empty: DefaultDevice.
	Device string
	// PinDir is a directory in a BPF file system, one for each network namespace. Empty: DefaultPinDir; below /sys/fs/bpf the
	// file system is mounted when it is not.
	PinDir string
	// Protocol marks routes and rules. 0: DefaultProtocol.
	Protocol uint8
	// Table has the routes to the anchor. 0: DefaultTable.
	Table uint32
	// Priority of the rules, below main's 32766. 0: DefaultPriority.
	Priority uint32
	// PreferSource makes sockets that are bound to no address send from the first loopback of the family that is an address
	// of this host.
	PreferSource bool
	// SUNH is the SUPERp subnet, a prefix of at most 16 (IPv4) or 112 bits (IPv6), whose last 16 bits are the host part.
	// Not valid: SUNH frames are not steered.
	SUNH netip.Prefix
	// SUNHType is SUNH's EtherType. 0: DefaultSUNHType.
	SUNHType uint16
	// MaxGroups, MaxDestinations and MaxPairs bound the maps; entries take memory when they are used. 0: the defaults.
	MaxGroups, MaxDestinations, MaxPairs int
	// MaxSlotCounters is how many slots of pairs are counted; each takes 32 bytes at once. Pairs beyond are not counted, and
	// Stats says how many. 0: DefaultMaxSlotCounters.
	MaxSlotCounters int
	// Log hears of what goes wrong apart from a call. nil: slog.Default.
	Log *slog.Logger
}

// resolve fills in the defaults.
func (c Config) resolve() (Config, error) {
	c.Device = cmp.Or(c.Device, DefaultDevice)
	c.PinDir = filepath.Clean(cmp.Or(c.PinDir, DefaultPinDir))
	c.Protocol = cmp.Or(c.Protocol, DefaultProtocol)
	c.Table = cmp.Or(c.Table, DefaultTable)
	c.Priority = cmp.Or(c.Priority, DefaultPriority)
	c.SUNHType = cmp.Or(c.SUNHType, DefaultSUNHType)
	c.MaxGroups = cmp.Or(c.MaxGroups, DefaultMaxGroups)
	c.MaxDestinations = cmp.Or(c.MaxDestinations, DefaultMaxDestinations)
	c.MaxPairs = cmp.Or(c.MaxPairs, DefaultMaxPairs)
	c.MaxSlotCounters = cmp.Or(c.MaxSlotCounters, DefaultMaxSlotCounters)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	switch {
	case !deviceName(c.Device):
		return c, fmt.Errorf("bpf: anchor device %q: use a name of 1 to 15 letters, without / or space", c.Device)
	case min(c.MaxGroups, c.MaxDestinations, c.MaxPairs, c.MaxSlotCounters) < 1:
		return c, fmt.Errorf("bpf: a limit below 1 (groups %d, destinations %d, pairs %d, slot counters %d); use 1 or more, or 0 for the default",
			c.MaxGroups, c.MaxDestinations, c.MaxPairs, c.MaxSlotCounters)
	case c.SUNH.IsValid() && (c.SUNH.Addr().Is4In6() || c.SUNH.Bits() > c.SUNH.Addr().BitLen()-16):
		return c, fmt.Errorf("bpf: SUNH prefix %v leaves no 16 bits for hosts; use at most /16 for IPv4, /112 for IPv6", c.SUNH)
	case c.Table >= 253 && c.Table <= 255:
		return c, fmt.Errorf("bpf: table %d is the system's own; use another", c.Table)
	}
	return c, nil
}

func deviceName(name string) bool {
	if len(name) == 0 || len(name) > 15 || name == "." || name == ".." {
		return false
	}
	for _, r := range name {
		if r <= ' ' || r == '/' || r == ':' {
			return false
		}
	}
	return true
}
