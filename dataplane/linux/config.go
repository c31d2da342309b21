package linux

import (
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"
)

// Defaults of Config.
const (
	DefaultProtocol      = 179 // as rtm_protocol; free in iproute2's table, and BGP's port
	DefaultTable         = unix.RT_TABLE_MAIN
	DefaultRulePriority  = 10000
	DefaultMetric        = 20
	DefaultBuckets       = 1024
	DefaultSeed          = 0x66617265 // "fare"
	DefaultFirstID       = 0x66617265 // "fare": far above what routing daemons count from
	DefaultProbeTable    = 0x66617265
	DefaultProbeMark     = 0x66617265
	DefaultRepairDelay   = 50 * time.Millisecond
	DefaultAuditInterval = time.Minute

	// MaxBuckets is the largest Config.Buckets: beyond it the kernel's 16-bit weights cannot express every division.
	MaxBuckets = 16384
)

// Config says what a Plane may use. The zero value uses the defaults.
type Config struct {
	// Protocol marks everything that the Plane makes (rtm_protocol, nh_protocol, FRA_PROTOCOL). What has this mark in the
	// network namespace is taken for its own; nothing without it is ever changed. 5 to 255; 0: DefaultProtocol.
	Protocol uint8
	// Table of the routes; 0: main. For any other table a marked rule of each family leads to it.
	Table uint32
	// RulePriority of those rules; 0: DefaultRulePriority.
	RulePriority uint32
	// Metric of the routes; 0: DefaultMetric.
	Metric uint32
	// Buckets of each group, 1 to MaxBuckets; 0: DefaultBuckets. It bounds the number of sub-ports and the sum of weights.
	Buckets uint16
	// Seed for net.ipv4.fib_multipath_hash_seed when that is not set; one that is set already stays. 0: DefaultSeed.
	Seed uint32
	// FirstID is where ids of nexthop objects begin; those in use by others are skipped. 0: DefaultFirstID.
	FirstID uint32
	// ProbeTable and ProbeMark are used while the kernel is asked how it hashes: a rule for packets with the mark leads to the
	// table, for milliseconds. 0: DefaultProbeTable, DefaultProbeMark.
	ProbeTable, ProbeMark uint32
	// RepairDelay is how long the control plane has, when a sub-port has lost its carrier and the kernel has moved its flows,
	// to say what the weights are now. 0: DefaultRepairDelay.
	RepairDelay time.Duration
	// AuditInterval is how often everything is compared with the kernel, and repaired. 0: DefaultAuditInterval.
	AuditInterval time.Duration
	// Logger; nil: slog.Default().
	Logger *slog.Logger

	// watchBuffer is the size of the link socket; 0: rtnl's.
	watchBuffer int
	// maxWeight pretends a kernel with smaller weights; 0: found out.
	maxWeight int
}

// withDefaults checks a configuration and fills in what is 0.
func (c Config) withDefaults() (Config, error) {
	if c.Protocol > 0 && c.Protocol <= unix.RTPROT_STATIC {
		return c, fmt.Errorf("protocol %d is the kernel's or the administrator's; use 5 to 255, of your own", c.Protocol)
	}
	if c.Buckets > MaxBuckets {
		return c, fmt.Errorf("%d buckets; use 1 to %d", c.Buckets, MaxBuckets)
	}
	if c.RepairDelay < 0 || c.AuditInterval < 0 {
		return c, fmt.Errorf("repair delay %v, audit interval %v; neither can be below 0", c.RepairDelay, c.AuditInterval)
	}
	or(&c.Protocol, DefaultProtocol)
	or(&c.Table, DefaultTable)
	or(&c.RulePriority, DefaultRulePriority)
	or(&c.Metric, DefaultMetric)
	or(&c.Buckets, DefaultBuckets)
	or(&c.Seed, DefaultSeed)
	or(&c.FirstID, DefaultFirstID)
	or(&c.ProbeTable, DefaultProbeTable)
	or(&c.ProbeMark, DefaultProbeMark)
	or(&c.RepairDelay, DefaultRepairDelay)
	or(&c.AuditInterval, DefaultAuditInterval)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Table == c.ProbeTable {
		return c, fmt.Errorf("table %d is the probe table too; set another", c.Table)
	}
	return c, nil
}

func or[T comparable](value *T, otherwise T) {
	var zero T
	if *value == zero {
		*value = otherwise
	}
}
