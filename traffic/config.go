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

// Config says what a run is. The zero value of each field but Size and Duration, of which one is needed, means its default.
type Config struct {
	// Pattern: all-to-all.
	Pattern Pattern
	// Op is "write", "write-imm" (the default), "send" or "read".
	Op string
	// Ordering is of every queue pair set.
	Ordering wecmp.Ordering
	// Message is the bytes of a message: 64 KiB, at most 64 MiB. Outstanding is how many a pair has under way: 16, at most 8,192.
	Message     int
	Outstanding int
	// Size is the bytes of each pair, rounded up to whole messages. Duration is how long messages are posted. With both, what ends first
	// ends a pair.
	Size     uint64
	Duration time.Duration
	// Interval is the time series': 1 s, at least 1 ms.
	Interval time.Duration
	// Stall is how long a pair may make no progress: 60 s, which is longer than transports try. Drain is how long what is missing at the end
	// is waited for: 5 s.
	Stall, Drain time.Duration
	// Seed is what content is made of.
	Seed uint64
}

// ops are the names of operations.
var ops = map[string]farev1.TrafficOp{
	"write": farev1.TrafficOp_TRAFFIC_OP_WRITE, "write-imm": farev1.TrafficOp_TRAFFIC_OP_WRITE_IMMEDIATE,
	"send": farev1.TrafficOp_TRAFFIC_OP_SEND, "read": farev1.TrafficOp_TRAFFIC_OP_READ,
}

// Ops are the names that Config.Op may have.
func Ops() []string { return []string{"write", "write-imm", "send", "read"} }

// orderings are the names of orderings, by ordering.
var orderings = []string{"weak", "partial", "strong"}

// Orderings are the names that ParseOrdering knows.
func Orderings() []string { return orderings }

// ParseOrdering reads the name of an ordering.
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

// prepare is the run's description, but for pairs. Errors name what is wrong as the command line does.
func (c Config) prepare() (*farev1.PrepareTraffic, error) {
	op, ok := ops[c.Op]
	switch {
	case !ok:
		return nil, fmt.Errorf("op %q is not known: use %s", c.Op, strings.Join(Ops(), ", "))
	case !slices.Contains(Patterns(), string(c.Pattern)):
		return nil, fmt.Errorf("pattern %q is not known: use %s", c.Pattern, strings.Join(Patterns(), ", "))
	case c.Size == 0 && c.Duration == 0:
		return nil, errors.New("size and duration are both 0: one of them ends the run")
	case c.Message < 0 || c.Outstanding < 0 || min(c.Duration, c.Interval, c.Stall, c.Drain) < 0:
		return nil, errors.New("sizes and times are not negative")
	}
	p := &farev1.PrepareTraffic{Seed: c.Seed, Op: op, Ordering: farev1.MemoryOrdering(c.Ordering) + farev1.MemoryOrdering_MEMORY_ORDERING_WEAK,
		MessageBytes: uint64(c.Message), Outstanding: uint32(min(c.Outstanding, maxOutstanding+1)), DurationNs: uint64(c.Duration),
		IntervalNs: uint64(c.Interval), StallNs: uint64(c.Stall), DrainNs: uint64(c.Drain)}
	if c.Size > 0 && c.Message > 0 {
		p.Messages = (c.Size-1)/uint64(c.Message) + 1
	}
	return p, checkPrepare(p)
}

// Check says what is wrong with a configuration; nil: nothing.
func (c Config) Check() error {
	_, err := c.withDefaults().prepare()
	return err
}
