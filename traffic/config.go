package traffic

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/wecmp"
)

// Config is the configuration of a run. The zero value of each field means its default, except that Size or Duration is
// required.
type Config struct {
	// Pattern is the pattern of pairs; default all-to-all.
	Pattern Pattern
	// Op is "write", "write-imm" (the default), "send" or "read".
	Op string
	// Ordering is the ordering of every queue pair set.
	Ordering wecmp.Ordering
	// Message is the size of a message in bytes; default 64 KiB, at most 64 MiB. Outstanding is the number of messages
	// that a pair has in transit; default 16, at most 8,192.
	Message     int
	Outstanding int
	// Size is the number of bytes of each pair, rounded up to whole messages. Duration is the time for which messages
	// are posted. With both, the limit reached first ends a pair.
	Size     uint64
	Duration time.Duration
	// Interval is the interval of the time series; default 1 s, at least 1 ms.
	Interval time.Duration
	// Stall is the time that a pair may take without progress; default 60 s, longer than transports retry. Drain is the
	// time to wait for missing messages at the end; default 5 s.
	Stall, Drain time.Duration
	// Seed is the seed of the content.
	Seed uint64
	// Notice, if not nil, receives a sentence about a part of the pattern that is left out.
	Notice func(string)
}

// ops maps the names of operations.
var ops = map[string]farev1.TrafficOp{
	"write": farev1.TrafficOp_TRAFFIC_OP_WRITE, "write-imm": farev1.TrafficOp_TRAFFIC_OP_WRITE_IMMEDIATE,
	"send": farev1.TrafficOp_TRAFFIC_OP_SEND, "read": farev1.TrafficOp_TRAFFIC_OP_READ,
}

// Ops returns the valid values of Config.Op.
func Ops() []string { return []string{"write", "write-imm", "send", "read"} }

// orderings holds the names of orderings, by ordering.
var orderings = []string{"weak", "partial", "strong"}

// Orderings returns the names that ParseOrdering accepts.
func Orderings() []string { return orderings }

// ParseOrdering parses the name of an ordering.
func ParseOrdering(name string) (wecmp.Ordering, error) {
	i := slices.Index(orderings, name)
	if i < 0 {
		return 0, fmt.Errorf("ordering %q is not known: use %s", name, strings.Join(orderings, ", "))
	}
	return wecmp.Ordering(i), nil
}

func (c Config) withDefaults() Config {
	if c.Pattern == "" {
		c.Pattern = AllToAll
	}
	if c.Op == "" {
		c.Op = "write-imm"
	}
	set := func(v *int, to int) {
		if *v == 0 {
			*v = to
		}
	}
	wait := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	set(&c.Message, 64<<10)
	set(&c.Outstanding, 16)
	wait(&c.Interval, time.Second)
	wait(&c.Stall, time.Minute)
	wait(&c.Drain, 5*time.Second)
	return c
}

// prepare returns the run's description without pairs. Errors name settings as the command line does.
func (c Config) prepare() (*farev1.PrepareTraffic, error) {
	op, ok := ops[c.Op]
	switch {
	case !ok:
		return nil, fmt.Errorf("op %q is not known: use %s", c.Op, strings.Join(Ops(), ", "))
	case !slices.Contains(Patterns(), string(c.Pattern)):
		return nil, fmt.Errorf("pattern %q is not known: use %s", c.Pattern, strings.Join(Patterns(), ", "))
	case c.Size == 0 && c.Duration == 0:
		return nil, errors.New("size and duration are both 0: set at least one of them")
	case c.Message < 0 || c.Outstanding < 0 || min(c.Duration, c.Interval, c.Stall, c.Drain) < 0:
		return nil, errors.New("sizes and times must not be negative")
	}
	p := &farev1.PrepareTraffic{Seed: c.Seed, Op: op, Ordering: farev1.MemoryOrdering(c.Ordering) + farev1.MemoryOrdering_MEMORY_ORDERING_WEAK,
		MessageBytes: uint64(c.Message), Outstanding: uint32(min(c.Outstanding, maxOutstanding+1)), DurationNs: uint64(c.Duration),
		IntervalNs: uint64(c.Interval), StallNs: uint64(c.Stall), DrainNs: uint64(c.Drain)}
	if c.Size > 0 && c.Message > 0 {
		p.Messages = (c.Size-1)/uint64(c.Message) + 1
	}
	return p, checkPrepare(p)
}

// Check returns an error for an invalid configuration.
func (c Config) Check() error {
	_, err := c.withDefaults().prepare()
	return err
}
