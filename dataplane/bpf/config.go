package bpf

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"time"
)

// Defaults of Config.
const (
	DefaultDevice          = "fared0"
	DefaultPinDir          = "/sys/fs/bpf/fared"
	DefaultProtocol        = 179
	DefaultTable           = 179
	DefaultPriority        = 1790
	DefaultSUNHType        = 0x885b
	DefaultMaxGroups       = 65536
	DefaultMaxDestinations = 262144
	DefaultMaxPairs        = 262144
	DefaultMaxSlotCounters = 131072
	DefaultAuditInterval   = time.Minute
)

// Config holds the parameters of Steering. The zero value selects all defaults.
type Config struct {
	// Device is the name of the anchor. Empty selects DefaultDevice.
	Device string
	// PinDir is a directory in a BPF file system, a separate one for each network namespace. Empty selects
	// DefaultPinDir. If it is below /sys/fs/bpf and no BPF file system is mounted there, Open mounts one.
	PinDir string
	// Protocol marks routes and rules. 0 selects DefaultProtocol.
	Protocol uint8
	// Table holds the routes to the anchor. 0 selects DefaultTable.
	Table uint32
	// Priority is the priority of the rules, lower than 32766 of the main table. 0 selects DefaultPriority.
	Priority uint32
	// PreferSource makes unbound sockets send from the first loopback of the family that is an address of this host.
	PreferSource bool
	// SUNH is the SUPERp subnet, a prefix of at most 16 (IPv4) or 112 bits (IPv6), whose last 16 bits are the host
	// part. If it is not valid, SUNH frames are not steered.
	SUNH netip.Prefix
	// SUNHType is the EtherType of SUNH. 0 selects DefaultSUNHType.
	SUNHType uint16
	// MaxGroups, MaxDestinations and MaxPairs limit the map sizes; entries use memory when they are created. 0 selects
	// the defaults.
	MaxGroups, MaxDestinations, MaxPairs int
	// MaxSlotCounters is the maximum number of counted slots of pairs; each counter takes 32 bytes from the start.
	// Slots of further pairs are not counted; Stats.Uncounted is the number of these pairs. 0 selects
	// DefaultMaxSlotCounters.
	MaxSlotCounters int
	// AuditInterval is the interval of comparisons of all maps, rules and routes with the kernel. Most differences are
	// detected earlier: those of rules and routes immediately, those of the program and of the words that all packets
	// depend on within half a second. 0 selects DefaultAuditInterval.
	AuditInterval time.Duration
	// Log receives errors that no call returns. nil selects slog.Default.
	Log *slog.Logger
}

// resolve replaces zero values with the defaults.
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
	c.AuditInterval = cmp.Or(c.AuditInterval, DefaultAuditInterval)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	switch {
	case c.AuditInterval < 0:
		return c, fmt.Errorf("bpf: audit interval %v; use more than 0, or 0 for %v", c.AuditInterval, DefaultAuditInterval)
	case !deviceName(c.Device):
		return c, fmt.Errorf("bpf: anchor device %q: use a name of 1 to 15 letters, without / or space", c.Device)
	case min(c.MaxGroups, c.MaxDestinations, c.MaxPairs, c.MaxSlotCounters) < 1:
		return c, fmt.Errorf("bpf: a limit is below 1 (groups %d, destinations %d, pairs %d, slot counters %d); use 1 or more, or 0 for the default",
			c.MaxGroups, c.MaxDestinations, c.MaxPairs, c.MaxSlotCounters)
	case c.SUNH.IsValid() && (c.SUNH.Addr().Is4In6() || c.SUNH.Bits() > c.SUNH.Addr().BitLen()-16):
		return c, fmt.Errorf("bpf: SUNH prefix %v leaves no 16 bits for hosts; use at most /16 for IPv4, /112 for IPv6", c.SUNH)
	case c.Table >= 253 && c.Table <= 255:
		return c, fmt.Errorf("bpf: table %d is reserved for the system; use another table", c.Table)
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
