package dptest

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Test is one case.
type Test struct {
	// Name is short and unique.
	Name string
	// Reference names the rule by an element of api/fare/v1/dataplane.proto.
	Reference string
	// Requires lists the capabilities without which the case does not apply.
	Requires []Capability
	// Fn runs the case on a data plane that is connected and empty. Its error describes the violation.
	Fn func(*Driver) error
}

// Capability is an optional property of a data plane.
type Capability struct {
	Name    string
	Present func(*farev1.Capabilities) bool
}

// The largest limits that the suite tests by reaching them.
const (
	maxVectorsFilled      = 4096
	maxDestinationsFilled = 65536
)

// The capabilities that cases require.
var (
	IPv6          = Capability{"ipv6", (*farev1.Capabilities).GetIpv6}
	NoIPv6        = Capability{"ipv6 = false", func(c *farev1.Capabilities) bool { return !c.GetIpv6() }}
	PerPacket     = Capability{"per_packet", (*farev1.Capabilities).GetPerPacket}
	NoPerPacket   = Capability{"per_packet = false", func(c *farev1.Capabilities) bool { return !c.GetPerPacket() }}
	FlowPins      = Capability{"flow_pins", (*farev1.Capabilities).GetFlowPins}
	FlowHash      = Capability{"flow_hash", func(c *farev1.Capabilities) bool { return c.GetFlowHash() != nil }}
	NoFlowPins    = Capability{"flow_pins = false", func(c *farev1.Capabilities) bool { return !c.GetFlowPins() }}
	Gathering     = Capability{"max_operations_per_request at least 3", func(c *farev1.Capabilities) bool { return c.GetMaxOperationsPerRequest() >= 3 }}
	LimitedWeight = Capability{"max_weight below 2^32-1", func(c *farev1.Capabilities) bool { return c.GetMaxWeight() > 0 && c.MaxWeight < 1<<32-1 }}
	LimitedSum    = Capability{"max_weight_sum below 2^32-1 and 4 x max_weight", func(c *farev1.Capabilities) bool {
		return c.GetMaxWeightSum() > 0 && c.MaxWeightSum < 1<<32-1 && (c.MaxWeight == 0 || 4*uint64(c.MaxWeight) > uint64(c.MaxWeightSum))
	}}
	LimitedVectors = Capability{fmt.Sprintf("max_vectors, at most %d", maxVectorsFilled), func(c *farev1.Capabilities) bool { return c.GetMaxVectors() > 0 && c.MaxVectors <= maxVectorsFilled }}
	LimitedTargets = Capability{fmt.Sprintf("max_destinations, at most %d", maxDestinationsFilled), func(c *farev1.Capabilities) bool {
		return c.GetMaxDestinations() > 0 && c.MaxDestinations <= maxDestinationsFilled
	}}
	// SomeVectors and SomeWeights require limits that fit the ordinary cases.
	SomeVectors = Capability{"max_vectors 0 or at least 16", func(c *farev1.Capabilities) bool { return c.GetMaxVectors() == 0 || c.MaxVectors >= 16 }}
	SomeWeights = Capability{"max_weight 0 or at least 3, max_weight_sum 0 or at least 8", func(c *farev1.Capabilities) bool {
		return (c.GetMaxWeight() == 0 || c.MaxWeight >= 3) && (c.GetMaxWeightSum() == 0 || c.MaxWeightSum >= 8)
	}}
)

// Status is the status of a Result.
type Status uint8

// The outcomes of a case.
const (
	Passed Status = iota + 1
	Failed
	NotApplicable
)

func (s Status) String() string {
	return [...]string{"none", "passed", "FAILED", "not applicable"}[min(s, NotApplicable)]
}

// Result is the outcome of a case.
type Result struct {
	Name, Reference string
	Status          Status
	// Reason is the violation, or the absent capability.
	Reason string
	// Seed repeats the case when set as Options.Seed.
	Seed     uint64
	Duration time.Duration
}

func (r Result) String() string {
	s := fmt.Sprintf("%s: %s (%s, seed %d, %v)", r.Name, r.Status, r.Reference, r.Seed, r.Duration.Round(time.Millisecond))
	if r.Reason != "" {
		s += ": " + r.Reason
	}
	return s
}

// Options adapt the suite to a data plane. The zero value suits a data plane that accepts any device name.
type Options struct {
	// Forwarding is sent in Hello: at least two planes of two sub-ports each, with devices that the data plane has.
	// nil means DefaultForwarding.
	Forwarding *farev1.Forwarding
	// Seed seeds the random cases; 0 means 1.
	Seed uint64
	// Batch is the number of destinations in the large case; 0 means 16,384, or max_destinations if that is lower.
	Batch int
	// Timeout limits each answer of the data plane; 0 means 10 s, and 2 min for Run, because tests run on busy
	// machines.
	Timeout time.Duration
	// Only, if not empty, names the cases to run; other cases are not reported.
	Only []string
}

// DefaultForwarding has planes p0 and p1 with the sub-ports dp0a, dp0b, dp1a, dp1b.
func DefaultForwarding() *farev1.Forwarding {
	return &farev1.Forwarding{
		Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{"10.255.0.1/32"}, UdpPorts: []uint32{4791},
		Planes: []*farev1.ForwardingPlane{
			{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{{Device: "dp0a"}, {Device: "dp0b"}}},
			{Plane: "p1", SubPorts: []*farev1.ForwardingSubPort{{Device: "dp1a"}, {Device: "dp1b"}}},
		},
	}
}

func (o Options) resolved() (Options, error) {
	if o.Forwarding == nil {
		o.Forwarding = DefaultForwarding()
	}
	if len(o.Forwarding.Planes) < 2 || len(o.Forwarding.Planes[0].SubPorts) < 2 || len(o.Forwarding.Planes[1].SubPorts) < 2 {
		return o, fmt.Errorf("conformance suite: the forwarding has too few sub-ports; use at least two planes of two each")
	}
	if o.Seed == 0 {
		o.Seed = 1
	}
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Second
	}
	known := map[string]bool{}
	for _, test := range Tests() {
		known[test.Name] = true
	}
	for _, name := range o.Only {
		if !known[name] {
			return o, fmt.Errorf("conformance suite: no case has the name %q; see Tests", name)
		}
	}
	return o, nil
}

func (o Options) selected(name string) bool {
	if len(o.Only) == 0 {
		return true
	}
	for _, only := range o.Only {
		if only == name {
			return true
		}
	}
	return false
}

// Check runs the suite over conn and reports every case. It returns an error when the suite could not run, or
// when a case failed.
func Check(ctx context.Context, conn grpc.ClientConnInterface, options Options, report func(Result)) error {
	options, err := options.resolved()
	if err != nil {
		return err
	}
	var failed []string
	for _, test := range Tests() {
		if !options.selected(test.Name) {
			continue
		}
		result := runCase(ctx, conn, options, test)
		if result.Status == Failed {
			failed = append(failed, test.Name)
		}
		report(result)
	}
	if len(failed) > 0 {
		return fmt.Errorf("data plane does not conform: %d cases failed: %s", len(failed), strings.Join(failed, ", "))
	}
	return nil
}

// Run runs every case as a subtest. A case that is not applicable logs the absent capability, which is a
// property of the data plane, not a skipped test.
func Run(t *testing.T, conn grpc.ClientConnInterface, options Options) {
	t.Helper()
	options.Timeout = cmp.Or(options.Timeout, 2*time.Minute)
	options, err := options.resolved()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range Tests() {
		if !options.selected(test.Name) {
			continue
		}
		t.Run(test.Name, func(t *testing.T) {
			if result := runCase(t.Context(), conn, options, test); result.Status == Failed {
				t.Error(result)
			} else {
				t.Log(result)
			}
		})
	}
}

// runCase runs one case on an emptied data plane, and empties it afterwards.
func runCase(ctx context.Context, conn grpc.ClientConnInterface, options Options, test Test) Result {
	result := Result{Name: test.Name, Reference: test.Reference, Seed: options.Seed}
	begin := time.Now()
	err := func() (err error) {
		d, err := newDriver(ctx, conn, options)
		if err != nil {
			return err
		}
		defer func() {
			if cleared := d.close(); err == nil {
				err = cleared
			}
		}()
		for _, capability := range test.Requires {
			if !capability.Present(d.capabilities) {
				result.Status, result.Reason = NotApplicable, "capability absent: "+capability.Name
				return nil
			}
		}
		return test.Fn(d)
	}()
	result.Duration = time.Since(begin)
	switch {
	case err != nil:
		result.Status, result.Reason = Failed, err.Error()
	case result.Status == 0:
		result.Status = Passed
	}
	return result
}
