package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// table is a layer that records its programmed state.
type table struct {
	capabilities *farev1.Capabilities
	forwarding   *farev1.Forwarding
	has          map[string]string
	fail         func() error // nil means that nothing fails
}

func newTable(c *farev1.Capabilities, fail func() error) *table {
	return &table{capabilities: c, has: map[string]string{}, fail: fail}
}

func (l *table) Capabilities() *farev1.Capabilities { return l.capabilities }
func (l *table) Settle() error                      { return nil }
func (l *table) Close() error                       { return nil }

func (l *table) SetForwarding(f *farev1.Forwarding) error {
	if l.fail != nil {
		if err := l.fail(); err != nil {
			return err
		}
	}
	l.forwarding = f
	return nil
}

func (l *table) Commit(changes []contract.Change) error {
	if l.fail != nil {
		if err := l.fail(); err != nil {
			return err
		}
	}
	for _, c := range changes {
		if l.has[c.Device] != fmt.Sprint(!c.Up) {
			panic("a change that does not start from what is")
		}
		l.has[c.Device] = fmt.Sprint(c.Up)
	}
	return nil
}

// TestStackIsAllOrNothing checks that, whatever fails, both layers have the acknowledged state; and that nothing is
// changed and health reports an error while they differ.
func TestStackIsAllOrNothing(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	flaky := func() error {
		if random.IntN(3) == 0 {
			return status.Error(codes.Unavailable, "not now")
		}
		return nil
	}
	below, above := newTable(nil, flaky), newTable(nil, flaky)
	s := &stack{below: below, above: above, log: slog.New(slog.DiscardHandler)}
	promised := map[string]string{}
	for _, l := range []map[string]string{promised, below.has, above.has} {
		for _, d := range []string{"a", "b", "c"} {
			l[d] = "true"
		}
	}
	differed := 0
	for range 5000 {
		var changes []contract.Change
		next := maps.Clone(promised)
		for range 1 + random.IntN(3) {
			device := string(rune('a' + random.IntN(3)))
			up := next[device] != "true"
			next[device] = fmt.Sprint(up)
			changes = append(changes, contract.Change{Kind: contract.SubPortChange, Device: device, Up: up})
		}
		if s.Commit(changes) == nil {
			promised = next
		}
		if !maps.Equal(below.has, promised) {
			t.Fatalf("below has %v, promised %v", below.has, promised)
		}
		if !maps.Equal(above.has, promised) {
			differed++
			if len(s.owed) == 0 {
				t.Fatalf("above has %v, promised %v, and owes nothing", above.has, promised)
			}
		}
	}
	if differed == 0 {
		t.Error("the layers never differed: the test lost its subject")
	}
	for s.healthy() != nil {
	}
	if !maps.Equal(above.has, promised) {
		t.Errorf("healthy, and above has %v, promised %v", above.has, promised)
	}
}

// TestStackSteersFirst checks that a change reaches the steered flows before the slower layer below works on it, and
// that a refusal by above reaches nothing else.
func TestStackSteersFirst(t *testing.T) {
	below, above := newTable(nil, nil), newTable(nil, nil)
	below.has["a"], above.has["a"] = "true", "true"
	s := &stack{below: below, above: above, log: slog.New(slog.DiscardHandler)}
	below.fail = func() error {
		if above.has["a"] != "false" {
			t.Error("below is changed before above")
		}
		return nil
	}
	down := []contract.Change{{Kind: contract.SubPortChange, Device: "a"}}
	if err := s.Commit(down); err != nil || below.has["a"] != "false" {
		t.Errorf("%v; below %v", err, below.has)
	}
	above.fail = func() error { return errors.New("no") }
	below.fail = func() error { t.Error("below is changed although above refused"); return nil }
	if err := s.Commit([]contract.Change{{Kind: contract.SubPortChange, Device: "a", Up: true}}); err == nil || above.has["a"] != "false" {
		t.Errorf("%v; above %v", err, above.has)
	}
}

func TestStackCapabilities(t *testing.T) {
	s := &stack{
		below: newTable(&farev1.Capabilities{MaxWeightSum: 1024, MaxWeight: 65535, Ipv6: true, ConfirmsInEffect: true, FlowHash: &farev1.FlowHash{}, DirectProbePort: true}, nil),
		above: newTable(&farev1.Capabilities{MaxWeightSum: 1 << 30, MaxVectors: 7, Ipv6: true, FlowPins: true, PerPacket: true, ConfirmsInEffect: true, CarriersAnnounced: "a/1"}, nil),
	}
	want := &farev1.Capabilities{
		MaxWeightSum: 1024, MaxWeight: 65535, MaxVectors: 7, Ipv6: true, FlowPins: true, PerPacket: true, ConfirmsInEffect: true, CarriersAnnounced: "a/1", DirectProbePort: true,
	}
	if got := s.Capabilities(); !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestStackForwarding checks that below never sprays, and returns to the previous forwarding if above refuses.
// follower is a layer that follows carriers.
type follower struct {
	*table
	covered bool
}

func (f *follower) CoverCarriers(on bool) { f.covered = on }

// TestStackCoversCarriers checks that the layer below leaves requests of carriers to the layer above if that announces
// them.
func TestStackCoversCarriers(t *testing.T) {
	for id, want := range map[string]bool{"a/1": true, "": false} {
		below := &follower{table: newTable(&farev1.Capabilities{CarriersAnnounced: "a/1"}, nil)}
		newStack(below, newTable(&farev1.Capabilities{CarriersAnnounced: id}, nil), slog.New(slog.DiscardHandler))
		if below.covered != want {
			t.Errorf("above announces %q: covered %v", id, below.covered)
		}
	}
}

func TestStackForwarding(t *testing.T) {
	below, above := newTable(nil, nil), newTable(nil, nil)
	s := &stack{below: below, above: above, log: slog.New(slog.DiscardHandler)}
	first := &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_PACKET}
	if err := s.SetForwarding(first); err != nil || below.forwarding.Mode != farev1.Mode_MODE_PER_FLOW || above.forwarding != first {
		t.Errorf("%v; below %v, above %v", err, below.forwarding, above.forwarding)
	}
	no := errors.New("no")
	above.fail = func() error { return no }
	if err := s.SetForwarding(&farev1.Forwarding{UdpPorts: []uint32{1}}); !errors.Is(err, no) || len(below.forwarding.UdpPorts) != 0 {
		t.Errorf("%v; below %v", err, below.forwarding)
	}
}

// careful is a table that reports integrity, approximates a group, and recovers state after a start.
type careful struct {
	*table
	report    func(*farev1.Integrity)
	deviation string
	found     *farev1.SnapshotResponse
}

func (c *careful) Guard(report func(*farev1.Integrity)) { c.report = report }
func (c *careful) Approximate(uint32) string            { return c.deviation }
func (c *careful) Recover() *farev1.SnapshotResponse    { return c.found }

// TestStackReports checks that the stack is intact if both layers are, adds up their repairs, names the deviations of
// both, and recovers from above, or from below if above finds nothing.
func TestStackReports(t *testing.T) {
	below, above := &careful{table: newTable(nil, nil)}, &careful{table: newTable(nil, nil)}
	s := &stack{below: below, above: above, log: slog.New(slog.DiscardHandler)}
	var last *farev1.Integrity
	s.Guard(func(i *farev1.Integrity) { last = i })
	for i, step := range []struct {
		layer     *careful
		now, want *farev1.Integrity
	}{
		{below, &farev1.Integrity{Message: "b"}, &farev1.Integrity{Message: "b"}},
		{above, &farev1.Integrity{Message: "a", Repairs: 2}, &farev1.Integrity{Message: "b; a", Repairs: 2}},
		{below, &farev1.Integrity{Intact: true, Repairs: 3}, &farev1.Integrity{Message: "a", Repairs: 5}},
		{above, &farev1.Integrity{Intact: true, Repairs: 4}, &farev1.Integrity{Intact: true, Repairs: 7}},
	} {
		if step.layer.report(step.now); !proto.Equal(last, step.want) {
			t.Errorf("step %d: %v, want %v", i, last, step.want)
		}
	}
	below.deviation, above.deviation = "half", "double"
	if got := s.Approximate(1); got != "half; double" {
		t.Errorf("deviation %q", got)
	}
	below.found, above.found = &farev1.SnapshotResponse{}, &farev1.SnapshotResponse{}
	if s.Recover() != above.found {
		t.Error("not recovered from above")
	}
	if above.found = nil; s.Recover() != below.found {
		t.Error("not recovered from below")
	}
}
