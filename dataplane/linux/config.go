package linux

import (
	"fmt"
	"log/slog"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// Defaults of Config.
const (
	DefaultProtocol      = 179 // rtm_protocol; unassigned in iproute2's table, and the port number of BGP
	DefaultTable         = unix.RT_TABLE_MAIN
	DefaultRulePriority  = 10000
	DefaultMetric        = 20
	DefaultSeed          = 0x66617265 // "fare"
	DefaultFirstID       = 0x66617265 // "fare"; far above the ids that routing daemons start from
	DefaultProbeTable    = 0x66617265
	DefaultSourceTable   = 0x66617300 // first of a range of tables
	DefaultProbeMark     = 0x66617265
	DefaultReachTable    = 0x66616000 // first of a range of tables
	DefaultReachPriority = 1780       // before that of steering by BPF
	DefaultAuditInterval = time.Minute

	// MaxBuckets is the largest value of Config.Buckets, a limit of the kernel.
	MaxBuckets = 65535
	// DefaultBuckets is the number of buckets per sub-port while MaxBuckets allows it: a share of a tenth of the
	// average is then accurate to 1 %. The time that the kernel takes to change a group grows with its buckets.
	DefaultBuckets = 512
	// DefaultMemory bounds the kernel memory of all groups, in bytes.
	DefaultMemory = 1 << 30

	// defaultWitnessTime is above the time in which the control plane usually changes a group again after a failure.
	defaultWitnessTime = 50 * time.Millisecond

	bucketSize = 32 // kernel memory of a bucket in bytes (struct nh_res_bucket)
	// mostNarrow replaces MaxBuckets on kernels with 8-bit weights: before Linux 6.12 the kernel multiplies buckets and
	// weights in 31 bits.
	mostNarrow = 32767
)

// Config holds the parameters of a Driver. The zero value selects all defaults.
type Config struct {
	// Protocol marks all objects of the Driver (rtm_protocol, nh_protocol, FRA_PROTOCOL). The Driver treats objects
	// with this mark in the network namespace as its own and never changes objects without it. Range 5 to 255; 0
	// selects DefaultProtocol.
	Protocol uint8
	// Table holds the routes; 0 selects main. For any other table, one marked rule per family leads to it.
	Table uint32
	// RulePriority is the priority of those rules, 3 or more, because the two lower numbers are used too. 0 selects
	// DefaultRulePriority.
	RulePriority uint32
	// SourceTable is the first table of the source groups. With several source groups, each one has its own table, and
	// a marked rule from each of its loopbacks leads to it, just before RulePriority. 0 selects DefaultSourceTable.
	SourceTable uint32
	// Metric of the routes; 0 selects DefaultMetric.
	Metric uint32
	// Buckets is the number of buckets of each group, 1 to MaxBuckets. 0 selects DefaultBuckets for each sub-port of
	// the largest source group. It limits the number of sub-ports and the smallest possible share.
	Buckets uint16
	// Memory bounds the kernel memory for the buckets of all groups, in bytes; Capabilities.max_vectors follows from
	// it. 0 selects DefaultMemory.
	Memory uint64
	// Seed is written to net.ipv4.fib_multipath_hash_seed if no seed is set; an existing seed stays. 0 selects
	// DefaultSeed.
	Seed uint32
	// FirstID is the first id of nexthop objects; ids in use by other programs are skipped. 0 selects DefaultFirstID.
	FirstID uint32
	// ProbeTable and ProbeMark are used for milliseconds while the Driver queries the flow hash of the kernel: a rule
	// for packets with the mark leads to the table. 0 selects DefaultProbeTable and DefaultProbeMark.
	ProbeTable, ProbeMark uint32
	// ReachTable is the first table of the next hops of probes (Forwarding.direct_probe_port), and ReachPriority the
	// priority of the rules that lead there: lower than those of all other rules for UDP. 0 selects DefaultReachTable
	// and DefaultReachPriority.
	ReachTable, ReachPriority uint32
	// AuditInterval is the interval of complete comparisons with the kernel, with repair. 0 selects
	// DefaultAuditInterval.
	AuditInterval time.Duration
	// Logger receives log messages; nil selects slog.Default().
	Logger *slog.Logger
	// Took receives the time from the start of each batch of changes until the kernel has answered all of them. It must
	// return quickly. nil disables it.
	Took func(time.Duration)

	// watchBuffer is the receive buffer size of the link socket in bytes; 0 selects the default of rtnl.
	watchBuffer int
	// maxWeight simulates a kernel with smaller weights; 0 probes the kernel.
	maxWeight int
	// witnessTime is how long a witness stays in a group that does not change; 0 selects defaultWitnessTime.
	witnessTime time.Duration
	// inPlace replaces every group in place, and keeps none ready, as with many destinations and with IPv6.
	inPlace bool
}

// withDefaults checks a configuration and replaces zero values with defaults.
func (c Config) withDefaults() (Config, error) {
	if c.Protocol > 0 && c.Protocol <= unix.RTPROT_STATIC {
		return c, fmt.Errorf("protocol %d is reserved for the kernel or the administrator; use an unused one from 5 to 255", c.Protocol)
	}
	if c.AuditInterval < 0 {
		return c, fmt.Errorf("audit interval %v; it cannot be below 0", c.AuditInterval)
	}
	or(&c.Protocol, DefaultProtocol)
	or(&c.Table, DefaultTable)
	or(&c.RulePriority, DefaultRulePriority)
	or(&c.Metric, DefaultMetric)
	or(&c.Memory, DefaultMemory)
	or(&c.Seed, DefaultSeed)
	or(&c.FirstID, DefaultFirstID)
	or(&c.ProbeTable, DefaultProbeTable)
	or(&c.SourceTable, DefaultSourceTable)
	or(&c.ProbeMark, DefaultProbeMark)
	or(&c.ReachTable, DefaultReachTable)
	or(&c.ReachPriority, DefaultReachPriority)
	or(&c.witnessTime, defaultWitnessTime)
	or(&c.AuditInterval, DefaultAuditInterval)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Table == c.ProbeTable {
		return c, fmt.Errorf("table %d is the probe table too; set another table", c.Table)
	}
	if c.ofSource(c.Table) || c.ofSource(c.ProbeTable) || c.SourceTable > math.MaxUint32-maxSources {
		return c, fmt.Errorf("tables %d to %d are for source groups, and %d or %d is among them; set other tables", c.SourceTable, c.SourceTable+maxSources-1, c.Table, c.ProbeTable)
	}
	if c.ofReach(c.Table) || c.ofReach(c.ProbeTable) || c.ReachTable > math.MaxUint32-maxReach || c.ReachTable < c.SourceTable+maxSources && c.SourceTable < c.ReachTable+maxReach {
		return c, fmt.Errorf("tables %d to %d are for probes, and another table is among them; set other tables", c.ReachTable, c.ReachTable+maxReach-1)
	}
	if c.RulePriority < 3 {
		return c, fmt.Errorf("rule priority %d; use 3 or more", c.RulePriority)
	}
	return c, nil
}

// maxSources limits the number of source group tables.
const maxSources = 256

// ofSource reports whether a table is in the range for source groups.
func (c Config) ofSource(table uint32) bool {
	return table >= c.SourceTable && table-c.SourceTable < maxSources
}

// ofReach reports whether a table is in the range for probes.
func (c Config) ofReach(table uint32) bool {
	return table >= c.ReachTable && table-c.ReachTable < maxReach
}

func or[T comparable](value *T, otherwise T) {
	var zero T
	if *value == zero {
		*value = otherwise
	}
}
